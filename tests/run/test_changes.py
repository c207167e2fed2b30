"""Resumes with changed settings, and new runs from another run's checkpoint: real runs, in this process."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch
from msgspec import structs
from typer.testing import CliRunner

from millstream import RunConfig, resume, train
from millstream.cli.main import app
from millstream.config import _paths, load
from millstream.errors import ConfigError, MillstreamError, OutputError, Stopped
from millstream.events import ConfigWritten, GroupTaken, Resumed, RunBranched, SettingChanged, Stepped
from millstream.events.rollouts.reader import RolloutDump
from millstream.events.sinks import read_events, read_history
from millstream.learner.state import read_state
from millstream.run.changes import RULES, rule_of
from millstream.run.checkpoint import steps_in
from millstream.run.folder import RunFolder, holder_of
from millstream.run.missing_rollouts import missing_rollouts
from support import rewards
from support.commands import start_command
from support.ports import free_port
from support.runs import SETTINGS, assert_clean, command, kill_at, recipe_in, resume_command, steps_of, until
from support.runs import resume as resume_in_process
from support.stop_at import StopAt

STEPS = 8
SMALL = {
    **SETTINGS,
    "pipeline.steps": STEPS,
    "pipeline.max_lag": 2,
    "data.size": 64,
    "data.holdout": 2,
    "checkpoint.every_steps": 1,
    "reward.0.function": f"{rewards.__file__}:digits",  # gradients are not zero
}
CHANGES = {
    "steps, more": ["pipeline.steps=10"],
    "steps, fewer": ["pipeline.steps=6"],
    "groups_per_step, more": ["pipeline.groups_per_step=6"],
    "groups_per_step, fewer": ["pipeline.groups_per_step=2"],
    "max_lag, higher": ["pipeline.max_lag=3"],
    "max_lag, lower": ["pipeline.max_lag=1"],
    "max_lag, synchronous": ["pipeline.max_lag=0"],
    "auto_lag": ["pipeline.auto_lag=true"],
    "lockstep": ["pipeline.lockstep=false"],
    "extra_groups": ["pipeline.extra_groups=2"],
    "surplus": ["pipeline.surplus=abort", "pipeline.extra_groups=12"],
    "overdue": ["pipeline.overdue=restart", "pipeline.max_restarts=2"],
    "filter_zero_signal": ["pipeline.filter_zero_signal=true"],
    "max_replaced_per_step": ["pipeline.max_replaced_per_step=3"],
    "stall_s": ["pipeline.stall_s=20", "pipeline.deadline_s=600", "pipeline.longest_first=true"],
    "learning_rate": ["learner.learning_rate=1e-4"],
    "schedule": ["learner.schedule=cosine", "learner.warmup_steps=2"],
    "weight_decay": ["learner.weight_decay=0.01", "learner.max_grad_norm=0.5"],
    "micro_batch_tokens": ["learner.micro_batch_tokens=64"],
    "recompute": ["learner.recompute=true", "learner.max_skipped_steps=1"],
    "offload": ["learner.offload=true"],
    "temperature": ["rollout.temperature=0.7"],
    "max_tokens": ["rollout.max_tokens=6"],
    "stop": ["rollout.stop=['9']"],
    "group_size": ["rollout.group_size=3"],
    "extra_members": ["rollout.extra_members=1"],
    "min_group_size": ["rollout.min_group_size=3"],
    "max_parts": ["rollout.max_parts=2"],
    "retries": ["rollout.retries=2", "rollout.timeout_s=300"],
    "keep_gb": ["rollout.keep_gb=1"],
    "workers": ["rollout.workers=1"],
    "trackers": ["trackers.project=mine", "trackers.name=this"],
    "metrics": [f"metrics.prometheus=:{free_port()}"],
    "alerts": ["alerts.command='exit 0'", "alerts.every_s=60"],
    "reward.weight": ["reward.0.weight=0.5"],
    "reward.timeout_s": ["reward.0.timeout_s=10"],
    "environment": ["environment.0.max_concurrent=4", "environment.0.step_timeout_s=30"],
    "clip": [
        "algorithm.clip_low=0.1",
        "algorithm.clip_high=0.3",
        "algorithm.dual_clip=4",
        "algorithm.entropy_bonus=0.001",
    ],
    "overlong_buffer": ["algorithm.overlong_buffer=2"],
    "slots": ["engine.slots=4", "engine.prefill_tokens=256"],
    "cache": ["engine.cache=pages", "engine.cache_gb=0.1"],
    "engine process": ["engine.process=true"],
    "replicas": ["engine.replicas=2"],
    "on_update": ["engine.on_update=recompute", "engine.answer_s=200"],
    "evaluation": ["evaluation.every_steps=2", "evaluation.tasks=2"],
    "checkpoint": ["checkpoint.every_steps=2", "checkpoint.keep=3", "checkpoint.keep_every=2", "checkpoint.grace_s=5"],
    "dtype": ["model.dtype=bfloat16"],
}


BY_STOP = [
    name for name, changes in CHANGES.items() if any(rule_of(one.partition("=")[0]).effect != "now" for one in changes)
]
"""Changed one by one in a run that was stopped; all others together, and one by one with kills (slow)."""
TOGETHER = [
    one for name, changes in CHANGES.items() if name not in (*BY_STOP, "cache", "dtype", "overdue") for one in changes
]


def config_of(run_dir: Path, **more: object) -> RunConfig:
    keys = {**SMALL, "run_dir": run_dir, **{key.replace("__", "."): value for key, value in more.items()}}
    return load(recipe_in(run_dir.parent), RunConfig, [f"{key}={value}" for key, value in keys.items()])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its third step."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stopped):
        train(config_of(run_dir), sinks=[StopAt(3)])
    assert_clean(run_dir)
    steps = [one for one in read_history(run_dir / "events.jsonl") if isinstance(one, Stepped)]
    assert all(one.metrics["grad_norm"] > 0 for one in steps), "the order of the data matters"
    return run_dir


@pytest.fixture(scope="module")
def finished(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = shutil.copytree(stopped, tmp_path_factory.mktemp("finished") / "run")
    resume(run_dir)
    return run_dir


def copied(run_dir: Path, to: Path) -> Path:
    return shutil.copytree(run_dir, to / "run")


def made(run_dir: Path) -> int:
    """The step of its newest checkpoint."""
    return steps_in(run_dir)[-1]


def digests_in(folder: Path) -> dict[str, str]:
    """Of every file but the lock."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changes_in(run_dir: Path) -> dict[str, tuple[object, object, int]]:
    events = read_history(run_dir / "events.jsonl")
    return {one.key: (one.old, one.new, one.version) for one in events if isinstance(one, SettingChanged)}


