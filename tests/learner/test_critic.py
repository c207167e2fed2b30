"""The real reference and critic: exact log-probabilities, values of what stands before a token, a critic that learns and resumes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from millstream.algo import AlgorithmConfig
from millstream.errors import LearnerError, ModelError
from millstream.learner import CriticConfig, LearnerConfig
from millstream.learner.critic import TorchCritic, value_loss
from millstream.learner.scorer import TorchScorer
from millstream.model.tiny import character_tokenizer
from millstream.run.build_scorers import check_vocabulary
from millstream.types import Floats, Metrics, TrainRow
from support.learners import learner, rows
from support.tiny import CONFIGS, make, make_small, plain

TEMPERATURE = 0.7
LEARNING = LearnerConfig(learning_rate=1e-3)


def with_returns(some: Sequence[TrainRow]) -> list[TrainRow]:
    """Returns that can be read off the last token that is seen."""
    made = []
    for row in some:
        before = np.concatenate([[0], row.tokens[:-1]])
        returns = np.where(row.loss_mask, before % 2, 0).astype(np.float32)
        made.append(replace(row, returns=returns, values=np.zeros(len(row.tokens), np.float32)))
    return made


def critic(config: CriticConfig | None = None, name: str = "qwen3") -> TorchCritic:
    return TorchCritic(make(name), config or CriticConfig())


def score(one: TorchScorer | TorchCritic, some: Sequence[TrainRow]) -> list[Floats]:
    return asyncio.run(one.score(some))


# ---- the reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_reference_says_what_the_model_says_by_itself(name: str) -> None:
    model, some = make(name), rows(6)
    found = score(TorchScorer(model, temperature=TEMPERATURE), some)
    twin = plain(model)
    for row, scores in zip(some, found, strict=True):
        with torch.no_grad():
            logits = twin(input_ids=torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0] / TEMPERATURE
        logs = torch.log_softmax(logits, -1)
        trained = np.flatnonzero(row.loss_mask)
        assert np.allclose(scores[trained], [float(logs[t - 1, row.tokens[t]]) for t in trained], atol=1e-4)
        assert len(scores) == len(row.tokens) and not scores[~row.loss_mask].any()


def test_in_16_bits_a_reference_says_about_the_same_and_a_critic_learns() -> None:
    some, model = with_returns(rows(2)), make_small("qwen3", torch.float32)
    exact = score(TorchScorer(copy.deepcopy(model)), some)
    rounded = score(TorchScorer(copy.deepcopy(model).to(torch.bfloat16)), some)
    assert all(np.allclose(mine, theirs, atol=0.1) for mine, theirs in zip(exact, rounded, strict=True))
    assert any(not np.array_equal(mine, theirs) for mine, theirs in zip(exact, rounded, strict=True))
    metrics = asyncio.run(train(TorchCritic(model.to(torch.bfloat16), FAST), some, 12))
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]


def test_rows_without_a_trained_token_have_nothing_to_score() -> None:
    one = rows(4)[3]
    assert not one.loss_mask.any()
    for scorer in (TorchScorer(make("qwen3")), critic()):
        assert np.array_equal(score(scorer, [one])[0], np.zeros(len(one.tokens)))


def test_the_learner_measures_the_kl_to_the_reference_and_a_kl_in_the_loss_pulls_towards_it() -> None:
    some = [replace(row, advantages=np.zeros(len(row.tokens), np.float32)) for row in rows(8)]
    other = TorchScorer(make("qwen3", seed=1))
    near = [replace(row, reference=scores) for row, scores in zip(some, score(other, some), strict=True)]

    async def steps(algorithm: AlgorithmConfig, batch: Sequence[TrainRow]) -> list[Metrics]:
        one, metrics = learner(algorithm, config=LEARNING), []
        for _ in range(6):
            await one.begin_batch()
            await one.accumulate(batch)
            metrics.append(await one.step())
        return metrics

    held = asyncio.run(steps(AlgorithmConfig(kl="loss", kl_coefficient=1.0), near))
    free = asyncio.run(steps(AlgorithmConfig(), near))
    assert held[-1]["reference_kl"] < 0.8 * held[0]["reference_kl"]
    assert free[-1]["reference_kl"] == pytest.approx(free[0]["reference_kl"], rel=1e-3), (
        "no advantage, nothing to learn"
    )
    assert "reference_kl" not in asyncio.run(steps(AlgorithmConfig(), some))[0]


def test_another_vocabulary_is_refused_by_the_token_that_differs() -> None:
    ours = character_tokenizer("abc")
    check_vocabulary(ours, character_tokenizer("abc"), "reference.path = 'x'")
    with pytest.raises(
        ModelError, match=r"reference\.path = 'x' has another tokenizer.*'b' is number 4 here and has the number 5"
    ):
        check_vocabulary(ours, character_tokenizer("acb"), "reference.path = 'x'")
    with pytest.raises(ModelError, match="'c' is number 5 here and is not there"):
        check_vocabulary(ours, character_tokenizer("ab"), "reference.path = 'x'")
    with pytest.raises(ModelError, match="only it has the token 'd'"):
        check_vocabulary(ours, character_tokenizer("abcd"), "reference.path = 'x'")


# ---- the critic --------------------------------------------------------------------------------------------------------


def test_a_value_clip_takes_the_larger_loss() -> None:
    values, old, returns = torch.tensor([0.5, 0.5, -1.0]), torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 0.2, 0.0])
    assert torch.allclose(value_loss(values, old, returns, None), torch.tensor([0.125, 0.045, 0.5]))
    # held at 0.2, 0.2 and -0.2
    assert torch.allclose(value_loss(values, old, returns, 0.2), torch.tensor([0.32, 0.045, 0.5]))


def test_a_new_critic_expects_nothing() -> None:
    some = rows(6)
    assert all(not scores.any() for scores in score(critic(), some))


async def train(one: TorchCritic, some: Sequence[TrainRow], steps: int, split: int = 2) -> list[Metrics]:
    metrics = []
    for _ in range(steps):
        for begin in range(0, len(some), split):
            await one.accumulate(some[begin : begin + split])
        metrics.append(await one.step())
    return metrics


FAST = CriticConfig(learning_rate=3e-3, value_clip=None)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_critic_learns_what_can_be_seen_before_a_token(name: str) -> None:
    one, some = critic(FAST, name), with_returns(rows(8))
    metrics = [*asyncio.run(train(one, some, 2)), *asyncio.run(train(one, some, 23, split=len(some)))]
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"] and metrics[-1]["explained"] > 0.5 > metrics[0]["explained"]
    assert metrics[0]["explained"] == 0.0 == metrics[0]["value"], "it said 0"
    assert metrics[0]["return"] == pytest.approx(float(np.concatenate([r.returns[r.loss_mask] for r in some]).mean()))  # type: ignore[index]
    found = score(one, some)
    mine = np.concatenate([scores[row.loss_mask] for row, scores in zip(some, found, strict=True)])
    theirs = np.concatenate([row.returns[row.loss_mask] for row in some])  # type: ignore[index]
    assert ((mine > 0.5) == (theirs > 0.5)).mean() > 0.8


def test_a_value_does_not_see_its_own_token() -> None:
    one = critic(FAST)
    asyncio.run(train(one, with_returns(rows(6)), 3))
    (row,) = [row for row in rows(6) if row.loss_mask[-1]][:1]
    other = replace(row, tokens=np.append(row.tokens[:-1], (row.tokens[-1] + 1) % 90).astype(np.int32))
    first, second = score(one, [row])[0], score(one, [other])[0]
    assert first[-1] != 0 and np.allclose(first, second)


def test_any_split_of_the_batch_gives_the_same_step() -> None:
    some, found = with_returns(rows(8)), []
    for split in (1, 3, 8):
        one = critic(FAST)
        asyncio.run(train(one, some, 2, split))
        found.append(score(one, some))
    for other in found[1:]:
        assert all(np.allclose(mine, theirs, atol=1e-4) for mine, theirs in zip(found[0], other, strict=True))


def test_a_critic_without_rows_stays_as_it_is_and_rows_that_are_not_finite_are_left_out() -> None:
    one, some = critic(FAST), with_returns(rows(4))
    assert asyncio.run(one.step()) == {}
    broken = [replace(row, returns=np.full(len(row.tokens), np.nan, np.float32)) for row in some]
    assert asyncio.run(train(one, broken, 1)) == [{}]
    assert all(not scores.any() for scores in score(one, some))
    with pytest.raises(LearnerError, match="rows without returns"):
        asyncio.run(train(one, rows(2), 1))


def test_a_critic_goes_on_from_its_snapshot_bit_for_bit(tmp_path: Path) -> None:
    some = with_returns(rows(6))

    async def whole() -> list[Floats]:
        one = critic(FAST)
        await train(one, some, 2)
        (await one.snapshot()).write(tmp_path)
        await train(one, some, 2)
        return await one.score(some)

    async def rest() -> list[Floats]:
        one = TorchCritic(make("qwen3", seed=7), FAST)
        one.restore(tmp_path)
        await train(one, some, 2)
        return await one.score(some)

    for first, second in zip(asyncio.run(whole()), asyncio.run(rest()), strict=True):
        assert np.array_equal(first, second)


def test_the_body_is_a_copy_of_ones_own_and_has_no_head_of_words() -> None:
    model = make("qwen3")
    before = copy.deepcopy(model.state_dict())
    one = TorchCritic(copy.deepcopy(model), FAST)
    asyncio.run(train(one, with_returns(rows(4)), 1))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not [name for name in one.rank.optimizer.state()["masters"] if "lm_head" in name]


def test_a_critic_that_is_not_finite_is_not_kept() -> None:
    one = TorchCritic(make("qwen3"), CriticConfig(learning_rate=1e39))
    asyncio.run(train(one, with_returns(rows(4)), 1))
    with pytest.raises(
        LearnerError, match=r"not finite.* the critic's optimizer step 0; .*Set critic\.learning_rate lower"
    ):
        asyncio.run(one.snapshot())


def test_a_step_of_the_critic_that_is_not_finite_is_left_out_and_too_many_end_the_run_by_row_and_key() -> None:
    one = TorchCritic(make("qwen3"), CriticConfig(max_skipped_steps=1))
    some = [replace(row, label=f"row {number}") for number, row in enumerate(with_returns(rows(3)))]
    some[1] = replace(some[1], returns=np.full(len(some[1].tokens), 3e30, np.float32))
    (metrics,) = asyncio.run(train(one, some, 1))
    assert metrics["skipped_steps"] == 1 and not any(scores.any() for scores in score(one, some))
    with pytest.raises(
        LearnerError,
        match=r"the critic's optimizer step 1 is inf; the loss of row 1 is not finite.*"
        r"critic\.max_skipped_steps = 1: set critic\.learning_rate lower",
    ):
        asyncio.run(train(one, some, 1))
