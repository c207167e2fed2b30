"""The start-up check: models whose numbers would be wrong are refused, right ones run, and what was checked is remembered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    DiffLlamaConfig,
    DogeConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    MptConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    RobertaConfig,
)

from millstream import DataConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig
from millstream.engine import EngineConfig
from millstream.engine.native.build import batcher_of
from millstream.engine.native.check import check_engine
from millstream.engine.native.plain import PLAIN
from millstream.errors import LearnerError, ModelError, RequestRefused
from millstream.learner.check import check_learner
from millstream.learner.rows import RowTensors
from millstream.model import compare
from millstream.model.load import context_length, load_model, new_model
from millstream.model.policy import Policy
from millstream.model.shrink import WINDOW, shrunk
from millstream.model.tiny import character_tokenizer
from millstream.rpc.process import LocalLauncher
from millstream.run.prepare import prepare_run
from millstream.types import TrainRow
from support.decoding import drain, teacher_forced
from support.tiny import CONFIGS, SHAPE, VOCABULARY, make, make_small, plain, request

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
WRONG: dict[str, Callable[[], Any]] = {
    "a window that its attention is not told of (PhiMoE)": lambda: PhimoeConfig(**SHAPE, sliding_window=9),
    "a window that its attention is not told of (Qwen2-MoE)": lambda: Qwen2MoeConfig(
        **SHAPE, **MOE, use_sliding_window=True, sliding_window=9
    ),
    "a mask of its own (Doge)": lambda: DogeConfig(**SHAPE),
    "positions that do not begin at 0 (RoBERTa)": lambda: RobertaConfig(**SHAPE, is_decoder=True),
    "positions that vanish (BART)": lambda: BartConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=128,
        is_decoder=True,
    ),
    "an encoder (BERT)": lambda: BertConfig(**SHAPE),
}
PATHS: dict[str, Callable[[PreTrainedModel], object]] = {
    "slots": partial(check_engine, kind="slots"),
    "pages": partial(check_engine, kind="pages"),
    "learner": check_learner,
}


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- what is wrong is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", WRONG)
def test_a_model_whose_numbers_would_be_wrong_is_refused_with_the_difference(name: str, path: str) -> None:
    """By the small one alone: before the model itself is anywhere."""
    with pytest.raises(ModelError, match=r"gives other numbers in the \w+.*differs by \d.*expected at most|cannot run"):
        PATHS[path](new_model(WRONG[name](), seed=0))


def test_two_attention_calls_on_one_cache_entry_are_refused_by_the_engine_and_trained_by_the_learner() -> None:
    model = new_model(DiffLlamaConfig(**SHAPE), seed=0)
    for kind in ("slots", "pages"):
        with pytest.raises(ModelError, match=r"DiffLlamaForCausalLM gives other numbers.*engine\.kind = \"vllm\""):
            check_engine(model, kind)  # type: ignore[arg-type]
    check_learner(model)


@pytest.mark.parametrize("config", [FalconConfig, GPTJConfig, GPTNeoConfig])
def test_a_model_that_chooses_its_attention_from_a_table_of_its_own_is_refused_where_it_is_built(
    config: Any, tmp_path: Path
) -> None:
    small = shrunk(config())
    with pytest.raises(ModelError, match="does not use transformers' attention interface"):
        new_model(small, seed=0)
    AutoModelForCausalLM.from_config(shrunk(config()), attn_implementation="eager").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"For\w+ does not use transformers' attention interface: .*Choose another model"
    ):
        load_model(tmp_path)


def test_an_error_of_the_library_is_a_reason_in_one_line() -> None:
    model = new_model(MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=VOCABULARY), seed=0)
    for check in PATHS.values():
        with pytest.raises(ModelError, match=r"MptForCausalLM") as refused:
            check(model)
        assert "\n" not in str(refused.value) and (
            "Set engine" in str(refused.value) or "choose" in str(refused.value).lower()
        )


@pytest.mark.parametrize("config", [MptConfig, FalconConfig, DiffLlamaConfig])
def test_a_run_with_such_a_model_ends_in_the_driver_before_any_process_starts(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = character_tokenizer("0123456789>")
    tokenizer.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_config(shrunk(config()), attn_implementation="eager").save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n' * 8)
    run = RunConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(path=str(tmp_path / "data.jsonl"), holdout=2),
        rollout=RolloutConfig(max_tokens=4),
        reward=(RewardConfig(),),
    )
    monkeypatch.setattr(LocalLauncher, "launch", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ModelError, match=r"^\w+ForCausalLM (does not use|gives other numbers|cannot run)"):
        prepare_run(run)


# ---- what is right runs ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_right_passes_and_the_random_numbers_are_what_they_were(name: str, dtype: torch.dtype) -> None:
    model = make_small(name, dtype)
    before, weights = torch.random.get_rng_state(), {key: value.clone() for key, value in model.state_dict().items()}
    np.random.seed(7)
    numbers = np.random.get_state()[1]
    for path in PATHS.values():
        path(model)
    assert check_engine(model, "pages") == ""
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numbers)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert model.config._attn_implementation == "millstream"


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_the_small_model_has_every_kind_of_layer_and_a_window_that_the_sequences_exceed(name: str) -> None:
    large = CONFIGS[name]()
    large.sliding_window = 4096
    small = shrunk(large)
    assert small.sliding_window == WINDOW
    assert set(getattr(small, "layer_types", None) or ()) == set(getattr(large, "layer_types", None) or ())
    model = compare.small_model(large)
    assert model is not None
    lengths = compare.lengths_for(model)
    assert min(lengths.prompts) < WINDOW < sorted(lengths.prompts)[1]


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (2, 2), (2, 1), (6, 6), (6, 2), (8, 1)])
def test_a_small_model_can_be_made_whatever_the_number_of_heads(heads: int, key_heads: int) -> None:
    config = CONFIGS["qwen3"]()
    config.num_attention_heads = heads
    config.num_key_value_heads = key_heads
    small = shrunk(config)
    assert small.num_attention_heads % small.num_key_value_heads == 0
    assert (small.num_attention_heads == small.num_key_value_heads) == (heads == key_heads)
    assert compare.small_model(config) is not None


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("why", ["its window", "its size"])
def test_a_model_that_is_too_large_is_checked_by_a_small_one(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["mistral"]()
    if why == "its window":
        config.sliding_window = compare.MAX_WINDOW + 1
    else:
        monkeypatch.setitem(compare.MAX_PARAMETERS, "cpu", 1000)
    model, seen = new_model(config, seed=0), list[PreTrainedModel]()
    right = compare.difference_from_library

    def watched(checked: PreTrainedModel, *others: Any) -> tuple[float, float]:
        seen.append(checked)
        return right(checked, *others)

    monkeypatch.setattr(compare, "difference_from_library", watched)
    check_learner(model)
    assert len(seen) == 2 and model not in seen


@pytest.mark.usefixtures("nothing_remembered")
def test_a_long_window_is_exceeded_where_no_small_model_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model with code of its own."""
    config = CONFIGS["mistral"]()
    config.sliding_window = compare.MAX_WINDOW + 1
    config.max_position_embeddings = 2 * compare.MAX_WINDOW
    monkeypatch.setattr(compare, "small_model", lambda *_: None)
    model = new_model(config, seed=0)
    assert sorted(compare.lengths_for(model).prompts)[1] > config.sliding_window
    check_learner(model)


