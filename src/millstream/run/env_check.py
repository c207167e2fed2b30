"""`millstream env check`: plays environments with scripted policies, without a model, and reports what is wrong with them.

A policy says its turns whatever it is shown: the gold turns, random text, an empty text, a very long one. Another calls each
tool that there is (`run.check_tools`). Every finding has a name, what was seen, and what to do. Light: imports no torch.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, structs

from millstream import config as configs
from millstream.env import Environment
from millstream.env.bytes_text import SPECIAL, ByteText
from millstream.env.config import SINGLE_TURN, EnvironmentConfig
from millstream.env.data import read
from millstream.env.isolated import NotMade
from millstream.env.multi_turn import NothingToShow
from millstream.env.registry import Hosted, name_of
from millstream.env.resolve import EnvironmentKind, find_environment
from millstream.env.rewards import CompletionScorer, RewardConfig, prepare_rewards
from millstream.env.single_turn import SingleTurn
from millstream.errors import ConfigError, EnvironmentFailed, shown
from millstream.pipeline.episode import Player
from millstream.run.check_tools import ToolPolicy
from millstream.run.config import RunConfig
from millstream.seeds import derive_seed
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task

MAX_TURNS = 256
MAX_PARTS = 64
LONG = 2_000  # characters of a very long answer
STEP_S = 10.0
TICK_S = 0.005
ScriptedPolicy = Callable[[int, str], str]  # from the number of a turn, and all that was shown, to its text

WHAT_TO_DO = {
    "no-tasks": "let tasks(num, seed) give at least one Task",
    "duplicate-ids": "give every task an id of its own",
    "task-without-id": "give every task an id that is not empty",
    "not-in-a-process": "put what it needs where a fresh Python finds it: a package, or a file that imports no file next to it",
    "raises": "catch what can go wrong and give a reward for it: a rollout that fails teaches nothing",
    "empty-observation": "show the model something: reset and step return a text, or Messages, that is not empty",
    "too-slow": "make the step faster, or set environment.step_timeout_s higher",
    "never-ends": "count the turns and end the episode, as max_turns does for reset and step",
    "reward-not-finite": "return a finite number",
    "gold-below-one": "let what gold(task) says earn 1.0, or correct the reward: no model can do better than gold",
    "not-repeatable": "draw all randomness from the seed that reset, or context.seed, gives; read no clock",
    "shared-state": "keep what an episode changes in the instance that reset sees (or in local variables), not in the class",
    "blocks": "make the method a coroutine that awaits, leave is_quick out so that it runs on a thread, or set process = true",
    "reward-out-of-range": "nothing, if that is meant; 0 to 1 is what accuracies and most settings expect",
    "tool-breaks": "return text or plain data in time; tools of a config have timeout_s and process",
    "tool-error": "nothing, if the tool cannot be called so: the model sees this text and may try again",
    "tool-undocumented": "write a docstring: it is what the model knows of the tool",
    "no-gold": "add gold(task), the turns of a perfect player: it proves that the reward can be earned, and warms models up",
}
NOTES = ("reward-out-of-range", "no-gold", "tool-error", "tool-undocumented")


class EnvironmentFinding(Struct, frozen=True, kw_only=True):
    name: str
    what: str  # what was seen
    do: str  # what to do
    is_note: bool

    def __str__(self) -> str:
        return f"{'note' if self.is_note else 'FOUND'} {self.name}: {self.what}\n  what to do: {self.do}"


class EnvironmentReport(Struct, frozen=True, kw_only=True):
    environment: str
    num_tasks: int
    num_episodes: int
    findings: tuple[EnvironmentFinding, ...]

    @property
    def is_fit(self) -> bool:
        return all(finding.is_note for finding in self.findings)


class Transcript(NamedTuple):
    """What is compared of two episodes."""

    tokens: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


class _Endless(EnvironmentFailed):
    """The policy was asked for more than `MAX_TURNS` turns."""


async def check_environment(
    kind: EnvironmentKind,
    tasks: Sequence[Task],
    *,
    rewards: Sequence[RewardConfig] = (),
    seed: int = 0,
    block_s: float = 0.25,
) -> EnvironmentReport:
    """Play these tasks with every policy. `block_s`: how long the event loop may be blocked."""
    checker = _Checker(kind, rewards, seed, block_s)
    try:
        await checker.check(tasks)
    finally:
        await checker.hosted.close()
    return EnvironmentReport(
        environment=kind.name,
        num_tasks=len(tasks),
        num_episodes=checker.num_episodes,
        findings=tuple(sorted(checker.findings.values(), key=lambda finding: finding.is_note)),
    )


class _Checker:
    def __init__(self, kind: EnvironmentKind, rewards: Sequence[RewardConfig], seed: int, block_s: float) -> None:
        limit = min(kind.config.step_timeout_s, STEP_S)
        kind = structs.replace(kind, config=structs.replace(kind.config, step_timeout_s=limit, max_concurrent=None))
        self._kind = kind
        self._seed = seed
        self._block_s = block_s
        self._text = ByteText()
        self.hosted = Hosted(kind, kind.environment or self._built(rewards), self._text)
        self._player = Player(
            environment=self.hosted,
            sampling=Sampling(max_tokens=LONG),
            run_seed=seed,
            role="check",
            max_parts=MAX_PARTS,
        )
        self.findings: dict[str, EnvironmentFinding] = {}
        self.num_episodes = 0

    def _built(self, rewards: Sequence[RewardConfig]) -> Environment:
        scorer = CompletionScorer(prepare_rewards(rewards))
        if self._kind.config.use == SINGLE_TURN:
            return SingleTurn(scorer)
        from millstream.serve.agents.environment import make_agent

        ends = (self._text.end_token,)
        return make_agent(self._kind.config, self._text, scorer, end_tokens=ends, vocabulary=len(SPECIAL) + 256)

    def _find(self, name: str, what: str) -> None:
        """Record a finding; only the first of each name is kept."""
        finding = EnvironmentFinding(name=name, what=what, do=WHAT_TO_DO[name], is_note=name in NOTES)
        self.findings.setdefault(name, finding)

    async def check(self, tasks: Sequence[Task]) -> None:
        for name, what in task_findings(tasks):
            self._find(name, what)
        if not tasks:
            return
        await self._gold(tasks)
        for task in tasks:
            for policy, says in self._policies():
                if not self._is_over():
                    await self._play(task, policy, says)
        if not self._is_over():
            calling = ToolPolicy(self._kind.config)
            await self._play(tasks[0], "calls", calling)
            for name, what in calling.findings():
                self._find(name, what)
        await self._compare(tasks)

    def _is_over(self) -> bool:
        """Whether more episodes would only take time."""
        return any(name in self.findings for name in ("not-in-a-process", "never-ends", "too-slow"))

    def _policies(self) -> Iterator[tuple[str, ScriptedPolicy]]:
        yield "random", self._random
        yield "empty", lambda turn, shown: ""
        yield "very long", lambda turn, shown: "long " * (LONG // 5)

    def _random(self, turn: int, shown: str) -> str:
        rng = random.Random(derive_seed(self._seed, "random", turn))
        return "".join(rng.choices(string.ascii_letters + string.digits + " ", k=rng.randrange(1, 24)))

    async def _gold(self, tasks: Sequence[Task]) -> None:
        has_gold = False
        for task in tasks:
            if self._is_over():
                return
            try:
                gold = [] if self._kind.gold is None else self._kind.gold(task)
            except Exception as error:  # the border to the user's code
                self._find("raises", f"gold of task {task.id!r} raised {type(error).__name__}: {error}")
                continue
            has_gold = has_gold or bool(gold)
            played = await self._play(task, "gold", _turns(gold)) if gold else None
            if played is not None and any(abs(reward - 1.0) > 1e-6 for reward in played.rewards):
                said = ", ".join(map(repr, gold[:4])) + (", ..." if len(gold) > 4 else "")
                self._find("gold-below-one", f"on task {task.id!r} gold earns {_shown(played.rewards)}; it says {said}")
        if not has_gold:
            self._find("no-gold", "no task has gold turns")

    async def _compare(self, tasks: Sequence[Task]) -> None:
        """Play two tasks twice one after the other, then at the same time. An episode may depend on its own seed, task and
        answers only."""
        if self._is_over() or any(name in self.findings for name in ("raises", "empty-observation")):
            return
        pair = (tasks[0], tasks[-1])
        for says in (_turns(self._gold_of(pair[0])), self._random):
            alone = [await self._play(task, "again", says) for task in pair]
            again = [await self._play(task, "again", says) for task in pair]
            if alone != again:
                self._find("not-repeatable", f"two plays of task {pair[0].id!r} with one seed and one policy differ")
                return
            together = await asyncio.gather(*(self._play(task, "again", says) for task in pair))
            if list(together) != alone:
                self._find("shared-state", "an episode goes differently when another runs at the same time")

    def _gold_of(self, task: Task) -> Sequence[str]:
        return [] if self._kind.gold is None else self._kind.gold(task)

    async def _play(self, task: Task, policy: str, says: ScriptedPolicy) -> Transcript | None:
        """One episode; None if it failed, which is a finding. If it blocked the event loop it is played again, since a busy
        machine may have done that."""
        where = f"task {task.id!r}, policy {policy}"
        played, late_s = await self._once(task, says, where)
        if late_s > self._block_s and "blocks" not in self.findings:
            played, late_s = await self._once(task, says, where)
            if late_s > self._block_s:
                self._find(
                    "blocks", f"{where}: the event loop stood still for {late_s:.2f} s, and every rollout with it"
                )
        return played

    async def _once(self, task: Task, says: ScriptedPolicy, where: str) -> tuple[Transcript | None, float]:
        """One episode, and the longest delay of the event loop meanwhile, in seconds."""
        late = [0.0]
        watch = asyncio.create_task(_watch(late))
        await asyncio.sleep(0)
        try:
            played = await self._attempt(task, says, where)
            return played, max(late)
        finally:
            watch.cancel()

    async def _attempt(self, task: Task, says: ScriptedPolicy, where: str) -> Transcript | None:
        self.num_episodes += 1
        result = await self._player.play(task, RequestKey(group_id=0, member=0), self._generate_by(says))
        await asyncio.sleep(TICK_S)  # lets a late tick be counted
        match result.failure:
            case None:
                rewards = tuple(part.reward for part in result.parts)
                if any(not 0.0 <= one <= 1.0 for one in rewards):
                    self._find("reward-out-of-range", f"{where}: a reward of {_shown(rewards)}")
                return Transcript(tuple(tuple(part.tokens.tolist()) for part in result.parts), rewards)
            case NotMade() as error:
                self._find("not-in-a-process", str(error))
            case NothingToShow() as error:
                self._find("empty-observation", f"{where}: {error}")
            case _Endless():
                self._find("never-ends", f"{where}: the model was asked {MAX_TURNS} times, and the episode did not end")
            case error:
                self._find(_name_of(error), f"{where}: {type(error).__name__}: {error}")
        return None

    def _generate_by(self, says: ScriptedPolicy) -> Callable[[Request], Awaitable[Completion]]:
        num_said = 0

        async def generate(request: Request) -> Completion:
            nonlocal num_said
            if num_said >= MAX_TURNS:
                raise _Endless("the policy has no more turns")
            shown = self._text.decode(request.tokens, is_raw=True)
            tokens = [*self._text.encode(says(num_said, shown)), self._text.end_token]
            num_said += 1
            await asyncio.sleep(TICK_S)  # other episodes run meanwhile, as they do while a model generates
            zeros = (0,) * len(tokens)
            return Completion(tokens=tuple(tokens), logprobs=zeros, versions=zeros, finish=Finish.STOP)

        return generate


async def _watch(late: list[float]) -> None:
    """Tick, and record how late each tick came: a late one means that the event loop was blocked."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(TICK_S)
        late.append(time.monotonic() - began - TICK_S)


