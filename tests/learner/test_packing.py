"""Micro-batches are counted in the tokens that a pass computes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millstream.learner.packing import REPEATED, Packer, num_computed, packed
from millstream.learner.rows import share_prompts
from millstream.types import TrainRow


def row_of(prompt: int, *, prompt_tokens: int, completion_tokens: int) -> TrainRow:
    """Prompts of one number are the same."""
    num_tokens = prompt_tokens + completion_tokens
    mask = np.arange(num_tokens) >= prompt_tokens
    zeros = np.zeros(num_tokens, np.float32)
    return TrainRow(tokens=np.full(num_tokens, prompt, np.int32), loss_mask=mask, logprobs=zeros, advantages=zeros)


ROWS = st.lists(
    st.builds(
        row_of,
        st.integers(0, 2),
        prompt_tokens=st.integers(1, 30),
        completion_tokens=st.integers(1, 30),
    ),
    max_size=30,
)


@given(rows=ROWS, max_tokens=st.integers(1, 100))
def test_every_row_is_in_one_micro_batch_in_order_and_none_computes_more_than_the_budget(
    rows: list[TrainRow], max_tokens: int
) -> None:
    micro_batches = list(packed(rows, max_tokens))
    assert [id(row) for some in micro_batches for row in some] == [id(row) for row in rows]
    for some in micro_batches:
        computed = 1 + max(int(row.max()) for row in share_prompts(some))
        assert computed <= num_computed(some)
        assert num_computed(some) <= max_tokens or len(some) == 1


@given(rows=ROWS, max_tokens=st.integers(1, 100))
def test_a_micro_batch_ends_only_where_the_next_row_would_not_fit(rows: list[TrainRow], max_tokens: int) -> None:
    micro_batches = list(packed(rows, max_tokens))
    for some, after in pairwise(micro_batches):
        assert num_computed([*some, after[0]]) > max_tokens


def test_a_prompt_that_rows_share_counts_once_and_an_eighth_for_each_further_row() -> None:
    group = [row_of(0, prompt_tokens=160, completion_tokens=20) for _ in range(16)]
    assert num_computed(group) == 160 + 15 * 160 // REPEATED + 16 * 20
    packer = Packer[TrainRow](num_computed(group))
    assert not any(packer.add(row) for row in group)
    assert len(packer.flush()) == 16


def test_a_row_that_begins_a_micro_batch_brings_its_prompt_with_it() -> None:
    packer = Packer[TrainRow](200)
    first, second, third = (row_of(0, prompt_tokens=160, completion_tokens=20) for _ in range(3))
    assert packer.add(first) == []
    assert packer.add(second) == [first]  # 180 and 40 are more than 200
    assert packer.add(third) == [second]  # so are they here: the prompt of the second row is counted in full
