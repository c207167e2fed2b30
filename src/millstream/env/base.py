"""The protocols of environments: `Environment` drives one rollout through a `Context` and returns its reward.

Every rollout runs its own coroutine, and none waits for another. An error is recorded as a failed rollout and retried; it
never stops the run. There are three ways to write an environment (`env.resolve`): a class with `reset` and `step`, a
coroutine function of a `Context`, or the name of a built-in one."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from millstream.errors import EnvironmentFailed
from millstream.types import Completion, Message, Task, TurnLimits

T = TypeVar("T")
Content = str | Sequence[Message]  # of an environment's turn: text, or the messages of a chat


class ScoredReward(float):
    """A reward that says what it is made of: `ScoredReward(0.7, {"correct": 1.0, "format": 0.4})`. An environment may return
    it; the parts are kept with the rollout and change nothing."""

    parts: Mapping[str, float]

    def __new__(cls, reward: float, parts: Mapping[str, float]) -> ScoredReward:
        self = super().__new__(cls, reward)
        self.parts = parts
        return self


class SplitReward(Struct, frozen=True, kw_only=True):
    """A reward, and which turns and parts have earned it: `SplitReward(turns=[0.0, 0.5, 1.0])`. Advantages per turn, token or
    part read it; others read `reward` alone."""

    # Of the rollout, or one per agent, in their order; of a program whose agents have names, by name. None: the sum of what
    # turns and parts have earned
    reward: float | list[float] | dict[str, float] | None = None
    turns: list[float] | None = None  # one per turn of the rollout, in the order in which they were generated
    parts: list[float] | None = (
        None  # one per part, in the order of their first turns, on top of what their turns have earned
    )

    @property
    def all_rewards(self) -> list[float]:
        match self.reward:
            case None:
                return []
            case dict() | list():
                return list(self.reward.values() if isinstance(self.reward, dict) else self.reward)
            case one:
                return [one]


EpisodeReward = float | Sequence[float] | SplitReward  # one number, or one per agent, in their order


def split_reward(reward: Any) -> SplitReward:
    """What an environment returned, as finite numbers. Raises `EnvironmentFailed`."""
    try:
        if reward is None:
            raise TypeError("no reward")
        split = reward if isinstance(reward, SplitReward) else SplitReward(reward=reward)
        split = SplitReward(reward=_numbers(split.reward), turns=_list(split.turns), parts=_list(split.parts))
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"the environment returned {reward!r}: expected a number, or one per agent") from error
    if not all(map(math.isfinite, [*split.all_rewards, *(split.turns or ()), *(split.parts or ())])):
        raise EnvironmentFailed(f"the environment returned a reward of {reward}: expected a finite number")
    return split


def _numbers(reward: Any) -> float | list[float] | dict[str, float] | None:
    if isinstance(reward, Mapping):
        return {str(name): float(one) for name, one in reward.items()}
    is_list = isinstance(reward, Sequence) and not isinstance(reward, str)
    return None if reward is None else [float(one) for one in reward] if is_list else float(reward)


def _list(rewards: Any) -> list[float] | None:
    return None if rewards is None else [float(one) for one in rewards]


class Step(Struct, frozen=True, kw_only=True):
    """The result of an action in an environment with `reset` and `step`. An episode's reward is the sum over its steps."""

    observation: str | tuple[Message, ...] = ""
    reward: float = 0.0
    is_done: bool = False


class Text(Protocol):
    """The model's tokenizer. Pure: the same text gives the same tokens."""

    @property
    def has_chat(self) -> bool:
        """Whether the tokenizer has a chat template."""
        ...

    @property
    def end_token(self) -> int:
        """The token that ends a turn."""
        ...

    @property
    def tool_format(self) -> str:
        """How the chat template writes calls of tools: see `env.tools.parse`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text in the middle of a sequence: no token is added. Special tokens in the text are recognized."""
        ...

    def opening(self, content: Content) -> list[int]:
        """The beginning of a sequence: a string with the tokenizer's start tokens, a chat through its template."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """A chat as text, up to the model's turn. Raises `DataError` for messages that the template refuses."""
        ...

    def decode(self, tokens: Sequence[int], *, is_raw: bool = False) -> str:
        """Without special tokens, unless it `is_raw`."""
        ...


class Context(Protocol):
    """The interface of one rollout to its environment, in tokens (`generate`) or text (`ask`), not mixed."""

    task: Task
    seed: int  # for the environment's own randomness: the same rollout gets the same seed

    @property
    def text(self) -> Text: ...

    async def generate(self, tokens: Sequence[int], limits: TurnLimits | None = None) -> Completion:
        """Append these tokens to the trajectory (not trained) and let the model generate its turn (trained). Raises
        `RequestRefused` if they exceed the model's context: the trajectory is then unchanged."""
        ...

    async def ask(self, content: Content, *, is_raw: bool = False) -> str:
        """Append this text and return the model's answer; with its special tokens, but for the end of its turn, if it `is_raw`.
        It is a user turn of the chat template if it is messages, or if the
        task's prompt is a chat and the tokenizer has a template (the task's system messages then come first); plain text
        otherwise. Sampled tokens are kept as they are: they are never encoded again."""
        ...

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        """Await work of the environment under a name, which the terminal and a timeout show. Without `is_timed` it does not
        count against the rollout's time limit."""
        ...

    def earned(self, reward: float) -> None:
        """The reward of the last turn, for advantages per turn or token. `rollout` still returns the total reward; the part
        that no turn has earned counts for the last turn."""
        ...

    def part(self, agent: int = 0) -> Context:
        """Another sequence of the same rollout, with its own history; `agent` selects its reward. At most `rollout.max_parts`
        of them may generate."""
        ...


class Environment(Protocol):
    async def rollout(self, context: Context) -> EpisodeReward:
        """Play one episode and return its reward. May raise anything: the rollout has then failed."""
        ...
