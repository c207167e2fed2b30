"""`train` and `resume` where an event loop is running already: a notebook, a coroutine. Nothing is left behind by what fails."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from pathlib import Path

import pytest

import millstream
from millstream.errors import ConfigError, Stopped
from millstream.events import Event, Stepped
from millstream.run.own_thread import RunThread
from millstream.types import Task
from support.runs import assert_clean
from support.stage_runs import config
from support.stop_at import PromptSink

SMALL = ("pipeline.steps=4", "pipeline.groups_per_step=4", "data.holdout=0", "data.size=60")


def ones(task: Task, completion: str) -> float:
    return completion.count("1") / 4


class AfterSteps(PromptSink):
    """Calls a function once: after this many steps of the run that it watches. Steps of milliseconds pass before a signal
    is heard, so where a resumed run begins is not known."""

    def __init__(self, steps: int, call: object) -> None:
        self._left = steps
        self._call = call

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._left -= 1
            if self._left == 0:
                self._call()  # type: ignore[operator]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_train_stops_and_resumes_inside_a_running_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is passed on to the thread of the run, and the handlers of before are restored."""
    before = signal.getsignal(signal.SIGINT)

    async def cell() -> None:
        with pytest.raises(Stopped, match="the checkpoint of step"):
            millstream.train(
                config(tmp_path, *SMALL, "pipeline.steps=400"), reward=ones, sinks=[AfterSteps(2, interrupt)]
            )
        millstream.resume(tmp_path / "run", reward=ones, sinks=[AfterSteps(2, interrupt)])

    with pytest.raises(Stopped):
        asyncio.run(cell())
    assert signal.getsignal(signal.SIGINT) is before
    assert_clean(tmp_path / "run")
    printed = capsys.readouterr()
    assert "step 1/400  reward" in printed.err and " left" in printed.err and not printed.out
    assert "stopping after the current batch" in printed.err


def test_an_interrupt_that_is_no_signal_stops_the_run_and_another_one_can_be_started(tmp_path: Path) -> None:
    """As a debugger raises it, in the thread that waits. The run's own thread ends."""
    waiting = threading.get_ident()

    def raise_there() -> None:
        raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(waiting), ctypes.py_object(KeyboardInterrupt)
        )
        assert raised == 1

    async def cell() -> None:
        with pytest.raises(Stopped, match="the checkpoint of step"):
            millstream.train(
                config(tmp_path, *SMALL, "pipeline.steps=400"), reward=ones, sinks=[AfterSteps(2, raise_there)]
            )
        assert not [thread for thread in threading.enumerate() if isinstance(thread, RunThread)]
        assert millstream.train(config(tmp_path / "second", *SMALL), reward=ones).summary.steps == 4

    asyncio.run(cell())


def test_a_kernel_that_does_not_wake_its_loop_stops_the_run_that_it_awaits(tmp_path: Path) -> None:
    """ipykernel cancels the cell's task by `call_soon`, from its signal handler: the loop must wake up by itself."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(
            millstream.train_async(
                config(tmp_path, *SMALL, "pipeline.steps=400"),
                reward=ones,
                sinks=[AfterSteps(2, interrupt)],
                progress=False,
            )
        )
        signal.signal(signal.SIGINT, lambda number, frame: loop.call_soon(running.cancel))
        with pytest.raises(asyncio.CancelledError):
            await running

    before = signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(program())
    finally:
        signal.signal(signal.SIGINT, before)


def test_train_returns_its_result_inside_a_running_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def cell() -> None:
        result = millstream.train(config(tmp_path, *SMALL), reward=ones, progress=False)
        assert result.summary.steps == 4

    asyncio.run(cell())
    assert "step" not in capsys.readouterr().err


def test_the_callers_loop_continues_while_a_run_is_awaited(tmp_path: Path) -> None:
    async def program() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        result = await millstream.train_async(config(tmp_path, *SMALL), reward=ones, progress=False)
        ticking.cancel()
        assert result.summary.steps == 4 and ticks > 5

    asyncio.run(program())


def test_a_cancelled_task_stops_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    async def program() -> None:
        loop, at_step = asyncio.get_running_loop(), asyncio.Event()
        sinks = [AfterSteps(2, lambda: loop.call_soon_threadsafe(at_step.set))]
        running = asyncio.create_task(
            millstream.train_async(config(tmp_path, *SMALL, "pipeline.steps=400"), reward=ones, sinks=sinks)
        )
        await at_step.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert list((tmp_path / "run/checkpoints").glob("step-*"))
        again = [AfterSteps(2, lambda: loop.call_soon_threadsafe(resuming.cancel))]
        resuming = asyncio.create_task(millstream.resume_async(tmp_path / "run", reward=ones, sinks=again))
        with pytest.raises(asyncio.CancelledError):
            await resuming

    asyncio.run(program())
    assert_clean(tmp_path / "run")


def test_a_start_that_fails_inside_a_running_loop_raises_its_error_and_leaves_no_folder(tmp_path: Path) -> None:
    async def cell() -> None:
        with pytest.raises(ConfigError, match="no toy task"):
            millstream.train(config(tmp_path, *SMALL, "data.toy=nothing"), reward=ones)
        with pytest.raises(ConfigError):
            await millstream.train_async(config(tmp_path, *SMALL, "data.toy=nothing"), reward=ones)

    asyncio.run(cell())
    assert not (tmp_path / "run").exists()


def test_a_model_is_evaluated_inside_a_running_loop(tmp_path: Path) -> None:
    async def cell() -> None:
        assert 0 <= millstream.evaluate(config(tmp_path, *SMALL, "data.holdout=8")).accuracy <= 1

    asyncio.run(cell())
