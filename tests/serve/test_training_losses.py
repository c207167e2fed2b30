"""The losses of the training client, against plain torch: one sequence at a time, the library's own attention, the formulas of
the client's documentation."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch

from millstream.algo.recipe import supervised
from millstream.learner import LearnerConfig
from millstream.learner.optimizer import AdamSettings
from millstream.learner.torch import TorchLearner
from millstream.learner.trainer import DirectRow, Trainer
from millstream.model.adapters import add_adapters, trained_weights
from millstream.model.lora import LoraConfig
from millstream.serve.http import HttpError
from millstream.serve.training.losses import CLIENT_LOSSES, loss_named
from millstream.types import TrainRow
from support.tiny import VOCABULARY, make, make_small

SETTINGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
}


def adapted() -> Any:
    model = make("qwen3")
    add_adapters(model, LoraConfig(rank=4), seed=3)
    for name, weight in trained_weights(model).items():
        if "lora_B" in name:  # so that both sides of every adapter have a gradient
            weight.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    return model


def direct_rows(name: str, *, num_targets: int = 1) -> list[DirectRow]:
    """Two share a beginning; targets are not the next tokens."""
    random = np.random.default_rng(5)
    prompt = random.integers(0, VOCABULARY, 5)
    made = []
    for length in (9, 12, 7):
        tokens = random.integers(0, VOCABULARY, length)
        tokens[:5] = prompt if length != 7 else tokens[:5]
        weights = random.normal(0, 1, length * num_targets).astype(np.float32)
        weights[: 4 * num_targets] = 0
        columns = {"sequence_ratio_mask": (weights != 0).astype(np.float32)} if name == "gspo" else {}
        made.append(
            DirectRow(
                tokens=tokens.astype(np.int32),
                at=np.repeat(np.arange(length), num_targets),
                targets=random.integers(0, VOCABULARY, length * num_targets),
                advantages=weights,
                behaviour=random.normal(-4.6, 0.3, length * num_targets).astype(np.float32),
                columns=columns,
            )
        )
    return made


def reference(name: str, logprobs: torch.Tensor, row: DirectRow) -> torch.Tensor:
    """As the client's documentation writes it."""
    advantages, sampled = torch.tensor(row.advantages), torch.tensor(row.behaviour)
    ratio = torch.exp(logprobs - sampled)
    settings = SETTINGS.get(name, {})
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 0.0)
    match name:
        case "cross_entropy":
            return -(logprobs * advantages).sum()
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()
        case "cispo":
            return -(torch.clamp(ratio, low, high).detach() * logprobs * advantages).sum()
        case "dro":
            return -(logprobs * advantages - 0.5 * settings["beta"] * (logprobs - sampled) ** 2).sum()
    is_in = torch.tensor(row.columns["sequence_ratio_mask"]) != 0
    log_ratio = (logprobs.detach() - sampled)[is_in].mean()
    ratio = torch.exp(log_ratio + logprobs - logprobs.detach())
    return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()


def plain_torch(model: Any, name: str, rows: list[DirectRow]) -> tuple[list[torch.Tensor], float]:
    """Its log-probabilities and the loss; the gradients are in the model."""
    model.set_attn_implementation("eager")
    found, total = [], torch.zeros(())
    for row in rows:
        logits = model(input_ids=torch.tensor(row.tokens[None].astype(np.int64))).logits[0]
        logprobs = torch.log_softmax(logits.float(), -1)[torch.tensor(row.at), torch.tensor(row.targets)]
        found.append(logprobs.detach())
        total = total + reference(name, logprobs, row)
    total.backward()
    return found, float(total.detach())


