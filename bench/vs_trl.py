"""Beside TRL's GRPOTrainer: the demo's model and task from the same checkpoint, on the same machine, in one run.

Both sides start from the demo's model after its warm-up and see the same prompts in the same order, with the same group size,
sampling, loss (clipped, mean over tokens), AdamW, clip of the gradient and constant learning rate. Both keep their weights
every few steps; all of them are then measured by our engine on the held-out tasks, sampled, outside both clocks.

TRL is calibrated first: from plain settings on, a change that makes its steps faster is kept. Then it runs in two ways, and
every row shows the better one: on policy, and with `steps_per_generation`, its own kind of staleness, under our bound. What
stays different: TRL trains on groups without signal, too, where we draw other prompts; and it divides rewards by the standard
deviation of the sample, where we take that of the population, which AdamW does not see.

    make bench-trl      # or: .venv/bin/python bench/vs_trl.py [--json] [--steps 400] [--repeat 1] [--target 0.6]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from millstream.runtime import local
from msgspec import Struct, structs
from safetensors.torch import load_file

from millstream import DataConfig, EvaluationConfig, ModelConfig, RunConfig, train
from millstream.clock import RealClock
from millstream.config import load
from millstream.env.data import in_order, read
from millstream.env.games import toy
from millstream.env.rewards import exact_match
from millstream.events import Event, GroupAdmitted, RolloutEnded, Stepped
from millstream.events.sinks import Tee
from millstream.run import build
from millstream.seeds import derive_seed
from millstream.types import Completion, Request, RequestKey, Task, Weights
from millstream.weights.local import LocalChannel

ROOT = Path(__file__).parent.parent
PEER = "TRL 1.16.0 GRPOTrainer"
OURS = "ours"
CALIBRATION_S = 120.0
"""For one setting of the calibration, with compilation."""
SET_UP_S = 180.0
"""What a run of TRL may take beyond its limit before it counts as failed."""
BUSY = 0.7
"""The load average above which the machine is not ours alone."""
GAIN = 0.98
"""A change of TRL's settings is kept if a step takes at most this share of the time: less is noise."""


class Point(Struct, frozen=True, kw_only=True, eq=False):
    """Weights, and the seconds of training that they took."""

    step: int
    seconds: float
    weights: Weights
    accuracy: float = math.nan


class Run(Struct, frozen=True, kw_only=True, eq=False):
    """One training run. Seconds are those of training alone."""

    seconds: float
    steps: int
    num_generated: int
    num_trained: int
    num_with_signal: int
    """Of those trained on: rollouts of groups whose advantages are not all 0."""
    points: list[Point]

    def seconds_to(self, accuracy: float) -> float:
        return next((point.seconds for point in self.points if point.accuracy >= accuracy), math.inf)

    @property
    def best(self) -> float:
        return max((point.accuracy for point in self.points), default=0.0)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- where both begin -------------------------------------------------------------------------------------------------


class Start(Struct, frozen=True, kw_only=True):
    config: RunConfig
    """Ours: the demo's, from the checkpoint on."""
    train_path: Path
    """The training tasks, in the order of our first epoch."""


def make_start(seed: int, steps: int, folder: Path) -> Start:
    demo = load(ROOT / "recipes/demo.toml", RunConfig, [f"seed={seed}"])
    assert demo.data.toy is not None
    all_path, train_path = folder / "all.jsonl", folder / "train.jsonl"
    write_lines(all_path, (structs.asdict(task) for task in toy.make_toy_tasks(demo.data.toy, demo.data.size, seed)))
    config = structs.replace(
        demo,
        model=ModelConfig(path=str(warm_up(demo, folder / "warm")), device="cpu"),
        data=DataConfig(path=str(all_path), holdout=demo.data.holdout),
        warmup=None,
        pipeline=structs.replace(demo.pipeline, steps=steps),
        learner=structs.replace(demo.learner, schedule="constant"),
        evaluation=EvaluationConfig(),
    )
    tasks = read(config.data, seed=seed).train
    first_epoch = islice(in_order(tasks, seed=seed, shuffle=config.data.shuffle), len(tasks))
    write_lines(train_path, ({"prompt": task.prompt, "answer": task.answer} for _, task in first_epoch))
    return Start(config=config, train_path=train_path)


def warm_up(demo: RunConfig, folder: Path) -> Path:
    """The demo up to its first step, which is taken at a rate that changes no weight: what is saved is where it begins."""
    result = train(
        structs.replace(
            demo,
            run_dir=str(folder),
            model=structs.replace(demo.model, device="cpu"),
            pipeline=structs.replace(demo.pipeline, steps=1, groups_per_step=1),
            learner=structs.replace(demo.learner, learning_rate=1e-30),
            evaluation=EvaluationConfig(),
        )
    )
    say(f"seed {demo.seed}: held-out accuracy after the warm-up {result.accuracy_before:.3f}, sampled")
    return folder / "model"


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