# ---- the table -----------------------------------------------------------------------------------------------------------


def test_every_key_of_the_config_is_in_the_table_and_the_table_has_no_other() -> None:
    keys = [key.replace(".0", ".*") for key in _paths(RunConfig)]
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    assert [key for key in leaves if rule_of(key) is None] == [], (
        "add them to RULES of run/changes.py, and to docs/resume.md"
    )
    assert [key for key in RULES if key not in keys and key != "environment.*"] == [], "they are no keys"
    optional = [field.name for field in structs.fields(RunConfig) if type(None) in get_args(field.type)]
    assert all(rule_of(key) is not None for key in optional)


def test_every_key_that_may_change_is_changed_by_a_test() -> None:
    """Of a table as a whole (engine, resources), some of its keys. Those that need a GPU, a cluster or another model are left out."""
    elsewhere = {
        "model.device",
        "model.trust_remote_code",
        "sim",  # a real run does not read it
        "traces",  # needs OpenTelemetry
        "outside",  # needs programs
        "data.path",
        "data.passed",
        "runtime",
        "resources",
        "learner.ranks",
        "learner.compile",
    }
    elsewhere |= {"learner.gpu_share", "environment.*.process"}
    elsewhere |= {
        "pipeline.filter",
        "pipeline.filter_args",
        "learner.schedule_args",
        "store",
        "weights",
    }  # test_own_parts
    elsewhere |= {
        f"algorithm.{key}" for key in ("discount", "trace", "normalization", "turn_baseline")
    }  # of other advantages
    tried = {change.partition("=")[0].replace(".0.", ".*.") for changes in CHANGES.values() for change in changes}
    may = {key for key, rule in RULES.items() if rule.effect is not None} - elsewhere
    may = {key for key in may if not key.startswith(("warmup.", "critic.", "reference.", "proximal."))}
    of_loss = {"aggregation", "fixed_length", "ratio_cap", "ratio_floor", "positive_weight"}
    of_loss |= {"negative_weight", "regularisation", "kl_coefficient"}  # each of other losses than this one
    may -= {f"algorithm.{key}" for key in of_loss}
    assert [key for key in sorted(may) if not any(one == key or one.startswith(f"{key}.") for one in tried)] == []


