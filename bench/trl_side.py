"""TRL's side of `bench/vs_trl.py` and `bench/time_to_quality.py`: one GRPOTrainer run, in TRL's own environment. Knows nothing
of Millstream, except the rules by which an environment of single turns scores an answer.

    python bench/trl_side.py JOB.json

Reads a job, trains, and writes `result.json` to the job's folder after every step, and weights (`step-N.safetensors`) as they
come: a run that is ended at any time counts up to its last step. The clock starts when training does: imports, loading and
set-up come before it. It stands still while files are written.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """The time of every step, the weights of some, and the end when the time is up. Weights are written at a
    fixed interval of steps, or of seconds; then what the first step takes longer than the next with a generation,
    such as compilation, is not counted as time."""

    def __init__(self, model: Any, reward: Reward, job: dict[str, Any]) -> None:
        self.model = model
        self.reward = reward
        self.folder = Path(job["folder"])
        self.keep_every: int | None = job.get("keep_every")
        self.keep_every_s: float = job.get("keep_every_s", 0.0)
        self.limit_s: float = job["limit_s"]
        self.cycle: int = job.get("cycle", 1)
        self.began = 0.0
        self.writing_s = 0.0
        self.step_ends: list[float] = []
        self.kept: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = time.perf_counter()
        self.step_ends.append(ended - self.began - self.writing_s)
        if state.is_world_process_zero:
            if self._is_due(state.global_step):
                self._keep(state.global_step)
            self.write()
        self.writing_s += time.perf_counter() - ended
        is_late = torch.tensor(float(self._seconds() > self.limit_s))
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(is_late, src=0)  # all processes stop at the same step, or none
        control.should_training_stop = control.should_training_stop or bool(is_late)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step not in self.kept:
            self._keep(state.global_step)

    def _keep(self, step: int) -> None:
        weights = {name: value.detach().contiguous() for name, value in self.model.named_parameters()}
        save_file(weights, self.folder / f"step-{step}.safetensors")
        self.kept.append(step)

    def write(self, num_with_signal: int | None = None) -> None:
        """`num_with_signal`: of all processes. None: of this one."""
        reward = self.reward
        result = {
            "step_ends": self.step_ends,
            "kept": self.kept,
            "num_with_signal": reward.num_with_signal if num_with_signal is None else num_with_signal,
            "mean_tokens": reward.num_tokens / max(1, reward.num_rollouts),
        }
        written = self.folder / "result.json.new"
        written.write_text(json.dumps(result))
        written.replace(self.folder / "result.json")

    def _seconds(self) -> float:
        ends, cycle = self.step_ends, self.cycle
        excess = ends[0] - (ends[cycle] - ends[cycle - 1]) if len(ends) > cycle and self.keep_every is None else 0.0
        return ends[-1] - max(0.0, excess)

    def _is_due(self, step: int) -> bool:
        if self.keep_every is not None:
            return step % self.keep_every == 0
        ends = [0.0, *self.step_ends]
        return ends[-1] // self.keep_every_s > ends[-2] // self.keep_every_s


class Reward:
    """The reward: 1 if the completion is the answer, or what the environment's rule gives. Counts the rollouts of groups whose
    rewards are not all equal, and the tokens of all rollouts."""

    __name__ = "reward"

    def __init__(self, group_size: int, environments: list[dict[str, Any]]) -> None:
        self.group_size, self.num_with_signal = group_size, 0
        self.num_rollouts, self.num_tokens = 0, 0
        self.score: Callable[[str, dict[str, Any]], float] = self._exact_match
        if environments and environments[0]["use"] == "reasoning_gym":
            from run_parts import reasoning_gym_rule

            self.score = reasoning_gym_rule(environments[0]["args"])

    @staticmethod
    def _exact_match(said: str, record: dict[str, Any]) -> float:
        return float(said.strip() == record["answer"])

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lists = {name: column for name, column in columns.items() if isinstance(column, list)}
        records = [{name: column[number] for name, column in lists.items()} for number in range(len(completions))]
        rewards = [self.score(said, record) for said, record in zip(completions, records, strict=True)]
        self.num_rollouts += len(completions)
        self.num_tokens += sum(map(len, completion_ids))
        for start in range(0, len(rewards), self.group_size):
            group = rewards[start : start + self.group_size]
            self.num_with_signal += len(group) * (min(group) < max(group))
        return rewards


def run(job: dict[str, Any]) -> None:
    if "threads" in job:
        torch.set_num_threads(job["threads"])
        torch.backends.mkldnn.set_flags(job["onednn"])  # type: ignore[no-untyped-call, unused-ignore]
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=job.get("attention", "sdpa")
    )
    if job.get("narrow_head"):
        trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = model.config.vocab_size  # made for GPUs and large vocabularies
    reward = Reward(job["config"]["num_generations"], job.get("environment", []))
    clock = Clock(model, reward, job)
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
        clock.write(num_with_signal)


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
