"""A learner's mathematics, without its thread: packed micro-batches, unnormalised sums, one division and clip at the step.

A rank has the whole policy, or a shard of it; then several of them are given parts of every micro-batch, and all take the same
calls in the same order, since each call is a collective of theirs. What they counted is added up by whoever calls them
(`total`) and handed to each of them at the step: a rank knows nothing of how it is called.
Shapes: M trained tokens of a micro-batch, R rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from transformers import PreTrainedModel

from millstream.errors import LearnerError
from millstream.learner import LearnerConfig
from millstream.learner.optimizer import MAX_NAMES, Optimizer, State, Stepped
from millstream.learner.rows import Rows, not_finite
from millstream.model.adapters import copy_of, trained_weights
from millstream.model.load import check_layers
from millstream.model.policy import Policy, recompute_activations
from millstream.objective import LossInputs, Objective
from millstream.types import Floats, Metrics, TrainRow

logger = logging.getLogger(__name__)
SIZES = 4
"""Of micro-batches that compiled layers see, up to the budget: each is compiled once."""
NOTHING = TrainRow(
    tokens=np.zeros(2, np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
)
"""What a rank computes when it has nothing to do and the others need its shard."""


class Tally(Struct, frozen=True, kw_only=True):
    """What ranks counted since the last step."""

    units: float = 0.0
    num_tokens: int = 0
    sums: dict[str, float] = {}
    max_ratio: float = 0.0
    num_left_out: int = 0
    left_out_first: list[str] = []
    """Some of those, each with its columns that are not finite."""
    suspects: list[str] = []
    """Whose loss was not finite."""

    def metrics(self, stepped: Stepped) -> Metrics:
        """Means over tokens; of the loss, over its units."""
        metrics = {name: value / self.num_tokens for name, value in self.sums.items()}
        metrics["loss"] = self.sums["loss"] / self.units
        metrics["effective_sample_size"] = metrics["ratio"] ** 2 / metrics.pop("squared_ratio")
        metrics["max_ratio"] = self.max_ratio
        metrics |= self.left_out() | {"grad_norm": stepped.norm, "learning_rate": stepped.learning_rate}
        return metrics | ({"skipped_steps": 1.0} if stepped.is_skipped else {})

    def left_out(self) -> Metrics:
        return {"skipped_rows": float(self.num_left_out)} if self.num_left_out else {}


class FiniteGuard:
    """Steps in a row that had rows and not a finite one: nothing is learned, and more than `most` of them end the run."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_in_a_row = 0

    def look_at(self, counted: Tally) -> None:
        """At every step. Raises `LearnerError`."""
        if counted.units:
            self._num_in_a_row = 0
        elif counted.num_left_out:
            self._num_in_a_row += 1
        if self._num_in_a_row > self._most:
            raise LearnerError(
                f"no row of the last {self._num_in_a_row} optimizer steps was finite, and learner.max_skipped_steps = "
                f"{self._most}. What is not: {', '.join(counted.left_out_first[:MAX_NAMES])}. Expected finite numbers of "
                "whoever computes that column: of the model that reference.path or critic.path names, say"
            )


def total(tallies: Sequence[Tally]) -> Tally:
    """Of all ranks, in their order."""
    names = dict.fromkeys(name for tally in tallies for name in tally.sums)
    return Tally(
        units=sum(tally.units for tally in tallies),
        num_tokens=sum(tally.num_tokens for tally in tallies),
        sums={name: sum(tally.sums.get(name, 0.0) for tally in tallies) for name in names},
        max_ratio=max(tally.max_ratio for tally in tallies),
        num_left_out=sum(tally.num_left_out for tally in tallies),
        left_out_first=[name for tally in tallies for name in tally.left_out_first],
        suspects=[name for tally in tallies for name in tally.suspects],
    )


def policies(
    model: PreTrainedModel, config: LearnerConfig, temperature: float, *, is_proximal_given: bool = False
) -> tuple[Policy, Policy | None]:
    """The policy that learns, and what the proximal policy is kept in, where a batch has several steps and nobody else has
    it."""
    check_layers(model)
    is_kept = config.mini_batches > 1 and not is_proximal_given
    proximal = Policy(copy_of(model), temperature=temperature) if is_kept else None
    policy = Policy(model, temperature=temperature, is_compiled=config.compile)
    if config.recompute:
        recompute_activations(model)
    return policy, proximal


