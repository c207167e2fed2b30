"""Log-probabilities of prompts, and lm-evaluation-harness through `millstream serve`: the real package, a task made here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.model.load import save_model, set_up_cpu
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from support.commands import start_command
from support.tiny import plain

HTTP = httpx.Client(timeout=60, trust_env=False)
QUESTIONS = [("31>", ["13", "31"]), ("52>", ["52", "25"]), ("90>", ["09", "99"]), ("41>", ["11", "14"])]
TASK = """
task: millstream_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def made() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    set_up_cpu()
    tokenizer = character_tokenizer("0123456789>")
    return tiny_model(TinyShape(hidden=32, layers=2, heads=4, context=64), tokenizer, seed=3), tokenizer


@pytest.fixture(scope="module")
def served(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of `millstream serve`, and the folder of the model."""
    folder = tmp_path_factory.mktemp("served") / "model"
    save_model(*made, folder)
    command = [sys.executable, "-m", "millstream.cli.main", "serve", str(folder), "--name", "mine", "--port", "0"]
    child = start_command(command, stderr=2)
    try:
        assert child.stdout is not None
        yield child.stdout.readline().split()[-1], folder
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(20)


def logprobs_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(plain(model)(input_ids=torch.tensor([tokens])).logits[0].float(), dim=-1)


def test_echo_returns_the_prompt_with_the_log_probabilities_of_the_model(made: Any, served: tuple[str, Path]) -> None:
    model, tokenizer = made
    prompts = [tokenizer.encode("31>13"), tokenizer.encode("52>25")]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    found = HTTP.post(f"{served[0]}/completions", json=body).raise_for_status().json()
    for choice, tokens in zip(found["choices"], prompts, strict=True):
        scores_TV, logprobs = logprobs_of(model, tokens), choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        expected = [float(scores_TV[at, token]) for at, token in enumerate(tokens[1:])]
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        best = [float(scores_TV[at].max()) for at in range(len(tokens) - 1)]
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:-1]] == pytest.approx(best, abs=1e-4)
        assert len(logprobs["tokens"]) == len(tokens) + 1 == len(logprobs["text_offset"])
        assert choice["text"].startswith(tokenizer.decode(tokens))
    plain = HTTP.post(f"{served[0]}/completions", json={"prompt": "31>", "echo": True, "max_tokens": 1}).json()
    assert plain["choices"][0]["text"].startswith("31>") and plain["choices"][0]["logprobs"] is None


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval: make test-lm-eval")
def test_lm_evaluation_harness_gets_the_accuracy_of_the_model_through_the_server(
    made: Any, served: tuple[str, Path], tmp_path: Path
) -> None:
    model, tokenizer = made
    rows = [{"question": question, "choices": choices, "label": 1} for question, choices in QUESTIONS]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    url, folder = served
    arguments = f"model=mine,base_url={url}/completions,tokenizer={folder},tokenizer_backend=huggingface,max_length=64,num_concurrent=2"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments,
               "--tasks", "millstream_choice", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]  # fmt: skip
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())["results"]["millstream_choice"]

    def score(question: str, answer: str) -> float:
        context, tokens = tokenizer.encode(question), tokenizer.encode(question + answer)
        scores_TV = logprobs_of(model, tokens)
        return sum(float(scores_TV[at - 1, tokens[at]]) for at in range(len(context), len(tokens)))

    right = [score(question, choices[1]) > score(question, choices[0]) for question, choices in QUESTIONS]
    assert results["acc,none"] == sum(right) / len(right)
