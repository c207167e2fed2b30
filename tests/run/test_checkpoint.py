"""Checkpoints of real runs: killed, resumed, corrupted, on a full disk. Processes of their own, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from millstream.audit import audit
from millstream.cli.main import app
from millstream.clock import RealClock
from millstream.errors import CheckpointError
from millstream.events import CheckpointFailed, CheckpointSealed, Resumed, RunEnded, Stepped
from millstream.events.sinks import MemorySink, read_events, read_history
from millstream.pipeline.state import Ledger, PipelineState
from millstream.run.checkpoint import CheckpointConfig, Checkpoints, RunState, find_newest, set_aside_newer, verify
from millstream.run.folder import RunFolder
from millstream.store import Row, Saved, blocks
from support.commands import start_command
from support.runs import (
    assert_clean,
    command,
    kill_at,
    metric_rows,
    resume,
    sealed_checkpoints,
    step_rows,
    steps_of,
    until,
)

STEPS = 24


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was killed after ten steps or so."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    process = start_command(command(run_dir, {"pipeline.steps": STEPS}))
    until(lambda: steps_of(run_dir) >= 10 and sealed_checkpoints(run_dir) > 1, process)
    process.kill()
    process.wait()
    assert_clean(run_dir)
    yield run_dir


def sealed_in(run_dir: Path) -> set[str]:
    return {event.digest for event in read_events(run_dir / "events.jsonl") if isinstance(event, CheckpointSealed)}


def copy_of(run_dir: Path, to: Path) -> Path:
    """With nothing in it that cannot be copied, although the run was killed."""
    return shutil.copytree(run_dir, to)


def test_a_killed_run_is_resumed_and_its_audit_is_clean(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    done = resume(run_dir)
    assert done.returncode == 0, done.stderr
    assert_clean(run_dir)
    assert done.stdout.index("sampled before: accuracy") < done.stdout.index("resumed from step"), "shown again"
    resumes = [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, Resumed)]
    assert len(resumes) == 1 and resumes[0].version > 0 and resumes[0].incarnation == 1
    steps = [event.version for event in read_history(run_dir / "events.jsonl") if isinstance(event, Stepped)]
    assert steps == list(range(1, STEPS + 1))
    assert [row["step"] for row in step_rows(run_dir)] == steps
    measured = [row["step"] for row in metric_rows(run_dir) if "eval/held_out/pass@1" in row]
    assert (measured[0], measured[-1]) == (0, STEPS) and measured.count(0) == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (
        summary["steps"] == STEPS
        and summary["rollouts_trained"] == STEPS * 16
        and summary["accuracy_before"] is not None
    )
    assert "is finished" in resume(run_dir).stderr, "a finished run is not run again"


@pytest.mark.parametrize(
    ("every", "num_sealed"),
    [
        pytest.param({"evaluation.every_steps": 2}, 2, id="an evaluation is due at every checkpoint"),
        pytest.param({"checkpoint.every_steps": 1000}, 1, id="the checkpoint of the start is the only one"),
    ],
)
def test_at_max_lag_zero_a_killed_and_resumed_run_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, every: dict[str, object], num_sealed: int
) -> None:
    (tmp_path / "mine.py").write_text("def reward(task, completion):\n    return float(len(completion) % 2)\n")
    changes: dict[str, object] = {"pipeline.max_lag": 0, "pipeline.steps": 12, "pipeline.filter_zero_signal": "true"}
    changes["reward.0.function"] = f"{tmp_path / 'mine.py'}:reward"  # some groups are filtered, and not nearly all
    changes |= every
    whole = start_command(command(tmp_path / "whole", changes))
    output = whole.communicate(timeout=200)[0]
    assert whole.returncode == 0, output
    kill_at(tmp_path / "cut", 5, changes, num_sealed=num_sealed)
    done = resume(tmp_path / "cut")
    assert done.returncode == 0, done.stderr
    assert_clean(tmp_path / "cut")
    ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("cut", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("cut", "whole")]
    for key in ("accuracy_before", "accuracy_after", "greedy_after", "groups_admitted", "rollouts_trained"):
        assert summaries[0][key] == summaries[1][key]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: flip(folder / "learner.pt"), "learner.pt is not as it was written"),
        (lambda folder: flip(folder / "rows.msgpack"), "rows.msgpack is not as it was written"),
        (lambda folder: os.truncate(folder / "learner.pt", 1000), "learner.pt has 1000 bytes instead of"),
        (lambda folder: (folder / "ledger.json").unlink(), "is not a complete checkpoint"),
        (lambda folder: os.truncate(folder / "manifest.json", 40), "is not a complete checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    killed: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    spoil(folders[-1])
    found, troubles = find_newest(run_dir, sealed_in(run_dir))
    assert found is not None and found.folder == folders[-2]
    assert len(troubles) == 1 and words in troubles[0] and folders[-1].name in troubles[0]
    set_aside_newer(found)
    assert (run_dir / "checkpoints" / f"{folders[-1].name}.corrupt").is_dir()


def test_a_run_is_resumed_from_the_checkpoint_before_a_damaged_one(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    *_, before, last = sorted((run_dir / "checkpoints").glob("step-*"))
    flip(last / "learner.pt")
    done = resume(run_dir)
    assert done.returncode == 0 and "learner.pt is not as it was written" in done.stderr
    assert_clean(run_dir)
    resumed = next(event for event in read_events(run_dir / "events.jsonl") if isinstance(event, Resumed))
    assert resumed.version == int(before.name.removeprefix("step-"))


def test_without_an_intact_checkpoint_nothing_is_changed_and_the_user_chooses(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    for folder in folders:
        flip(folder / "learner.pt")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is usable: .*learner.pt is not as .* To start again"
    ):
        find_newest(run_dir, sealed_in(run_dir))
    assert sorted((run_dir / "checkpoints").glob("step-*")) == folders


def test_a_checkpoint_of_before_rows_had_rewards_by_turn_is_refused_by_its_format(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    for manifest in (run_dir / "checkpoints").glob("*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(CheckpointError, match=r"has format 1; this version of Millstream reads 2.*To start again"):
        find_newest(run_dir, sealed_in(run_dir))


def test_a_checkpoint_of_another_run_is_not_taken(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    with pytest.raises(CheckpointError, match="is not a checkpoint of this run"):
        find_newest(run_dir, {"the digest of none of them"})


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":99999,"kind":"torn')
    done = resume(run_dir)
    assert done.returncode == 0, done.stderr
    assert_clean(run_dir)
    resumed = next(event for event in read_events(run_dir / "events.jsonl") if isinstance(event, Resumed))
    assert resumed.from_seq == -1


def test_sigterm_is_a_clean_stop_with_a_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"pipeline.steps": 100000, "checkpoint.every_steps": 100000}))
    until(lambda: steps_of(run_dir) >= 5, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and f"To resume the run:\n  millstream train --resume {run_dir}" in output
    assert "Traceback" not in output
    *_, last = read_events(run_dir / "events.jsonl")
    assert isinstance(last, RunEnded) and last.outcome == "Stopped" and last.version >= 5
    found, _ = find_newest(run_dir, sealed_in(run_dir))
    assert found is not None and found.manifest.version == last.version, "nothing that was trained is lost"
    assert_clean(run_dir)


def test_a_stop_does_not_wait_longer_than_its_grace_for_a_batch(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\n\nasync def reward(task, completion):\n    await asyncio.sleep(1000)\n    return 1.0\n"
    )
    changes: dict[str, object] = {
        "reward": f"[{{function='{tmp_path / 'slow.py'}:reward',timeout_s=2000}}]",
        "rollout.timeout_s": 3000,
        "checkpoint.grace_s": 1,
        "data.holdout": 0,
    }
    process = start_command(command(tmp_path / "run", changes))
    until(lambda: (tmp_path / "run/checkpoints/step-000000").is_dir(), process)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and "the checkpoint of step 0 is written" in output, output
    assert time.monotonic() - began < 30


def test_a_full_disk_at_the_checkpoint_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    limit = 1 << 20  # bytes of a file: the learner's state is larger, everything else is smaller
    process = start_command(command(run_dir, {"pipeline.steps": 8}), max_file_bytes=limit)
    output = process.communicate(timeout=120)[0]
    failed = [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, CheckpointFailed)]
    assert failed and {event.message for event in failed} == {"File too large"}
    assert "failed: File too large; the run continues" in output
    assert sum(isinstance(event, Stepped) for event in read_events(run_dir / "events.jsonl")) == 8, output
    left = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert left == ["step-000000"], (
        "the first is small, having no moments yet; nothing half written is left of the others"
    )


def refusal_of(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    return " ".join(result.output.split())


def test_a_config_that_was_edited_by_hand_is_found_by_the_audit_and_refused_at_a_resume_if_it_may_not_change(
    killed: Path, tmp_path: Path
) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    config = run_dir / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("max_lag = 2", "max_lag = 4"))
    assert config.read_text() != text
    findings = [finding for finding in audit(run_dir).findings if finding.rule == "config"]
    assert len(findings) == 2, "its digest, and max_lag of run_started"
    config.write_text(text.replace("max_lag = 2", "max_lag = 4").replace("seed = 0", "seed = 1"))
    refusal = refusal_of("train", "--resume", str(run_dir))
    assert "config.toml was edited: seed=1 does not go with --resume, and the run has 0" in refusal
    events = run_dir / "events.jsonl"
    events.write_bytes(re.sub(rb',"text":"(?:[^"\\]|\\.)*"', b"", events.read_bytes()))  # a log of an earlier version
    refusal = refusal_of("train", "--resume", str(run_dir))
    assert "config.toml is not as the run wrote it: it was edited, and the log has no copy" in refusal
    config.write_text(text)
    assert_clean(run_dir)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize(
    "garbage", [b"\0" * 80 + b"\n", b'{"seq":1,"kind":"step', b'{"seq":-1}\n', b"[" * 5000 + b"\n"]
)
def test_a_damaged_line_in_the_middle_of_a_file_of_a_run_is_named_in_one_line(
    killed: Path, tmp_path: Path, name: str, garbage: bytes
) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    lines = (run_dir / name).read_bytes().splitlines(keepends=True)
    (run_dir / name).write_bytes(b"".join([*lines[:2], garbage, *lines[2:]]))
    refusal = refusal_of("train", "--resume", str(run_dir))
    assert f"{run_dir / name}, line 3 cannot be read: " in refusal and f"millstream audit {run_dir}" in refusal
    if name == "events.jsonl":
        assert f"{run_dir / name}, line 3 cannot be read: " in refusal_of("report", str(run_dir))
    assert audit(run_dir).findings, "the audit lists it"


def test_two_processes_cannot_write_to_one_run(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    ours = RunFolder(run_dir)
    ours.lock()
    other = resume(run_dir)
    assert other.returncode == 1 and "is active" in other.stderr
    ours.unlock()


def test_checkpoints_are_few_intact_and_in_the_log(killed: Path) -> None:
    folders = sorted((killed / "checkpoints").glob("step-*"))
    assert 1 <= len(folders) <= 3, "the newest two, and perhaps one about to be removed"
    sealed = {e.version: e.digest for e in read_events(killed / "events.jsonl") if isinstance(e, CheckpointSealed)}
    for folder in folders:
        found = verify(folder)
        assert sealed[found.manifest.version] == found.digest


def test_rows_come_back_with_the_types_and_shapes_they_had() -> None:
    columns = {
        "tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
        "mask": np.array([True, False]),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "reward": 0.5,
        "name": "a",
    }
    row = Row(row_id=3, group_id=7, columns=columns)
    saved = Saved(rows=(row,), is_closed={7: True, 8: False}, acknowledged={"settle": (7,)})
    again = blocks.decode_snapshot(blocks.encode_snapshot(saved))
    assert again.is_closed == saved.is_closed and again.acknowledged == saved.acknowledged
    for name, value in columns.items():
        found = again.rows[0].columns[name]
        assert type(found) is type(value)
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype and found.shape == value.shape and np.array_equal(found, value)
            assert found.flags.writeable
        else:
            assert found == value


def test_the_commands_that_read_a_run_say_what_they_find_and_exit_accordingly(killed: Path, tmp_path: Path) -> None:
    run_dir = copy_of(killed, tmp_path / "run")
    clean = CliRunner().invoke(app, ["audit", str(run_dir)])
    assert clean.exit_code == 0 and "clean" in clean.output
    as_json = json.loads(CliRunner().invoke(app, ["audit", str(run_dir), "--json"]).output)
    assert as_json["findings"] == [] and as_json["checks"] > 100
    report = CliRunner().invoke(app, ["report", str(run_dir)])
    assert report.exit_code == 0 and "no bias found" in report.output and "aborted" in report.output
    assert {test["verdict"] for test in json.loads(CliRunner().invoke(app, ["report", str(run_dir), "--json"]).output)["tests"]} <= {"no bias found", "not tested"}  # fmt: skip
    lines = (run_dir / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines[:50] + lines[51:]))
    guilty = CliRunner().invoke(app, ["audit", str(run_dir)])
    assert guilty.exit_code == 1 and "seq" in guilty.output


def test_a_checkpoint_is_due_by_time_or_by_steps_and_never_twice_for_one_step(tmp_path: Path) -> None:
    class Hands:
        time = 0.0

        def now(self) -> float:
            return self.time

    def checkpoints(clock: Hands, **settings: object) -> Checkpoints:
        return Checkpoints(
            tmp_path / "checkpoints",
            CheckpointConfig(**settings),  # type: ignore[arg-type]
            last_step=100,
            clock=clock,
            sink=MemorySink(),
            last_seq=lambda: 0,
            sync=lambda: None,
            run_state=lambda: RunState(run_id="", data_digest="", generators={}),
        )

    clock = Hands()
    by_time = checkpoints(clock, every_s=10.0)
    assert by_time.is_due(0, is_last=False), "one before the first step"
    by_time.resume_from(0)
    assert not by_time.is_due(0, is_last=True) and not by_time.is_due(1, is_last=False)
    clock.time = 9.9
    assert (
        not by_time.is_due(5, is_last=False) and by_time.is_due(5, is_last=True) and by_time.is_due(100, is_last=False)
    )
    clock.time = 10.0
    assert by_time.is_due(5, is_last=False)
    by_steps = checkpoints(clock, every_s=None, every_steps=3)
    by_steps.resume_from(0)
    assert [version for version in range(1, 10) if by_steps.is_due(version, is_last=False)] == [3, 6, 9]


def test_the_last_checkpoint_is_written_even_if_the_waiter_is_cancelled(tmp_path: Path) -> None:
    class Slow:
        def write(self, folder: Path) -> None:
            time.sleep(0.3)
            (folder / "learner.pt").write_bytes(b"x")

    async def program() -> None:
        checkpoints = Checkpoints(
            tmp_path / "checkpoints",
            CheckpointConfig(),
            last_step=1,
            clock=RealClock(),
            sink=MemorySink(),
            last_seq=lambda: 0,
            sync=lambda: None,
            run_state=lambda: RunState(run_id="", data_digest="", generators={}),
        )
        ledger = Ledger(version=0, next_group=0, groups={}, vacant=[], num_replaced=0, num_failed_in_a_row=0)
        rows = Saved(rows=(), is_closed={}, acknowledged={})
        await checkpoints.keep(PipelineState(ledger, rows), 0, Slow(), 0.0)
        closing = asyncio.create_task(checkpoints.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled() and checkpoints.version is None
        await checkpoints.close()
        assert checkpoints.version == 0

    asyncio.run(program())
    assert verify(tmp_path / "checkpoints/step-000000").manifest.version == 0
