"""AdamW over float32 master weights, whatever the dtype that the module computes in.

A bfloat16 weight has eight significant bits: an update of a thousandth of it is lost. So each such parameter has a float32
master, which is updated, saved and restored; the parameter is its rounding. Gradients are summed in float32, too: those of a
micro-batch are added as soon as the backward pass has them, and freed. A float32 parameter is its own master.

A step whose gradient is not finite is skipped and counted; too many in a row end the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from millstream.errors import LearnerError
from millstream.learner.config import LearnerConfig, OwnSchedule, own_schedule
from millstream.model.finite import names_not_finite
from millstream.types import Metrics, Weights

logger = logging.getLogger(__name__)
OptimizerState = dict[str, Any]
Marks = dict[str, tuple[int, int] | None]
MAX_NAMES = 8  # of rows, in a message
LEARNING_RATE_KEYS = {"learner": "learner.learning_rate (of supervised training: warmup.learning_rate)"}


def learning_rate_share(
    config: LearnerConfig, step: int, num_steps: int | None, own: OwnSchedule | None = None
) -> float:
    """The share of the learning rate at an optimizer step, counted from 0. `own`: the user's schedule, if it has one."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if own is not None:
        return _checked_share(own(step, num_steps), config, step)
    if config.schedule == "constant" or num_steps is None:
        return 1.0
    left = 1 - min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def _checked_share(share: float, config: LearnerConfig, step: int) -> float:
    if not isinstance(share, int | float) or not 0 <= share < math.inf:
        raise LearnerError(
            f"learner.schedule = {config.schedule!r} returned {share!r} for step {step}: expected a share of the learning "
            "rate, a finite number of at least 0"
        )
    return float(share)


