"""The learner of one device: packed micro-batches, unnormalised accumulation, one division and clip at the step, AdamW.

All work runs on one thread of its own, so that training neither blocks the event loop nor the engine.
Shapes: N tokens to compute (a prompt that rows share counts once), T tokens of all rows, M of them trained, R rows.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import LearnerError
from millstream.learner import LearnerConfig
from millstream.model.attention import Indices, Packed
from millstream.model.load import check_layers, model_weights, save_model
from millstream.model.objective import LossInputs, Objective
from millstream.threads import DaemonThreads
from millstream.types import Metrics, TrainRow, Weights

T = TypeVar("T")
STATE = "learner.pt"


def learning_rate_share(config: LearnerConfig, step: int, num_steps: int | None) -> float:
    """The share of the learning rate at an optimizer step, the first being 0."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant" or num_steps is None:
        return 1.0
    left = 1 - min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


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
        self.model = model.eval()  # no dropout: the log-probabilities of a row must not depend on chance
        self._config, self._objective, self._temperature = config, objective, temperature
        self._num_optimizer_steps = None if num_steps is None else num_steps * config.mini_batches
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self._proximal = copy.deepcopy(model).eval() if config.mini_batches > 1 else None
        self._thread = DaemonThreads("learner", most=1)
        self._num_steps_done = 0
        self._start_sums()

    def _start_sums(self) -> None:
        self._units = 0.0
        self._tokens = 0
        self._sums: dict[str, float] = {}
        self._max_ratio = 0.0

    async def _run(self, work: Callable[[], T]) -> T:
        result: T = await self._thread.call(work)
        return result

    async def begin_batch(self) -> None:
        if self._proximal is not None:
            await self._run(self._remember)

    @torch.no_grad()
    def _remember(self) -> None:
        assert self._proximal is not None
        torch._foreach_copy_(list(self._proximal.parameters()), list(self.model.parameters()))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._run(lambda: self._accumulate(rows))

    def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        batch = _Rows(rows, self._device)
        if not batch.num_trained:
            return
        logprobs_M, entropy_M = self._predict(self.model, batch, needs_entropy=self._objective.needs_entropy)
        with torch.no_grad():
            proximal_M = logprobs_M.detach() if self._proximal is None else self._predict(self._proximal, batch)[0]
        inputs = LossInputs(logprobs_M, batch.behaviour_M, proximal_M, batch.advantages_M, batch.row_M, entropy_M)
        result = self._objective.token_loss(inputs)
        weights_R = self._objective.row_weights(batch.counts_R)
        loss = (result.loss_N * weights_R[batch.row_M]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self._units += float(self._objective.units(batch.counts_R))
        self._tokens += batch.num_trained
        distance, max_ratio = _distance(inputs)
        self._add(loss=loss.detach(), **result.metrics, **distance)
        self._max_ratio = max(self._max_ratio, float(max_ratio))

    def _add(self, **sums: Tensor) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _predict(
        self, model: PreTrainedModel, batch: _Rows, *, needs_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the trained tokens, at the sampling temperature, and the entropies of the distributions they
        are from; logits exist for these tokens only, and not beyond this call where no gradient needs them."""
        out = model(
            input_ids=batch.tokens_N[None],
            position_ids=batch.packed.position_ids,
            use_cache=False,
            context=batch.packed,
            logits_to_keep=batch.before_M,
        )
        logs_MV = torch.log_softmax(out.logits[0].float() / self._temperature, dim=-1)
        entropy_M = -(logs_MV.exp() * logs_MV).sum(-1) if needs_entropy else None
        return logs_MV.gather(1, batch.targets_M[:, None])[:, 0], entropy_M

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """The policy's log-probabilities of each row's trained tokens, as it is now."""

        @torch.no_grad()
        def compute() -> list[np.ndarray[Any, np.dtype[np.float32]]]:
            batch = _Rows(rows, self._device)
            flat = self._predict(self.model, batch)[0].cpu().numpy()
            return np.split(flat, np.cumsum(batch.counts_R.cpu().numpy().astype(int))[:-1])

        return await self._run(compute)

    async def step(self) -> Metrics:
        return await self._run(self._step)

    def _step(self) -> Metrics:
        if not self._units:
            self._start_sums()
            return {}
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_div_(gradients, self._units)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient of optimizer step {self._num_steps_done} is {norm}: set learner.learning_rate lower"
            )
        share = learning_rate_share(self._config, self._num_steps_done, self._num_optimizer_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * share
        self._optimizer.step()
        self._optimizer.zero_grad()
        metrics = {name: value / self._tokens for name, value in self._sums.items()}
        metrics["loss"] = self._sums["loss"] / self._units
        metrics["effective_sample_size"] = metrics["ratio"] ** 2 / metrics.pop("squared_ratio")
        metrics["max_ratio"] = self._max_ratio
        metrics |= {"grad_norm": norm, "learning_rate": self._config.learning_rate * share}
        self._num_steps_done += 1
        self._start_sums()
        return metrics

    async def weights(self) -> Weights:
        return await self._run(
            lambda: {name: tensor.detach().clone() for name, tensor in model_weights(self.model).items()}
        )

    async def snapshot(self) -> TorchSnapshot:
        return await self._run(lambda: TorchSnapshot(_on_host(self._state())))

    def _state(self) -> dict[str, Any]:
        """The optimizer's state is by parameter name, not by number: it survives a change of their order."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            "model": model_weights(self.model),
            "optimizer": {names[id(p)]: state for p, state in self._optimizer.state.items()},
            "num_steps_done": self._num_steps_done,
        }

    def restore(self, folder: Path) -> None:
        try:
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise LearnerError(f"cannot read the learner's state in {folder}: {error}") from error
        weights, parameters = model_weights(self.model), dict(self.model.named_parameters())
        if weights.keys() != state["model"].keys():
            different = sorted(weights.keys() ^ state["model"].keys())
            raise LearnerError(f"the checkpoint in {folder} is of another model: it differs in {different[:4]}")
        with torch.no_grad():
            for name, value in weights.items():
                value.copy_(state["model"][name])
        self._optimizer.state.clear()
        for name, moments in state["optimizer"].items():
            parameter = parameters[name]
            self._optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) else value
                for key, value in moments.items()
            }
        self._num_steps_done = state["num_steps_done"]

    def save(self, path: Path) -> None:
        save_model(self.model, self._tokenizer, path)

    async def close(self) -> None:
        """Let the work in hand come to its end."""
        await self._thread.close()