def test_every_loss_of_the_client_is_here_or_refused_by_name() -> None:
    assert set(CLIENT_LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
    for name in ("stable_reinforce", "custom", "strange"):
        with pytest.raises(HttpError, match=f"{name}.*Supported: cross_entropy"):
            loss_named(name, {})
    with pytest.raises(HttpError, match=r"ppo has beta: expected clip_low_threshold, clip_high_threshold"):
        loss_named("ppo", {"beta": 1.0})
    with pytest.raises(HttpError, match="dro: beta = None, expected a number"):
        loss_named("dro", {})


@pytest.mark.parametrize(("name", "num_targets"), [*((name, 1) for name in CLIENT_LOSSES), ("cross_entropy", 3)])
def test_losses_log_probabilities_and_gradients_are_those_of_plain_torch(name: str, num_targets: int) -> None:
    model, rows = adapted(), direct_rows(name, num_targets=num_targets)
    twin = copy.deepcopy(model)
    learner = Trainer(model, LearnerConfig(micro_batch_tokens=22), supervised())  # two passes
    _, loss = loss_named(name, SETTINGS.get(name, {}))

    async def scores() -> Any:
        seen = await learner.forward(rows, loss)
        return seen, await learner.forward_backward(rows, loss)

    seen, trained = asyncio.run(scores())
    logprobs, total = plain_torch(twin, name, rows)
    for one, two, expected in zip(seen, trained, logprobs, strict=True):
        assert np.array_equal(one.logprobs, two.logprobs) and np.allclose(one.logprobs, expected, atol=2e-5)
    assert sum(score.loss for score in trained) == pytest.approx(total, rel=1e-4, abs=1e-4)
    own = trained_weights(model)
    for weight_name, weight in trained_weights(twin).items():
        assert torch.allclose(own[weight_name].grad, weight.grad, atol=2e-4, rtol=1e-3), weight_name


def test_a_step_is_that_of_torch_with_the_settings_of_the_request() -> None:
    model, rows = adapted(), direct_rows("cross_entropy")
    twin = copy.deepcopy(model)
    learner = Trainer(model, LearnerConfig(), supervised())
    _, loss = loss_named("cross_entropy", {})
    own = torch.optim.AdamW(list(trained_weights(twin).values()))
    for step, clip in enumerate((float("inf"), 0.5)):
        adam = AdamSettings(1e-2 / (step + 1), 0.8, 0.97, 1e-10, 0.1 * step, clip)

        async def both(adam: AdamSettings = adam) -> float:
            await learner.forward_backward(rows, loss)
            return (await learner.step_with(adam)).norm

        norm = asyncio.run(both())
        plain_torch(twin, "cross_entropy", rows)
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        assert norm == pytest.approx(float(expected), rel=1e-4)
        own.param_groups[0].update(lr=adam.learning_rate, betas=(0.8, 0.97), eps=1e-10, weight_decay=adam.weight_decay)
        own.step()
        own.zero_grad()
    for name, weight in trained_weights(twin).items():
        assert torch.allclose(trained_weights(model)[name], weight, atol=1e-4), name


def test_a_pass_adds_the_gradient_that_a_learner_of_rows_adds() -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    (row, *_) = direct_rows("cross_entropy")
    tokens = np.append(row.tokens, row.targets[-1]).astype(np.int32)
    shifted = DirectRow(
        tokens=row.tokens,
        at=row.at,
        targets=tokens[1:].astype(np.int64),
        advantages=row.advantages,
        behaviour=row.behaviour,
    )
    plain = TrainRow(
        tokens=tokens,
        loss_mask=np.append(False, row.advantages != 0),
        logprobs=np.append(0, row.behaviour).astype(np.float32),
        advantages=np.append(0, row.advantages).astype(np.float32),
    )
    direct, usual = (
        Trainer(model, LearnerConfig(), supervised()),
        TorchLearner(twin, LearnerConfig(), supervised()),
    )

    async def both() -> None:
        await direct.forward_backward([shifted], loss_named("cross_entropy", {})[1])
        await usual.begin_batch()
        await usual.accumulate([plain])

    asyncio.run(both())
    for name, weight in trained_weights(twin).items():
        assert torch.allclose(trained_weights(model)[name].grad, weight.grad, atol=1e-5, rtol=1e-4), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_pass_that_fails_half_way_leaves_the_gradient_that_was_there(dtype: torch.dtype, has_gradient: bool) -> None:
    model, rows = make_small("qwen3", dtype), direct_rows("cross_entropy")
    learner = Trainer(model, LearnerConfig(micro_batch_tokens=22), supervised())  # two passes
    _, loss = loss_named("cross_entropy", {})
    num_backward = 0

    def fail(_: Any) -> None:
        nonlocal num_backward
        num_backward += 1
        if num_backward == 2:  # after the gradient of later layers
            raise RuntimeError("a device failed")

    async def run() -> None:
        if has_gradient:
            await learner.forward_backward(rows, loss)
        before = {name: gradient.clone() for name, gradient in learner.optimizer.gradients().items()}
        hook = model.get_input_embeddings().weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="a device failed"):
            await learner.forward_backward(rows, loss)
        hook.remove()
        after = learner.optimizer.gradients()
        assert after.keys() == before.keys() and bool(before) == has_gradient
        assert all(torch.equal(after[name], before[name]) for name in before)
        await learner.forward_backward(rows, loss)
        if not has_gradient:
            return
        for name, gradient in learner.optimizer.gradients().items():
            assert torch.allclose(gradient, 2 * before[name], rtol=1e-3, atol=1e-4), name

    asyncio.run(run())
    assert num_backward == 2
