"""The learner: streaming does not change the gradient, log-probabilities are exact, checkpoints load anywhere."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from millstream.algo import AlgorithmConfig, recipe
from millstream.errors import LearnerError, ModelError
from millstream.learner import LearnerConfig
from millstream.learner.optimizer import learning_rate_share
from millstream.learner.packing import Packer
from millstream.learner.rank import rows_to_fill
from millstream.learner.rows import RowTensors, share_prompts
from millstream.learner.scorer import TorchScorer
from millstream.learner.torch import TorchLearner
from millstream.learner.trainer import save_trained
from millstream.model.finite import names_not_finite
from millstream.objective import LossInputs, TokenLoss
from millstream.types import Metrics, TrainRow
from support.learners import learner, rows
from support.tiny import CONFIGS, VOCABULARY, make, make_small, plain

AGGREGATIONS = ["token_mean", "sequence_mean", "fixed_length"]


def gradient(one: TorchLearner, micro_batches: list[list[TrainRow]]) -> torch.Tensor:
    """The gradient that the step would apply: accumulated over the micro-batches, divided once."""

    async def accumulate() -> None:
        await one.begin_batch()
        for micro_batch in micro_batches:
            await one.accumulate(micro_batch)

    one.optimizer._adam.zero_grad()
    one.rank.tally()
    asyncio.run(accumulate())
    flat = torch.cat([grad.flatten() for grad in one.optimizer.gradients().values()])
    return flat / one.rank._sums.units


SPLIT = [AlgorithmConfig(name=name) for name in ("grpo", "dr_grpo", "decoupled_ppo", "topr", "gspo", "kimi")] + [
    AlgorithmConfig(entropy_bonus=0.1),
    AlgorithmConfig(loss="reinforce", correction="mask", correction_level="geometric", ratio_cap=10.0),
]


@pytest.mark.parametrize("algorithm", SPLIT, ids=lambda algorithm: algorithm.name or algorithm.loss)
def test_any_split_and_order_of_rows_gives_the_gradient_of_the_whole_batch(algorithm: AlgorithmConfig) -> None:
    one, batch = learner(algorithm), rows(12)
    whole = gradient(one, [batch])
    assert whole.norm() > 1e-3

    @settings(max_examples=10)
    @given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11)))
    def holds(order: list[int], cuts: set[int]) -> None:
        edges = [0, *sorted(cuts), 12]
        split = [[batch[i] for i in order[a:b]] for a, b in itertools.pairwise(edges)]
        found = gradient(one, split)
        assert torch.allclose(found, whole, atol=2e-5 * float(whole.abs().max()), rtol=1e-3)

    holds()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_the_formula_written_out_plainly(aggregation: str) -> None:
    """An independent twin: padded, one row at a time, by the library's own attention, whole-batch mean at the end."""
    algorithm = AlgorithmConfig(aggregation=aggregation, loss="truncated_is")  # type: ignore[arg-type]
    one, batch = learner(algorithm, temperature=0.7), rows(6)
    found = gradient(one, [batch])
    twin = plain(one.model)
    terms, tokens, sequences = [], 0, 0
    for row in batch:
        mask = torch.from_numpy(row.loss_mask)[1:]
        if not mask.any():
            continue
        ids = torch.from_numpy(row.tokens).long()
        logprobs = torch.log_softmax(twin(ids[None]).logits[0, :-1] / 0.7, -1).gather(1, ids[1:, None])[:, 0]
        ratio = (logprobs - torch.from_numpy(row.logprobs)[1:]).exp().detach().clamp(max=1)
        loss = (-ratio * torch.from_numpy(row.advantages)[1:] * logprobs)[mask].sum()
        terms.append(loss / mask.sum() if aggregation == "sequence_mean" else loss)
        tokens, sequences = tokens + int(mask.sum()), sequences + 1
    divisor = {"token_mean": tokens, "sequence_mean": sequences, "fixed_length": sequences * 16}[aggregation]
    (sum(terms) / divisor).backward()  # type: ignore[union-attr]
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()) + 1e-7, rtol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_of_packed_rows_are_those_of_each_row_alone(name: str, temperature: float) -> None:
    one, batch = learner(name=name, temperature=temperature), rows(8)
    twin = plain(one.model)
    found = asyncio.run(one.logprobs(batch))
    for row, logprobs in zip(batch, found, strict=True):
        ids = torch.from_numpy(row.tokens).long()
        with torch.no_grad():
            all_logprobs = torch.log_softmax(twin(ids[None]).logits[0] / temperature, -1)
        trained = np.flatnonzero(row.loss_mask)
        expected = all_logprobs[trained - 1, ids[trained]].numpy()
        assert np.allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("loss", ["truncated_is", "gspo", "kimi", "topr"])
