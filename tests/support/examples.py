"""How many examples a property test tries: the default suite has minutes for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

ARE_ALL = os.environ.get("MILLSTREAM_EXAMPLES") == "all"  # `make test-slow`


def examples(few: int, *, of: int) -> settings:
    """`few` by default, of those that `make test-slow` tries. They are the same ones each time (`derandomize`)."""
    return settings(max_examples=of if ARE_ALL else few)
