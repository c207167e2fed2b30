"""The learner of one device: packed micro-batches, unnormalised accumulation, one division and clip at the step, AdamW.

All work runs on one thread of its own, so that training neither blocks the event loop nor the engine. On a GPU it is only put
into the device's queue there: nothing waits for the device before the step.
Shapes: M trained tokens of a micro-batch, R rows.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import LearnerError
from millstream.learner import LearnerConfig
from millstream.learner.optimizer import Optimizer, learning_rate_share
from millstream.learner.rows import Rows, is_finite, share_prompts
from millstream.model.adapters import copy_of, lora_of, merged, save_adapters, trained_weights
from millstream.model.load import check_layers, save_model
from millstream.model.objective import LossInputs, Objective
from millstream.model.policy import Policy, recompute_activations
from millstream.threads import DaemonThreads
from millstream.types import Floats, Metrics, TrainRow, Weights

__all__ = ["TorchLearner", "TorchSnapshot", "learning_rate_share", "share_prompts"]
T = TypeVar("T")
STATE = "learner.pt"
logger = logging.getLogger(__name__)


class TorchLearner:
    """See `millstream.learner.Learner` for the promises."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        objective: Objective,
        *,
        temperature: float = 1.0,
        num_steps: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_layers(model)
        self.model = model
        self._config, self._objective, self._tokenizer = config, objective, tokenizer
        self._device = next(model.parameters()).device
        self._proximal = Policy(copy_of(model), temperature=temperature) if config.mini_batches > 1 else None
        self._policy = Policy(model, temperature=temperature, is_compiled=config.compile)
        if config.recompute:
            recompute_activations(model)
        num_optimizer_steps = None if num_steps is None else num_steps * config.mini_batches
        self.optimizer = Optimizer(model, config, num_steps=num_optimizer_steps)
        self._thread = DaemonThreads("learner", most=1)
        self._has_stepped = False
        """In this batch: before, the proximal policy is the policy itself."""
        self._start_sums()

    def _start_sums(self) -> None:
        self._sums = _Sums()

    async def _run(self, work: Callable[[], T]) -> T:
        result: T = await self._thread.call(work)
        return result

    async def begin_batch(self) -> None:
        self._has_stepped = False
        if self._proximal is not None:
            await self._run(self._remember)

    @torch.no_grad()
    def _remember(self) -> None:
        assert self._proximal is not None
        old, new = (trained_weights(policy.model) for policy in (self._proximal, self._policy))
        torch._foreach_copy_(list(old.values()), [new[name] for name in old])

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._run(lambda: self._accumulate(rows))

    def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        sound = [row for row in rows if is_finite(row)]
        self._sums.leave_out([row.label for row in rows if not is_finite(row)])
        if not any(row.loss_mask.any() for row in sound):
            return
        batch = Rows(sound, self._device)
        inputs = self._inputs(batch, has_reference=sound[0].reference is not None)
        result = self._objective.token_loss(inputs)
        weights_R = self._objective.row_weights(batch.counts_R).to(self._device, non_blocking=True)
        loss_M = result.loss_N * weights_R[batch.row_M]
        loss_M.sum().backward()  # type: ignore[no-untyped-call]
        self._sums.add(batch, loss_M.detach(), {**result.metrics, **_distance(inputs)}, [row.label for row in sound])
        self._sums.units += float(self._objective.units(batch.counts_R))

    def _inputs(self, batch: Rows, *, has_reference: bool) -> LossInputs:
        needs_entropy = self._objective.needs_entropy
        arguments = (batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        logprobs_M, entropy_M = self._policy(*arguments, needs_entropy)
        proximal_M = logprobs_M.detach()
        if self._proximal is not None and self._has_stepped:
            with torch.no_grad():
                proximal_M = self._proximal(*arguments).logprobs_M
        return LossInputs(
            logprobs_N=logprobs_M,
            behaviour_N=batch.column("logprobs"),
            proximal_N=proximal_M,
            advantages_N=batch.column("advantages"),
            row_N=batch.row_M,
            entropy_N=entropy_M,
            reference_N=batch.column("reference") if has_reference else None,
        )

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """The policy's log-probabilities of each row's trained tokens, as it is now."""

        @torch.no_grad()
        def compute() -> list[Floats]:
            batch = Rows(rows, self._device)
            found = self._policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
            return batch.per_row(found.logprobs_M)

        return await self._run(compute)

    async def step(self) -> Metrics:
        return await self._run(self._step)

    def _step(self) -> Metrics:
        sums = self._sums
        self._start_sums()
        if not sums.units:
            return {"skipped_rows": sums.num_left_out} if sums.num_left_out else {}
        stepped = self.optimizer.step(sums.units, sums.suspects())
        self._has_stepped = True
        metrics = sums.metrics() | {"grad_norm": stepped.norm, "learning_rate": stepped.learning_rate}
        if stepped.is_skipped:
            metrics["skipped_steps"] = 1.0
        return metrics

    async def weights(self) -> Weights:
        return await self._run(
            lambda: {name: tensor.detach().clone() for name, tensor in trained_weights(self.model).items()}
        )

    async def snapshot(self) -> TorchSnapshot:
        return await self._run(lambda: TorchSnapshot(on_host(self._state())))

    def _state(self) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        buffers = {name: value for name, value in trained_weights(self.model).items() if name not in parameters}
        return {"buffers": buffers, **self.optimizer.state()}

    def restore(self, folder: Path) -> None:
        state = read_state(folder / STATE)
        self.optimizer.restore(state)
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in state["buffers"].items():
                buffers[name].copy_(value)

    def save(self, path: Path) -> None:
        """With adapters: the ordinary model that they make of theirs, and in `adapter/` themselves, in peft's format."""
        if lora_of(self.model) is None:
            save_model(self.model, self._tokenizer, path)
            return
        save_model(merged(self.model), self._tokenizer, path)
        save_adapters(self.model, path / "adapter")

    async def close(self) -> None:
        """Let the work in hand come to its end. The model may then be another learner's."""
        await self._thread.close()
        self.optimizer.let_go()


class _Sums:
    """Over the micro-batches of a step. On the device until somebody asks, since asking waits for it."""

    def __init__(self) -> None:
        self.units = 0.0
        self.num_left_out = 0
        self._num_tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._max_ratio: Tensor | None = None
        self._num_bad: list[tuple[Tensor, list[str]]] = []

    def leave_out(self, labels: list[str]) -> None:
        self.num_left_out += len(labels)
        if labels:
            logger.warning("%s is left out: it has a number that is not finite", ", ".join(labels))

    def add(self, batch: Rows, loss_M: Tensor, sums: dict[str, Tensor], labels: list[str]) -> None:
        self._num_tokens += batch.num_trained
        largest = sums.pop("max_ratio")
        self._max_ratio = largest if self._max_ratio is None else torch.maximum(self._max_ratio, largest)
        for name, value in {"loss": loss_M.sum(), **sums}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        num_bad_R = torch.zeros(len(labels), dtype=torch.int32, device=loss_M.device)
        num_bad_R.index_add_(0, batch.row_M, (~loss_M.isfinite()).int())
        self._num_bad.append((num_bad_R, labels))

    def suspects(self) -> list[str]:
        """Whose loss was not finite."""
        return [
            label
            for num_bad_R, labels in self._num_bad
            for label, num_bad in zip(labels, num_bad_R.tolist(), strict=True)
            if num_bad
        ]

    def metrics(self) -> Metrics:
        """Means over tokens; of the loss, over its units."""
        sums = {name: float(value) for name, value in self._sums.items()}
        metrics = {name: value / self._num_tokens for name, value in sums.items()}
        metrics["loss"] = sums["loss"] / self.units
        metrics["effective_sample_size"] = metrics["ratio"] ** 2 / metrics.pop("squared_ratio")
        assert self._max_ratio is not None
        metrics["max_ratio"] = float(self._max_ratio)
        if self.num_left_out:
            metrics["skipped_rows"] = float(self.num_left_out)
        return metrics


class TorchSnapshot:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def write(self, folder: Path) -> None:
        with (folder / STATE).open("wb") as file:  # a file of ours: its errors say what is wrong
            torch.save(self._state, file)


def read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise LearnerError(f"cannot read the learner's state in {path}: {error}") from error
    return state


def on_host(value: Any) -> Any:
    """A copy in the host's memory of everything in these dictionaries."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: on_host(item) for key, item in value.items()} if isinstance(value, dict) else value


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