def task_findings(tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    ids = [task.id for task in tasks]
    if not tasks:
        yield "no-tasks", "there is no task to play"
    if not all(ids):
        yield "task-without-id", f"task number {ids.index('')} has an empty id"
    if twice := [one for one in ids if one and ids.count(one) > 1]:
        yield "duplicate-ids", f"{len(twice)} of {len(ids)} tasks share an id; the first is {twice[0]!r}"


def _name_of(error: Exception) -> str:
    """The name of the finding for a failed episode."""
    if isinstance(error, EnvironmentFailed) and "took longer than" in str(error):
        return "too-slow"
    is_infinite = isinstance(error, EnvironmentFailed) and "expected a finite number" in str(error)
    return "reward-not-finite" if is_infinite else "raises"


def _turns(said: Sequence[str]) -> ScriptedPolicy:
    """Says these turns; after the last one, an empty text."""
    return lambda turn, shown: said[turn] if turn < len(said) else ""


def _shown(rewards: Sequence[float]) -> str:
    return ", ".join(f"{reward:g}" for reward in rewards)


# ---- the command -----------------------------------------------------------------------------------------------------


def run_env_check(
    use: str | None, args: Sequence[str], path: Path | None, *, process: bool = False, num_tasks: int = 8
) -> list[EnvironmentReport]:
    """Check one environment, or all that a config names."""
    if use is None and path is None:
        raise ConfigError("type what to check (millstream env check file.py:Name), or a config (--config RUN.toml)")
    config = None if path is None else configs.load(path, RunConfig)
    tables = _tables(use, args, config)
    if process:
        tables = [structs.replace(table, process=True) for table in tables]
    kinds = [find_environment(table) for table in tables]
    rewards = (RewardConfig(),) if config is None else config.reward
    tasks = [_tasks(kind, [kind.name for kind in kinds], config, num_tasks) for kind in kinds]

    async def check_all() -> list[EnvironmentReport]:
        return [await check_environment(kind, of, rewards=rewards) for kind, of in zip(kinds, tasks, strict=True)]

    return asyncio.run(check_all())


def _tables(use: str | None, args: Sequence[str], config: RunConfig | None) -> list[EnvironmentConfig]:
    given = _given(args)
    if use is None:
        assert config is not None
        if given:
            raise ConfigError("--args goes with one environment: type which (millstream env check USE --args ...)")
        return list(config.environment)
    named = [] if config is None else [one for one in config.environment if use in (one.use, one.shown)]
    table = named[0] if named else EnvironmentConfig(use=use)
    return [structs.replace(table, args={**table.args, **given})]


def _given(args: Sequence[str]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for arg in args:
        key, _, value = arg.partition("=")
        if not value.strip() or not key.strip().isidentifier():
            raise ConfigError(f"--args {shown(arg)}: expected KEY=VALUE, such as --args size=5")
        data[key.strip()] = configs.parse_value(value.strip(), f"--args {shown(arg)}")
    return data


def _tasks(kind: EnvironmentKind, names: Sequence[str], config: RunConfig | None, num_tasks: int) -> list[Task]:
    """The environment's tasks from the data set, or those that it makes itself."""
    data = None if config is None else config.data
    if config is not None and data is not None and (data.path or data.name or data.toy):
        found = read(structs.replace(data, holdout=0), seed=config.seed).tasks
        return [task for task in found if len(names) == 1 or name_of(task, names) == kind.name][:num_tasks]
    if kind.make_tasks is None:
        raise ConfigError(
            f"environment {kind.name} makes no tasks of its own: give the data set with --config RUN.toml"
        )
    return kind.make_tasks(num_tasks, 0 if config is None else config.seed)


def env_report_lines(report: EnvironmentReport) -> Iterator[str]:
    played = f"{report.num_tasks} tasks, {report.num_episodes} episodes"
    yield from map(str, report.findings)
    yield f"{report.environment}: {'fit' if report.is_fit else 'not fit'} ({played})"
