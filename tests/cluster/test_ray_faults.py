"""What goes wrong around a run on Ray, other than a process that is killed: a full disk, a spoiled checkpoint, SIGTERM, another
cluster at the resume, two nodes that cannot reach each other. Real runs in processes of their own. `make test-ray`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from millstream.cli.main import app
from millstream.events import (
    CheckpointFailed,
    CheckpointSealed,
    ReplicaLeft,
    Resumed,
    RunEnded,
    Stepped,
    WeightsLoaded,
    WorkerStarted,
)
from millstream.events.sinks import read_history
from millstream.run.checkpoint import steps_in
from support.ray_runs import START_S, command, events_of, memory_of, running, stop, tree_of, wait_until_gone
from support.runs import assert_clean, resume_command, steps_of, until
from support.two_nodes import TwoNodes, may_be_made, two_nodes

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

STEPS = 30


def resumed_with(run_dir: Path, *changes: str) -> str:
    words = [word for change in changes for word in ("--set", change)]
    with running([*resume_command(run_dir), *words]) as process:
        output: str = process.communicate(timeout=START_S)[0]
    assert process.returncode == 0, output
    assert_clean(run_dir)
    return output


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two ranks and one engine on Ray that was told to stop; what it left behind is looked at once, here."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    with running(command(run_dir, {"pipeline.steps": STEPS, "checkpoint.every_steps": 1})) as process:
        until(lambda: len(steps_in(run_dir)) >= 2 and steps_of(run_dir) >= 3, process, START_S)
        pids = tree_of(process.pid)
        memory = memory_of(pids)
        began = time.monotonic()
        output = stop(process)
        assert process.returncode == 128 + signal.SIGTERM, output
        assert time.monotonic() - began < 20 + 15, "the grace for the batch, and the time that all parts take to end"
        assert f"To resume the run:\n  millstream train --resume {run_dir}" in output and "Traceback" not in output
        wait_until_gone(pids)
        assert memory, "weights and rows are in shared memory while it runs"
        assert not [path for path in memory if path.exists()]
    yield run_dir


def copy_of(run_dir: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(run_dir), str(to)], check=True)
    return to


def test_sigterm_is_a_clean_stop_with_a_checkpoint_and_leaves_no_process_and_no_memory_behind(stopped: Path) -> None:
    *_, last = events_of(stopped)
    assert isinstance(last, RunEnded) and last.outcome == "Stopped"
    assert steps_in(stopped)[-1] == last.version >= 3, "nothing that was trained is lost"
    workers = {event.what for event in events_of(stopped) if isinstance(event, WorkerStarted)}
    assert workers == {"engine", "learner", "store"}
    assert_clean(stopped)


def test_a_spoiled_newest_checkpoint_is_said_and_the_one_before_it_taken(stopped: Path, tmp_path: Path) -> None:
    run_dir = copy_of(stopped, tmp_path / "run")
    *_, before, newest = steps_in(run_dir)
    shard = next((run_dir / f"checkpoints/step-{newest:06d}").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    output = resumed_with(run_dir)
    assert f"{shard.name} is not as it was written" in output and "it is set aside" in output, output
    resumed = next(event for event in events_of(run_dir) if isinstance(event, Resumed))
    assert resumed.version == before
    assert (run_dir / f"checkpoints/step-{newest:06d}.corrupt").is_dir()


@pytest.mark.parametrize(
    "changes",
    [("learner.ranks=1", "engine.replicas=2"), ("runtime=local", "learner.ranks=1"), ("runtime=local",)],
    ids=["fewer ranks and more engines", "one process", "two ranks without Ray"],
)
def test_a_run_goes_on_elsewhere_with_other_numbers_of_parts(
    stopped: Path, tmp_path: Path, changes: tuple[str, ...]
) -> None:
    run_dir = copy_of(stopped, tmp_path / "run")
    output = resumed_with(run_dir, *changes)
    assert f"with {', '.join(sorted(changes))}" in output
    steps = [event.version for event in read_history(run_dir / "events.jsonl") if isinstance(event, Stepped)]
    assert steps == list(range(1, STEPS + 1))


def test_a_run_is_scaled_up_and_down_and_beyond_the_room_of_its_cluster_it_is_told_so(tmp_path: Path) -> None:
    """The cluster that is started has 16 CPUs more than the run needs."""
    run_dir, parts = tmp_path / "run", {"learner.ranks": 1, "resources.engine_cpus": 10, "resources.patience_s": 30}
    with running(command(run_dir, {"pipeline.steps": 100000, **parts})) as process:
        until(lambda: steps_of(run_dir) >= 2, process, START_S)

        def scale(num: int) -> Result:
            return CliRunner().invoke(app, ["scale", str(run_dir), f"engines={num}"])

        said = scale(2)
        assert said.exit_code == 0 and "engine-0 has joined\nengines: engine, engine-0\n" in said.output, said.output
        said = scale(3)
        assert said.exit_code == 1 and "waited 30 s for engine-1 (10 CPU, 0 GPU) to start" in said.output, said.output
        assert "the run continues with engine, engine-0: ask for fewer engines" in said.output
        said = scale(1)
        assert said.exit_code == 0 and "engine-0 has left\nengines: engine\n" in said.output, said.output
        num_steps = steps_of(run_dir)
        until(lambda: steps_of(run_dir) >= num_steps + 2, process)
        stop(process)
    assert_clean(run_dir)


def test_a_local_run_goes_on_under_ray(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    local = {"runtime": "local", "learner.ranks": 1, "engine.process": "false", "pipeline.steps": 6}
    with running(command(run_dir, local)) as process:
        until(lambda: any(steps_in(run_dir)), process)
        stop(process)
    resumed_with(run_dir, "runtime=ray", "engine.process=", "learner.ranks=2", "engine.replicas=2")
    workers = [event.worker for event in events_of(run_dir) if isinstance(event, WorkerStarted)]
    assert {"engine-0", "engine-1", "rank 0", "rank 1"} <= set(workers), workers
    AutoModelForCausalLM.from_pretrained(run_dir / "model")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_at_a_checkpoint_is_said_the_run_goes_on_and_later_ones_are_written(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    with running(command(run_dir, {"pipeline.steps": 100_000, "checkpoint.every_steps": 1})) as process:
        until(lambda: len(steps_in(run_dir)) >= 2, process, START_S)
        ballast = small_disk / "ballast"
        room = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        ballast.write_bytes(bytes(room - (300 << 10)))  # enough for the events of a while
        kinds = (CheckpointFailed, CheckpointSealed)
        until(lambda: any(isinstance(event, CheckpointFailed) for event in events_of(run_dir)), process, 60)
        steps = steps_of(run_dir)
        ballast.unlink()
        until(
            lambda: isinstance([e for e in events_of(run_dir) if isinstance(e, kinds)][-1], CheckpointSealed),
            process,
            60,
        )
        until(lambda: steps_of(run_dir) > steps, process)
        output = stop(process)
    failed = [event.message for event in events_of(run_dir) if isinstance(event, CheckpointFailed)]
    assert set(failed) == {"No space left on device"}, failed
    assert "failed: No space left on device; the run continues" in output
    assert not list((run_dir / "checkpoints").glob(".*")), "nothing half written is left"
    assert_clean(run_dir)


CUT_S = 40.0


@pytest.mark.skipif(not may_be_made(), reason="only root may make network namespaces")
def test_a_run_goes_on_with_the_engine_that_it_reaches_when_the_network_between_two_nodes_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a line may be silent, so that the other node's engine is given up. Until then it has its weights by broadcast:
    both nodes have an address of their own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    run_dir = tmp_path / "run"
    changes = {
        "resources.address": TwoNodes.address,
        "resources.learner_cpus": 2,  # more than the other node has: the rank is with the driver
        "learner.ranks": 1,
        "engine.replicas": 2,
        "pipeline.steps": 100_000,
    }
    with (
        two_nodes(head_cpus=3, worker_cpus=1) as nodes,
        running(nodes.within(nodes.head, command(run_dir, changes))) as process,
    ):
        until(lambda: steps_of(run_dir) >= 5, process, START_S)
        there = {event.worker: event.node for event in events_of(run_dir) if isinstance(event, WorkerStarted)}
        assert there["engine-0"] != there["engine-1"], "an engine on each node"
        (far,) = [name for name in ("engine-0", "engine-1") if there[name] != there["rank 0"]]
        assert any(loaded_by(run_dir, far)), "weights reached the other node"
        nodes.cut()
        began, steps = time.monotonic(), steps_of(run_dir)
        until(lambda: any(isinstance(event, ReplicaLeft) for event in events_of(run_dir)), process, CUT_S)
        until(lambda: time.monotonic() - began > CUT_S, process)
        assert steps_of(run_dir) > steps + 3, "the run goes on meanwhile"
        nodes.mend()
        steps = steps_of(run_dir)
        until(lambda: steps_of(run_dir) > steps + 3, process, 60)
        output = stop(process)
        assert process.returncode == 128 + signal.SIGTERM, output
    left = {event.engine for event in events_of(run_dir) if isinstance(event, ReplicaLeft)}
    assert left == {far}
    assert_clean(run_dir)


def loaded_by(run_dir: Path, engine: str) -> list[int]:
    """Versions beyond the first that this engine took."""
    found = [event for event in events_of(run_dir) if isinstance(event, WeightsLoaded) and event.engine == engine]
    return [event.version for event in found if event.version > 0]
