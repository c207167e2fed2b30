"""Beside TRL's GRPOTrainer: the demo's model and task from the same checkpoint, on the same machine, in one run.

Both sides start from the demo's model after its warm-up and see the same prompts in the same order, with the same group size,
sampling, loss (clipped, mean over tokens), AdamW, clip of the gradient and constant learning rate. Both keep their weights
every few steps (ours as checkpoints, which cost it about a percent); all of them are then measured by our engine on the
held-out tasks, sampled, outside both clocks.

TRL is calibrated first: from plain settings on, a change that makes its steps faster is kept. Then it runs in two ways, and
every row shows the better one: on policy, and with `steps_per_generation`, its own kind of staleness, under our bound. What
stays different: TRL trains on groups without signal, too, where we draw other prompts; and it divides rewards by the standard
deviation of the sample, where we take that of the population, which AdamW does not see.

    make bench-trl      # or: .venv/bin/python bench/vs_trl.py [--json] [--smoke] [--steps 400] [--repeat 1] [--target 0.6]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, structs

from internals import first_epoch, recipe
from millstream import CheckpointConfig, EvaluationConfig, ModelConfig, RunConfig, evaluate, export, train
from millstream.errors import CheckpointError, ConfigError
from millstream.events import Event, GroupAdmitted, RolloutEnded, Stepped
from report import ROOT, Options, Row, cost, publish, rate, say

OURS = "ours"
CALIBRATION_S = 120.0
"""For one setting of the calibration, with compilation."""
SET_UP_S = 180.0
"""What a run of TRL may take beyond its limit before it counts as failed."""
BUSY = 0.7
"""The load average above which the machine is not ours alone."""
GAIN = 0.98
"""A change of TRL's settings is kept if a step takes at most this share of the time: less is noise."""


class Point(Struct, frozen=True, kw_only=True):
    """A model, and the seconds of training that it took."""

    step: int
    seconds: float
    model: Path
    accuracy: float = math.nan


class Run(Struct, frozen=True, kw_only=True):
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


# ---- where both begin -------------------------------------------------------------------------------------------------


class Start(Struct, frozen=True, kw_only=True):
    config: RunConfig  # ours: the demo's, from the checkpoint on
    train_path: Path  # the training tasks, in the order of our first epoch

    @property
    def model(self) -> Path:
        assert self.config.model.path is not None
        return Path(self.config.model.path)


def make_start(seed: int, options: argparse.Namespace, folder: Path) -> Start:
    demo = recipe("demo", f"seed={seed}", is_smoke=options.smoke)
    config = structs.replace(
        demo,
        model=ModelConfig(path=str(warm_up(demo, folder / "warm")), device="cpu"),
        warmup=None,
        pipeline=structs.replace(demo.pipeline, steps=options.steps),
        learner=structs.replace(demo.learner, schedule="constant"),
        evaluation=EvaluationConfig(),
    )
    records = ({"prompt": task.prompt, "answer": task.answer} for task in first_epoch(config))
    train_path = folder / "train.jsonl"
    train_path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Start(config=config, train_path=train_path)


def warm_up(demo: RunConfig, folder: Path) -> Path:
    """The demo up to its first step, which is taken at a rate that changes no weight: the model that both begin with."""
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


# ---- ours -------------------------------------------------------------------------------------------------------------