class Rank:
    """`proximal`: a copy of the policy, where a batch has several steps; without it, rows after the first one must bring what
    it would say. `num_steps`: batches, for the schedule."""

    def __init__(
        self,
        policy: Policy,
        proximal: Policy | None,
        config: LearnerConfig,
        objective: Objective,
        *,
        num_steps: int | None,
        is_one_of_several: bool = False,
    ) -> None:
        self.policy = policy
        self._proximal = proximal
        self._objective = objective
        self._is_one_of_several = is_one_of_several
        self._is_proximal_given = config.mini_batches > 1 and proximal is None
        num_optimizer_steps = None if num_steps is None else num_steps * config.mini_batches
        self.optimizer = Optimizer(policy.model, config, num_steps=num_optimizer_steps)
        self._device = next(policy.parameters()).device
        self._quantum = max(1, config.micro_batch_tokens // SIZES) if config.compile else 1
        self._has_stepped = False
        """In this batch: before, the proximal policy is the policy itself."""
        self._sums = _Sums()

    @torch.no_grad()
    def begin_batch(self) -> None:
        self._has_stepped = False
        if self._proximal is not None:
            torch._foreach_copy_(_own_parts(self._proximal), _own_parts(self.policy))

    def accumulate(self, rows: Sequence[TrainRow]) -> None:
        """Add the unnormalised gradient of these rows, and of those that other ranks are given now."""
        faults = [not_finite(row) for row in rows]
        sound = [row for row, columns in zip(rows, faults, strict=True) if not columns]
        self._sums.leave_out([(row.label, columns) for row, columns in zip(rows, faults, strict=True) if columns])
        if any(row.loss_mask.any() for row in sound):
            self._add(sound)
        elif self._is_one_of_several:
            logprobs_M, _, _ = self._forward(self._rows([NOTHING]), needs_entropy=False)
            (logprobs_M.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def _rows(self, rows: Sequence[TrainRow]) -> Rows:
        return Rows(rows, self._device, quantum=self._quantum)

    def _add(self, rows: Sequence[TrainRow]) -> None:
        batch = self._rows(rows)
        inputs = self._inputs(batch, rows[0])
        result = self._objective.token_loss(inputs)
        weights_R = self._objective.row_weights(batch.counts_R).to(self._device, non_blocking=True)
        loss_M = result.loss_N * weights_R[batch.row_M]
        loss_M.sum().backward()  # type: ignore[no-untyped-call]
        self._sums.add(batch, loss_M.detach(), {**result.metrics, **_distance(inputs)}, [row.label for row in rows])
        self._sums.units += float(self._objective.units(batch.counts_R))

    def _forward(self, batch: Rows, *, needs_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probabilities, entropies if asked for, and log-probabilities under the proximal policy, where it is kept."""
        arguments = (batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        logprobs_M, entropy_M = self.policy(*arguments, needs_entropy)
        proximal_M = logprobs_M.detach()
        if self._proximal is not None and self._has_stepped:
            with torch.no_grad():
                proximal_M = self._proximal(*arguments).logprobs_M
        return logprobs_M, entropy_M, proximal_M

    def _inputs(self, batch: Rows, first: TrainRow) -> LossInputs:
        """All rows have the columns that the first has. Raises `LearnerError` if they lack what the objective reads."""
        logprobs_M, entropy_M, proximal_M = self._forward(batch, needs_entropy=self._objective.needs_entropy)
        if self._has_stepped and (self._is_proximal_given or first.proximal is not None):
            proximal_M = batch.column("proximal")
        return LossInputs(
            logprobs_N=logprobs_M,
            behaviour_N=batch.column("logprobs"),
            proximal_N=proximal_M,
            advantages_N=batch.column("advantages"),
            row_N=batch.row_M,
            entropy_N=entropy_M,
            reference_N=batch.column("reference") if first.reference is not None else None,
        )

    @torch.no_grad()
    def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """The policy's log-probabilities of each row's trained tokens, as it is now."""
        batch = self._rows(rows or [NOTHING])
        found = self.policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        if (
            self._is_one_of_several
        ):  # no backward pass follows: what it gathered would be stale after a step or a restore
            self.policy.reshard()  # type: ignore[operator]
        return batch.per_row(found.logprobs_M) if rows else []

    def tally(self) -> Tally:
        """What this rank counted. Begins anew."""
        sums = self._sums
        self._sums = _Sums()
        return sums.tally()

    def step(self, counted: Tally) -> Stepped:
        """Divide by what all ranks counted, clip, update, forget the gradient. Raises `LearnerError`."""
        stepped = self.optimizer.step(counted.units, counted.suspects)
        self._has_stepped = True
        return stepped

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Whole, one after the other. Every rank must take them all."""
        parameters = dict(self.policy.model.named_parameters())
        for name, tensor in trained_weights(self.policy.model).items():
            value = tensor.detach()
            yield name, whole(value.to(dtype) if name in parameters else value)

    def state(self) -> State:
        """All that a snapshot needs, by reference; of a sharded policy, this rank's shards."""
        parameters = dict(self.policy.model.named_parameters())
        buffers = {name: value for name, value in trained_weights(self.policy.model).items() if name not in parameters}
        return {"buffers": buffers, **self.optimizer.state()}

    @torch.no_grad()
    def restore(self, state: State) -> None:
        self.optimizer.restore(state)
        buffers = dict(self.policy.model.named_buffers())
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)


def _own_parts(policy: Policy) -> list[Tensor]:
    """The parameters; of a sharded one, what this rank has of it."""
    parameters: list[Any] = list(policy.parameters())
    return [one.to_local() if hasattr(one, "to_local") else one for one in parameters]


def whole(tensor: Any) -> Tensor:
    """Of a sharded tensor all of it: a collective."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


class _Sums:
    """Over the micro-batches of a step. On the device until somebody asks, since asking waits for it."""

    def __init__(self) -> None:
        self.units = 0.0
        self._num_left_out = 0
        self._left_out_first: list[str] = []
        self._num_tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._max_ratio: Tensor | None = None
        self._num_bad: list[tuple[Tensor, list[str]]] = []

    def leave_out(self, faults: list[tuple[str, list[str]]]) -> None:
        """Rows by name, each with its columns that are not finite."""
        self._num_left_out += len(faults)
        room = MAX_NAMES - len(self._left_out_first)
        self._left_out_first += [f"{label} ({', '.join(columns)})" for label, columns in faults[:room]]
        if faults:
            labels = ", ".join(label for label, _ in faults)
            logger.warning("%s is left out: it has a number that is not finite", labels)

    def add(self, batch: Rows, loss_M: Tensor, sums: dict[str, Tensor], labels: list[str]) -> None:
        self._num_tokens += batch.num_trained
        largest = sums.pop("max_ratio")
        self._max_ratio = largest if self._max_ratio is None else torch.maximum(self._max_ratio, largest)
        for name, value in {"loss": loss_M.sum(), **sums}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        num_bad_R = torch.zeros(len(labels), dtype=torch.int32, device=loss_M.device)
        num_bad_R.index_add_(0, batch.row_M, (~loss_M.isfinite()).int())
        self._num_bad.append((num_bad_R, labels))

    def _suspects(self) -> list[str]:
        return [
            label
            for num_bad_R, labels in self._num_bad
            for label, num_bad in zip(labels, num_bad_R.tolist(), strict=True)
            if num_bad
        ]

    def tally(self) -> Tally:
        return Tally(
            units=self.units,
            num_tokens=self._num_tokens,
            sums={name: float(value) for name, value in self._sums.items()},
            max_ratio=0.0 if self._max_ratio is None else float(self._max_ratio),
            num_left_out=self._num_left_out,
            left_out_first=self._left_out_first,
            suspects=self._suspects(),
        )


@torch.no_grad()
def _distance(x: LossInputs) -> dict[str, Tensor]:
    """How far the policy has moved from the one that sampled, summed over tokens: KL(mu || th) by k3 and by k1, the ratio
    th/mu and its square; and the largest ratio. The effective sample size, as a share of the tokens, is mean(ratio)^2 /
    mean(ratio^2)."""
    log_ratio_N = (x.logprobs_N - x.behaviour_N).clamp(-20, 20)
    ratio_N = log_ratio_N.exp()
    return {
        "behaviour_kl": (ratio_N - log_ratio_N - 1).sum(),
        "behaviour_kl_k1": -log_ratio_N.sum(),
        "ratio": ratio_N.sum(),
        "squared_ratio": ratio_N.double().square().sum(),
        "max_ratio": ratio_N.max(),
    }
