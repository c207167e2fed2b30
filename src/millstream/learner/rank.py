"""The mathematics of a learner: packed micro-batches, unnormalised sums, one division and clip at the step.

A rank has the whole policy, or one shard of it. In the second case several ranks are given parts of every micro-batch, and all
get the same calls in the same order, since each call is a collective. The caller adds up their tallies and gives the total to
each of them at the step. A rank has no thread and no process of its own: its callers do.
Shapes: M trained tokens of a micro-batch, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel

from millstream.errors import LearnerError
from millstream.learner.check import check_learner
from millstream.learner.config import LearnerConfig
from millstream.learner.optimizer import Optimizer, OptimizerState, StepResult
from millstream.learner.passes import Passes, why_fixed
from millstream.learner.rows import EMPTY_ROW, MAX_FILLER, RowTensors
from millstream.learner.tally import RunningSums, StepTally, behaviour_distance
from millstream.model.adapters import copy_of, trained_weights
from millstream.model.load import model_weights
from millstream.model.policy import Policy, activations_on_host, recompute_activations
from millstream.model.shared_memory import Layout
from millstream.model.slices import EVERYTHING
from millstream.objective import LossInputs, Objective
from millstream.types import Floats, TrainRow, Weights

NUM_COMPILED_SIZES = 4  # of micro-batches: compiled layers are compiled once for each


def make_policies(
    model: PreTrainedModel,
    config: LearnerConfig,
    temperature: float,
    *,
    is_proximal_given: bool = False,
    device: torch.device | None = None,
    is_head_plain: bool | None = None,
) -> tuple[Policy, Policy | None]:
    """The policy that is trained; and a copy that holds the proximal policy, where a batch has several optimizer steps and rows
    do not bring its log-probabilities. Of a model that has no weights yet: the device where it will have them, and whether its
    head is plain."""
    check_learner(model, device=device)
    is_kept = config.mini_batches > 1 and not is_proximal_given
    proximal = Policy(copy_of(model), temperature=temperature, is_head_plain=is_head_plain) if is_kept else None
    policy = Policy(model, temperature=temperature, is_compiled=config.is_compiled, is_head_plain=is_head_plain)
    if config.recompute:
        recompute_activations(model)
    return policy, proximal


class Rank:
    """One rank. `proximal`: a copy of the policy, where a batch has several optimizer steps; without it, rows after the first
    step must have `proximal`. `num_steps`: batches in all, for the schedule. `is_sharded`: one of several ranks. `is_fixed`:
    passes are never made smaller, so that a run repeats bit for bit."""

    def __init__(
        self,
        policy: Policy,
        proximal: Policy | None,
        config: LearnerConfig,
        objective: Objective,
        *,
        num_steps: int | None,
        is_sharded: bool = False,
        is_fixed: bool = False,
    ) -> None:
        self.policy = policy
        self._proximal = proximal
        self._objective = objective
        self._is_offloaded = config.offload
        self._is_sharded = is_sharded
        self._is_proximal_given = config.mini_batches > 1 and proximal is None
        num_optimizer_steps = None if num_steps is None else num_steps * config.mini_batches
        self.optimizer = Optimizer(policy.model, config, num_steps=num_optimizer_steps)
        self._device = next(policy.parameters()).device
        self._quantum = max(1, config.pass_tokens // NUM_COMPILED_SIZES) if config.is_compiled else 1
        why = why_fixed(is_sharded=is_sharded, is_fixed=is_fixed)
        self.passes = Passes("learner", why_fixed=why, is_logged=False)
        self._limit_reported: int | None = None
        self._has_stepped = False  # in this batch: before, the proximal policy is the policy itself
        self._has_sizes_to_compile = config.is_compiled and not is_sharded
        self._sums = RunningSums()

    def begin_batch(self) -> None:
        self._has_stepped = False
        if self._has_sizes_to_compile:
            self._compile_sizes()
        if self._proximal is not None:
            with torch.no_grad():
                torch._foreach_copy_(_local_parts(self._proximal), _local_parts(self.policy))

    def _compile_sizes(self) -> None:
        """Compile the layers for every size of a pass before the first batch, while its rollouts are generated: a size that is
        compiled when it is first needed holds up that step."""
        self._has_sizes_to_compile = False
        with self.optimizer.leaving_out(self.optimizer.names), suppress(torch.OutOfMemoryError):
            # the batches may never fill a pass as these do: where memory does not suffice, larger sizes are not compiled
            for number in range(1, NUM_COMPILED_SIZES + 1):
                self._discard(rows_to_fill(number * self._quantum))

    def _discard(self, rows: Sequence[TrainRow]) -> None:
        logprobs_M, _, _ = self._forward(self._rows(rows), needs_entropy=self._objective.needs_entropy)
        logprobs_M.sum().backward()  # type: ignore[no-untyped-call]

    def accumulate(self, rows: Sequence[TrainRow]) -> None:
        """Add the unnormalised gradient of these rows, and of the rows that other ranks are given in the same call."""
        sound = self._sums.sound(rows)
        if any(row.loss_mask.any() for row in sound):
            self.passes.run(sound, self._add, self.optimizer)
        elif self._is_sharded:
            logprobs_M, _, _ = self._forward(self._rows([EMPTY_ROW]), needs_entropy=False)
            (logprobs_M.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def _rows(self, rows: Sequence[TrainRow]) -> RowTensors:
        """A limit below the quantum is one: filling rows up beyond it would need the memory that there is not."""
        return RowTensors(rows, self._device, quantum=min(self._quantum, self.passes.max_tokens or self._quantum))

    def _add(self, rows: Sequence[TrainRow]) -> None:
        if not any(row.loss_mask.any() for row in rows):
            return
        batch = self._rows(rows)
        inputs = self._inputs(batch, rows[0])
        result = self._objective.token_loss(inputs)
        weights_R = self._objective.row_weights(batch.counts_R).to(self._device, non_blocking=True)
        loss_M = result.loss_N * weights_R[batch.row_M]
        loss_M.sum().backward()  # type: ignore[no-untyped-call]
        self._sums.add(
            batch,
            loss_M.detach(),
            (inputs.logprobs_N - inputs.behaviour_N).detach(),
            {**behaviour_distance(inputs), **result.metrics},
            [row.label for row in rows],
            units=float(self._objective.units(batch.counts_R)),
        )

    def _forward(self, batch: RowTensors, *, needs_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probabilities, entropies if needed, and log-probabilities under the proximal policy."""
        arguments = (batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        with activations_on_host() if self._is_offloaded else nullcontext():
            logprobs_M, entropy_M = self.policy(*arguments, needs_entropy)
        proximal_M = logprobs_M.detach()
        if self._proximal is not None and self._has_stepped:
            with torch.no_grad():
                proximal_M = self._proximal(*arguments).logprobs_M
        return logprobs_M, entropy_M, proximal_M

    def _inputs(self, batch: RowTensors, first: TrainRow) -> LossInputs:
        """All rows have the columns of the first. Raises `LearnerError` if they lack a column that the objective reads."""
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
        """The current policy's log-probabilities of each row's trained tokens."""
        found = self.passes.run(rows or [EMPTY_ROW], self._logprobs)
        return [of_row for some in found for of_row in some] if rows else []

    def _logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        batch = self._rows(rows)
        found = self.policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        if self._is_sharded:  # no backward pass follows: gathered parameters would be stale after a step or a restore
            self.policy.reshard()  # type: ignore[operator]
        return batch.per_row(found.logprobs_M)

    def tally(self) -> StepTally:
        """This rank's counts since the last call."""
        sums, limit = self._sums, self.passes.max_tokens
        self._sums = RunningSums()
        is_lower = limit != self._limit_reported
        self._limit_reported = limit
        return sums.tally(micro_batch_tokens=limit or 0 if is_lower else 0)

    def step(self, counted: StepTally) -> StepResult:
        """Divide by the total of all ranks, clip, update, clear the gradient. Raises `LearnerError`."""
        stepped = self.optimizer.step(counted.units, counted.suspects)
        self._has_stepped = True
        return stepped

    def check_finite(self) -> None:
        """See `Optimizer.check_finite`. A collective."""
        self.optimizer.check_finite(trained_weights(self.policy.model))

    def layout(self, dtype: torch.dtype) -> Layout:
        """Of the weights that `weights` gives."""
        parameters = dict(self.policy.model.named_parameters())
        found = trained_weights(self.policy.model).items()
        dtypes = {name: dtype if name in parameters else value.dtype for name, value in found}
        return Layout(tensors=[(name, str(dtypes[name]).removeprefix("torch."), tuple(v.shape)) for name, v in found])

    def slices(self, dtype: torch.dtype) -> Iterator[tuple[str, slice, Tensor]]:
        """What this rank has of each weight, and which part of its first dimension that is. What is not sharded (a buffer) is
        the same on all ranks, and rank 0 has it."""
        parameters = dict(self.policy.model.named_parameters())
        is_first = not self._is_sharded or torch.distributed.get_rank() == 0
        for name, tensor in trained_weights(self.policy.model).items():
            value = tensor.detach()
            if hasattr(value, "to_local"):
                yield name, own_slice(value), value.to_local().to(dtype)
            elif is_first:
                yield name, EVERYTHING, value.to(dtype) if name in parameters else value

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Each weight whole, one after the other, on rank 0 alone; the others give their slices. A collective: every rank must
        iterate to the end. Rank 0 has one whole tensor at a time."""
        shapes = {name: shape for name, _, shape in self.layout(dtype).tensors}
        for name, part, value in self.slices(dtype):
            if part == EVERYTHING:
                yield name, value
            elif (whole := gathered(value, shapes[name])) is not None:
                yield name, whole

    def state(self) -> OptimizerState:
        """Everything a snapshot needs, by reference; of a sharded policy, this rank's shards."""
        parameters = dict(self.policy.model.named_parameters())
        buffers = {name: value for name, value in trained_weights(self.policy.model).items() if name not in parameters}
        return {"buffers": buffers, **self.optimizer.state()}

    @torch.no_grad()
    def restore(self, state: OptimizerState) -> None:
        self.optimizer.restore(state)
        buffers = dict(self.policy.model.named_buffers())
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)