# ---- ours -------------------------------------------------------------------------------------------------------------


class Watch:
    """A sink that counts."""

    def __init__(self) -> None:
        self.began = math.inf
        self.steps: dict[int, Stepped] = {}
        self.num_generated = self._num_ended = 0

    def emit(self, event: Event) -> None:
        match event:
            case GroupAdmitted():
                self.began = min(self.began, event.at)
            case RolloutEnded():
                self._num_ended += 1
            case Stepped():
                self.steps[event.version] = event
                self.num_generated = self._num_ended


def train_ours(start: Start, keep_every: int, folder: Path) -> Run:
    watch, kept = Watch(), dict[int, Weights]()

    class KeepingChannel(LocalChannel):
        """What is published is a copy already: to keep it costs nothing."""

        async def publish(self, version: int, weights: Weights) -> None:
            if version % keep_every == 0:
                kept[version] = weights
            await super().publish(version, weights)

    with mock.patch.object(local, "LocalChannel", KeepingChannel):
        train(structs.replace(start.config, run_dir=str(folder)), sinks=[watch])
    num_trained = sum(step.num_rows for step in watch.steps.values())
    return Run(
        seconds=watch.steps[len(watch.steps)].at - watch.began,
        steps=len(watch.steps),
        num_generated=watch.num_generated,
        num_trained=num_trained,
        num_with_signal=num_trained,  # the others are not trained on
        points=[
            Point(step=version, seconds=watch.steps[version].at - watch.began, weights=weights)
            for version, weights in kept.items()
        ],
    )


# ---- TRL --------------------------------------------------------------------------------------------------------------


class Setting(Struct, frozen=True, kw_only=True):
    """How TRL runs: what can make it faster on a CPU, and how stale it may be."""

    processes: int = 1
    """Data parallel."""
    threads: int = 1
    onednn: bool = True
    attention: str = "sdpa"
    narrow_head: bool = False
    """Its output layer works in tiles of 32,768 tokens of the vocabulary; narrow: in one as wide as the vocabulary."""
    pieces: int = 1
    """Micro-batches a step and process."""
    cache: str | None = None
    continuous_batching: bool = False
    compile: bool = False
    steps_per_generation: int = 1
    """Above 1, the last of these steps trains on rollouts that are this many versions old, less one."""

    def __str__(self) -> str:
        changed = {name: value for name, value in structs.asdict(self).items() if value != getattr(Setting(), name)}
        return ", ".join(f"{name} = {value}" for name, value in changed.items()) or "plain"


CHANGES: tuple[dict[str, Any], ...] = (
    {"onednn": False},
    {"narrow_head": True},
    {"threads": 2},
    {"threads": 1, "processes": 2},
    {"attention": "eager"},
    {"pieces": 2},
    {"cache": "static"},
    {"continuous_batching": True},
    {"compile": True},
)