class TorchSnapshot:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def write(self, folder: Path) -> None:
        with (folder / STATE).open("wb") as file:  # a file of ours: its errors say what is wrong
            torch.save(self._state, file)


def _on_host(value: Any) -> Any:
    """A copy in the host's memory of everything in these dictionaries."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: _on_host(item) for key, item in value.items()} if isinstance(value, dict) else value


class _Rows:
    """The rows of a micro-batch as flat tensors. A trained token is predicted from the position before it.

    What comes before the first trained token of a row (the prompt) is often that of other rows, too: it is computed once."""

    def __init__(self, rows: Sequence[TrainRow], device: torch.device) -> None:
        masks = [row.loss_mask for row in rows]
        if any(mask[0] for mask in masks):
            raise LearnerError("the first token of a row cannot be trained: nothing comes before it")
        trained_M = np.flatnonzero(np.concatenate(masks))
        self.num_trained = len(trained_M)
        indices = share_prompts(rows)
        self.packed = Packed(indices, device)
        at_T, tokens_T = np.concatenate(indices), np.concatenate([row.tokens for row in rows])
        tokens_N = np.zeros(self.packed.position_ids.shape[1], np.int64)
        tokens_N[at_T] = tokens_T

        def on_device(array: np.ndarray[Any, Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.tokens_N = on_device(tokens_N)
        self.before_M = on_device(at_T[trained_M - 1])
        self.targets_M = on_device(tokens_T[trained_M].astype(np.int64))
        self.behaviour_M = on_device(np.concatenate([row.logprobs for row in rows])[trained_M])
        self.advantages_M = on_device(np.concatenate([row.advantages for row in rows])[trained_M])
        self.row_M = on_device(np.repeat(np.arange(len(rows)), [len(row) for row in indices])[trained_M])
        self.counts_R = on_device(np.array([mask.sum() for mask in masks], dtype=np.float32))


def share_prompts(rows: Sequence[TrainRow]) -> list[Indices]:
    """Where each row's tokens stand when every distinct prompt stands once: its members follow it or come later."""
    prompts: dict[bytes, Indices] = {}
    indices: list[Indices] = []
    num_tokens = 0
    for row in rows:
        length = int(row.loss_mask.argmax())  # 0 where nothing is trained: nothing to share
        key = row.tokens[:length].tobytes()
        if key not in prompts:
            prompts[key] = np.arange(num_tokens, num_tokens + length)
            num_tokens += length
        end = num_tokens + len(row.tokens) - length
        indices.append(np.concatenate([prompts[key], np.arange(num_tokens, end)]))
        num_tokens = end
    return indices


@torch.no_grad()
def _distance(x: LossInputs) -> tuple[dict[str, Tensor], Tensor]:
    """How far the policy has moved from the one that sampled, summed over tokens: KL(mu || th) by k3 and by k1, the ratio
    th/mu and its square; and the largest ratio. The effective sample size, as a share of the tokens, is mean(ratio)^2 /
    mean(ratio^2)."""
    log_ratio_N = (x.logprobs_N - x.behaviour_N).clamp(-20, 20)
    ratio_N = log_ratio_N.exp()
    sums = {
        "behaviour_kl": (ratio_N - log_ratio_N - 1).sum(),
        "behaviour_kl_k1": -log_ratio_N.sum(),
        "ratio": ratio_N.sum(),
        "squared_ratio": ratio_N.double().square().sum(),
    }
    return sums, ratio_N.max()