@pytest.mark.usefixtures("nothing_remembered")
def test_a_context_of_a_few_tokens_is_enough_for_the_check() -> None:
    for context in (2, 3, 9, 24):
        model = new_model(LlamaConfig(**{**SHAPE, "max_position_embeddings": context}), seed=0)
        for path in PATHS.values():
            path(model)


# ---- what was checked is remembered --------------------------------------------------------------------------------------


def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls, right = list[None](), compare.difference_from_library

    def counted(*args: Any) -> tuple[float, float]:
        calls.append(None)
        return right(*args)

    monkeypatch.setattr(compare, "difference_from_library", counted)
    return calls


def test_a_check_is_made_once_for_a_config_a_dtype_and_a_version(
    nothing_remembered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_comparisons(monkeypatch)
    check_learner(make("llama"))
    assert len(calls) == 2, "a small one, and itself"
    check_learner(make("llama", seed=3))
    assert len(calls) == 2
    check_learner(new_model(CONFIGS["llama"](), seed=0, dtype=torch.bfloat16))
    assert len(calls) == 4, "itself in float32 and as it is; the small one is the same"
    check_engine(make("llama").eval(), "slots")
    assert len(calls) == 6, "another pass"
    monkeypatch.setattr(compare.transformers, "__version__", "6.0")
    check_learner(make("llama"))
    assert len(calls) == 8
    assert all(file.stat().st_size == 0 for file in (nothing_remembered / "millstream" / "checked").iterdir())


def test_what_was_refused_is_tried_again(nothing_remembered: Path) -> None:
    model = new_model(WRONG["an encoder (BERT)"](), seed=0)
    for _ in range(2):
        with pytest.raises(ModelError, match="gives other numbers"):
            check_learner(model)


def test_without_a_folder_to_remember_in_checks_are_made_every_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    for base in (str(tmp_path / "file"), "/proc/nothing", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
        with monkeypatch.context() as counting:
            calls = count_comparisons(counting)
            check_learner(make("llama"))
            check_learner(make("llama"))
            assert len(calls) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- rope that looks at the longest row ------------------------------------------------------------------------------------


def longrope() -> Any:
    """Phi-3, whose frequencies are others for a pass with a row of more than 32 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    shape = {**SHAPE, "max_position_embeddings": 128}
    return Phi3Config(**shape, original_max_position_embeddings=32, rope_parameters=rope, pad_token_id=0)


def dynamic() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return LlamaConfig(**{**SHAPE, "max_position_embeddings": 32}, rope_parameters=rope)


@pytest.mark.parametrize("config", [longrope, dynamic])
@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_a_request_that_would_change_the_rope_of_others_is_refused_and_theirs_is_right(config: Any, kind: Any) -> None:
    model = new_model(config(), seed=0).eval()
    twin = plain(model)
    batcher = batcher_of(model, EngineConfig(slots=4, cache=kind, **({"cache_gb": 0.01} if kind == "pages" else {})))
    with pytest.raises(RequestRefused, match=r"the 32 tokens beyond which the model's rope changes for all requests"):
        batcher.add(request(0, tuple(range(3, 43)), max_tokens=8))
    for number, length in enumerate((5, 24)):
        batcher.add(request(number, tuple(range(3, 3 + length)), max_tokens=8, temperature=0.0))
    done: dict[int, Any] = {}
    drain(batcher, done)
    for number, length in enumerate((5, 24)):
        expected = teacher_forced(twin, tuple(range(3, 3 + length)), done[number].tokens)
        assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("config", [longrope, dynamic])
def test_a_row_that_would_change_the_rope_of_others_is_refused_by_the_learner(config: Any) -> None:
    model = new_model(config(), seed=0)
    assert context_length(model) == 32
    policy = Policy(model, temperature=1.0)

    def logprobs(*lengths: int) -> Any:
        rows = [
            TrainRow(
                tokens=np.arange(3, 3 + length, dtype=np.int32),
                loss_mask=np.arange(length) > 0,
                logprobs=np.zeros(length, np.float32),
                advantages=np.zeros(length, np.float32),
            )
            for length in lengths
        ]
        batch = RowTensors(rows, torch.device("cpu"))
        with torch.no_grad():
            return policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M).logprobs_M

    assert torch.allclose(logprobs(10, 32)[:9], logprobs(10), atol=1e-5)
    with pytest.raises(LearnerError, match=r"a row of 40 tokens, and beyond 32 the rope of \w+ has other frequencies"):
        logprobs(10, 40)


@pytest.mark.usefixtures("nothing_remembered")
def test_operations_that_are_wrong_are_found_whatever_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PLAIN.decode_attention
    monkeypatch.setattr(PLAIN, "decode_attention", lambda q, pages, rule: right(q, pages, rule._replace(window=4)))
    with pytest.raises(
        ModelError, match=r'the engine \(pages\).*Set engine\.cache = "slots", or engine\.kind = "vllm"'
    ):
        batcher_of(make("llama"), EngineConfig(slots=2, cache="pages", cache_gb=0.01))
    batcher_of(make("llama"), EngineConfig(slots=2, cache="slots"))