@pytest.mark.parametrize("change", [*map(CHANGES.get, BY_STOP), TOGETHER], ids=[*BY_STOP, "all others"])
def test_a_stopped_run_is_resumed_with_the_change_and_its_audit_is_clean(
    change: list[str], stopped: Path, tmp_path: Path
) -> None:
    run_dir = copied(stopped, tmp_path)
    result = resume(run_dir, changes=change)
    assert_clean(run_dir)
    found = changes_in(run_dir)
    assert {one.partition("=")[0] for one in change} >= found.keys() and all(
        version == made(stopped) for _, _, version in found.values()
    )
    config = load(run_dir / "config.toml", RunConfig)
    assert result.summary.steps == config.pipeline.steps, "the config in the folder has the change"
    again = load(run_dir / "config.toml", RunConfig, change)
    assert again == config


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("seed=1", "every random number of the run follows from it"),
        ("data.size=100", "place in the data"),
        ("data.shuffle=false", "place in the data"),
        ("model.tiny.hidden=32", "the weights and the optimizer's state"),
        ("learner.lora.rank=4", "the weights and the optimizer's state"),
        ("learner.mini_batches=2", "counts that many steps a batch"),
        ("algorithm.loss=cispo", "scored for it"),
        ("reference.device=cpu", "the columns of the models"),
        ("environment.0.use=dialog", "place in the data"),
        ("run_dir=elsewhere", "mv RUN OTHER"),
    ],
)
def test_what_may_not_change_is_refused_with_the_reason_and_what_to_type_and_nothing_is_changed(
    change: str, why: str, stopped: Path, tmp_path: Path
) -> None:
    run_dir = copied(stopped, tmp_path)
    before = digests_in(run_dir)
    said = CliRunner().invoke(app, ["train", "--resume", str(run_dir), "--set", change])
    words = " ".join(said.output.split())
    assert said.exit_code == 1 and why in words and f"--from {run_dir} --set {change}" in words, said.output
    with pytest.raises(ConfigError):
        resume(run_dir, changes=[change])
    assert digests_in(run_dir) == before


@pytest.mark.parametrize(
    "change",
    [
        "engine.slots=0",
        "rollout.max_tokens=5000",
        "reward.0.function=nowhere.py:reward",
        "data.path=nowhere.jsonl",
    ],
)
def test_a_resume_that_fails_leaves_the_folder_as_it_was(change: str, stopped: Path, tmp_path: Path) -> None:
    run_dir = copied(stopped, tmp_path)
    flip = run_dir / f"checkpoints/step-{made(run_dir):06d}/learner.pt"
    flip.write_bytes(b"damaged" + flip.read_bytes()[7:])
    before = digests_in(run_dir)
    with pytest.raises(MillstreamError):
        resume(run_dir, changes=[change])
    assert digests_in(run_dir) == before, "neither the config nor the damaged checkpoint"
    resume(run_dir)
    assert_clean(run_dir)


def test_fewer_steps_than_were_made_are_refused_with_what_to_type(stopped: Path) -> None:
    message = (
        f"pipeline.steps = 2, and the run has made {made(stopped)} steps: set it to {made(stopped)} to end the run"
    )
    with pytest.raises(ConfigError, match=message):
        resume(stopped, changes=["pipeline.steps=2"])


