"""TRL's side of `bench/vs_trl.py`: one GRPOTrainer run, in TRL's own environment. Knows nothing of Millstream.

    python bench/trl_side.py JOB.json

Reads a job, trains, and writes `result.json` and weights (`step-N.safetensors`) to the job's folder. The clock starts when
training does: imports, loading and set-up come before it. Weights are kept in memory and written when training is over.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """The time of every step, the weights of some, and the end when the time is up."""

    def __init__(self, model: Any, keep_every: int, limit_s: float) -> None:
        self.model, self.keep_every, self.limit_s = model, keep_every, limit_s
        self.began = 0.0
        self.step_ends: list[float] = []
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_ends.append(time.perf_counter() - self.began)
        if state.global_step % self.keep_every:
            return
        self.kept[state.global_step] = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        is_late = torch.tensor(float(self.step_ends[-1] > self.limit_s))
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(is_late, src=0)  # all processes stop at the same step, or none
        control.should_training_stop = control.should_training_stop or bool(is_late)


class ExactMatch:
    """The reward: 1 if the completion is the answer. Counts the rollouts of groups that have both kinds."""

    __name__ = "exact_match"

    def __init__(self, group_size: int) -> None:
        self.group_size, self.num_with_signal = group_size, 0

    def __call__(self, completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(found.strip() == wanted) for found, wanted in zip(completions, answer, strict=True)]
        for start in range(0, len(rewards), self.group_size):
            group = rewards[start : start + self.group_size]
            self.num_with_signal += len(group) * (min(group) < max(group))
        return rewards


def run(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    torch.backends.mkldnn.set_flags(job["onednn"])  # type: ignore[no-untyped-call, unused-ignore]
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=job["attention"]
    )
    if job["narrow_head"]:
        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = model.config.vocab_size  # made for GPUs and large vocabularies
    reward, clock = ExactMatch(job["config"]["num_generations"]), Clock(model, job["keep_every"], job["limit_s"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**job["config"]),
        train_dataset=Dataset.from_list([json.loads(line) for line in Path(job["data"]).read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    num_with_signal = int(trainer.accelerator.reduce(torch.tensor(float(reward.num_with_signal)), reduction="sum"))
    if trainer.accelerator.is_main_process:
        write(Path(job["folder"]), clock, num_with_signal)


def write(folder: Path, clock: Clock, num_with_signal: int) -> None:
    for step, weights in clock.kept.items():
        save_file(weights, folder / f"step-{step}.safetensors")
    result = {"step_ends": clock.step_ends, "kept": list(clock.kept), "num_with_signal": num_with_signal}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
