"""The nouns. Frozen structs that know nothing of queues, engines or torch; every other module speaks in them.

Glossary: Task (an item of the data set), Turn (one model call in a rollout), Rollout (one trajectory), Group (n rollouts
of one prompt), Batch (what one optimizer step consumes), Version (+1 per batch), Lag (trainer version minus the version a
rollout started with). Arrays are numpy, one entry per token, in the order of the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
HalfFloats = NDArray[np.float16]
Mask = NDArray[np.bool_]

# Named tensors, as a learner gives them out and an engine takes them in. Opaque to everything in between.
Weights = Mapping[str, Any]

Metrics = dict[str, float]  # the one string-keyed dictionary that crosses module borders


ROLES = ("system", "user", "assistant", "tool")  # of messages, that chat templates know
TOOLS_ROLE = "tools"
"""The role of a message whose content is the JSON list of the functions that the model may call. It comes first in a chat; chat
templates get the list as `tools`."""


class Message(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    role: str
    content: str
    fields: str = ""  # its other fields, such as tool_calls, for the chat template: a JSON object. "": there are none

    def as_dict(self) -> dict[str, Any]:
        """As a chat template reads it."""
        others = json.loads(self.fields) if self.fields else {}
        return {"role": self.role, "content": self.content, **others}


class Task(Struct, frozen=True, kw_only=True):
    """One item of the data set. `data` carries every other field of the record, for the reward to read."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: str | None = None  # the gold answer, where the data set has one; None where the reward does not need it
    data: dict[str, Any] = {}
    answer_key: str = "answer"  # the answer's name in its record


TURNS_PER_PART = 1 << 16
"""Turn t of part n of a rollout has the number n * TURNS_PER_PART + t, which also seeds it."""


class RequestKey(Struct, frozen=True, kw_only=True, order=True):
    """Who asks: orders requests and seeds them, so that neither depends on timing."""

    group_id: int
    member: int
    attempt: int = 0
    turn: int = 0

    @property
    def conversation(self) -> tuple[int, int, int, int]:
        """The same for all turns of one part of a rollout."""
        return self.group_id, self.member, self.attempt, self.turn // TURNS_PER_PART

    @property
    def is_first_turn(self) -> bool:
        return self.turn % TURNS_PER_PART == 0


class ComputePath(Struct, frozen=True, array_like=True):
    """Which of several ways a part computes, in words, and why it is not the fastest one; empty: it is."""

    name: str
    why: str = ""


class Sampling(Struct, frozen=True, kw_only=True):
    max_tokens: int
    temperature: float = 1.0  # 0 is greedy; the log-probabilities are then those of temperature 1
    stop: tuple[int, ...] = ()  # token ids that end a turn. The one that ended it is the last token of the completion.
    # Text that ends a turn. The token that completes it is the last one of the completion, all of it.
    stop_strings: tuple[str, ...] = ()
    top_k: int = 0  # sample among this many most likely tokens; 0: among all
    # Of these, among the fewest that have this probability together. Log-probabilities are of what is left.
    top_p: float = 1.0


class TurnLimits(Struct, frozen=True, kw_only=True):
    """What one turn of a rollout may have less than the others."""

    max_tokens: int | None = None  # None: as the rollout's sampling says
    stop_strings: tuple[str, ...] = ()  # besides those of the rollout's sampling


class Request(Struct, frozen=True, kw_only=True):
    key: RequestKey
    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    # How many of the last `tokens` were sampled for this request before it was interrupted. Its random stream continues after
    # them, here or on another engine; `max_tokens` counts what is still to come.
    num_sampled: int = 0
    # Of an engine that has several adapters side by side: the one that samples. None: all of them together, or there is one.
    adapter: int | None = None

    def behind(self, sampled: Sequence[int]) -> Request:
        """What is left of it when these tokens of its answer are there."""
        return structs.replace(
            self,
            tokens=(*self.tokens, *sampled),
            sampling=structs.replace(self.sampling, max_tokens=self.sampling.max_tokens - len(sampled)),
            num_sampled=self.num_sampled + len(sampled),
        )


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Sampled(Struct, frozen=True, array_like=True):
    """Some tokens in a row of a request that is not done yet, as in a `Completion`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


class Completion(Struct, frozen=True, kw_only=True):
    """What an engine sampled: token by token, the log-probability it was sampled with and the version that did it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish


