"""TRL's cells of `bench/time_to_quality.py`: `GRPOTrainer` with vLLM on the same GPU (or, on a CPU, with transformers).

The same model, tasks in the same order, prompts, group size, lengths, learning rate and loss (clipped, mean over tokens), and
the same measure: our engine, on the weights that TRL had every few seconds. What the first step takes longer than the second is
not counted. The training itself is `bench/trl_side.py`, in TRL's own Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from safetensors.torch import load_file

from curves import Point
from held_out import measure_versions
from internals import first_epoch
from internals_torch import TokenizerText, device_name, load_tokenizer
from millstream import RunConfig
from report import ROOT, say
from time_to_quality_cells import TimedCell, TimedResult, TimedSettings, base_config
from time_to_quality_data import split_by_prompt
from vs_trl import same_as_ours, without_start_up

TRL = "trl"
ON_GPU: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "bf16": True,
    "per_device_train_batch_size": 64,
}
ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False}


def run_trl(
    settings: TimedSettings,
    config: RunConfig,
    cell: TimedCell,
    folder: Path,
    *,
    python: Path,
    changes: Sequence[str] = (),
) -> TimedResult:
    """`changes` of GRPOConfig, as KEY=JSON. Raises `subprocess.CalledProcessError` if TRL fails; its last words are shown."""
    began = time.monotonic()
    folder.mkdir(exist_ok=True)
    config, held_out = split_by_prompt(base_config(config), folder)
    job = job_of(settings, config, folder, changes)
    (folder / "job.json").write_text(json.dumps(job))
    torch.cuda.empty_cache()  # what earlier cells left on the GPU
    call_trl(python, folder)
    result = json.loads((folder / "result.json").read_text())
    ends = in_time(without_start_up(result["step_ends"], 1), seconds_of_trl(settings))
    trained_s = time.monotonic()
    weights = {step: load_file(folder / f"step-{step}.safetensors") for step in result["kept"] if step <= len(ends)}
    found = measure_versions(config, held_out, weights)
    rollouts = config.pipeline.groups_per_step * config.rollout.group_size
    return TimedResult(
        settings=settings,
        mode=TRL,
        seed=cell.seed,
        curve=[
            Point(
                step=step,
                samples=step * rollouts,
                seconds=ends[step - 1] if step else 0.0,
                accuracy=measured.accuracy,
                greedy=measured.greedy_accuracy,
            )
            for step, measured in sorted(found.items())
        ],
        steps=len(ends),
        rollouts_per_s=len(ends) * rollouts / ends[-1],
        generated_per_s=len(ends) * rollouts / ends[-1],
        tokens_per_s=len(ends) * rollouts * result["mean_tokens"] / ends[-1],
        mean_tokens=result["mean_tokens"],
        mean_lag=0.0,
        held_out=len(found[0].sampled),
        start_s=trained_s - began - ends[-1],
        evaluation_s=time.monotonic() - trained_s,
        device=device_name(),
        at=datetime.now(UTC).isoformat(timespec="minutes"),
    )


def seconds_of_trl(settings: TimedSettings) -> float:
    return settings.seconds if settings.trl_seconds is None else settings.trl_seconds


def in_time(ends: Sequence[float], limit_s: float) -> list[float]:
    """The ends of the steps up to the first one that is past the limit, which ends a run of ours, too."""
    return list(ends[: 1 + sum(end < limit_s for end in ends)])


def job_of(settings: TimedSettings, config: RunConfig, folder: Path, changes: Sequence[str]) -> dict[str, Any]:
    assert not config.rollout.stop, "stop strings are not passed on to TRL"
    rollouts = config.pipeline.groups_per_step * config.rollout.group_size
    device = ON_CPU if config.model.device == "cpu" else ON_GPU
    chosen = {"per_device_train_batch_size": rollouts} | device | dict(map(changed, changes))
    pieces = rollouts // chosen["per_device_train_batch_size"]
    records, longest = records_of(config)
    (folder / "trl.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if "use_vllm" in chosen:
        chosen = {"vllm_max_model_length": longest + config.rollout.max_tokens, **chosen}
    return {
        "folder": str(folder),
        "model": config.model.path,
        "data": str(folder / "trl.jsonl"),
        "environment": [structs.asdict(one) for one in config.environment],
        "keep_every_s": seconds_of_trl(settings) / settings.points,
        "limit_s": seconds_of_trl(settings),
        "config": {
            **same_as_ours(config),
            "gradient_checkpointing": False,
            "gradient_accumulation_steps": pieces,
            "steps_per_generation": pieces,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **chosen,
            "output_dir": str(folder / "trainer"),
        },
    }


def changed(words: str) -> tuple[str, Any]:
    key, _, value = words.partition("=")
    return key, json.loads(value)


def records_of(config: RunConfig) -> tuple[list[dict[str, Any]], int]:
    """The training tasks in the order of our first epoch, each prompt as the text that our engine gets; and the tokens of the
    longest prompt."""
    assert config.model.path is not None, "TRL has no tiny models"
    text, tasks = TokenizerText(tokenizer=load_tokenizer(config.model.path)), first_epoch(config)
    prompts = [task.prompt if isinstance(task.prompt, str) else text.render(task.prompt) for task in tasks]
    longest = max(len(text.opening(task.prompt)) for task in tasks)
    records = [
        {"prompt": prompt, "answer": task.answer, **task.data} for prompt, task in zip(prompts, tasks, strict=True)
    ]
    return records, longest


def call_trl(python: Path, folder: Path) -> None:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment: Mapping[str, str] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(python), str(ROOT / "bench/trl_side.py"), str(folder / "job.json")]
    with (folder / "log.txt").open("w") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        say((folder / "log.txt").read_text()[-3000:])
        raise subprocess.CalledProcessError(status, command)
