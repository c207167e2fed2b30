"""TRL and verl themselves, beside this package: the same records and functions give the same calls and the same rewards.
`make test-peers`; skipped where they are not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from millstream.env.data import DataConfig, read
from millstream.env.rewards import CompletionScorer, RewardConfig, check_reward, find_reward, prepare_rewards
from millstream.env.rewards.foreign import adapted
from millstream.model.load import save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.run.text import TokenizerText
from millstream.types import Task
from support.talk import CHATML

TRLS_ALONE = {"completion_ids", "trainer_state"}
TOOL_TEMPLATE = "{% if tools %}TOOLS {{ tools | tojson }} {% endif %}" + CHATML


def tasks_of(records: list[dict[str, Any]]) -> tuple[Task, ...]:
    return read(DataConfig(holdout=0, shuffle=False), seed=0, passed=records).train


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_function_is_called_with_what_trl_s_trainer_calls_it_with(tmp_path: Path, is_chat: bool) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizer = character_tokenizer("0123456789>+= abcdefghijklmnopqrstuvwxyz|_<\n")
    tokenizer.chat_template = CHATML
    model = tiny_model(TinyShape(hidden=16, layers=1, heads=2, context=256), tokenizer, seed=0)
    model.set_attn_implementation("eager")
    save_model(model, tokenizer, tmp_path / "model")
    prompts = [[{"role": "user", "content": f"{n}>"}] if is_chat else f"{n}>" for n in range(4)]
    records = [{"prompt": prompt, "solution": str(n), "level": n} for n, prompt in enumerate(prompts)]
    seen: list[dict[str, Any]] = []

    def reward(prompts, completions, **columns):  # type: ignore[no-untyped-def]
        columns["log_metric"]("calls", 1.0)
        kept = {key: value for key, value in columns.items() if key not in ("trainer_state", "log_metric", "log_extra")}
        seen.append(plain({"prompts": prompts, "completions": completions, **kept}))
        return [None if level == 3 else float(level) for level in columns["level"]]

    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list(records),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=4,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        ),
    )
    trainer.train()
    theirs = list(seen)
    assert theirs
    by_level = {task.data["level"]: task for task in tasks_of(records)}
    mine = adapted(reward, "reward")
    for call in theirs:
        for index, level in enumerate(call["level"]):
            said = call["completions"][index]
            seen.clear()
            value = mine(by_level[level], said if isinstance(said, str) else said[0]["content"])
            ours = {key: values[0] for key, values in seen[0].items()}
            expected = {key: values[index] for key, values in call.items() if key not in TRLS_ALONE}
            assert ours == expected and value == (0.0 if level == 3 else float(level))


def test_a_chat_with_tools_is_rendered_as_trl_renders_it() -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    tokenizer = character_tokenizer("ab")
    tokenizer.chat_template = TOOL_TEMPLATE
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    chat = [{"role": "user", "content": "a"}]
    (task,) = tasks_of([{"prompt": chat, "tools": tools}])
    assert not isinstance(task.prompt, str)
    theirs = data_utils.apply_chat_template({"prompt": chat}, tokenizer, tools=tools)["prompt"]
    assert TokenizerText(tokenizer=tokenizer).render(task.prompt) == theirs


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("trl.rewards:think_format_reward", "<think>a</think>b", 1.0),
        ("trl.rewards:think_format_reward", "b", 0.0),
        ("trl.rewards:accuracy_reward", r"\boxed{4}", 1.0),
    ],
)
def test_rewards_of_trl_are_named_as_they_are(name: str, said: str, expected: float) -> None:
    pytest.importorskip("trl.rewards")
    if "accuracy" in name:
        pytest.importorskip("math_verify")
    config = RewardConfig(function=name)
    check_reward(find_reward(name), config)
    (task,) = tasks_of([{"prompt": [{"role": "user", "content": "2+2="}], "solution": r"\boxed{4}"}])
    assert asyncio.run(CompletionScorer(prepare_rewards([config])).score(task, said)) == expected


@pytest.fixture
def verl_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's modules without what its packages import: tensordict, Ray and others, which its rewards do not need."""
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not here")
    folder = Path(found.submodule_search_locations[0])
    for name, place in (("verl", folder), ("verl.utils", folder / "utils")):
        package = types.ModuleType(name)
        package.__path__ = [str(place)]
        monkeypatch.setitem(sys.modules, name, package)


def test_verl_s_own_score_of_its_own_records(tmp_path: Path, verl_files: None) -> None:
    """The record is what verl's examples/data_preprocess/gsm8k.py writes."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'What is 2+2? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0, "answer": "2+2=4\n#### 4", "question": "What is 2+2?"},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (task,) = read(DataConfig(path=str(tmp_path / "train.parquet"), holdout=0), seed=0).train
    for name in ("verl.utils.reward_score:default_compute_score", "verl.utils.reward_score.gsm8k:compute_score"):
        config = RewardConfig(function=name)
        check_reward(find_reward(name), config)
        scorer = CompletionScorer(prepare_rewards([config]))
        assert asyncio.run(scorer.score(task, "2+2=4\n#### 4")) == 1.0
        assert asyncio.run(scorer.score(task, "2+2=5\n#### 5")) == 0.0
