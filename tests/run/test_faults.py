"""Whatever hangs is named, within its deadline: an engine, a reward, a blocked event loop, a full store."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from millstream.errors import StallError
from millstream.events import Event, RolloutFailed, RunEnded, Stalled
from millstream.events.sinks import JsonlSink, LineFile, MemorySink, Tee, read_events
from millstream.pipeline.pipeline import Pipeline
from millstream.store.memory import MemoryStore
from support.commands import Command, start_command
from support.processes import workers
from support.runs import assert_clean, command, resume, steps_of, until
from support.simulated import Diary, World, simulate


@pytest.mark.usefixtures("own_warm_process")
def test_an_engine_that_stops_answering_is_replaced_by_name_and_the_run_continues(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"engine.process": "true", "engine.answer_s": 4, "pipeline.steps": 12}))
    until(lambda: steps_of(run_dir) >= 3, process)
    engine, _ = workers(process.pid)  # then the learner
    os.kill(engine, signal.SIGSTOP)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "engine has left: engine broke: it has said nothing for 4 s while" in " ".join(output.split()), output
    assert not Path(f"/proc/{engine}").exists(), "the stopped process was not left behind"
    *_, last = read_events(run_dir / "events.jsonl")
    assert isinstance(last, RunEnded) and last.outcome == "finished"
    assert_clean(run_dir)


def test_a_run_whose_engine_can_never_work_ends_at_once_with_the_reason_from_its_process(tmp_path: Path) -> None:
    process = start_command(command(tmp_path / "run", {"engine.process": "true", "engine.slots": 2 * 10**12}))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and output.count("set engine.slots lower") == 1, output
    assert "Traceback" not in output and "exit code" not in output and "has left" not in output, output


def test_a_reward_that_hangs_for_one_prompt_costs_its_groups_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import time\n\ndef reward(task, completion):\n"
        "    if task.prompt.startswith('7'):\n        time.sleep(1e6)\n    return float(len(completion) % 2)\n"
    )
    reward = f"[{{function='{tmp_path / 'mine.py'}:reward',timeout_s=0.3}}]"
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"reward": reward, "pipeline.steps": 12}))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    failures = [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, RolloutFailed)]
    assert failures and all("mine.py:reward took longer than 0.3 s" in failure.message for failure in failures)
    assert_clean(run_dir)


def test_an_async_reward_that_blocks_the_event_loop_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import time\n\nasync def reward(task, completion):\n    time.sleep(1e6)\n    return 1.0\n"
    )
    reward = f"[{{function='{tmp_path / 'mine.py'}:reward'}}]"
    run_dir = tmp_path / "run"
    changes = {"reward": reward, "pipeline.stall_s": 1, "pipeline.deadline_s": 4, "data.holdout": 0}
    alert = f"echo $MILLSTREAM_ALERT $MILLSTREAM_ALERT_NAME >> {tmp_path / 'alerts'}"
    process = start_command(command(run_dir, {**changes, "alerts.command": f"'{alert}'"}))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    place = f"by reward ({tmp_path / 'mine.py'}, line 4: time.sleep(1e6))"
    assert "StallError: the event loop has been blocked for" in output and place in output, output
    assert "To resume the run:\n  millstream train --resume" in output
    stacks = (run_dir / "stacks.txt").read_text()
    assert "time.sleep(1e6)" in stacks and "waits, the longest first:" in stacks and "for reward" in stacks
    events = list(read_events(run_dir / "events.jsonl"))
    assert any(isinstance(event, Stalled) and event.owner == "the event loop" for event in events)
    assert isinstance(events[-1], RunEnded) and events[-1].outcome == "StallError"
    assert (tmp_path / "alerts").read_text() == "stall the event loop\nfailure StallError\n"


def has_dumps(stacks: Path, number: int) -> bool:
    return stacks.exists() and stacks.read_text().count("coroutines:") >= number


def test_on_sigusr1_a_run_writes_what_everything_is_doing_and_continues(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import asyncio\n\nasync def reward(task, completion):\n    await asyncio.sleep(0.2)\n    return len(completion) % 2\n"
    )
    run_dir = tmp_path / "run"
    reward = f"[{{function='{tmp_path / 'mine.py'}:reward'}}]"
    process = start_command(command(run_dir, {"reward": reward, "pipeline.steps": 40}))
    until(lambda: steps_of(run_dir) >= 2, process)
    stacks, text = run_dir / "stacks.txt", ""
    wanted = ("SIGUSR1", "train:", "thread learner", "mine.py:reward")  # the last: what rollouts wait for is named
    for number in range(1, 6):  # a loop that is at work just then waits for nothing
        process.send_signal(signal.SIGUSR1)
        until(partial(has_dumps, stacks, number), process, seconds=20)
        text = stacks.read_text()
        if all(word in text for word in wanted):
            break
    assert [word for word in wanted if word not in text] == []
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output


BUSY = """
import asyncio, signal, sys, threading, time
from pathlib import Path
from millstream.clock import RealClock
from millstream.events.sinks import MemorySink
from millstream.pipeline.waits import Waits
from millstream.run.watchdog import Watchdog

def deep(count):
    return 0 if not count else 1 + deep(count - 1)

def counted(count):
    if count:
        yield from counted(count - 1)
    yield count

def work():
    while True:
        deep(30), list(counted(20)), (lambda: [one for one in range(5)])()

