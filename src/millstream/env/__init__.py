"""The seam to the world: an environment drives one rollout by letting the model speak, and returns its reward.

An environment is a coroutine function of its own: as many of them run at once as there are rollouts, and none waits for
another. What it raises is recorded as a failed rollout and retried; it never stops the run. There are three ways to write one
(`env.resolve`): a class with `reset` and `step`, a coroutine function of a `Context`, or the name of one that is built in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from millstream.types import Completion, Message, Task

T = TypeVar("T")
Content = str | Sequence[Message]  # what an environment says: text, or the messages of a chat
Reward = float | Sequence[float]  # of an episode: one number, or one for every agent, in their order


class Step(Struct, frozen=True, kw_only=True):
    """What follows an action in an environment with `reset` and `step`. An episode's reward is the sum over its steps."""

    observation: str | tuple[Message, ...] = ""
    reward: float = 0.0
    is_done: bool = False


class Text(Protocol):
    """Between text and tokens, as the model's tokenizer has it. Pure: the same text gives the same tokens."""

    @property
    def has_chat(self) -> bool:
        """Whether the tokenizer has a chat template."""
        ...

    @property
    def end_token(self) -> int:
        """What ends a turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text in the middle of something: no token is added. Special tokens that are written out are read as such."""
        ...

    def opening(self, content: Content) -> list[int]:
        """What a sequence begins with: a string as the tokenizer begins one, a chat through its template."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """A chat as text, up to where the model is to speak. Raises `DataError` for what the template refuses."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        ...


class Context(Protocol):
    """What an environment gets for one rollout. It speaks tokens (`generate`) or text (`ask`), and not both by turns."""

    task: Task
    seed: int  # for randomness of the environment's own: the same rollout gets the same seed

    @property
    def text(self) -> Text: ...

    async def generate(self, tokens: Sequence[int]) -> Completion:
        """Append these tokens to the trajectory (they are not trained) and let the model take its turn (it is). Raises
        `RequestRefused` where the model's context has no room for it: the trajectory is then as before."""
        ...

    async def ask(self, content: Content) -> str:
        """Say this to the model and return what it answers. It is a user turn of the chat template if messages are said, or if
        the task's prompt is a chat and the tokenizer has a template (the task's system messages then come first); plain text
        otherwise. What was sampled stays as it was sampled: it is never encoded again."""
        ...

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        """Await something of the environment's own under a name, which the terminal shows and a timeout tells. What is not
        timed does not count against the rollout's time limit."""
        ...

    def earned(self, reward: float) -> None:
        """What the turn just taken has earned, for advantages by turn or token. `rollout` returns the whole reward all the
        same; what no turn is said to have earned counts as its last turn's."""
        ...

    def part(self, agent: int = 0) -> Context:
        """Another sequence of the same rollout, with a history of its own; `agent` says whose reward it gets. At most
        `rollout.max_parts` of them may speak."""
        ...


class Environment(Protocol):
    async def rollout(self, context: Context) -> Reward:
        """Play one episode and return its reward. May raise anything: the rollout has then failed."""
        ...