class Trl(Struct, frozen=True, kw_only=True):
    python: Path

    def train(self, start: Start, setting: Setting, keep_every: int, limit_s: float, folder: Path) -> Run:
        """Raises `subprocess.SubprocessError` if it fails or takes too long."""
        config = start.config
        rollouts_per_step = config.pipeline.groups_per_step * config.rollout.group_size
        folder.mkdir()
        job = {
            "folder": str(folder),
            "model": config.model.path,
            "data": str(start.train_path),
            "keep_every": keep_every,
            "limit_s": limit_s,
            "threads": setting.threads,
            "onednn": setting.onednn,
            "attention": setting.attention,
            "narrow_head": setting.narrow_head,
            "config": {
                **same_as_ours(config),
                **as_fast_as_possible(setting, rollouts_per_step),
                "output_dir": str(folder / "trainer"),
            },
        }
        (folder / "job.json").write_text(json.dumps(job))
        self._call(folder, setting, limit_s + SET_UP_S)
        result = json.loads((folder / "result.json").read_text())
        ends = without_start_up(result["step_ends"], setting.steps_per_generation)
        return Run(
            seconds=ends[-1],
            steps=len(ends),
            num_generated=len(ends) * rollouts_per_step,
            num_trained=len(ends) * rollouts_per_step,
            num_with_signal=result["num_with_signal"],
            points=[
                Point(step=step, seconds=ends[step - 1], weights=load_file(folder / f"step-{step}.safetensors"))
                for step in result["kept"]
            ],
        )

    def _call(self, folder: Path, setting: Setting, timeout_s: float) -> None:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
        command = [str(self.python), *(launch if setting.processes > 1 else []), str(ROOT / "bench/trl_side.py")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(setting.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [*command, str(folder / "job.json")],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                status = process.wait(timeout_s)
            finally:
                if process.poll() is None:
                    stop(process)
        if status:
            say((folder / "log.txt").read_text()[-2000:])
            raise subprocess.CalledProcessError(status, command)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asked first: only the launcher of several processes knows them all."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def same_as_ours(config: RunConfig) -> dict[str, Any]:
    """What decides over learning, in the words of GRPOConfig."""
    algorithm = config.algorithm
    kind = (algorithm.advantage, algorithm.loss, algorithm.aggregation, config.learner.mini_batches)
    assert kind == ("grpo", "ppo", "token_mean", 1), f"the demo's algorithm is {kind}: translate it for TRL here"
    return {
        "seed": config.seed,
        "max_steps": config.pipeline.steps,
        "shuffle_dataset": False,  # the file is in order
        "num_generations": config.rollout.group_size,
        "max_completion_length": config.rollout.max_tokens,
        "temperature": config.rollout.temperature,
        "beta": 0.0,
        "num_iterations": 1,
        "scale_rewards": "group",
        "loss_type": "dapo",  # the mean over the tokens of the batch
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "learning_rate": config.learner.learning_rate,
        "lr_scheduler_type": config.learner.schedule,
        "warmup_steps": config.learner.warmup_steps,
        "weight_decay": config.learner.weight_decay,
        "max_grad_norm": config.learner.max_grad_norm,
    }


def as_fast_as_possible(setting: Setting, rollouts_per_step: int) -> dict[str, Any]:
    fast: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "per_device_train_batch_size": rollouts_per_step // setting.processes // setting.pieces,
        "gradient_accumulation_steps": setting.pieces,
        "steps_per_generation": setting.pieces * setting.steps_per_generation,
        "cache_implementation": setting.cache,
        "use_transformers_continuous_batching": setting.continuous_batching,
        "torch_compile": setting.compile,
    }
    return fast | ({"ddp_backend": "gloo"} if setting.processes > 1 else {})


def without_start_up(step_ends: Sequence[float], cycle: int) -> list[float]:
    """What the first step takes longer than the next one of its kind, such as compilation, is not counted."""
    excess = step_ends[0] - (step_ends[cycle] - step_ends[cycle - 1]) if len(step_ends) > cycle else 0.0
    return [end - max(0.0, excess) for end in step_ends]


def calibrate(trl: Trl, start: Start, steps: int, folder: Path) -> Setting:
    """From plain settings on, one change after the other; what makes a step faster is kept."""
    if not steps:
        return Setting()
    folder.mkdir()
    config = structs.replace(start.config, pipeline=structs.replace(start.config.pipeline, steps=steps))
    short = structs.replace(start, config=config)

    def seconds_a_step(setting: Setting, name: str) -> float:
        try:
            run = trl.train(short, setting, 1, CALIBRATION_S, folder / name)
        except subprocess.SubprocessError as error:
            say(f"  left out: {setting}: {type(error).__name__}")
            return math.inf
        ends = [point.seconds for point in run.points]
        seconds = statistics.median(after - before for before, after in pairwise(ends))
        say(f"  {seconds:.3f} s a step: {setting}")
        return seconds

    say("calibrating TRL")
    setting = Setting()
    best = seconds_a_step(setting, "plain")
    for number, change in enumerate(CHANGES):
        changed = structs.replace(setting, **change)
        seconds = seconds_a_step(changed, f"change-{number}") if changed != setting else math.inf
        if seconds < GAIN * best:
            setting, best = changed, seconds
    say(f"TRL's settings: {setting}")
    return setting


# ---- the same measure for both ----------------------------------------------------------------------------------------


def measure(run: Run, config: RunConfig, limit_s: float) -> Run:
    """The run with accuracies on the held-out tasks, sampled, one rollout each; what came after the limit is left out."""
    prepared = local.prepare(config)
    requests = [
        Request(
            key=RequestKey(group_id=number, member=0),
            tokens=tuple(prepared.text.opening(task.prompt)),
            sampling=prepared.sampling,
            seed=derive_seed(config.seed, "held out", number),  # the same random numbers for every point of both sides
        )
        for number, task in enumerate(prepared.held_out)
    ]

    def reward(task: Task, completion: Completion) -> float:
        return exact_match(task, prepared.text.decode(completion.tokens))

    async def measured(points: Sequence[Point]) -> list[Point]:
        found = []
        engine = build.build_engine(config.engine, prepared.model, clock=RealClock(), sink=Tee([]))
        try:
            for version, point in enumerate(points, start=1):
                await engine.load(version, point.weights)
                completions = await asyncio.gather(*map(engine.generate, requests))
                accuracy = statistics.mean(map(reward, prepared.held_out, completions))
                found.append(structs.replace(point, accuracy=accuracy, weights={}))
        finally:
            await engine.close()
        return found

    points = asyncio.run(measured([point for point in run.points if point.seconds <= limit_s]))
    return structs.replace(run, points=points)


def describe(name: str, run: Run) -> None:
    curve = " ".join(f"{point.seconds:.0f}s:{point.accuracy:.2f}" for point in run.points)
    say(
        f"{name}: {run.steps} steps in {run.seconds:.1f} s, {run.num_trained / run.seconds:.0f} rollouts/s trained on, "
        f"{run.num_with_signal / run.seconds:.0f} with signal, {run.num_generated / run.seconds:.0f} generated\n  {curve}"
    )


def rows_of(found: dict[str, list[Run]], workload: str, target: float) -> list[dict[str, Any]]:
    """Medians over the repeats; of TRL's ways to run, the better one, row by row."""
    theirs = [runs for name, runs in found.items() if name != OURS]
    reached = min(min(run.best for run in found[OURS]), max(min(run.best for run in runs) for runs in theirs))
    if reached < target:
        say(f"not every run reached {target}: the highest accuracy that both sides reached is {reached:.3f}")
    target = min(target, math.floor(100 * reached) / 100)

    def row(metric: str, value: Callable[[Run], float], *, is_rate: bool = True) -> dict[str, Any]:
        our = statistics.median(map(value, found[OURS]))
        their = (max if is_rate else min)(statistics.median(map(value, runs)) for runs in theirs)
        ratio = our / their if is_rate else their / our
        return {
            "workload": workload,
            "metric": metric,
            "ours": round(our, 1),
            "peer": PEER,
            "theirs": round(their, 1),
            "ratio": round(ratio, 2),
        }

    return [
        row("rollouts/s trained on", lambda run: run.num_trained / run.seconds),
        row("rollouts/s trained on, groups with signal", lambda run: run.num_with_signal / run.seconds),
        row("rollouts/s generated", lambda run: run.num_generated / run.seconds),
        row(f"seconds to held-out accuracy {target:.2f}, sampled", lambda run: run.seconds_to(target), is_rate=False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of a run, on both sides")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of training that count")
    parser.add_argument("--target", type=float, default=0.6, help="held-out accuracy, sampled")
    parser.add_argument("--repeat", type=int, default=1, help="each with a seed of its own; medians are shown")
    parser.add_argument("--keep-every", type=int, default=10, help="steps between two measured weights")
    parser.add_argument("--calibration-steps", type=int, default=15, help="of each of TRL's settings; 0: plain ones")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl/bin/python")
    options = parser.parse_args()
    if not options.trl_python.exists():
        parser.error(f"no {options.trl_python}: `make bench-trl` makes it, or name another with --trl-python")
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(options, Path(folder))
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['metric']:42} ours: {row['ours']:8}   TRL: {row['theirs']:8}   {row['ratio']:.2f}x")


def compare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    if (busy := os.getloadavg()[0]) > BUSY:
        say(f"other programs are at work here (load {busy:.1f}): the seconds will mean little")
    trl = Trl(python=options.trl_python)
    found: dict[str, list[Run]] = {}
    for seed in range(options.repeat):
        (here := folder / f"seed-{seed}").mkdir()
        start = make_start(seed, options.steps, here)
        if not found:
            on_policy = calibrate(trl, start, options.calibration_steps, folder / "calibration")
            cycle = math.ceil(start.config.pipeline.max_lag) + 1
            stale = structs.replace(on_policy, steps_per_generation=cycle)
            settings = {"TRL, on policy": on_policy, f"TRL, {cycle} steps a generation": stale}
            found = {name: [] for name in (OURS, *settings)}
        names = list(found) if seed % 2 else list(reversed(found))  # neither side is always the first
        for number, name in enumerate(names):
            if name == OURS:
                run = train_ours(start, options.keep_every, here / f"run-{number}")
            else:
                run = trl.train(start, settings[name], options.keep_every, options.limit, here / f"run-{number}")
            run = measure(run, start.config, options.limit)
            describe(name, run)
            found[name].append(run)
    config = start.config
    workload = (
        f"demo after its warm-up, {config.pipeline.groups_per_step} x {config.rollout.group_size} rollouts a step, "
        f"{options.steps} steps"
    )
    return rows_of(found, workload, options.target)


if __name__ == "__main__":
    main()
