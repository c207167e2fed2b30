"""examples/small_loop.py: the loop for readers of the code keeps the bound on the lag, and learns."""

from __future__ import annotations

import asyncio

import pytest

import small_loop


@pytest.mark.parametrize("max_lag", [0, 2])
def test_no_sample_of_the_small_loop_is_older_than_max_lag(max_lag: int) -> None:
    loop = small_loop.Loop(4, max_lag)
    asyncio.run(loop.run())
    assert len(loop.rewards) == 4 and len(loop.lags) == 4 * small_loop.GROUPS_PER_STEP
    assert max(loop.lags) <= max_lag
    assert loop.engine.version == 4


@pytest.mark.slow
def test_the_small_loop_learns_the_next_three_digits_in_a_hundred_steps() -> None:
    loop = small_loop.Loop(100, 2)
    asyncio.run(loop.run())
    assert max(loop.rewards[:5]) < 0.2 and min(loop.rewards[-5:]) > 0.7
    assert max(loop.lags) == 2, "it runs asynchronously"
