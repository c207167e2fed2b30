"""What a run has trained so far, as a model for other programs: from any checkpoint, alive, dead or done."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import millstream
from millstream.cli.main import app
from millstream.config import load
from millstream.errors import CheckpointError, ConfigError, LearnerError
from millstream.events import Resumed
from millstream.events.sinks import read_events
from millstream.learner.state import flat_state, read_state, read_trained, write_shards, write_state
from millstream.run import checkpoint
from millstream.run.checkpoint import steps_in
from millstream.run.config import RunConfig
from support.commands import start_command
from support.ray_runs import running, stop
from support.runs import assert_clean, command, kill_at, resume_command, until


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("done") / "run"
    (run_dir.parent / "mine.py").write_text("def reward(task, completion):\n    return float(len(completion) % 2)\n")
    changes: dict[str, object] = {"pipeline.steps": 4, "checkpoint.keep": 3, "data.holdout": 0}
    changes["reward.0.function"] = (
        f"{run_dir.parent / 'mine.py'}:reward"  # what it earns differs from the first step on
    )
    process = start_command(command(run_dir, changes))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    return run_dir


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_the_newest_checkpoint_of_a_finished_run_is_its_model_and_transformers_loads_it(
    done: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["export", str(done), str(tmp_path / "model")])
    assert result.exit_code == 0 and f"the model of step 4 is in {tmp_path / 'model'}" in result.output, result.output
    ours, theirs = tensors_of(tmp_path / "model"), tensors_of(done / "model")
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("31524>", return_tensors="pt").input_ids
    assert torch.isfinite(model(tokens).logits).all()
    assert not list(tmp_path.glob(".*")), "nothing half written is left"


def test_the_checkpoint_of_a_step_is_another_model_and_a_step_without_one_is_refused_with_those_there_are(
    done: Path, tmp_path: Path
) -> None:
    *before, _ = steps_in(done)  # on a slow machine not all that are due are made
    assert millstream.export(done, tmp_path / "two", step=before[-1]).step == before[-1]
    ours, theirs = tensors_of(tmp_path / "two"), tensors_of(done / "model")
    assert any(not np.array_equal(ours[name], theirs[name]) for name in ours)
    there = ", ".join(map(str, steps_in(done)))
    with pytest.raises(
        ConfigError, match=rf"no checkpoint of step 3; it has those of {there}: name one of them, or leave"
    ):
        millstream.export(done, tmp_path / "three", step=3)
    with pytest.raises(ConfigError, match="is there already"):
        millstream.export(done, tmp_path / "two")
    with pytest.raises(ConfigError, match="is not a run folder"):
        millstream.export(tmp_path / "two", tmp_path / "four")


def test_an_active_run_is_exported_from_an_intact_checkpoint_and_is_not_disturbed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(command(run_dir, {"pipeline.steps": 100_000, "checkpoint.every_steps": 1})) as process:
        until(lambda: any(steps_in(run_dir)), process)
        found = millstream.export(run_dir, tmp_path / "model")
        assert found.step >= 1 and not found.troubles and process.poll() is None
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        stop(process)
    assert_clean(run_dir)


def test_the_checkpoint_before_training_is_exported_only_if_it_is_asked_for(done: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    subprocess.run(["cp", "-r", str(done), str(run_dir)], check=True)
    *before, newest = sorted((run_dir / "checkpoints").glob("step-*"))
    for folder in before:
        shutil.rmtree(folder)
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**manifest, "version": 0}))
    newest.rename(run_dir / "checkpoints/step-000000")
    with pytest.raises(ConfigError, match=r"no checkpoint but that of step 0, before training.*\n .* --step 0$"):
        millstream.export(run_dir, tmp_path / "model")
    result = CliRunner().invoke(app, ["export", str(run_dir), str(tmp_path / "model"), "--step", "0"])
    assert f"the model of step 0, before reinforcement learning is in {tmp_path / 'model'}" in result.output


def test_a_damaged_checkpoint_is_named_and_kept_and_the_one_before_is_exported(done: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    subprocess.run(["cp", "-r", str(done), str(run_dir)], check=True)
    newest = run_dir / "checkpoints/step-000004"
    (newest / "ledger.json").unlink()
    if steps_in(done)[-2] == 0:  # a busy machine writes fewer
        with pytest.raises(ConfigError, match="no checkpoint but that of step 0"):
            millstream.export(run_dir, tmp_path / "model")
        return
    found = millstream.export(run_dir, tmp_path / "model")
    assert found.step == steps_in(done)[-2] and len(found.troubles) == 1 and "step-000004" in found.troubles[0]
    assert newest.is_dir(), "that is for a resume to set aside"
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is usable: .*step-000004"):
        millstream.export(run_dir, tmp_path / "four", step=4)


def test_what_is_exported_is_the_same_from_one_file_and_from_shards(tmp_path: Path) -> None:
    state = {
        "masters": {"a.weight": torch.randn(3, 5), "b": torch.randn(4)},
        "buffers": {"c": torch.ones(2)},
        "moments": {"a.weight": {"exp_avg": torch.randn(3, 5), "step": torch.tensor(3.0)}, "b": {}},
        "num_steps_done": 3,
    }
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    write_state(state, tmp_path / "one")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        write_shards(state, tmp_path / "many", None)
    finally:
        torch.distributed.destroy_process_group()
    assert any(name.startswith("moments:") for name in flat_state(state))
    for folder in (tmp_path / "one", tmp_path / "many"):
        found = read_trained(folder)
        assert found.keys() == {"a.weight", "b", "c"}
        assert all(torch.equal(found[name], {**state["masters"], **state["buffers"]}[name]) for name in found)


class Harmful:
    """What runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._trace}",)