def rows_to_fill(num_tokens: int) -> list[TrainRow]:
    """Rows that a pass of this many tokens can hold: they share their first token."""
    lengths = [MAX_FILLER] * (num_tokens // MAX_FILLER) + [num_tokens % MAX_FILLER]
    return [
        TrainRow(
            tokens=np.zeros(length, np.int32),
            loss_mask=np.arange(length) > 0,
            logprobs=np.zeros(length, np.float32),
            advantages=np.zeros(length, np.float32),
        )
        for length in lengths
        if length > 1
    ]


def _local_parts(policy: Policy) -> list[Tensor]:
    """The parameters that are trained; of a sharded policy, this rank's shards."""
    parameters: list[Any] = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]


def own_slice(tensor: Any) -> slice:
    """What this rank has of a tensor that is sharded by its first dimension: `ceil(length / ranks)` for each, as long as there
    is something left."""
    length, mesh = tensor.shape[0], tensor.device_mesh
    share = -(-length // mesh.size())
    begin = min(length, mesh.get_local_rank() * share)
    return slice(begin, min(length, begin + share))


@torch.no_grad()
def load_slices(model: PreTrainedModel, weights: Weights) -> None:
    """As `load_weights`, also into a model that is sharded: whole tensors, of which each rank copies its own slices."""
    own = model_weights(model)
    for name, value in weights.items():
        target: Any = own[name]
        if not hasattr(target, "to_local"):
            target.copy_(value)
        elif target.shape != value.shape:
            raise LearnerError(f"{name} has the size {tuple(value.shape)}, expected {tuple(target.shape)}")
        else:
            target.to_local().copy_(value[own_slice(target)])


def gathered(own: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The whole tensor on rank 0, from the slices of all ranks; None on the others. A collective. Slices are received in their
    places: gloo's `gather` would make another copy of the whole."""
    if torch.distributed.get_rank():
        if len(own):
            torch.distributed.send(own, 0)
        return None
    whole, share = own.new_empty(shape), max(1, -(-shape[0] // torch.distributed.get_world_size()))
    whole[: len(own)] = own
    for sender, begin in enumerate(range(share, shape[0], share), 1):
        torch.distributed.recv(whole[begin : begin + share], sender)
    return whole
