"""Conformance tests of small parts: filters, schedules, samplers, tool formats, trackers, weight channels. Needs pytest.

from millstream.testing.parts import FilterSuite

class TestMyFilter(FilterSuite):
    filter = staticmethod(keep)

    def make_groups(self):                  # of your own tasks, where the filter reads their fields
        return [FinishedGroup(task=..., rewards=(0.0, 1.0), tokens=(...,))]

`millstream check filter my.py:keep` runs the same tests."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.env.tools.parse import AssistantTurn, InvalidCall, ToolCall
from millstream.errors import WeightsError
from millstream.run.tracking.sink import TrackedRun, Tracker
from millstream.types import FinishedGroup, Task, Weights
from millstream.weights import WeightChannel
from millstream.weights.base import NOTHING

NUM_STEPS = (1, 2, 10, 1000)
TEXTS = ("", "plain text", "{", "}", "[]", "<", "</tool_call>", "\0", "{}" * 1000, "[" * 5000, "🙂" * 50, '{"name": 1}')


class FilterSuite:
    filter: Callable[[FinishedGroup], Any]

    def make_groups(self) -> list[FinishedGroup]:
        """Of 1 to 8 members, with rewards from -1 to 1."""
        rng, groups = np.random.default_rng(0), list[FinishedGroup]()
        for number, size in enumerate((1, 2, 4, 8) * 8):
            rewards = [(0.0, 1.0), (-1.0, -0.5, 0.5, 1.0), (1.0,), (0.0,)][number % 4]
            groups.append(
                FinishedGroup(
                    task=Task(id=f"task-{number}", prompt="2+2=", answer="4"),
                    rewards=tuple(float(value) for value in rng.choice(rewards, size)),
                    tokens=tuple(rng.integers(0, 97, rng.integers(1, 50)).astype(np.int32) for _ in range(size)),
                )
            )
        return groups

    def keeps(self, group: FinishedGroup) -> Any:
        return type(self).filter(group)

    def test_it_answers_true_or_false_for_every_group(self) -> None:
        for group in self.make_groups():
            found = self.keeps(group)
            assert isinstance(found, bool | np.bool_), f"it returned {found!r} for rewards {group.rewards}"

    def test_the_same_group_gets_the_same_answer_whatever_came_before_it(self) -> None:
        """A resumed run asks again, in another order, and in a new process."""
        groups = self.make_groups()
        first = [bool(self.keeps(group)) for group in groups]
        again = [bool(self.keeps(group)) for group in reversed(groups)][::-1]
        assert first == again, "the filter remembers what it was asked before"

    def test_it_does_not_change_the_group(self) -> None:
        """The tokens are those that are trained."""
        for group in self.make_groups():
            before = [tokens.copy() for tokens in group.tokens]
            self.keeps(group)
            same = all(np.array_equal(one, other) for one, other in zip(before, group.tokens, strict=True))
            assert same, "the filter wrote into the tokens of a rollout"

    def test_some_group_is_kept(self) -> None:
        """Otherwise every step is empty."""
        assert any(self.keeps(group) for group in self.make_groups()), "it refuses every group"


class ScheduleSuite:
    schedule: Callable[[int, int | None], Any]

    def share(self, step: int, num_steps: int | None) -> Any:
        return type(self).schedule(step, num_steps)

    def test_every_step_has_a_finite_share_of_at_least_0(self) -> None:
        for num_steps in NUM_STEPS:
            for step in {*range(min(num_steps, 20)), num_steps - 1}:
                found = self.share(step, num_steps)
                is_share = isinstance(found, int | float) and math.isfinite(found) and found >= 0
                assert is_share, f"it returned {found!r} for step {step} of {num_steps}"

    def test_it_works_where_the_number_of_steps_is_not_known(self) -> None:
        assert math.isfinite(self.share(3, None))

    def test_the_same_step_has_the_same_share_whatever_came_before_it(self) -> None:
        """A resumed run begins in the middle."""
        forwards = [self.share(step, 10) for step in range(10)]
        assert forwards == [self.share(step, 10) for step in reversed(range(10))][::-1]

    def test_some_step_trains(self) -> None:
        assert any(self.share(step, 10) > 0 for step in range(10)), "every share is 0"


class SamplerSuite:
    sampler: Callable[[Sequence[Task], int], Iterable[Task]]

    def make_tasks(self) -> list[Task]:
        return [Task(id=f"task-{number}", prompt="7" * (1 + number % 9), answer="4") for number in range(20)]

    def first(self, count: int, seed: int = 0) -> list[Any]:
        return list(itertools.islice(type(self).sampler(self.make_tasks(), seed), count))

    def test_it_gives_the_tasks_that_it_was_given_and_no_others(self) -> None:
        known = {task.id for task in self.make_tasks()}
        for task in self.first(50):
            assert isinstance(task, Task) and task.id in known, f"it gave {task!r}"

    def test_the_same_seed_gives_the_same_order(self) -> None:
        """A resumed run takes the same way through the tasks, up to where it was."""
        assert [task.id for task in self.first(50)] == [task.id for task in self.first(50)]

    def test_it_does_not_end(self) -> None:
        """A run that has no task left ends before its last step."""
        assert len(self.first(200)) == 200, "it ended before ten times the number of tasks"

    def test_tasks_come_one_at_a_time(self) -> None:
        """A sampler that makes the whole order first never begins, as there is no end."""
        assert len(self.first(1)) == 1


class ToolFormatSuite:
    parse: Callable[[str], Any]
    example: str | None = None  # an answer with at least one call, in this format

    def of(self, text: str) -> AssistantTurn:
        found = type(self).parse(text)
        assert isinstance(found, AssistantTurn), f"it returned {type(found).__name__}: expected AssistantTurn"
        return found

    def test_whatever_the_model_writes_is_an_answer_or_a_call_and_never_an_error(self) -> None:
        example = self.example or ""
        cut = [example[:at] + example[at + length :] for length in (1, 3, len(example)) for at in range(len(example))]
        for text in (*TEXTS, *cut):
            turn = self.of(text)
            assert isinstance(turn.content, str)
            assert all(isinstance(call, ToolCall | InvalidCall) for call in turn.calls)

    def test_plain_text_is_an_answer_without_calls(self) -> None:
        turn = self.of("The answer is 4.")
        assert turn.calls == () and "The answer is 4." in turn.content

    def test_the_example_has_a_call_with_a_name_and_arguments(self) -> None:
        if self.example is None:
            pytest.skip("there is no example: parse.promises = {'example': '...'}")
        calls = self.of(self.example).calls
        assert calls and all(isinstance(call, ToolCall) and call.name for call in calls)


class TrackerSuite:
    def make_tracker(self, run: TrackedRun) -> Tracker:
        raise NotImplementedError("give the suite a tracker: def make_tracker(self, run)")

    def opened(self, folder: Path, version: int = 0) -> Tracker:
        config = {"pipeline.steps": 3, "run_dir": str(folder), "model.path": None}
        run = TrackedRun(
            project="p", name="n", run_id="0123456789abcdef", folder=folder, config=config, version=version
        )
        return self.make_tracker(run)

    def track(self, tracker: Tracker, steps: range) -> None:
        for step in steps:
            tracker.log(step, {"reward": 0.5, "held_out/pass@1": 0.25, "loss": -1e-9})
        tracker.text(steps[-1], "samples/held_out", "prompt: µ\ncompletion: <b>\nreward: 0.0")

    def test_it_takes_metrics_texts_and_the_end(self, tmp_path: Path) -> None:
        tracker = self.opened(tmp_path)
        self.track(tracker, range(1, 4))
        tracker.finish({"wall_s": 1.0}, is_finished=True)

    def test_a_step_may_be_logged_twice_with_other_values(self, tmp_path: Path) -> None:
        """Of a step, and of the evaluation after it."""
        tracker = self.opened(tmp_path)
        tracker.log(1, {"reward": 0.5})
        tracker.log(1, {"held_out/accuracy": 0.5})
        tracker.finish({}, is_finished=False)

    def test_a_resumed_run_continues(self, tmp_path: Path) -> None:
        first = self.opened(tmp_path)
        self.track(first, range(1, 4))
        first.finish({}, is_finished=False)
        again = self.opened(tmp_path, version=2)
        self.track(again, range(3, 6))
        again.finish({}, is_finished=True)


class ChannelSuite:
    def make_channel(self) -> WeightChannel:
        raise NotImplementedError("give the suite a weight channel: def make_channel(self)")

    def make_weights(self, number: int) -> Weights:
        import torch

        generator = torch.Generator().manual_seed(number)
        shapes = {"a.weight": (3, 5), "b.bias": (7,), "c.weight": (64, 64)}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        asyncio.run(program)

    def check(self, found: Weights, number: int) -> None:
        expected = self.make_weights(number)
        assert found.keys() == expected.keys(), f"names: {sorted(found)}"
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].equal(tensor), f"{name} has other values"

    def test_before_the_first_version_there_is_nothing_to_fetch(self) -> None:
        async def program() -> None:
            channel = self.make_channel()
            assert channel.version == NOTHING, f"version is {channel.version}: expected {NOTHING}"
            with pytest.raises(WeightsError):
                await channel.fetch()

        self.run(program())

    def test_what_is_fetched_is_the_newest_version_every_bit(self) -> None:
        async def program() -> None:
            channel = self.make_channel()
            for version in (0, 1, 5):
                await channel.publish(version, self.make_weights(version))
                assert channel.version == version
                found = await channel.fetch()
                assert found.version == version, f"version {found.version} was fetched, {version} is the newest"
                self.check(found.weights, version)

        self.run(program())

    def test_versions_only_rise(self) -> None:
        async def program() -> None:
            channel = self.make_channel()
            await channel.publish(3, self.make_weights(3))
            for version in (3, 2):
                with pytest.raises(WeightsError):
                    await channel.publish(version, self.make_weights(0))
            found = await channel.fetch()
            assert found.version == 3
            self.check(found.weights, 3)

        self.run(program())

    def test_a_fetch_while_the_next_version_is_published_gets_one_of_them_whole(self) -> None:
        async def program() -> None:
            channel = self.make_channel()
            await channel.publish(0, self.make_weights(0))
            for version in range(1, 8):
                publishing = asyncio.create_task(channel.publish(version, self.make_weights(version)))
                for found in await asyncio.gather(*(channel.fetch() for _ in range(4))):
                    assert found.version in (version - 1, version)
                    self.check(found.weights, found.version)
                await publishing

        self.run(program())

    def test_weights_that_are_staged_again_are_those_of_the_newest_version(self) -> None:
        async def program() -> None:
            channel = self.make_channel()
            await channel.publish(1, self.make_weights(1))
            again = await channel.restage()
            if again is not None:
                self.check(again, 1)
            self.check((await channel.fetch()).weights, 1)

        self.run(program())
