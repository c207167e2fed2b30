"""Replicas in processes of their own, killed with SIGKILL in the middle of what they do."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import ProcessHost
from millstream.errors import EngineMisconfigured
from millstream.events import ReplicaLeft, RunEnded, WeightsLoaded
from millstream.events.sinks import MemorySink, read_events
from millstream.run.build import build_engine
from millstream.serving.fleet import Fleet
from millstream.serving.router import Router
from millstream.types import Completion, Request
from support.commands import start_command
from support.processes import workers
from support.runs import assert_clean, command, steps_of, until
from support.tiny import make, prompts, request

NUM_REQUESTS = 12


def asked(temperature: float) -> list[Request]:
    return [request(n, p, max_tokens=200, temperature=temperature) for n, p in enumerate(prompts(NUM_REQUESTS))]


async def answers(router: Router, temperature: float) -> list[Completion]:
    return list(await asyncio.gather(*(router.generate(one, floor=0) for one in asked(temperature))))


async def at_work(router: Router) -> TorchEngine:
    """The first replica, when each of its requests has some tokens and none has all."""
    first = router.engines[0]
    assert isinstance(first, TorchEngine)

    def is_at_work() -> bool:
        own = [flight for flight in router._requests.values() if flight.engine is first]
        return bool(own) and all(flight.num_sampled >= 20 for flight in own)

    while not is_at_work():
        await asyncio.sleep(0.002)
    return first


async def drained(router: Router) -> list[Completion]:
    """Sampled, while a replica is drained; then it joins again."""
    turns = asyncio.create_task(answers(router, 1.0))
    first = await at_work(router)
    await router.drain(first.name)
    assert first.stats()[:2] == (0, 0) and not turns.done()
    found = await turns
    router.join(first)
    return found


async def killed(router: Router) -> list[Completion]:
    """Greedy, while a replica is killed."""
    turns = asyncio.create_task(answers(router, 0.0))
    await asyncio.sleep(0)
    first = await at_work(router)
    assert isinstance(first._host, ProcessHost)
    first._host.remote.kill()
    return await turns


@pytest.mark.slow
def test_a_replica_that_is_drained_or_killed_in_the_middle_changes_no_answer() -> None:
    sink = MemorySink()

    async def play() -> list[list[Completion]]:
        config = EngineConfig(replicas=2, slots=8, process=True, answer_s=60.0)
        model, clock = make("qwen3"), RealClock()
        fleet = Fleet(
            lambda name: build_engine(config, model, clock=clock, sink=sink, name=name),
            config.replicas,
            is_queueing=True,
            patience_s=config.answer_s,
            clock=clock,
            sink=sink,
        )
        router = fleet.router
        try:
            assert [engine.name for engine in router.engines] == ["engine-0", "engine-1"]
            undisturbed = [await answers(router, temperature) for temperature in (1.0, 0.0)]
            return [*undisturbed, await drained(router), await killed(router)]
        finally:
            await fleet.close()

    sampled, greedy, while_drained, while_killed = asyncio.run(asyncio.wait_for(play(), 120))
    drain, death = sink.of(ReplicaLeft)
    assert drain.why == "it was drained" and "exit code -9" in death.why
    assert drain.num_moved > 0 < death.num_moved and drain.num_left == death.num_left == 1
    for found, expected in ((while_drained, sampled), (while_killed, greedy)):
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        for one, other in zip(found, expected, strict=True):
            assert len(one.logprobs) == len(one.versions) == len(one.tokens) == 200
            assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) < 1e-3


TOO_LARGE = {
    "in its first step": (
        EngineConfig(process=True, slots=2 * 10**12),
        r"the cache would have .* GB, and cpu has .* GB: set engine.slots lower",
    ),
    "while it is built": (
        EngineConfig(process=True, slots=10**8, cache="pages", cache_gb=1e6),
        r"the cache would have .* GB, and cpu has .* GB: set engine.cache_gb lower",
    ),
}


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("when", TOO_LARGE)
def test_an_engine_that_can_never_work_is_not_replaced_and_its_own_reason_is_the_error(when: str, num: int) -> None:
    config, reason = TOO_LARGE[when]
    made: list[str] = []
    clock, sink = RealClock(), MemorySink()

    def new(name: str) -> TorchEngine:
        made.append(name)
        engine = build_engine(config, make("qwen3"), clock=clock, sink=sink, name=name)
        assert isinstance(engine, TorchEngine)
        return engine

    async def play() -> None:
        fleet = Fleet(new, num, is_queueing=True, patience_s=60.0, clock=clock, sink=sink, is_lone_replaced=True)
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        try:
            with pytest.raises(EngineMisconfigured, match=rf"^engine(-\d)? broke: .*{reason}"):
                await fleet.router.generate(request(0, prompts(1)[0]), floor=0)
        finally:
            replacing.cancel()
            await fleet.close()

    asyncio.run(play())
    assert len(made) == num


@pytest.mark.slow
@pytest.mark.usefixtures("own_warm_process")
def test_a_run_survives_the_death_of_one_of_its_replicas(tmp_path: Path) -> None:
    """A whole run, in processes: most of its time is that of interpreters that import torch."""
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"engine.process": "true", "engine.replicas": 2, "pipeline.steps": 40}))
    until(lambda: steps_of(run_dir) >= 3, process)
    first, second, _ = workers(process.pid)  # then the learner
    subprocess.run(["kill", "-KILL", str(first)], check=True)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "engine-0 has left: engine-0 broke: its process ended with exit code -9" in output
    events = list(read_events(run_dir / "events.jsonl"))
    assert [event.engine for event in events if isinstance(event, ReplicaLeft)] == ["engine-0"]
    assert {event.engine for event in events if isinstance(event, WeightsLoaded)} == {"engine-0", "engine-1"}
    assert isinstance(events[-1], RunEnded) and events[-1].outcome == "finished" and events[-1].version == 40
    assert_clean(run_dir)
    assert not Path(f"/proc/{second}").exists()