class Watch:
    """A sink that counts."""

    def __init__(self) -> None:
        self.began = math.inf
        self.steps: dict[int, Stepped] = {}
        self.num_generated = 0
        self._num_ended = 0

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
    watch, run_dir = Watch(), folder / "run"
    num_kept = start.config.pipeline.steps // keep_every + 2
    checkpoint = CheckpointConfig(every_s=1e9, every_steps=keep_every, keep=num_kept)
    train(structs.replace(start.config, run_dir=str(run_dir), checkpoint=checkpoint), sinks=[watch])
    points = []
    for step in range(keep_every, len(watch.steps) + 1, keep_every):
        model = folder / f"step-{step}"
        try:
            export(run_dir, model, step=step)
        except (
            CheckpointError,
            ConfigError,
        ) as error:  # a step may have no checkpoint: the one before was being written
            say(f"step {step} has no checkpoint: {error}")
        else:
            points.append(Point(step=step, seconds=watch.steps[step].at - watch.began, model=model))
    num_trained = sum(step.num_rows for step in watch.steps.values())
    return Run(
        seconds=watch.steps[len(watch.steps)].at - watch.began,
        steps=len(watch.steps),
        num_generated=watch.num_generated,
        num_trained=num_trained,
        num_with_signal=num_trained,  # the others are not trained on
        points=points,
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


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    def train(self, start: Start, setting: Setting, keep_every: int, limit_s: float, folder: Path) -> Run:
        """Raises `subprocess.SubprocessError` if it fails or takes too long."""
        ...


class Stub(Struct, frozen=True, kw_only=True):
    """Takes TRL's place in `--smoke` where it is not installed: our own run."""

    name: str = "stub (TRL is not installed)"

    def train(self, start: Start, setting: Setting, keep_every: int, limit_s: float, folder: Path) -> Run:
        return train_ours(start, keep_every, folder)


class Trl(Struct, frozen=True, kw_only=True):
    python: Path
    name: str = "TRL 1.16.0 GRPOTrainer"

    def train(self, start: Start, setting: Setting, keep_every: int, limit_s: float, folder: Path) -> Run:
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
                Point(step=step, seconds=ends[step - 1], model=as_model(start.model, folder, step))
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


def as_model(base: Path, folder: Path, step: int) -> Path:
    """The weights that TRL's side has written, as a folder like the one that training began with."""
    model = folder / f"step-{step}"
    shutil.copytree(base, model)
    (folder / f"step-{step}.safetensors").replace(model / "model.safetensors")
    return model


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
        "lr_scheduler_type": "constant_with_warmup"
        if config.learner.schedule == "constant"
        else config.learner.schedule,
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


def calibrate(trl: Peer, start: Start, steps: int, folder: Path) -> Setting:
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
    """The run with accuracies on the held-out tasks, sampled, one rollout each; what came after the limit is left out. The
    random numbers are the same for every point of both sides."""
    engine = structs.replace(config.engine, process=False)

    def measured(point: Point) -> Point:
        model = ModelConfig(path=str(point.model), device="cpu")
        accuracy = evaluate(structs.replace(config, model=model, engine=engine)).accuracy
        return structs.replace(point, accuracy=accuracy)

    return structs.replace(run, points=[measured(point) for point in run.points if point.seconds <= limit_s])


RATES: dict[str, Callable[[Run], float]] = {
    "rollouts/s trained on": lambda run: run.num_trained / run.seconds,
    "rollouts/s trained on, groups with signal": lambda run: run.num_with_signal / run.seconds,
    "rollouts/s generated": lambda run: run.num_generated / run.seconds,
}


def describe(name: str, run: Run) -> None:
    curve = " ".join(f"{point.seconds:.0f}s:{point.accuracy:.2f}" for point in run.points)
    say(
        f"{name}: {run.steps} steps in {run.seconds:.1f} s, {run.num_trained / run.seconds:.0f} rollouts/s trained on, "
        f"{run.num_with_signal / run.seconds:.0f} with signal, {run.num_generated / run.seconds:.0f} generated\n  {curve}"
    )


def rows_of(found: dict[str, list[Run]], workload: str, peer: str, target: float) -> list[Row]:
    """Medians over the repeats; of the peer's ways to run, the better one, row by row."""
    theirs = [runs for name, runs in found.items() if name != OURS]
    reached = min(min(run.best for run in found[OURS]), max(min(run.best for run in runs) for runs in theirs))
    if reached < target:
        say(f"not every run reached {target}: the highest accuracy that both sides reached is {reached:.3f}")
    target = min(target, math.floor(100 * reached) / 100)

    def medians(value: Callable[[Run], float]) -> tuple[float, list[float]]:
        return statistics.median(map(value, found[OURS])), [statistics.median(map(value, runs)) for runs in theirs]

    rows = []
    for metric, value in RATES.items():
        our, their = medians(value)
        rows.append(rate(workload, metric, our, peer, max(their), digits=1))
    our, their = medians(lambda run: run.seconds_to(target))
    rows.append(cost(workload, f"seconds to held-out accuracy {target:.2f}, sampled", our, peer, min(their), digits=1))
    return rows


def compare(options: argparse.Namespace, trl: Peer, folder: Path) -> list[Row]:
    if (busy := os.getloadavg()[0]) > BUSY:
        say(f"other programs use this machine (load {busy:.1f}): the seconds will mean little")
    found: dict[str, list[Run]] = {}
    settings: dict[str, Setting] = {}
    for seed in range(options.repeat):
        (here := folder / f"seed-{seed}").mkdir()
        start = make_start(seed, options, here)
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
    return rows_of(found, workload, trl.name, options.target)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 400, smoke=3, help="optimizer steps of a run, on both sides")
    parser.add("--limit", 600.0, help="seconds of training that count")
    parser.add("--target", 0.6, help="held-out accuracy, sampled")
    parser.add("--repeat", 1, help="each with a seed of its own; medians are shown")
    parser.add("--keep-every", 10, smoke=1, help="steps between two measured models")
    parser.add("--calibration-steps", 15, smoke=0, help="of each of TRL's settings; 0: plain ones")
    parser.add("--trl-python", ROOT / ".venv-trl/bin/python", kind=Path)
    options = parser.parse(argv)
    if not options.trl_python.exists() and not options.smoke:
        parser.error(f"no {options.trl_python}: `make bench-trl` makes it, or name another with --trl-python")
    trl: Peer = Trl(python=options.trl_python) if options.trl_python.exists() else Stub()
    with tempfile.TemporaryDirectory() as folder:
        publish(compare(options, trl, Path(folder)), options)


if __name__ == "__main__":
    main()