def test_masked_tokens_and_rows_without_trained_tokens_change_nothing(loss: str) -> None:
    one, batch = learner(AlgorithmConfig(loss=loss)), rows(4)
    with_empty, without = gradient(one, [batch]), gradient(one, [batch[:3]])
    assert torch.allclose(with_empty, without, atol=1e-7)
    spoilt = [
        structs.replace(
            row,
            logprobs=np.where(row.loss_mask, row.logprobs, np.nan),
            advantages=np.where(row.loss_mask, row.advantages, np.nan),
        )
        for row in batch
    ]
    assert torch.equal(gradient(one, [spoilt]), with_empty)


def test_metrics_say_how_far_the_policy_is_from_the_one_that_sampled() -> None:
    """Against the whole batch at once, though it came in two micro-batches."""

    async def program() -> None:
        one, batch = learner(), rows(6)
        now = np.concatenate(await one.logprobs(batch)).astype(np.float64)
        log_ratio = now - np.concatenate([row.logprobs[row.loss_mask] for row in batch])
        ratio = np.exp(log_ratio)
        await one.accumulate(batch[:2])
        await one.accumulate(batch[2:])
        metrics = await one.step()
        expected = {
            "ratio": ratio.mean(),
            "max_ratio": ratio.max(),
            "behaviour_kl_k1": -log_ratio.mean(),
            "behaviour_kl": (ratio - 1 - log_ratio).mean(),
            "effective_sample_size": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
            "truncated_share": (ratio > 1).mean(),
            "entropy": -np.concatenate([row.logprobs[row.loss_mask] for row in batch]).mean(),
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert "squared_ratio" not in metrics
        assert np.allclose(one.log_ratios(), log_ratio, rtol=1e-3, atol=1e-5)
        await one.step()
        assert not len(one.log_ratios())

    asyncio.run(program())


def test_the_entropy_is_that_of_the_policy_at_its_temperature_and_only_where_it_is_asked_for() -> None:
    async def program() -> None:
        one, batch = learner(AlgorithmConfig(entropy_bonus=0.5), temperature=0.7), rows(5)
        twin, entropies = plain(one.model), []
        for row in batch:
            trained = np.flatnonzero(row.loss_mask)
            with torch.no_grad():
                logs = torch.log_softmax(twin(torch.from_numpy(row.tokens).long()[None]).logits[0] / 0.7, -1)
            entropies += (-(logs.exp() * logs).sum(-1))[trained - 1].tolist()
        await one.accumulate(batch)
        assert (await one.step())["entropy"] == pytest.approx(np.mean(entropies), rel=1e-4)

    asyncio.run(program())
    flat = [structs.replace(row, advantages=np.zeros_like(row.advantages)) for row in rows(5)]
    assert gradient(learner(AlgorithmConfig(entropy_bonus=0.5)), [flat]).norm() > 1e-3
    assert gradient(learner(), [flat]).norm() == 0


def test_a_step_divides_by_the_batch_clips_and_moves_the_weights() -> None:
    async def program() -> None:
        one = learner(config=LearnerConfig(learning_rate=1e-3, max_grad_norm=1e-6))
        before = await one.weights()
        await one.begin_batch()
        await one.accumulate(rows(6))
        metrics = await one.step()
        after = await one.weights()
        assert metrics["grad_norm"] > 1e-6 and metrics["learning_rate"] == 1e-3 and np.isfinite(metrics["loss"])
        assert any(not torch.equal(before[name], after[name]) for name in before)

    asyncio.run(program())


def test_published_weights_are_a_copy_and_a_step_without_rows_changes_nothing() -> None:
    async def program() -> None:
        one = learner(config=LearnerConfig(learning_rate=0.1, weight_decay=0.1))
        first = await one.weights()
        kept = copy.deepcopy(dict(first))
        assert await one.step() == {}
        await one.accumulate(rows(4))
        await one.step()
        assert all(torch.equal(first[name], kept[name]) for name in kept)

    asyncio.run(program())


def test_with_several_mini_batches_the_proximal_policy_stays_that_of_the_batchs_start() -> None:
    """After the first optimizer step th differs from prox, and only then can the clip of decoupled PPO act."""

    async def program() -> None:
        config = LearnerConfig(learning_rate=0.05, mini_batches=2)
        one = learner(AlgorithmConfig(loss="decoupled_ppo"), config)
        batch = rows(8)
        on_policy = [
            TrainRow(tokens=r.tokens, loss_mask=r.loss_mask, logprobs=r.logprobs, advantages=np.sign(r.advantages))
            for r in batch
        ]
        await one.begin_batch()
        await one.accumulate(on_policy)
        first = await one.step()
        await one.accumulate(on_policy)
        second = await one.step()
        assert first["clipped_share"] == 0.0
        assert second["clipped_share"] > 0.1
        await one.begin_batch()
        await one.accumulate(on_policy)
        assert (await one.step())["clipped_share"] == 0.0, "a new batch, a new proximal policy"

    asyncio.run(program())


async def two_steps(one: TorchLearner, first: list[TrainRow], second: list[TrainRow]) -> dict[str, float]:
    await one.begin_batch()
    await one.accumulate(first)
    await one.step()
    await one.accumulate(second)
    return await one.step()


def test_rows_that_bring_the_proximal_policy_are_learned_from_as_with_a_copy_of_it_and_none_is_kept() -> None:
    async def program() -> None:
        config = LearnerConfig(learning_rate=0.05, mini_batches=2)
        objective = recipe.objective(AlgorithmConfig(loss="decoupled_ppo"), max_tokens=16)
        own = TorchLearner(make("qwen3"), config, objective)
        given = TorchLearner(make("qwen3"), config, objective, is_proximal_given=True)
        assert own.rank._proximal is not None and given.rank._proximal is None
        scorer, first, second = TorchScorer(make("qwen3", seed=5)), rows(8), rows(8, seed=1)
        await scorer.load(await given.weights())
        said = await scorer.score(second)
        with_column = [structs.replace(row, proximal=one) for row, one in zip(second, said, strict=True)]
        theirs, ours = await two_steps(own, first, second), await two_steps(given, first, with_column)
        assert ours == pytest.approx(theirs, rel=1e-5) and ours["clipped_share"] > 0.1
        weights, expected = await given.weights(), await own.weights()
        assert all(torch.allclose(weights[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)
        far = [structs.replace(row, proximal=one - 1) for row, one in zip(second, said, strict=True)]
        assert (await two_steps(own, first, far))["clipped_share"] != theirs["clipped_share"], (
            "a column goes before the copy"
        )

    asyncio.run(program())


def test_rows_that_should_bring_the_proximal_policy_and_do_not_are_refused() -> None:
    config = LearnerConfig(mini_batches=2)
    one = TorchLearner(
        make("qwen3"), config, recipe.objective(AlgorithmConfig(), max_tokens=16), is_proximal_given=True
    )
    with pytest.raises(LearnerError, match="rows without proximal, which the objective reads"):
        asyncio.run(two_steps(one, rows(4), rows(4)))


def test_a_row_whose_proximal_log_probability_is_not_finite_is_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = LearnerConfig(mini_batches=2)
    one = TorchLearner(
        make("qwen3"), config, recipe.objective(AlgorithmConfig(), max_tokens=16), is_proximal_given=True
    )
    second = [structs.replace(row, proximal=np.where(row.loss_mask, -1, 0).astype(np.float32)) for row in rows(4)]
    broken = np.where(second[0].loss_mask, -np.inf, 0).astype(np.float32)
    second[0] = structs.replace(second[0], proximal=broken, label="group 7, member 0")
    assert asyncio.run(two_steps(one, rows(4), second))["skipped_rows"] == 1
    assert "group 7, member 0 is left out" in caplog.text


def test_with_one_step_a_batch_the_clip_of_decoupled_ppo_never_acts() -> None:
    async def program() -> None:
        one = learner(AlgorithmConfig(loss="decoupled_ppo"), LearnerConfig(learning_rate=0.05))
        for _ in range(3):
            await one.begin_batch()
            await one.accumulate(rows(8))
            assert (await one.step())["clipped_share"] == 0.0

    asyncio.run(program())


@pytest.mark.parametrize("column", ["logprobs", "advantages", "reference"])
def test_a_row_with_a_number_that_is_not_finite_is_left_out_by_name(
    column: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = [structs.replace(row, reference=row.logprobs, label=f"row {i}") for i, row in enumerate(rows(3))]
    broken = getattr(batch[1], column).copy()
    broken[np.flatnonzero(batch[1].loss_mask)[-1]] = np.nan
    one = learner()
    with_it = gradient(one, [[batch[0], structs.replace(batch[1], **{column: broken}), batch[2]]])
    assert asyncio.run(one.step())["skipped_rows"] == 1
    is_left_out = np.repeat([False, True, False], [np.count_nonzero(row.loss_mask) for row in batch])
    assert np.array_equal(np.isnan(one.log_ratios()), is_left_out)
    assert "row 1 is left out" in caplog.text
    other = learner()
    assert torch.equal(with_it, gradient(other, [[batch[0], batch[2]]]))
    assert "skipped_rows" not in asyncio.run(other.step())


def infinite(x: LossInputs) -> TokenLoss:
    """Finite but for the second row of a micro-batch."""
    return TokenLoss(torch.where(x.row_N == 1, -torch.inf, 1.0) * x.logprobs_N, {})


def test_a_step_whose_gradient_is_not_finite_is_left_out_and_too_many_in_a_row_end_the_run() -> None:
    supervised = recipe.supervised()
    one = TorchLearner(make("qwen3"), LearnerConfig(max_skipped_steps=2), supervised._replace(token_loss=infinite))
    batch = [structs.replace(row, label=f"group 7, member {i}") for i, row in enumerate(rows(3))]

    async def train(some: list[TrainRow]) -> Metrics:
        await one.begin_batch()
        await one.accumulate(some)
        return await one.step()

    async def program() -> None:
        before = await one.weights()
        for _ in range(2):
            assert (await train(batch))["skipped_steps"] == 1
        after = await one.weights()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert "skipped_steps" not in await train(batch[:1])  # a finite one: the count starts at 0 again
        for _ in range(2):
            await train(batch)
        with pytest.raises(LearnerError, match=r"the loss of group 7, member 1 is not finite.*learner\.learning_rate"):
            await train(batch)

    asyncio.run(program())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_neither_published_nor_kept_nor_saved(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    one = TorchLearner(make_small("qwen3", dtype), LearnerConfig(learning_rate=1e39), recipe.supervised())

    async def program() -> None:
        await one.weights()
        await one.begin_batch()
        await one.accumulate(rows(3))
        assert "skipped_steps" not in await one.step(), "its gradient is finite"
        said = (
            r"weight has a value that is not finite, as have \d+ others after the learner's optimizer step 0; the weights are "
            r"neither published nor saved\. Set learner\.learning_rate \(.*warmup\.learning_rate\) lower"
        )
        for leave in (one.weights, one.snapshot):
            with pytest.raises(LearnerError, match=said):
                await leave()
        with pytest.raises(LearnerError, match=said):
            one.save(tmp_path / "model")

    asyncio.run(program())
    with pytest.raises(
        ModelError, match=r"the model is not saved to .*/model: model\.\S+ has a value that is not finite"
    ):
        save_trained(one.model, None, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_that_begins_with_a_value_that_is_not_finite_is_not_published() -> None:
    model = make("qwen3")
    model.lm_head.weight.data[3, 4] = torch.nan
    one = TorchLearner(model, LearnerConfig(), recipe.supervised())
    with pytest.raises(
        LearnerError, match=r"lm_head\.weight has .* before the first optimizer step: model\.path needs"
    ):
        asyncio.run(one.weights())


def test_every_kind_of_weight_is_looked_at_and_large_ones_are_finite() -> None:
    weights = {
        "nan": torch.tensor([1.0, torch.nan]),
        "large": torch.full((3,), 3e38),
        "infinite": torch.tensor([-torch.inf, 0.0], dtype=torch.bfloat16),
        "large too": torch.full((3,), 1e300, dtype=torch.float64),
        "whole": torch.ones(2, dtype=torch.int64),
        "empty": torch.empty(0),
    }
    assert names_not_finite(weights) == ["nan", "infinite"]
    assert names_not_finite({"empty": torch.empty(0)}) == []


def test_with_bfloat16_the_masters_keep_what_rounding_would_lose(tmp_path: Path) -> None:
    """A hundred steps of a ten-thousandth of a weight move it by a hundredth, though each is below what it can show."""
    model = make_small("qwen3", torch.bfloat16)
    exact = TorchLearner(copy.deepcopy(model).float(), LearnerConfig(learning_rate=1e-5), recipe.supervised())
    one = TorchLearner(model, LearnerConfig(learning_rate=1e-5), recipe.supervised())
    batch = rows(1)

    async def program() -> None:
        for _ in range(30):
            for each in (one, exact):
                await each.accumulate(batch)
                await each.step()

    start = {name: value.float() for name, value in asyncio.run(one.weights()).items()}
    asyncio.run(program())
    masters, parameters = one.optimizer.state()["masters"], dict(model.named_parameters())
    for name, master in masters.items():
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), parameters[name])
    moved = torch.cat([(masters[name] - start[name]).flatten() for name in masters])
    expected = torch.cat([(p.detach() - start[name]).flatten() for name, p in exact.model.named_parameters()])
    assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > 0.97
    assert abs(float(moved.norm() / expected.norm()) - 1) < 0.05


def test_a_bfloat16_learner_goes_on_from_its_snapshot_bit_for_bit(tmp_path: Path) -> None:
    async def program() -> None:
        one = TorchLearner(make_small("qwen3", torch.bfloat16), LearnerConfig(), recipe.supervised())
        other = TorchLearner(make_small("qwen3", torch.bfloat16), LearnerConfig(), recipe.supervised())
        await one.accumulate(rows(4))
        await one.step()
        (await one.snapshot()).write(tmp_path)
        other.restore(tmp_path)
        for each in (one, other):
            await each.accumulate(rows(4, seed=1))
            await each.step()
        assert torch.equal(*(torch.cat([m.flatten() for m in each.optimizer.state()["masters"].values()])
                             for each in (one, other)))  # fmt: skip

    asyncio.run(program())


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_recomputed_activations_change_no_gradient(name: str) -> None:
    batch = rows(6)
    plainly = gradient(learner(name=name), [batch])
    assert torch.equal(gradient(learner(name=name, config=LearnerConfig(recompute=True)), [batch]), plainly)


@pytest.mark.parametrize("quantum", [1, 7, 64, 2000])
def test_tokens_that_fill_a_micro_batch_up_change_nothing(quantum: int) -> None:
    one, batch = learner(), rows(6)
    plainly = gradient(one, [batch])
    one.rank._quantum = quantum
    assert torch.allclose(gradient(one, [batch]), plainly, atol=1e-5 * float(plainly.abs().max()), rtol=1e-3)
    assert RowTensors(batch, torch.device("cpu"), quantum=quantum).num_computed % quantum == 0


@pytest.mark.slow
def test_compiled_layers_change_no_gradient_and_are_compiled_once_for_each_size() -> None:
    batch = rows(6)
    plainly = gradient(learner(), [batch])
    one = learner(config=LearnerConfig(compile=True, micro_batch_tokens=512))
    compiled = []
    for some in ([batch], [batch[:2], batch[2:]], [batch[::-1]], [[row] for row in batch]):
        assert torch.allclose(gradient(one, some), plainly, atol=1e-5 * float(plainly.abs().max()), rtol=1e-3)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] and set(compiled) == {compiled[0]}, "every micro-batch here is filled up to 128 tokens"


@pytest.mark.parametrize("num_tokens", [2, 32, 513, 1000, 1200, 4096])
def test_rows_to_fill_a_pass_have_its_size(num_tokens: int) -> None:
    filled = RowTensors(rows_to_fill(num_tokens), torch.device("cpu"), quantum=max(1, num_tokens // 4))
    assert num_tokens * 3 / 4 < filled.num_computed <= num_tokens


@pytest.mark.slow
def test_every_size_of_a_pass_is_compiled_before_the_first_batch_and_leaves_no_gradient() -> None:
    batch, one = rows(6), learner(config=LearnerConfig(compile=True, micro_batch_tokens=128))
    one.rank.begin_batch()
    assert not one.rank.optimizer.gradients()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for some in ([batch], [batch[:2], batch[2:]], [[row] for row in batch]):
        for rows_of_a_pass in some:
            one.rank.accumulate(rows_of_a_pass)
    assert before and torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_a_row_that_trains_its_first_token_is_refused() -> None:
    (row, *_) = rows(1)
    mask = row.loss_mask.copy()
    mask[0] = True
    bad = TrainRow(tokens=row.tokens, loss_mask=mask, logprobs=row.logprobs, advantages=row.advantages)
    with pytest.raises(LearnerError, match="first token"):
        asyncio.run(learner().accumulate([bad]))


def test_the_saved_weights_are_as_readable_as_every_other_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        learner().save(tmp_path / "model")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o640}


def test_the_saved_model_is_a_hugging_face_checkpoint_with_the_same_outputs(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from millstream.model.load import load_model
    from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model

    tokenizer = character_tokenizer("0123456789>")
    model = tiny_model(TinyShape(hidden=32, layers=2, heads=4, context=32), tokenizer, seed=0)
    one = TorchLearner(model, LearnerConfig(), recipe.supervised(), tokenizer=tokenizer)
    one.save(tmp_path / "model")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "model")("31>").input_ids])
    assert ids.tolist() == [[6, 4, 13]]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        expected = plain(model)(ids).logits
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
    again = load_model(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_a_learner_goes_on_from_its_snapshot_bit_for_bit_whatever_came_after_it(tmp_path: Path) -> None:
    async def train(one: TorchLearner, steps: range) -> None:
        for step in steps:
            await one.begin_batch()
            await one.accumulate(rows(6, seed=step))
            await one.step()

    config = LearnerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=2)
    whole, first = learner(config=config, num_steps=6), learner(config=config, num_steps=6)
    asyncio.run(train(whole, range(6)))
    asyncio.run(train(first, range(3)))
    snapshot = asyncio.run(first.snapshot())
    asyncio.run(train(first, range(3, 5)))
    snapshot.write(tmp_path)
    second = learner(config=config, num_steps=6)
    second.restore(tmp_path)
    asyncio.run(train(second, range(3, 6)))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))