class AdamSettings(NamedTuple):
    """Of one step, where the caller of the step chooses them."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float  # infinite: the gradient is not clipped


class StepResult(NamedTuple):
    norm: float  # of the whole gradient, before clipping
    learning_rate: float
    is_skipped: bool  # the gradient was not finite: the weights are unchanged

    def metrics(self) -> Metrics:
        found = {"grad_norm": self.norm, "learning_rate": self.learning_rate}
        return found | ({"skipped_steps": 1.0} if self.is_skipped else {})


class Optimizer:
    """Updates the parameters of a module that require a gradient. `num_steps`: optimizer steps in all, for the schedule.
    `table`: the config table of its values, for error messages."""

    def __init__(
        self, module: nn.Module, config: LearnerConfig, *, num_steps: int | None, table: str = "learner"
    ) -> None:
        self._config = config
        self._schedule = own_schedule(config)
        self._num_steps = num_steps
        self._table = table
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise LearnerError("no parameter of the model requires a gradient: there is nothing to train")
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._adder(name, self._masters[name]))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
            if self._masters[name] is not parameter
        ]
        self._left_out: set[str] = set()
        masters = list(self._masters.values())
        self._adam = torch.optim.AdamW(masters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        self.num_steps_done = 0
        self._num_skipped_in_a_row = 0

    def _adder(self, name: str, master: Tensor) -> Any:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if name in self._left_out:
                pass
            elif master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return add

    @property
    def names(self) -> set[str]:
        """Of the parameters that are trained."""
        return set(self._parameters)

    def gradients(self) -> dict[str, Tensor]:
        """The sums so far, of the parameters that have one."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """The sums become these; those of other parameters are dropped."""
        self.zero_grad()
        for name, gradient in gradients.items():
            self._masters[name].grad = gradient.to(self._masters[name].device)

    def marks(self) -> Marks:
        """What each sum is now: another tensor, or the same one after an addition, has another mark."""
        grads = {name: master.grad for name, master in self._masters.items()}
        return {name: None if grad is None else (id(grad), grad._version) for name, grad in grads.items()}

    def added(self, since: Marks) -> set[str]:
        """The parameters whose sums have changed since then. A backward pass adds to each once: the gradient of all rows."""
        return {name for name, mark in self.marks().items() if mark != since[name]}

    @contextmanager
    def leaving_out(self, names: Collection[str]) -> Iterator[None]:
        """Passes in this block add nothing to the sums of these parameters. What a pass before it has left unfinished is
        dropped."""
        own = {name: parameter for name, parameter in self._parameters.items() if self._masters[name] is parameter}
        for name in self._parameters.keys() - own.keys():
            self._parameters[name].grad = None
        kept = {name: own[name].grad for name in own.keys() & set(names)}
        hooks = [own[name].register_post_accumulate_grad_hook(_drop) for name in kept]  # type: ignore[no-untyped-call]
        before = self._left_out
        self._left_out = before | set(names)
        for name in kept:
            own[name].grad = None
        try:
            yield
        finally:
            self._left_out = before
            for hook in hooks:
                hook.remove()
            for name, grad in kept.items():
                own[name].grad = grad

    def detach(self) -> None:
        """Release the module to another optimizer. Two on one module would take each other's gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def step(self, divisor: float, suspects: list[str]) -> StepResult:
        """Divide, clip, update, clear the gradient. `suspects`: labels of the rows whose loss was not finite. Raises
        `LearnerError` after too many steps in a row that are not finite."""
        torch._foreach_div_(list(self.gradients().values()), divisor)
        share = learning_rate_share(self._config, self.num_steps_done, self._num_steps, self._schedule)
        return self._update(self._config.learning_rate * share, self._config.max_grad_norm, suspects)

    def step_with(self, adam: AdamSettings) -> StepResult:
        """The same with these settings, and without a division: the gradient is the sum over all passes."""
        for group in self._adam.param_groups:
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.epsilon
            group["weight_decay"] = adam.weight_decay
        return self._update(adam.learning_rate, adam.max_grad_norm, [])

    def _update(self, rate: float, max_norm: float, suspects: list[str]) -> StepResult:
        masters = [master for master in self._masters.values() if master.grad is not None]
        found = torch.nn.utils.clip_grad_norm_(masters, max_norm)
        norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
        is_skipped = not math.isfinite(norm)
        if is_skipped:
            self._skip(norm, suspects)
        else:
            self._num_skipped_in_a_row = 0
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self._round_parameters()
        self._adam.zero_grad()
        self.num_steps_done += 1
        return StepResult(norm, rate, is_skipped)

    def zero_grad(self) -> None:
        """Drop the gradient that was added up since the last step, and what a pass that failed has left unfinished."""
        self._adam.zero_grad()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _skip(self, norm: float, suspects: list[str]) -> None:
        self._num_skipped_in_a_row += 1
        shown = ", ".join(suspects[:MAX_NAMES]) + (", ..." if len(suspects) > MAX_NAMES else "")
        whose = f"the loss of {shown} is not finite" if suspects else "every loss was finite"
        step = f"the {self._table}'s optimizer step {self.num_steps_done}"
        logger.warning("%s is left out: its gradient is %s; %s", step, norm, whose)
        if self._num_skipped_in_a_row > self._config.max_skipped_steps:
            raise LearnerError(
                f"the gradient of {step} is {norm}; {whose}. It is number {self._num_skipped_in_a_row} in a row, and "
                f"{self._table}.max_skipped_steps = {self._config.max_skipped_steps}: set "
                f"{LEARNING_RATE_KEYS.get(self._table, f'{self._table}.learning_rate')} lower"
            )

    def check_finite(self, weights: Weights) -> None:
        """Before weights leave the learner, to engines or to a checkpoint: raises `LearnerError` if one is not finite. Of a
        sharded module, this rank's shards; then it is a collective, and raises in all ranks or in none."""
        is_sharded = any(hasattr(weight, "to_local") for weight in weights.values())
        local: dict[str, Tensor] = {
            name: weight.to_local() if hasattr(weight, "to_local") else weight for name, weight in weights.items()
        }
        names = names_not_finite(local)
        if is_sharded:
            device = next(iter(local.values())).device
            counts = torch.tensor([name in names for name in local], dtype=torch.int32, device=device)
            torch.distributed.all_reduce(counts)
            names = [name for name, count in zip(local, counts.tolist(), strict=True) if count]
        if not names:
            return
        what = f"{names[0]} has a value that is not finite" + (
            f", as have {len(names) - 1} others" if names[1:] else ""
        )
        if not self.num_steps_done:
            key = {"learner": "model"}.get(self._table, self._table)
            raise LearnerError(f"{what}, before the first optimizer step: {key}.path needs another checkpoint")
        rate = LEARNING_RATE_KEYS.get(self._table, f"{self._table}.learning_rate")
        raise LearnerError(
            f"{what} after the {self._table}'s optimizer step {self.num_steps_done - 1}; the weights are neither published nor "
            f"saved. Set {rate} lower"
        )

    @torch.no_grad()
    def _round_parameters(self) -> None:
        """Set each parameter to the rounding of its master."""
        rounded = [name for name, master in self._masters.items() if master is not self._parameters[name]]
        if rounded:
            torch._foreach_copy_([self._parameters[n] for n in rounded], [self._masters[n] for n in rounded])

    def state(self) -> OptimizerState:
        """By parameter name: independent of the order of the parameters."""
        moments = {name: dict(self._adam.state.get(master, {})) for name, master in self._masters.items()}
        masters = {name: master.detach() for name, master in self._masters.items()}
        return {"masters": masters, "moments": moments, "num_steps_done": self.num_steps_done}

    @torch.no_grad()
    def restore(self, state: OptimizerState) -> None:
        """Masters, parameters and moments become those of the state. Raises `LearnerError` if it is of another model."""
        if self._masters.keys() != state["masters"].keys():
            different = sorted(self._masters.keys() ^ state["masters"].keys())
            raise LearnerError(f"the checkpoint is of another model: it differs in {different[:4]}")
        for name, master in self._masters.items():
            if (found := state["masters"][name].shape) != master.shape:
                raise LearnerError(
                    f"the checkpoint is of another model: {name} has the shape {tuple(found)} there and {tuple(master.shape)} "
                    "here. Set the model, and [learner.lora], as they were"
                )
        for name, master in self._masters.items():
            master.copy_(state["masters"][name])
        self._round_parameters()
        self._adam.state.clear()
        for name, moments in state["moments"].items():
            master = self._masters[name]
            if moments:
                self._adam.state[master] = {
                    key: value.to(master.device) if isinstance(value, Tensor) else value
                    for key, value in moments.items()
                }
        self.num_steps_done = state["num_steps_done"]


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()
