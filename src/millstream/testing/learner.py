"""Conformance tests of `millstream.learner.Learner`, for any implementation. Needs pytest.

    from millstream.testing.learner import LearnerSuite

    class TestMyLearner(LearnerSuite):
        vocabulary = 97

        def open(self, num_steps=None):
            return MyLearner(...)        # every call: the same weights, a loss that reads the advantages

Every test opens its own learners. `close` ends one; `tolerance` is the allowed difference of the weights after a step when rows
were only split or ordered differently, relative to the size of the step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from millstream.learner import Learner
from millstream.types import Floats, Metrics, TrainRow, Weights

NUM_ROWS = 9


def make_rows(vocabulary: int, *, seed: int = 0, count: int = NUM_ROWS) -> list[TrainRow]:
    """Ragged rows of several turns, some of one prompt; one without a trained token, and one longer than all others
    together."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocabulary, 5)
    rows = []
    for number in range(count):
        length = 150 if number == 4 else int(rng.integers(2, 20))
        mask = rng.random(length) < (0.0 if number == 3 else 0.7)
        mask[0] = number != 3
        opening = prompt if number % 2 else rng.integers(0, vocabulary, int(rng.integers(1, 9)))
        mask = np.concatenate([np.zeros(len(opening), np.bool_), mask])
        rows.append(
            TrainRow(
                tokens=np.concatenate([opening, rng.integers(0, vocabulary, length)]).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, np.log(0.7 / vocabulary) + rng.random(len(mask)), 0).astype(np.float32),
                advantages=np.full(len(mask), rng.normal(), dtype=np.float32),
                label=f"row {number}",
            )
        )
    return rows


def flat_weights(weights: Weights) -> Floats:
    """All numbers as one array, in the order of names. Tensors of any kind."""
    parts = [np.asarray(_array(weights[name]), dtype=np.float32).ravel() for name in sorted(weights)]
    return np.concatenate(parts)


def _array(value: Any) -> Any:
    return value.detach().float().cpu().numpy() if hasattr(value, "detach") else value


def learner_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on an event loop of its own."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