async def run():
    clock, sink = RealClock(), MemorySink()
    waits = Waits(clock=clock, sink=sink, stall_s=60.0, deadline_s=60.0)
    path = Path(sys.argv[1])
    watchdog = Watchdog(path, waits, clock=clock, sink=sink, stall_s=60.0, deadline_s=60.0, end=print)
    watchdog.start()
    sys.setswitchinterval(1e-5)
    for _ in range(6):
        threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        deep(20)
    watchdog.stop()

asyncio.run(run())
"""


def test_sigusr1_never_ends_a_process_whose_threads_are_at_work(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path / "stacks.txt")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.0003)
    assert process.wait(60) == 0
    assert "in deep" in (tmp_path / "stacks.txt").read_text()


HANGING = """
import ctypes
from millstream.rpc.serve import write_stacks_on_signal

def hang(libc, mutex):
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)

write_stacks_on_signal()
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
hang(libc, mutex)
"""


def test_sigusr1_writes_where_a_worker_hangs_outside_of_python() -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGUSR1)
    lines = [process.stderr.readline() for _ in range(2)]
    process.kill()
    process.communicate()
    assert b"most recent call first" in lines[0] and b"in hang" in lines[1], lines


def test_a_store_without_room_becomes_an_error_that_names_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.simulated.MemoryStore", lambda tasks: MemoryStore(tasks, capacity_rows=3))
    with pytest.raises(StallError, match=r"group \d+ has waited 50 s for room in the store"):
        simulate(World(group_size=4, deadline_s=50.0))


def test_a_full_disk_ends_with_what_could_not_be_written_and_what_to_type(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    limit = 100_000  # bytes of a file: less than the events and the model need, enough for everything before
    process = start_command(command(run_dir, {"pipeline.steps": 12}), max_file_bytes=limit)
    output = " ".join(process.communicate(timeout=120)[0].split())
    assert process.returncode == 1 and "Traceback" not in output, output
    assert "OutputError: cannot write" in output and f"millstream train --resume {run_dir}" in output
    assert "File too large" in output
    done = resume(run_dir)
    assert done.returncode == 0, done.stderr
    assert_clean(run_dir)


def test_events_that_find_no_room_wait_in_memory_and_are_written_when_there_is_some(tmp_path: Path) -> None:
    full = LineFile(Path("/dev/full"), bytes)
    full.append(b"one\n")
    with pytest.raises(OSError, match="No space left"):
        full.flush()
    full.append(b"two\n")
    full._file = (tmp_path / "file").open("ab", buffering=0)  # room again
    full.close()
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\n"


def test_sigterm_to_the_whole_process_group_is_a_clean_stop_too(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changes = {"engine.process": "true", "pipeline.steps": 100000, "checkpoint.every_steps": 100000}
    process = start_command(command(run_dir, changes))  # its own group: the process that a shell would have started
    until(lambda: steps_of(run_dir) >= 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    *_, last = read_events(run_dir / "events.jsonl")
    assert isinstance(last, RunEnded) and f"the checkpoint of step {last.version} is written" in output
    assert last.version >= 3


@pytest.mark.slow
def test_a_run_that_was_suspended_with_the_machine_continues(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"pipeline.steps": 60, "pipeline.stall_s": 1, "pipeline.deadline_s": 3}))
    until(lambda: steps_of(run_dir) >= 2, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output


def test_a_terminal_that_stands_still_holds_nothing_up(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4000)  # nearly full, and not read
    with Path(os.devnull).open("w") as nowhere:
        process = Command(command(run_dir, {"pipeline.steps": 10}), writer, nowhere.fileno())
    until(lambda: steps_of(run_dir) >= 10, process)
    process.kill()
    process.wait()
    os.close(reader)
    os.close(writer)


def test_a_stop_during_an_evaluation_between_two_steps_keeps_the_last_step(tmp_path: Path) -> None:
    """On the virtual clock: the stop comes while what follows a step is at work."""
    holder: list[Pipeline] = []

    async def evaluate(version: int) -> None:
        await asyncio.sleep(1.0)
        if version == 3:
            holder[0].stop()

    diary = OnlyAtTheEnd()
    simulate(World(max_lag=0, steps=8), after_step=evaluate, on_pipeline=holder.append, keeper=diary)
    assert [kept.standing.ledger.version for kept in diary.kept] == [3]


class OnlyAtTheEnd(Diary):
    def is_due(self, version: int, *, is_last: bool) -> bool:
        return is_last


def test_text_that_is_not_unicode_is_written_down_all_the_same(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    failed = RolloutFailed(
        at=0.0, group_id=1, member=0, attempt=0, error="E", message="half a character: \udcff", is_final=True
    )
    Tee([sink]).emit(failed)
    sink.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert isinstance(event, RolloutFailed) and event.message == "half a character: ?"


def test_a_partial_last_line_of_any_length_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long = b'{"seq":0,"kind":"run_ended","at":0,"outcome":"' + b"x" * (3 << 20) + b'","version":0}\n'
    path.write_bytes(long + b'{"seq":1,"kind":"run_en')
    sink = JsonlSink(path)
    assert sink.last_seq == 0
    sink.close()
    assert path.read_bytes() == long


def test_a_failing_sink_of_the_users_own_is_left_out_and_the_books_are_kept(tmp_path: Path) -> None:
    class ConnectionBroken:
        def emit(self, event: Event) -> None:
            raise RuntimeError("no screen")

    sink = MemorySink()
    tee = Tee([sink], [ConnectionBroken()])
    for number in range(3):
        tee.emit(RunEnded(at=0.0, outcome="x", version=number))
    tee.close()
    assert len(sink.events) == 3