def forged(folder: Path, kind: str, trace: Path) -> None:
    """Shards in place of the learner's file, with something harmful among them; the manifest is right."""
    harm = pickle.dumps(Harmful(trace))
    (folder / "learner.pt").unlink()
    if kind == "the description":
        (folder / ".metadata").write_bytes(harm)
    else:  # torch loads what it describes as bytes without limits
        bytes_of: Any = BytesStorageMetadata()
        bytes_of.size, bytes_of.properties = torch.Size([1]), TensorProperties()
        stored = {MetadataIndex("masters:a"): _StorageInfo("__0_0.distcp", 0, len(harm))}
        (folder / "__0_0.distcp").write_bytes(harm)
        (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"masters:a": bytes_of}, storage_data=stored)))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("the description", "posix.system"),
        ("what it describes", "torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
    ],
)
def test_reading_untrusted_shards_runs_no_code_and_is_refused_by_name(
    done: Path, tmp_path: Path, kind: str, named: str
) -> None:
    run_dir, trace = tmp_path / "run", tmp_path / "harm"
    subprocess.run(["cp", "-r", str(done), str(run_dir)], check=True)
    forged(run_dir / "checkpoints/step-000004", kind, trace)
    for read in (
        lambda: millstream.export(run_dir, tmp_path / "model"),
        lambda: read_state(run_dir / "checkpoints/step-000004"),
    ):
        with pytest.raises(
            LearnerError, match=rf"\.metadata asks for {re.escape(named)}, which is no part of a learner's state"
        ):
            read()
    assert not trace.exists() and not (tmp_path / "model").exists()


def test_a_description_that_is_no_pickle_at_all_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"not a pickle", pickle.dumps([1]), pickle.dumps({})):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(LearnerError, match="cannot read the learner's state in"):
            read_state(tmp_path)


def at_work(monkeypatch: pytest.MonkeyPatch, run_dir: Path, removes: list[int], seals: list[int]) -> None:
    """An active run whose checkpoints are read: with every file that is opened one more checkpoint is removed, or sealed."""
    folder, digest = run_dir / "checkpoints", checkpoint._sha256

    def meanwhile(path: Path) -> str:
        if seals:
            new, old = folder / f"step-{seals.pop(0):06d}", max(folder.glob("step-*"))
            subprocess.run(["cp", "-r", str(old), str(new)], check=True)
            manifest = json.loads((new / "manifest.json").read_text())
            (new / "manifest.json").write_text(json.dumps({**manifest, "version": int(new.name[5:])}))
        if removes:
            checkpoint._remove(folder / f"step-{removes.pop(0):06d}")
        return digest(path)

    monkeypatch.setattr(checkpoint, "_sha256", meanwhile)


@pytest.mark.parametrize("which", [None, -1, -2], ids=["the newest", "that of the last step", "that of a step before"])
def test_a_checkpoint_that_the_run_removes_while_it_is_verified_gives_way_to_those_that_are_there_then(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int | None
) -> None:
    run_dir, there = tmp_path / "run", steps_in(done)
    subprocess.run(["cp", "-r", str(done), str(run_dir)], check=True)
    step = there[-1 if which is None else which]
    at_work(monkeypatch, run_dir, removes=[step], seals=[6])
    if which is None:
        found = millstream.export(run_dir, tmp_path / "model")
        assert found.step == 6 and not found.troubles
    else:
        others = ", ".join(str(one) for one in (*there, 6) if one != step)
        with pytest.raises(
            ConfigError, match=rf"no checkpoint of step {step}; it has those of {others}: name one of them"
        ):
            millstream.export(run_dir, tmp_path / "model", step=step)


def test_a_run_that_removes_one_checkpoint_after_the_other_is_not_read_for_ever(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    subprocess.run(["cp", "-r", str(done), str(run_dir)], check=True)
    at_work(monkeypatch, run_dir, removes=[4, *range(6, 100)], seals=list(range(6, 100)))
    with pytest.raises(
        CheckpointError, match=r"removed step-000004, step-000006, .* while they were read.*checkpoint\.keep"
    ):
        millstream.export(run_dir, tmp_path / "model")


@pytest.mark.slow
def test_a_run_is_resumed_with_other_numbers_of_parts_and_its_folder_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    kill_at(run_dir, 2, {"pipeline.steps": 6, "checkpoint.every_steps": 1})
    changes = ["--set", "engine.replicas=2", "--set", "engine.process="]
    process = start_command([*resume_command(run_dir), *changes])
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and ", with engine.process=, engine.replicas=2" in output, output
    config = load(run_dir / "config.toml", RunConfig)
    assert config.engine.replicas == 2 and config.engine.process is None
    resumed = next(event for event in read_events(run_dir / "events.jsonl") if isinstance(event, Resumed))
    assert resumed.changes == ("engine.process=", "engine.replicas=2")
    assert_clean(run_dir)


@pytest.mark.parametrize("change", ["algorithm.loss=gspo", "seed=3", "data.size=9"])
def test_what_defines_a_run_cannot_change_when_it_is_resumed(done: Path, change: str) -> None:
    result = CliRunner().invoke(app, ["train", "--resume", str(done), "--set", change])
    assert result.exit_code == 1 and f"--set {change} does not go with --resume" in result.output, result.output
    assert f"--from {done} --set {change}" in " ".join(result.output.split())
