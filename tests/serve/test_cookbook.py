"""tinker-cookbook, unmodified, against the training service: its loops and its trainers learn. `make test-cookbook`.

The model, its tokenizer and the data sets are made on the spot, under the names that the cookbook knows. Every program is a
process of its own. The cookbook passes no seeds, so that curves differ from run to run: what is asserted holds by a wide margin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millstream.audit import audit_service
from millstream.engine import EngineConfig
from millstream.learner import LearnerConfig
from millstream.model.load import save_model, set_up_cpu
from millstream.model.tiny import TinyShape, tiny_model
from millstream.run.serve_training import base_of
from support.training_server import KEY, listening

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(900)]
pytest.importorskip("tinker_cookbook")
MODEL = "Qwen/Qwen3-8B-Base"  # the cookbook chooses the chat format by the name: `User: ...`, in plain text
WORDS = [" ", "\n", ":", ".", "User", "Assistant", "Say", *"0123", *(f"\\boxed{{{digit}}}" for digit in "0123")]
ANSWER = "\\boxed{2}"


def word_tokenizer() -> Any:
    """One token a word; all that is not in `WORDS` is <unk>."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{\d\}|[A-Za-z]+|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(folder: Path) -> None:
    """Of the form of `openai/gsm8k` and `HuggingFaceH4/no_robots`. The answer is always the same."""
    problems = [{"question": f"Say {number % 4}.", "answer": "#### 2"} for number in range(800)]
    gsm8k = folder / "openai" / "gsm8k"
    write_rows(gsm8k / "train.jsonl", problems)
    write_rows(gsm8k / "test.jsonl", problems[:8])
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (gsm8k / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    talk = [
        {"messages": [{"role": "user", "content": "Say 2."}, {"role": "assistant", "content": ANSWER}]}
        for _ in range(400)
    ]
    write_rows(folder / "HuggingFaceH4" / "no_robots" / "train.jsonl", talk)


class Place(NamedTuple):
    folder: Path  # where programs run
    service: Path
    url: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, service = tmp_path_factory.mktemp("cookbook"), tmp_path_factory.mktemp("service")
    set_up_cpu()
    tokenizer = word_tokenizer()
    model = tiny_model(TinyShape(hidden=32, layers=2, heads=2, context=512), tokenizer, seed=0)
    model.get_output_embeddings().weight.data.mul_(6)  # the head has no adapter, and could not move small logits
    save_model(model, tokenizer, folder / MODEL)
    write_data(folder)
    engine = EngineConfig(slots=64, process=False)
    base = base_of(model, tokenizer, name=MODEL, path=MODEL, engine=engine, learner=LearnerConfig())
    with listening(service, base=base, tokens=[KEY]) as url:
        yield Place(folder, service, url)


def run(place: Place, module: str, **settings: Any) -> list[dict[str, Any]]:
    """The rows of the program's metrics."""
    logs = place.folder / "logs" / module / str(len(list(place.folder.glob(f"logs/{module}/*"))))
    given = {"base_url": place.url, "model_name": MODEL, "log_path": logs, **settings}
    words = [f"{name}={value}" for name, value in given.items()]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(place.folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{module}", *words],
        cwd=place.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = audit_service(place.service)
    assert found.is_clean, found.findings
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_sl_loop_lowers_the_loss(place: Place) -> None:
    rows = run(place, "sl_loop", batch_size=16, learning_rate=1e-2, lora_rank=8, max_steps=12, save_every=5)
    losses = [row["train_mean_nll"] for row in rows]
    assert len(losses) == 12 and mean(losses[-3:]) < 0.5 * losses[0], losses


def test_rl_loop_raises_the_reward(place: Place) -> None:
    sizes = {"batch_size": 8, "group_size": 16, "lora_rank": 8, "max_tokens": 4}
    rows = run(place, "rl_loop", **sizes, learning_rate=3e-3, max_steps=16, save_every=10)
    rewards = [row["reward/total"] for row in rows]
    assert len(rewards) == 16 and mean(rewards[-4:]) > rewards[0] + 0.4, rewards


TRAINERS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"max_steps_off_policy": 2},
    "streaming": {"stream_minibatch_config.groups_per_batch": 8, "stream_minibatch_config.num_minibatches": 2},
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_trainer_of_math_rl_raises_the_reward(place: Place, kind: str) -> None:
    sizes = {
        "groups_per_batch": 8,
        "group_size": 8,
        "lora_rank": 8,
        "max_tokens": 4,
        "eval_every": 0,
        "save_every": 10,
    }
    rows = run(place, "math_rl.train", env="gsm8k", **sizes, learning_rate=3e-3, max_steps=16, **TRAINERS[kind])
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    assert len(rewards) >= 8 and mean(rewards[-4:]) > rewards[0] + 0.4, rewards