def test_the_steps_that_were_made_end_the_run_with_its_model(stopped: Path, tmp_path: Path) -> None:
    run_dir = copied(stopped, tmp_path)
    steps = made(run_dir)
    assert resume(run_dir, changes=[f"pipeline.steps={steps}"]).summary.steps == steps and (run_dir / "model").is_dir()
    assert_clean(run_dir)


def test_a_change_that_was_undone_by_a_crash_is_an_event_again(stopped: Path, tmp_path: Path) -> None:
    """The second resume has no --set, and the change is in the config: by its checkpoint, it is one all the same."""
    run_dir = copied(stopped, tmp_path)
    with pytest.raises(Stopped):
        resume(run_dir, changes=["pipeline.groups_per_step=2"], sinks=[StopAt(made(run_dir) + 1)])
    shutil.rmtree(run_dir / "checkpoints")
    shutil.copytree(stopped / "checkpoints", run_dir / "checkpoints")  # as if it had been killed before it wrote one
    resume(run_dir)
    resumes = [one for one in read_events(run_dir / "events.jsonl") if isinstance(one, Resumed)]
    assert [one.version for one in resumes] == [made(stopped)] * 2
    assert all(one.changes == ("pipeline.groups_per_step=2",) for one in resumes)
    assert changes_in(run_dir) == {"pipeline.groups_per_step": (4, 2, made(stopped))}
    assert_clean(run_dir)


