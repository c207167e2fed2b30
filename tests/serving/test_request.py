"""What is known of a request before it has ended."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from millstream.serving.request import NUM_RECENT, Lengths


def plain(ended: Sequence[int], num_sampled: float, at_most: float) -> float:
    """What `Lengths.tokens_left` says, one number after the other."""
    recent = ended[-NUM_RECENT:]
    longer = [length for length in recent if length > num_sampled]
    if not recent:
        return at_most
    return min(at_most, sum(longer) / len(longer) - num_sampled if longer else max(1, num_sampled))


@given(
    count=st.sampled_from([0, 1, 5, NUM_RECENT, NUM_RECENT + 1, 3 * NUM_RECENT]),
    lowest=st.integers(0, 30),
    num_sampled=st.floats(0, 60) | st.integers(0, 60),
    at_most=st.integers(0, 60),
    seed=st.integers(0, 2**32),
)
def test_a_request_is_expected_to_sample_what_longer_ones_among_the_last_answers_had_left(
    count: int, lowest: int, num_sampled: float, at_most: int, seed: int
) -> None:
    rng = random.Random(seed)
    ended = [rng.randint(lowest, 50) for _ in range(count)]
    lengths = Lengths()
    for length in ended:
        lengths.add(length)
    assert lengths.tokens_left(num_sampled, at_most) == plain(ended, num_sampled, at_most)