class LearnerSuite:
    vocabulary = 97
    tolerance = 1e-3

    def open(self, num_steps: int | None = None) -> Learner:
        raise NotImplementedError("give the suite a learner: def open(self, num_steps=None)")

    async def close(self, learner: Learner) -> None:
        """Release what `open` created."""
        close = getattr(learner, "close", None)
        if close is not None:
            await close()

    @asynccontextmanager
    async def opened(self, num_steps: int | None = None) -> AsyncIterator[Learner]:
        learner = self.open(num_steps)
        try:
            yield learner
        finally:
            await self.close(learner)

    async def train(self, learner: Learner, *micro_batches: Sequence[TrainRow]) -> Metrics:
        await learner.begin_batch()
        for rows in micro_batches:
            await learner.accumulate(rows)
        return await learner.step()

    async def after(self, *micro_batches: Sequence[TrainRow]) -> tuple[Floats, Floats]:
        """The weights before and after one step of a new learner."""
        async with self.opened() as learner:
            before = flat_weights(await learner.weights())
            await self.train(learner, *micro_batches)
            return before, flat_weights(await learner.weights())

    @learner_test
    async def test_any_split_and_order_of_rows_gives_the_same_step(self) -> None:
        rows, rng = make_rows(self.vocabulary), random.Random(0)
        before, whole = await self.after(rows)
        moved = np.abs(whole - before).max()
        assert moved > 0, "a step with rows moves the weights"
        for _ in range(3):
            order = rng.sample(rows, len(rows))
            cut = rng.randint(1, len(rows) - 1)
            _, found = await self.after(order[:cut], order[cut:])
            # Adam's first step is the sign of the gradient: near 0 it may be either
            assert np.mean(np.abs(found - whole) > self.tolerance * moved) < 0.01

    @learner_test
    async def test_the_same_order_gives_the_same_bits(self) -> None:
        rows = make_rows(self.vocabulary)
        _, one = await self.after(rows[:4], rows[4:])
        _, other = await self.after(rows[:4], rows[4:])
        assert np.array_equal(one, other)

    @learner_test
    async def test_log_ratios_are_of_the_trained_tokens_of_the_last_step_in_their_order(self) -> None:
        """To half precision; or there are none."""
        rows = make_rows(self.vocabulary)
        async with self.opened() as learner:
            now = np.concatenate(await learner.logprobs(rows))
            await self.train(learner, rows[:4], rows[4:])
            found = learner.log_ratios()
            expected = now - np.concatenate([row.logprobs[row.loss_mask] for row in rows])
            assert not len(found) or np.allclose(found, expected, rtol=1e-2, atol=1e-2)
            await learner.step()
            assert not len(learner.log_ratios())

    @learner_test
    async def test_what_is_not_trained_changes_nothing(self) -> None:
        """Numbers outside of the mask, and rows without a trained token."""
        rows = make_rows(self.vocabulary)
        spoilt = [
            structs.replace(
                row,
                logprobs=np.where(row.loss_mask, row.logprobs, np.nan).astype(np.float32),
                advantages=np.where(row.loss_mask, row.advantages, np.nan).astype(np.float32),
            )
            for row in rows
        ]
        before, plain = await self.after(rows)
        _, found = await self.after(spoilt)
        assert np.array_equal(found, plain)
        _, fewer = await self.after([row for row in rows if row.loss_mask.any()])
        assert np.abs(fewer - plain).max() <= max(self.tolerance, 1e-3) * np.abs(plain - before).max()

    @learner_test
    async def test_a_step_without_rows_leaves_the_weights_as_they_are(self) -> None:
        untrained = [row for row in make_rows(self.vocabulary) if not row.loss_mask.any()]
        for micro_batches in ([], [untrained]):
            before, found = await self.after(*micro_batches)
            assert np.array_equal(found, before)

    @learner_test
    async def test_a_row_that_is_not_finite_is_left_out(self) -> None:
        rows = make_rows(self.vocabulary)
        bad = structs.replace(rows[0], advantages=np.full(len(rows[0].tokens), np.inf, dtype=np.float32))
        before, found = await self.after([bad, *rows[1:]])
        assert np.isfinite(found).all() and not np.array_equal(found, before)
        _, without = await self.after(rows[1:])
        assert np.abs(found - without).max() <= max(self.tolerance, 1e-3) * np.abs(found - before).max()

    @learner_test
    async def test_weights_are_a_copy_that_later_steps_do_not_change(self) -> None:
        async with self.opened() as learner:
            weights = await learner.weights()
            before = flat_weights(weights).copy()
            await self.train(learner, make_rows(self.vocabulary))
            assert np.array_equal(flat_weights(weights), before)
            assert not np.array_equal(flat_weights(await learner.weights()), before)

    @learner_test
    async def test_it_resumes_from_a_snapshot_whatever_came_after_it(self, tmp_path: Path) -> None:
        batches = [make_rows(self.vocabulary, seed=seed) for seed in range(4)]
        async with self.opened(num_steps=8) as one, self.opened(num_steps=8) as other:
            await self.train(one, batches[0])
            snapshot = await one.snapshot()
            await self.train(one, batches[1])
            snapshot.write(tmp_path)  # later: it must not have changed
            await asyncio.to_thread(other.restore, tmp_path)
            await self.train(other, batches[1])
            assert np.array_equal(flat_weights(await one.weights()), flat_weights(await other.weights()))
            for learner in (one, other):
                await self.train(learner, batches[2])
            assert np.array_equal(flat_weights(await one.weights()), flat_weights(await other.weights()))

    @learner_test
    async def test_log_probabilities_are_those_of_each_row_alone_and_training_moves_them(self) -> None:
        rows = [row for row in make_rows(self.vocabulary) if row.loss_mask.any()]
        async with self.opened() as learner:
            together = await learner.logprobs(rows)
            alone = [(await learner.logprobs([row]))[0] for row in rows]
            for row, found, expected in zip(rows, together, alone, strict=True):
                assert found.shape == (int(row.loss_mask.sum()),) and (found <= 0).all()
                assert np.allclose(found, expected, atol=max(1e-4, self.tolerance / 10))
            good = structs.replace(rows[0], advantages=np.ones(len(rows[0].tokens), np.float32))
            for _ in range(5):
                await self.train(learner, [good])
            assert (await learner.logprobs([good]))[0].sum() > together[0].sum()

    @learner_test
    async def test_metrics_are_finite_numbers(self) -> None:
        async with self.opened() as learner:
            metrics = await self.train(learner, make_rows(self.vocabulary))
        assert metrics and all(np.isfinite(value) for value in metrics.values())

    @learner_test
    async def test_what_it_saves_is_there(self, tmp_path: Path) -> None:
        async with self.opened() as learner:
            await asyncio.to_thread(learner.save, tmp_path / "model")
        assert any((tmp_path / "model").iterdir())
