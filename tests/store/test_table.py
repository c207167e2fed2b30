"""The table of rows: bounds."""

from __future__ import annotations

import pytest

from millstream.errors import StoreError
from millstream.store import Reads
from millstream.store.table import GROUPS_PER_ROW, RowTable


def test_a_group_that_is_named_twice_counts_once_against_the_limit_of_groups() -> None:
    table = RowTable({"train": Reads(("x",))}, capacity_rows=4)
    limit = GROUPS_PER_ROW * 4
    table.close([*range(limit - 1), 0, 1, 2], "train")
    table.close([limit - 1, limit - 1, 0], "train")
    with pytest.raises(StoreError, match=f"{limit} groups"):
        table.close([limit], "train")
