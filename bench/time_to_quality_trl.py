"""TRL's cells of `bench/time_to_quality.py`: `GRPOTrainer` with vLLM on the same GPU (or, on a CPU, with transformers).

The same model, tasks in the same order, prompts, group size, lengths, learning rate and loss (clipped, mean over tokens), and
the same measure: our engine, on the weights that TRL had every few seconds. What the first step takes longer than the second is
not counted. The training itself is `bench/trl_side.py`, in TRL's own Python; it is ended some time after its limit, and counts
up to its last step. `fastest` tries settings for it.
"""

from __future__ import annotations

import json
import math
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
from limited import run_limited
from millstream import RunConfig
from report import ROOT, say
from time_to_quality_cells import TimedCell, TimedResult, TimedSettings, base_config
from time_to_quality_data import split_by_prompt
from trl_search import Settings, Trial, search, step_s
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
PER_GENERATION = "optimizer_steps_per_generation"
"""Not of GRPOConfig: its `steps_per_generation` counts micro-batches. Above 1, later steps train on stale rollouts."""
TRIED: tuple[Settings, ...] = (
    {"per_device_train_batch_size": "128"},
    {"per_device_train_batch_size": "256"},
    {"per_device_train_batch_size": "512"},
    {"vllm_importance_sampling_correction": "false"},
    {PER_GENERATION: "2"},
    {"vllm_gpu_memory_utilization": "0.5"},
    {"gradient_checkpointing": "true"},
)
"""The settings that `fastest` changes, the most promising first."""
SET_UP_S = 240.0
"""What TRL may take beyond its seconds of training, with the start of vLLM."""
TRIAL_STEPS = 4


def run_trl(
    settings: TimedSettings,
    config: RunConfig,
    cell: TimedCell,
    folder: Path,
    *,
    python: Path,
    changes: Sequence[str] = (),
    limit_s: float = math.inf,
) -> TimedResult:
    """`changes` of GRPOConfig, as KEY=JSON; `limit_s`: of TRL's process. Raises `subprocess.CalledProcessError` if it had no
    step; its last words are shown."""
    began = time.monotonic()
    folder.mkdir(exist_ok=True)
    config, held_out = split_by_prompt(base_config(config), folder)
    job = job_of(settings, config, folder, changes)
    (folder / "job.json").write_text(json.dumps(job))
    torch.cuda.empty_cache()  # what earlier cells left on the GPU
    result = call_trl(python, folder, min(limit_s, seconds_of_trl(settings) + SET_UP_S))
    ends = in_time(without_start_up(result["step_ends"], job["cycle"]), seconds_of_trl(settings))
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
    steps_per_generation = chosen.pop(PER_GENERATION, 1)
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
        "cycle": steps_per_generation,
        "config": {
            **same_as_ours(config),
            "gradient_checkpointing": False,
            "gradient_accumulation_steps": pieces,
            "steps_per_generation": pieces * steps_per_generation,
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


def call_trl(python: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Its result, up to the last step before it ended or was ended. Raises `subprocess.CalledProcessError` if it had none."""
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
        status = run_limited(command, limit_s, env=environment, out=log, log=log)
    if status != 0:
        say((folder / "log.txt").read_text()[-3000:])
        say(
            f"TRL {'was ended by its limit' if status is None else f'failed with {status}'}: what it had until then counts"
        )
    if not (folder / "result.json").exists():
        raise subprocess.CalledProcessError(-1 if status is None else status, command)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def fastest(settings: TimedSettings, config: RunConfig, folder: Path, *, python: Path, limit_s: float) -> list[Trial]:
    """The settings that were tried for this recipe, within `limit_s`."""
    folder.mkdir(exist_ok=True)
    config, _ = split_by_prompt(base_config(config), folder)
    config = structs.replace(config, pipeline=structs.replace(config.pipeline, steps=TRIAL_STEPS))
    rollouts = config.pipeline.groups_per_step * config.rollout.group_size
    changes = [one for one in TRIED if int(one.get("per_device_train_batch_size", "1")) <= rollouts]

    def step_s_of(given: Settings, left_s: float) -> float:
        own = folder / f"trial-{len(list(folder.glob('trial-*')))}"
        own.mkdir()
        words = [f"{key}={value}" for key, value in given.items()]
        (own / "job.json").write_text(json.dumps(job_of(settings, config, own, words)))
        try:
            ends = call_trl(python, own, min(left_s, SET_UP_S))["step_ends"]
        except subprocess.CalledProcessError:
            return math.inf
        seconds = step_s(ends, int(given.get(PER_GENERATION, "1")))
        say(f"  TRL with {words}: {seconds:.2f} s a step")
        return seconds

    return search({}, changes, step_s_of, limit_s)
