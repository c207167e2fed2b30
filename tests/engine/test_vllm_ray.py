"""vLLM under Ray on this machine's CPU: real training runs. `make test-vllm-ray`, a few minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millstream.events import ReplicaJoined, ReplicaLeft, WorkerStarted
from millstream.run.checkpoint import steps_in
from millstream.run.export import export
from millstream.run.read_rollouts import RolloutQuery, find_rollouts, open_dump
from support.ray_runs import events_of, running, stop, tree_of, wait_until_gone
from support.runs import assert_clean, resume, step_rows, steps_of, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("vllm")
pytest.importorskip("ray")

START_S = 400
STEPS = 80
MAX_COMPARED = 200  # rollouts
RECIPE = """
seed = 0
runtime = "ray"
[model.tiny]
hidden = 64
heads = 2
[data]
toy = "sort_digits"
size = 2000
holdout = 16
[warmup]
learning_rate = 2e-3
stop_at = 0.15
check_every = 4
[engine]
kind = "vllm"
slots = 32
on_update = "{on_update}"
[engine.vllm]
cache_gib = 0.25
tensor_parallel = {parallel}
args = {{ disable_custom_all_reduce = true }}
[resources]
engine_cpus = 0.5
learner_cpus = 0.5
[rollout]
group_size = 8
max_tokens = 8
stop = ["<no such end>"]
[pipeline]
steps = 100000
groups_per_step = 8
max_lag = 1
filter_zero_signal = false
[learner]
learning_rate = 4e-4
[algorithm]
loss = "ppo"
clip_high = 0.28
[checkpoint]
every_steps = 1
keep = 1000
"""

HALF = '[{ function = "format", args = { pattern = "[^0-4].*" } }]'  # a reward that an untrained model has now and then


def words(folder: Path, *changes: str, on_update: str = "recompute", parallel: int = 1) -> list[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(on_update=on_update, parallel=parallel))
    changes = (*changes, f"run_dir={folder / 'run'}")
    sets = [word for change in changes for word in ("--set", change)]
    return [sys.executable, "-m", "millstream.cli.main", "train", str(recipe), *sets]


def engine_pids(run_dir: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in events_of(run_dir) if (run_dir / "events.jsonl").exists() else []:
        if isinstance(event, WorkerStarted) and event.what == "engine":
            found.setdefault(event.worker, []).append(event.pid)
    return found


@torch.no_grad()
def worst_error(run_dir: Path, folder: Path) -> tuple[float, float, int]:
    """Of recorded log-probabilities against transformers with the checkpoint of the version recorded for each token, and with
    older checkpoints; and how many tokens were compared."""
    models: dict[int, Any] = {}
    dump, _ = open_dump(run_dir)
    worst, of_others, compared = 0.0, 0.0, 0
    sealed = steps_in(run_dir)  # not every step has a checkpoint: the next waits until the one before is written
    parts = [part for one in find_rollouts(dump, RolloutQuery()) for part in one.parts]
    known = [part for part in parts if set(part.versions[part.loss_mask].tolist()) <= set(sealed)]

    def error(model: Any, tokens: Any, own: Any, said: Any) -> float:
        logprobs = torch.log_softmax(model(torch.tensor([tokens.tolist()])).logits[0].float(), -1).numpy()
        return float(np.abs(logprobs[own - 1, tokens[own]] - said[own]).max())

    for part in known[:: max(1, len(known) // MAX_COMPARED)]:
        for version in sorted(set(part.versions[part.loss_mask].tolist())):
            if version not in models:
                export(run_dir, folder / f"step-{version}", step=version)
                models[version] = AutoModelForCausalLM.from_pretrained(folder / f"step-{version}", dtype=torch.float32)
            own = np.flatnonzero(part.loss_mask & (part.versions == version))
            worst = max(worst, error(models[version], part.tokens, own, part.logprobs))
            others = [model for other, model in models.items() if other < version]
            of_others = max([of_others, *(error(model, part.tokens, own, part.logprobs) for model in others)])
            compared += len(own)
    return worst, of_others, compared


def joined(run_dir: Path, engine: str) -> bool:
    return any(isinstance(event, ReplicaJoined) and event.engine == engine for event in events_of(run_dir))


def test_a_run_with_vllm_on_ray_learns_survives_a_killed_replica_and_every_token_has_its_version(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    with running(words(tmp_path, "engine.replicas=2")) as process:
        until(lambda: steps_of(run_dir) >= 3, process, START_S)
        pids = tree_of(process.pid)
        os.kill(engine_pids(run_dir)["engine-0"][0], signal.SIGKILL)
        until(lambda: joined(run_dir, "engine-0"), process, START_S)
        again = steps_of(run_dir)
        until(lambda: steps_of(run_dir) >= max(STEPS, again + 5), process, START_S)
        stop(process, 120)
        wait_until_gone(pids, 60)
    left = [event.engine for event in events_of(run_dir) if isinstance(event, ReplicaLeft)]
    assert left == ["engine-0"] and len(engine_pids(run_dir)["engine-0"]) == 2
    rewards = [row["reward"] for row in step_rows(run_dir)]
    before, after = np.mean(rewards[:20]), np.mean(rewards[-20:])
    print(
        f"\n{len(rewards)} steps, {again} of them before the killed replica was replaced; reward {before:.3f} to {after:.3f}"
    )
    assert after > before, rewards
    assert_clean(run_dir)
    worst, of_others, compared = worst_error(run_dir, tmp_path)
    print(f"{compared} tokens within {worst:.1e} nats of their version's checkpoint, {of_others:.1e} of older ones")
    assert compared > 200 and worst < 1e-4 < of_others / 100


def test_engines_of_two_workers_are_scaled_while_the_run_trains(tmp_path: Path) -> None:
    """Tensor parallel 2, keys and values kept."""
    run_dir = tmp_path / "run"
    with running(words(tmp_path, parallel=2, on_update="keep")) as process:
        until(lambda: steps_of(run_dir) >= 2, process, START_S)
        scale = [sys.executable, "-m", "millstream.cli.main", "scale", str(run_dir)]
        done = subprocess.run([*scale, "engines=2"], capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0 and "engine-0" in done.stdout, done.stdout + done.stderr
        steps = steps_of(run_dir)
        until(lambda: steps_of(run_dir) >= steps + 2, process, START_S)
        done = subprocess.run([*scale, "engines=1"], capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, done.stdout + done.stderr
        pids = tree_of(process.pid)
        stop(process, 120)
        wait_until_gone(pids, 60)
    assert_clean(run_dir)


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_run_with_adapters_is_resumed_and_every_token_has_the_log_probability_of_its_versions_merged_model(
    runtime: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    changes = ["learner.lora.rank=4", "learner.learning_rate=4e-3", "warmup=", f"reward={HALF}"]
    changes += ["runtime=local", "resources="] if runtime == "local" else []
    with running(words(tmp_path, *changes)) as process:
        until(lambda: steps_of(run_dir) >= 6, process, START_S)
        stop(process, 120)
    last = steps_of(run_dir) + 6
    done = resume(run_dir, f"pipeline.steps={last}")
    assert done.returncode == 0 and steps_of(run_dir) == last, done.stdout + done.stderr
    assert_clean(run_dir)
    worst, of_others, compared = worst_error(run_dir, tmp_path)
    print(f"\n{compared} tokens within {worst:.1e} nats of their version's merged model, {of_others:.1e} of older ones")
    assert compared > 200 and worst < 1e-4 < of_others / 100