def test_at_max_lag_zero_a_resume_that_changes_what_does_not_matter_ends_with_the_same_bits(tmp_path: Path) -> None:
    more = {"pipeline__max_lag": 0, "pipeline__steps": 4}
    train(config_of(tmp_path / "whole/run", **more))
    with pytest.raises(Stopped):
        train(config_of(tmp_path / "cut/run", **more), sinks=[StopAt(2)])
    resume(
        tmp_path / "cut/run", changes=["checkpoint.every_steps=2", "pipeline.stall_s=20", "learner.max_skipped_steps=1"]
    )
    assert_clean(tmp_path / "cut/run")
    models = [(tmp_path / name / "run/model/model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


# ---- with rollouts kept ------------------------------------------------------------------------------------------------


def go_back(run_dir: Path, step: int) -> None:
    """As if the process had been killed before it wrote a checkpoint after this step."""
    for number in steps_in(run_dir):
        if number > step:
            shutil.rmtree(run_dir / f"checkpoints/step-{number:06d}")


def num_trained(run_dir: Path) -> dict[int, int]:
    """By step: rollouts in the files."""
    dump = RolloutDump(run_dir)
    return Counter(one.step for group in dump.groups() for one in dump.rollouts(group) if one.step is not None)


def test_rollouts_of_steps_that_were_undone_stay_void_through_a_resume_that_keeps_none(
    stopped: Path, tmp_path: Path
) -> None:
    run_dir, step = copied(stopped, tmp_path), made(stopped)
    with pytest.raises(Stopped):
        resume(run_dir, changes=["checkpoint.keep=9", f"pipeline.steps={2 * STEPS}"], sinks=[StopAt(step + 2)])
    go_back(run_dir, step)
    with pytest.raises(Stopped):
        resume(run_dir, changes=["rollout.keep_gb=0", "trackers.name=mine"], sinks=[StopAt(step + 1)])
    off = made(run_dir)
    last = 2 * STEPS + 4  # beyond the groups that were in flight when none was kept
    resume(run_dir, changes=["rollout.keep_gb=1", f"pipeline.steps={last}"])
    assert_clean(run_dir)
    assert changes_in(run_dir)["rollout.keep_gb"] == (0, 1, off) and "trackers.name" in changes_in(run_dir)
    assert not num_trained(run_dir).keys() & set(range(step + 1, off + 1)), "what was undone, and what was not kept"
    assert num_trained(run_dir).keys() >= {*range(1, step + 1), last}
    missing = missing_rollouts(RolloutDump(run_dir), run_dir / "events.jsonl")
    assert missing.num_lost and missing.by_version.keys() >= set(range(step, off))


def test_a_finished_run_that_trains_on_and_is_stopped_and_killed_has_each_rollout_once(
    finished: Path, tmp_path: Path
) -> None:
    run_dir = copied(finished, tmp_path)
    with pytest.raises(Stopped):
        resume(run_dir, changes=[f"pipeline.steps={2 * STEPS}", "checkpoint.keep=19"], sinks=[StopAt(STEPS + 1)])
    begun = made(run_dir)
    with pytest.raises(Stopped):
        resume(run_dir, sinks=[StopAt(begun + 1)])
    go_back(run_dir, begun)
    resume(run_dir)
    assert_clean(run_dir)
    assert num_trained(run_dir) == dict.fromkeys(range(1, 2 * STEPS + 1), 16)
    assert missing_rollouts(RolloutDump(run_dir), run_dir / "events.jsonl") == (0, 0, {})


# ---- edited by hand ------------------------------------------------------------------------------------------------------


def edit(run_dir: Path, old: str, new: str) -> None:
    text = (run_dir / "config.toml").read_text()
    assert old in text
    (run_dir / "config.toml").write_text(text.replace(old, new))


def test_a_config_edited_by_hand_is_taken_as_changes(stopped: Path, tmp_path: Path) -> None:
    run_dir = copied(stopped, tmp_path)
    edit(run_dir, "temperature = 1.0", "temperature = 0.8  # mine")
    resume(run_dir, changes=["pipeline.steps=7"])
    assert changes_in(run_dir) == {
        "rollout.temperature": (1.0, 0.8, made(stopped)),
        "pipeline.steps": (8, 7, made(stopped)),
    }
    written = [one for one in read_events(run_dir / "events.jsonl") if isinstance(one, ConfigWritten)]
    assert written[-1].text == (run_dir / "config.toml").read_text()
    assert_clean(run_dir)


def test_an_edit_that_may_not_be_is_refused_with_what_to_type(stopped: Path, tmp_path: Path) -> None:
    run_dir = copied(stopped, tmp_path)
    edit(run_dir, "hidden = ", "hidden = 2")
    before = digests_in(run_dir)
    said = " ".join(CliRunner().invoke(app, ["train", "--resume", str(run_dir)]).output.split())
    assert "config.toml was edited: model.tiny.hidden=2" in said and f"--from {run_dir}" in said
    assert digests_in(run_dir) == before


# ---- from another run ----------------------------------------------------------------------------------------------------


def test_a_new_run_begins_with_the_weights_and_the_optimizer_of_another(finished: Path, tmp_path: Path) -> None:
    run_dir, step = tmp_path / "run", steps_in(finished)[0]
    train(config_of(run_dir, pipeline__steps=2, checkpoint__keep=9), from_run=f"{finished}@{step}")
    events = list(read_events(run_dir / "events.jsonl"))
    source = finished / f"checkpoints/step-{step:06d}"
    digest = hashlib.sha256((source / "manifest.json").read_bytes()).hexdigest()
    assert isinstance(events[0], RunBranched) and (events[0].step, events[0].digest) == (step, digest)
    lineage = json.loads((run_dir / "start/lineage.json").read_text())
    assert lineage["run_dir"] == str(finished) and lineage["step"] == step
    theirs, ours = read_state(source), read_state(run_dir / "checkpoints/step-000000")
    for part in ("masters", "moments"):
        flat = [(one[name], other) for one, other in [(ours[part], theirs[part])] for name, other in other_items(other)]
        assert flat and all(equal(mine, other) for mine, other in flat)
    assert ours["num_steps_done"] == 0 and theirs["num_steps_done"] == step
    assert [one.version for one in events if isinstance(one, Stepped)] == [1, 2]
    assert_clean(run_dir)


def other_items(part: dict[str, object]) -> list[tuple[str, object]]:
    return list(part.items())


def equal(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_a_run_that_began_with_another_is_resumed_without_that_one(finished: Path, tmp_path: Path) -> None:
    other = shutil.copytree(finished, tmp_path / "other")
    more = {"pipeline__max_lag": 0, "pipeline__steps": 3}
    train(config_of(tmp_path / "whole/run", **more), from_run=other)
    with pytest.raises(Stopped):
        train(config_of(tmp_path / "cut/run", **more), from_run=other, sinks=[StopAt(1)])
    shutil.rmtree(other)
    for checkpoint in (tmp_path / "cut/run/checkpoints").iterdir():
        shutil.rmtree(checkpoint)  # it starts over: from the copy in its folder
    resume(tmp_path / "cut/run")
    assert_clean(tmp_path / "cut/run")
    models = [(tmp_path / name / "run/model/model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("@99", {}, r"has no checkpoint of step 99; it has those of steps \d, 8: type --from .*@8"),
        ("@x", {}, "expected RUN or RUN@STEP"),
        ("/nowhere", {}, "is not a run folder"),
        ("", {"model__tiny__hidden": 32}, r"is of another model than \[model\]: .* has the shape"),
        ("", {"model__tiny__layers": 2}, r"is of another model than \[model\]: they differ in"),
        ("", {"learner__lora__rank": 4}, r"has trained a whole model, and \[learner.lora\] is set"),
        ("", {"warmup__max_steps": 4}, r"with a \[warmup\] table"),
    ],
)
def test_what_is_wrong_with_another_run_is_said_and_no_folder_is_left(
    source: str, changes: dict[str, object], message: str, finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "new/run"
    with pytest.raises(ConfigError, match=message):
        train(config_of(run_dir, **changes), from_run=f"{finished}{source}")
    assert not run_dir.exists()


def test_from_is_an_option_of_the_command(finished: Path, tmp_path: Path) -> None:
    config = recipe_in(tmp_path)
    settings = [
        word
        for key, value in {**SMALL, "pipeline.steps": 1, "run_dir": tmp_path / "run"}.items()
        for word in ("--set", f"{key}={value}")
    ]
    said = CliRunner().invoke(app, ["train", str(config), "--from", str(finished), *settings, "--quiet"])
    assert said.exit_code == 0, said.output
    said = CliRunner().invoke(app, ["train", "--resume", str(finished), "--from", str(finished)])
    assert said.exit_code == 1 and "--from begins a new run and --resume continues one" in said.output


# ---- kept for ever -------------------------------------------------------------------------------------------------------


def test_checkpoints_of_every_so_many_steps_are_kept_for_ever(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(config_of(run_dir, checkpoint__keep_every=2, checkpoint__keep=1, checkpoint__every_steps=1000))
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000004", "step-000006", "step-000008"]
    assert_clean(run_dir)


# ---- killed, with every key ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_run_that_is_killed_before_and_after_the_change_ends_with_a_clean_audit(
    change: list[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    kill_at(run_dir, 3, {**SMALL, "pipeline.steps": 40})
    done = steps_of(run_dir)
    later = {"pipeline.steps=6": "pipeline.steps=30", "pipeline.steps=10": "pipeline.steps=50"}  # more than were made
    words = [word for one in change for word in ("--set", later.get(one, one))]
    process = start_command([*resume_command(run_dir), *words])
    until(lambda: steps_of(run_dir) >= done + 3 or (run_dir / "summary.json").exists(), process)
    process.kill()
    process.wait()
    assert_clean(run_dir)
    ended = resume_in_process(run_dir)
    assert ended.returncode == 0, ended.stderr
    assert_clean(run_dir)
    names = {
        one.key for one in itertools.chain(read_events(run_dir / "events.jsonl")) if isinstance(one, SettingChanged)
    }
    assert names


# ---- a finished run that trains on ---------------------------------------------------------------------------------------


def test_a_finished_run_is_resumed_for_more_steps_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    train(config_of(folder, pipeline__steps=2), progress=False)
    with pytest.raises(ConfigError, match=r"is finished.*\n.*--set pipeline\.steps=N"):
        resume(folder, progress=False)
    fewer = r"2 steps are trained, and pipeline\.steps = 1 asks for fewer\. To train it for more steps, N above 2:\n"
    with pytest.raises(ConfigError, match=fewer):
        resume(folder, changes=["pipeline.steps=1"], progress=False)
    before = digests_in(folder / "model")

    def half(model: object, tokenizer: object, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{}")
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched, pytest.raises(OutputError, match="no space left"):
        patched.setattr("millstream.learner.trainer.save_model", half)
        resume(folder, changes=["pipeline.steps=3"], progress=False)
    assert digests_in(folder / "model") == before, "a model is there as a whole, or not"
    result = resume(folder, progress=False)
    assert result.summary.steps == 3 and digests_in(folder / "model") != before
    assert not list(folder.glob(".model*"))
    assert_clean(folder)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="its checkpoints are gone"):
        resume(folder, changes=["pipeline.steps=4"], progress=False)


# ---- the lock ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_locked_within_one_process_too_and_asking_who_has_it_does_not_release_it(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.lock()
    for _ in range(2):
        assert holder_of(tmp_path) == os.getpid()
        with pytest.raises(ConfigError, match="is active"):
            second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_start_that_fails_does_not_remove_a_run_in_a_folder_below_it(tmp_path: Path) -> None:
    outer = RunFolder.create(config_of(tmp_path / "outer"), "run")
    inner = RunFolder.create(config_of(tmp_path / "outer" / "inner"), "run")
    outer.discard()
    assert inner.config.exists() and not outer.config.exists()
    for folder in (inner, outer):
        folder.unlock()


# ---- while the run trains ------------------------------------------------------------------------------------------------


def set_in(run_dir: Path, *settings: str) -> str:
    return CliRunner().invoke(app, ["set", str(run_dir), *settings]).output


def test_max_lag_changes_while_the_run_trains_and_groups_in_flight_keep_their_bound(tmp_path: Path) -> None:
    """Killed after the changes, and resumed: the config and the log have them, and the audit is clean."""
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {**SMALL, "pipeline.steps": 100_000}))
    until(lambda: steps_of(run_dir) >= 2, process)
    assert "for groups that start from version" in set_in(run_dir, "pipeline.max_lag=4")
    higher = steps_of(run_dir)
    until(lambda: steps_of(run_dir) >= higher + 6, process)
    assert set_in(run_dir, "pipeline.max_lag=1", "pipeline.extra_groups=2").count("for groups that start") == 2
    lower = steps_of(run_dir)
    until(lambda: steps_of(run_dir) >= lower + 6, process)
    assert set_in(run_dir, "pipeline.max_lag=1") == "nothing to do\n"
    assert "pipeline.auto_lag=True" in set_in(run_dir, "pipeline.auto_lag=true", "pipeline.extra_groups=")
    assert "learner.learning_rate cannot change while the run trains" in set_in(run_dir, "learner.learning_rate=1e-4")
    assert "cannot begin or end lockstep" in set_in(run_dir, "pipeline.max_lag=0", "pipeline.auto_lag=false")
    assert "extra_groups = 9 cannot all be trained" in set_in(run_dir, "pipeline.extra_groups=9")
    process.kill()
    process.wait()
    changed = [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, SettingChanged)]
    assert [(event.key, event.old, event.new) for event in changed] == [
        ("pipeline.max_lag", 2.0, 4.0),
        ("pipeline.extra_groups", None, 2),
        ("pipeline.max_lag", 4.0, 1.0),
        ("pipeline.auto_lag", False, True),
        ("pipeline.extra_groups", 2, None),
    ]
    taken = [event for event in read_history(run_dir / "events.jsonl") if isinstance(event, GroupTaken)]
    assert max(event.lag for event in taken) > 2, "the higher bound was never used"
    assert_clean(run_dir)
    resume_in_process(run_dir, f"pipeline.steps={steps_of(run_dir) + 3}")
    assert load(run_dir / "config.toml", RunConfig).pipeline.max_lag == 1
    assert_clean(run_dir)


def test_a_resume_that_is_stopped_while_it_loads_has_undone_the_rollouts_that_its_log_undoes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    kill_at(run_dir, 6, {**SMALL, "checkpoint.every_steps": 3})

    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("millstream.run.run._phases", stopped)
        resume(run_dir, progress=False)
    assert_clean(run_dir)
    resume(run_dir, progress=False)
    assert_clean(run_dir)


def test_a_start_replaces_no_file_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("# mine")
    with pytest.raises(ConfigError, match=r"has config\.toml, which a run would replace: choose another run_dir"):
        train(config_of(tmp_path), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
