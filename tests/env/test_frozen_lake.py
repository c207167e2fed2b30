"""The recipe of the frozen lake, on a slow lake: what was sampled, turn by turn, is what is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from millstream import RunConfig, train
from millstream.config import load
from millstream.engine import OnSampled
from millstream.engine.native.engine import TorchEngine
from millstream.env.games.frozen_lake import FrozenLake
from millstream.events import RolloutEnded
from millstream.events.sinks import read_events
from millstream.learner.torch import TorchLearner
from millstream.run import build
from millstream.types import Completion, Request, RequestKey, Task, TrainRow
from support.runs import assert_clean

RECIPE = Path(__file__).parents[2] / "recipes/frozen_lake.toml"
LATENCY_S = 0.002
SHORT = [
    f"environment.0.args.latency_s={LATENCY_S}",
    "environment.0.args.latency_tail=1.0",
    "environment.0.args.max_turns=6",
    "data.size=40",
    "data.holdout=4",
    "warmup.max_steps=2",
    "warmup.check_every=2",
    "warmup.stop_at=1",
    "rollout.group_size=4",
    "pipeline.groups_per_step=3",
    "pipeline.steps=4",
    "pipeline.filter_zero_signal=false",
    "engine.process=false",
    "evaluation.every_steps=",
]
Turn = tuple[Request, Completion]


class Heard(TorchEngine):
    """The real engine, and everything that was asked of it and answered."""

    turns: dict[RequestKey, Turn]

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        completion = await super().generate(request, on_sampled)
        self.turns[request.key] = request, completion
        return completion


class Taught(TorchLearner):
    """The real learner, and every row that it was given."""

    rows: list[TrainRow]

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        self.rows.extend(rows)
        await super().accumulate(rows)


def rollouts_of(turns: dict[RequestKey, Turn]) -> list[list[Turn]]:
    """Turns by rollout, in their order. An evaluation's have groups below 0."""
    found: dict[tuple[int, int, int], list[Turn]] = {}
    for key in sorted(key for key in turns if key.group_id >= 0):
        found.setdefault((key.group_id, key.member, key.attempt), []).append(turns[key])
    return list(found.values())


Row = tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]


def as_sampled(turns: Sequence[Turn]) -> Row:
    """Tokens, mask and log-probabilities of a rollout, from its requests and completions alone."""
    mask, logprobs = list[bool](), list[float]()
    for request, completion in turns:
        mask += [False] * (len(request.tokens) - len(mask)) + [True] * len(completion.tokens)
        logprobs += [0.0] * (len(request.tokens) - len(logprobs)) + list(completion.logprobs)
    request, completion = turns[-1]
    return (*request.tokens, *completion.tokens), tuple(mask), tuple(logprobs)


def as_trained(row: TrainRow) -> Row:
    return tuple(row.tokens.tolist()), tuple(row.loss_mask.tolist()), tuple(row.logprobs.tolist())


@pytest.mark.parametrize("changes", [["pipeline.max_lag=2", "pipeline.extra_groups=4"], ["pipeline.max_lag=0"]])
def test_a_walk_of_several_turns_is_trained_token_for_token_as_it_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    Heard.turns, Taught.rows = {}, []
    monkeypatch.setattr(build, "TorchEngine", Heard)
    monkeypatch.setattr(build, "TorchLearner", Taught)
    result = train(load(RECIPE, RunConfig, [f"run_dir={tmp_path / 'run'}", *SHORT, *changes]))
    assert_clean(tmp_path / "run")
    assert result.summary.steps == 4 and result.summary.rollouts_trained == 48

    walks = rollouts_of(Heard.turns)
    ended = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, RolloutEnded)]
    num_turns = sum(event.num_sampled for event in ended) / 2  # at least: a turn has two tokens at most
    assert sum(event.seconds for event in ended) > 0.5 * LATENCY_S * num_turns, "every turn waits for the lake"
    assert sum(len(walk) > 1 for walk in walks) > 40, "a walk has several turns"
    for walk in walks:
        for (before, said), (after, _) in pairwise(walk):
            begin = (*before.tokens, *said.tokens)
            assert after.tokens[: len(begin)] == begin, "the next turn is shown what was sampled, not another encoding"
    sampled = [as_sampled(walk) for walk in walks]
    trained = [as_trained(row) for row in Taught.rows if row.logprobs.any()]  # the warm-up's have none
    assert len(trained) == 48
    for row in trained:
        assert row in sampled
        sampled.remove(row)  # none twice


def test_a_walker_who_looks_around_sees_the_moves_there_are_and_where_it_has_been() -> None:
    async def walk(moves: str) -> list[str]:
        lake = FrozenLake(shows_around=True)
        seen = [await lake.reset(Task(id="1", prompt="phf=fff=fhg>"), 0)]
        return seen + [(await lake.step(move)).observation for move in moves]  # type: ignore[misc]

    assert asyncio.run(walk("drx")) == ["phf=fff=fhg>dfrh>", "dfrfup>", "lpdhrfuh>", "lpdhrfuh>"]


def test_an_explorer_crosses_every_lake_turns_back_from_dead_ends_and_never_falls() -> None:
    lake = Task(id="1", prompt="pff=fhh=ffg>")
    assert FrozenLake.gold(lake, shows_around=True) == ["d", "d", "r", "r"] == FrozenLake.gold(lake)
    lake = Task(id="2", prompt="pff=fhf=fhg>")
    assert FrozenLake.gold(lake, shows_around=True) == [*"dd", *"uu", *"rrdd"]

    async def reward_of(task: Task) -> float:
        walker = FrozenLake(shows_around=True)
        await walker.reset(task, 0)
        return sum([(await walker.step(move)).reward for move in FrozenLake.gold(task, shows_around=True)])

    for task in FrozenLake.tasks(100, seed=1, holes=0.4):
        assert asyncio.run(reward_of(task)) == 1.0