class Rollout(Struct, frozen=True, kw_only=True, eq=False):
    """One finished trajectory, or one sequence of it: a rollout of several agents, or one whose history was rewritten between
    two turns, has several *parts*. `logprobs` is 0 and `versions` is -1 where the mask is False (nothing was sampled there)."""

    group_id: int
    member: int
    part: int = 0
    agent: int = 0  # whose sequence it is. Advantages compare the members of a group agent by agent.
    attempt: int
    start_version: int
    reward: float
    # What each turn of this sequence (each run of the mask) has earned, as far as the environment reported it.
    turn_rewards: NDArray[np.float64]
    finish: Finish
    tokens: Tokens
    loss_mask: Mask
    logprobs: Floats
    versions: Tokens


class TrainRow(Struct, frozen=True, kw_only=True, eq=False):
    """A rollout as the learner sees it: no group, no reward, no version; only tokens, mask, behaviour and advantages."""

    tokens: Tokens
    loss_mask: Mask
    logprobs: Floats
    advantages: Floats
    reference: Floats | None = None  # log-probabilities under the reference. None: there is none.
    values: Floats | None = None  # what the critic expected. None: there is none.
    # Log-probabilities under the policy of the batch's start. None: the learner computes them.
    proximal: Floats | None = None
    returns: Floats | None = None  # what the critic is to expect. None: there is none.
    label: str = ""  # what to call it where something is wrong with it

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_shared(self) -> int:
        """The length of its prompt, which other rows may share: all tokens before the first trained one. 0: none is trained."""
        return int(self.loss_mask.argmax())

    @property
    def prompt(self) -> bytes:
        """Rows with the same one share these tokens."""
        return self.tokens[: self.num_shared].tobytes()


class StoredRow(TrainRow, frozen=True, kw_only=True, eq=False):
    """A row that its learner or scorer reads from the store by itself, by its id. What is known of it has a constant size: its
    cells are empty, but for an advantage that all its tokens have (`numpy.broadcast_to`)."""

    row_id: int
    num_tokens: int
    num_trained: int
    num_shared: int
    prompt: bytes  # its digest
    tokens: Tokens = np.zeros(0, np.int32)
    loss_mask: Mask = np.zeros(0, np.bool_)
    logprobs: Floats = np.zeros(0, np.float32)
    advantages: Floats = np.zeros(0, np.float32)
    scale: tuple[float, float] | None = None  # its advantages are trained as (A - shift) / divisor. None: as they are
    is_proximal_stored: bool = False  # whether it is trained with the `proximal` that is in the store


def scaled_advantages(advantages: Floats, shift: float, divisor: float) -> Floats:
    """By statistics of a whole batch. The same bits wherever it is done."""
    return ((advantages - shift) / divisor).astype(np.float32)


class FinishedGroup(Struct, frozen=True, kw_only=True, eq=False):
    """A group as a filter of the user's own sees it (`pipeline.filter`): its rollouts that did not fail, in the order of
    members."""

    task: Task
    rewards: tuple[float, ...]
    tokens: tuple[Tokens, ...]  # that each rollout sampled


class Fate(StrEnum):
    """How a group leaves. Every admitted group has exactly one."""

    TRAINED = "trained"
    # Its rewards carry no signal, or the user's own filter refused it (`pipeline.filter`). It was replaced by a new prompt, or,
    # past the step's budget, its place stayed empty.
    FILTERED = "filtered"
    # Fewer members than the smallest group survived their retries, or the reward of the whole group raised.
    FAILED = "failed"
    ABORTED = "aborted"  # first to finish: the batch was full without it, and it could not be trained any more
    # A resume changed the schedule, and no batch could train it in time any more. Its prompt is fed again.
    SUPERSEDED = "superseded"