def test_the_schedule_warms_up_and_falls() -> None:
    def shares(**settings: object) -> list[float]:
        config = LearnerConfig(**settings)  # type: ignore[arg-type]
        return [round(learning_rate_share(config, step, 10), 3) for step in range(10)]

    assert shares() == [1.0] * 10
    assert shares(warmup_steps=3)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares(schedule="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    cosine = shares(schedule="cosine")
    assert cosine[0] == 1.0 and cosine[5] == 0.5 and cosine == sorted(cosine, reverse=True)


def test_micro_batches_fill_their_budget_and_keep_the_order() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 40) for _ in range(200)]
    packer, packed = Packer(128), []
    for number, length in enumerate(lengths):
        row = TrainRow(
            tokens=np.full(length, number, dtype=np.int32),
            loss_mask=np.zeros(length, dtype=np.bool_),
            logprobs=np.zeros(length, dtype=np.float32),
            advantages=np.zeros(length, dtype=np.float32),
        )
        packed.append(packer.add(row))
    packed.append(packer.flush())
    packed = [micro_batch for micro_batch in packed if micro_batch]
    assert [int(row.tokens[0]) for micro_batch in packed for row in micro_batch] == list(range(200))
    sizes = [sum(len(row.tokens) for row in micro_batch) for micro_batch in packed]
    assert max(sizes) <= 128 and sum(sizes[:-1]) / (128 * (len(sizes) - 1)) > 0.8
    assert packer.flush() == []


