"""An environment on trial, before there is a model: played with scripted policies, it shows what is wrong with it.

A policy says its lines whatever it is shown: the gold turns, random text, nothing, very much. Every finding has a name, says
what was seen, and what to do. Light: imports no torch.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, structs

from millstream.env import EpisodeReward
from millstream.env.bytes_text import ByteText
from millstream.env.isolated import NotMade
from millstream.env.multi_turn import NothingToShow
from millstream.env.registry import Hosted
from millstream.env.resolve import EnvironmentKind
from millstream.env.rewards import RewardConfig, Scorer, prepare_rewards
from millstream.env.single_turn import SingleTurn
from millstream.errors import EnvironmentFailed
from millstream.pipeline.episode import Episode
from millstream.seeds import derive_seed
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task

MAX_TURNS = 256
MAX_PARTS = 64
LONG = 2_000
"""Characters of a very long answer."""
STEP_S = 10.0
TICK_S = 0.005
Policy = Callable[[int], str]
"""From the number of the turn to what is said."""

WHAT_TO_DO = {
    "no-tasks": "let tasks(num, seed) give at least one Task",
    "duplicate-ids": "give every task an id of its own",
    "task-without-id": "give every task an id that is not empty",
    "not-in-a-process": "put what it needs where a fresh Python finds it: a package, or a file that imports nothing beside it",
    "raises": "catch what can go wrong and give a reward for it: a rollout that fails teaches nothing",
    "empty-observation": "show the model something: reset and step return a text, or Messages, that is not empty",
    "too-slow": "make the step faster, or set environment.step_timeout_s higher",
    "never-ends": "count the turns and end the episode, as max_turns does for reset and step",
    "reward-not-finite": "return a finite number",
    "gold-below-one": "let what gold(task) says earn 1.0, or mend the reward: no model can do better than gold",
    "not-repeatable": "draw all randomness from the seed that reset, or context.seed, gives; read no clock",
    "shared-state": "keep what an episode changes in the instance that reset sees (or in local variables), not in the class",
    "blocks": "make the method a coroutine that awaits, leave is_quick out so that it runs on a thread, or set process = true",
    "reward-out-of-range": "nothing, if that is meant; 0 to 1 is what accuracies and most settings expect",
    "no-gold": "add gold(task), the turns of a perfect player: it proves that the reward can be earned, and warms models up",
}
NOTES = ("reward-out-of-range", "no-gold")


class Finding(Struct, frozen=True, kw_only=True):
    name: str
    what: str
    """What was seen."""
    do: str
    is_note: bool

    def __str__(self) -> str:
        return f"{'note' if self.is_note else 'FOUND'} {self.name}: {self.what}\n  what to do: {self.do}"


class Verdict(Struct, frozen=True, kw_only=True):
    environment: str
    num_tasks: int
    num_episodes: int
    findings: tuple[Finding, ...]

    @property
    def is_fit(self) -> bool:
        return all(finding.is_note for finding in self.findings)


class Played(NamedTuple):
    """What can be compared of two plays."""

    tokens: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


class _Endless(EnvironmentFailed):
    """The policy has spoken often enough."""


async def examine(
    kind: EnvironmentKind,
    tasks: Sequence[Task],
    *,
    rewards: Sequence[RewardConfig] = (),
    seed: int = 0,
    block_s: float = 0.25,
) -> Verdict:
    """Plays these tasks with every policy. `block_s`: how long the event loop may be held up."""
    trial = _Trial(kind, rewards, seed, block_s)
    try:
        await trial.hold(tasks)
    finally:
        await trial.hosted.close()
    return Verdict(
        environment=kind.name,
        num_tasks=len(tasks),
        num_episodes=trial.num_episodes,
        findings=tuple(sorted(trial.findings.values(), key=lambda finding: finding.is_note)),
    )


class _Trial:
    def __init__(self, kind: EnvironmentKind, rewards: Sequence[RewardConfig], seed: int, block_s: float) -> None:
        limit = min(kind.config.step_timeout_s, STEP_S)
        kind = structs.replace(kind, config=structs.replace(kind.config, step_timeout_s=limit, max_concurrent=None))
        self._kind = kind
        self._seed = seed
        self._block_s = block_s
        self._text = ByteText()
        self.hosted = Hosted(kind, kind.environment or self._single_turn(rewards), self._text)
        self.findings: dict[str, Finding] = {}
        self.num_episodes = 0

    def _single_turn(self, rewards: Sequence[RewardConfig]) -> SingleTurn:
        scorer = Scorer(prepare_rewards(rewards))
        return SingleTurn(encode=lambda task: self._text.opening(task.prompt), decode=self._text.decode, scorer=scorer)

    def _find(self, name: str, what: str) -> None:
        """The first of its name stands for all of them."""
        finding = Finding(name=name, what=what, do=WHAT_TO_DO[name], is_note=name in NOTES)
        self.findings.setdefault(name, finding)

    async def hold(self, tasks: Sequence[Task]) -> None:
        for name, what in tasks_trouble(tasks):
            self._find(name, what)
        if not tasks:
            return
        await self._gold(tasks)
        for task in tasks:
            for policy, says in self._policies():
                if not self._is_hopeless():
                    await self._play(task, policy, says)
        await self._compare(tasks)

    def _is_hopeless(self) -> bool:
        """More of it would only take time."""
        return any(name in self.findings for name in ("not-in-a-process", "never-ends", "too-slow"))

    def _policies(self) -> Iterator[tuple[str, Policy]]:
        yield "random", self._random
        yield "empty", lambda turn: ""
        yield "very long", lambda turn: "long " * (LONG // 5)

    def _random(self, turn: int) -> str:
        rng = random.Random(derive_seed(self._seed, "random", turn))
        return "".join(rng.choices(string.ascii_letters + string.digits + " ", k=rng.randrange(1, 24)))

    async def _gold(self, tasks: Sequence[Task]) -> None:
        has_gold = False
        for task in tasks:
            if self._is_hopeless():
                return
            try:
                gold = [] if self._kind.gold is None else self._kind.gold(task)
            except Exception as error:  # the border to the user's code
                self._find("raises", f"gold of task {task.id!r} raised {type(error).__name__}: {error}")
                continue
            has_gold = has_gold or bool(gold)
            played = await self._play(task, "gold", _lines(gold)) if gold else None
            if played is not None and any(abs(reward - 1.0) > 1e-6 for reward in played.rewards):
                said = ", ".join(map(repr, gold[:4])) + (", ..." if len(gold) > 4 else "")
                self._find("gold-below-one", f"on task {task.id!r} gold earns {_shown(played.rewards)}; it says {said}")
        if not has_gold:
            self._find("no-gold", "no task has gold turns")

    async def _compare(self, tasks: Sequence[Task]) -> None:
        """Twice alone, then beside another: what an episode does depends on its own seed, task and answers, on nothing else."""
        if self._is_hopeless() or any(name in self.findings for name in ("raises", "empty-observation")):
            return
        pair = (tasks[0], tasks[-1])
        for says in (_lines(self._gold_of(pair[0])), self._random):
            alone = [await self._play(task, "again", says) for task in pair]
            again = [await self._play(task, "again", says) for task in pair]
            if alone != again:
                self._find("not-repeatable", f"two plays of task {pair[0].id!r} with one seed and one policy differ")
                return
            beside = await asyncio.gather(*(self._play(task, "again", says) for task in pair))
            if list(beside) != alone:
                self._find("shared-state", "an episode goes differently when another runs beside it")

    def _gold_of(self, task: Task) -> Sequence[str]:
        return [] if self._kind.gold is None else self._kind.gold(task)

    async def _play(self, task: Task, policy: str, says: Policy) -> Played | None:
        """None if it failed, which is a finding. What held up the event loop once may have been the machine: it is played
        again."""
        where = f"task {task.id!r}, policy {policy}"
        played, late_s = await self._once(task, says, where)
        if late_s > self._block_s and "blocks" not in self.findings:
            played, late_s = await self._once(task, says, where)
            if late_s > self._block_s:
                self._find(
                    "blocks", f"{where}: the event loop stood still for {late_s:.2f} s, and every rollout with it"
                )
        return played

    async def _once(self, task: Task, says: Policy, where: str) -> tuple[Played | None, float]:
        """And how late the latest tick of the event loop came."""
        late = [0.0]
        watch = asyncio.create_task(_watch(late))
        await asyncio.sleep(0)
        try:
            played = await self._attempt(task, says, where)
            return played, max(late)
        finally:
            watch.cancel()

    async def _attempt(self, task: Task, says: Policy, where: str) -> Played | None:
        self.num_episodes += 1
        episode = self._episode(task, says)
        try:
            return self._judged(episode, await self.hosted.rollout(episode), where)
        except NotMade as error:
            self._find("not-in-a-process", str(error))
        except NothingToShow as error:
            self._find("empty-observation", f"{where}: {error}")
        except _Endless:
            self._find("never-ends", f"{where}: the model was asked {MAX_TURNS} times, and the episode went on")
        except Exception as error:  # the border to the user's code: whatever it raises is a finding
            self._find(_name_of(error), f"{where}: {type(error).__name__}: {error}")
        finally:
            await asyncio.sleep(TICK_S)  # a tick that is late has its chance to say so
        return None

    def _judged(self, episode: Episode, reward: EpisodeReward, where: str) -> Played | None:
        try:
            parts = episode.finish(reward)
        except EnvironmentFailed as error:
            self._find(_name_of(error), f"{where}: {error}")
            return None
        rewards = tuple(part.reward for part in parts)
        if any(not 0.0 <= one <= 1.0 for one in rewards):
            self._find("reward-out-of-range", f"{where}: a reward of {_shown(rewards)}")
        return Played(tuple(tuple(part.tokens.tolist()) for part in parts), rewards)

    def _episode(self, task: Task, says: Policy) -> Episode:
        num_said = 0

        async def speak(request: Request) -> Completion:
            nonlocal num_said
            if num_said >= MAX_TURNS:
                raise _Endless("the policy has nothing more to say")
            tokens = [*self._text.encode(says(num_said)), self._text.end_token]
            num_said += 1
            await asyncio.sleep(TICK_S)  # others may move meanwhile, as they do while a model speaks
            zeros = (0,) * len(tokens)
            return Completion(tokens=tuple(tokens), logprobs=zeros, versions=zeros, finish=Finish.STOP)

        async def waiting(what: str, work: Awaitable[Any]) -> Any:
            return await work

        return Episode(
            task,
            RequestKey(group_id=0, member=0),
            generate=speak,
            waiting=waiting,
            sampling=Sampling(max_tokens=LONG),
            run_seed=self._seed,
            role="check",
            max_parts=MAX_PARTS,
        )


async def _watch(late: list[float]) -> None:
    """Ticks; one that comes late says that somebody held the event loop."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(TICK_S)
        late.append(time.monotonic() - began - TICK_S)


def tasks_trouble(tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    ids = [task.id for task in tasks]
    if not tasks:
        yield "no-tasks", "there is no task to play"
    if not all(ids):
        yield "task-without-id", f"task number {ids.index('')} has an empty id"
    if twice := [one for one in ids if one and ids.count(one) > 1]:
        yield "duplicate-ids", f"{len(twice)} of {len(ids)} tasks share an id; the first is {twice[0]!r}"


def _name_of(error: Exception) -> str:
    """Of a failure, by what our own side says of it."""
    if isinstance(error, EnvironmentFailed) and "took longer than" in str(error):
        return "too-slow"
    is_infinite = isinstance(error, EnvironmentFailed) and "expected a finite number" in str(error)
    return "reward-not-finite" if is_infinite else "raises"


def _lines(said: Sequence[str]) -> Policy:
    """When they are over, nothing is said."""
    return lambda turn: said[turn] if turn < len(said) else ""


def _shown(rewards: Sequence[float]) -> str:
    return ", ".join(f"{reward:g}" for reward in rewards)