def test_a_row_above_the_budget_goes_alone() -> None:
    packer = Packer(10)
    (small, large) = sorted(rows(2), key=lambda row: len(row.tokens))
    assert packer.add(small) == []
    assert packer.add(large) == [small]
    assert packer.flush() == [large]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_that_rows_share_is_computed_once_and_changes_nothing(name: str) -> None:
    """Alone, a row shares with none; members of one group do not stand side by side."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in (3, 7, 3)]
    batch = [
        TrainRow(
            tokens=np.concatenate([prompt, rng.integers(3, VOCABULARY, length).astype(np.int32)]),
            loss_mask=np.arange(len(prompt) + length) >= len(prompt),
            logprobs=np.full(len(prompt) + length, -3.0, np.float32),
            advantages=np.full(len(prompt) + length, rng.normal(), np.float32),
        )
        for length in (1, 4, 9, 30)
        for prompt in prompts
    ]
    one = learner(name=name)
    together, apart = gradient(one, [batch]), gradient(one, [[row] for row in batch])
    assert torch.allclose(together, apart, atol=2e-5 * float(apart.abs().max()), rtol=1e-3)
    num_tokens = len(np.unique(np.concatenate(share_prompts(batch))))
    assert num_tokens == sum(len(row.tokens) for row in batch) - 3 * sum(map(len, prompts))
