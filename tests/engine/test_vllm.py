"""A real vLLM behind the seam: the same tokens and log-probabilities as transformers, and the right version for every token.

Two engines, each started once: one with weights in shared memory, which computes keys and values again after an update; one with
weights in files, which keeps them, and (on a CPU) is split over two workers. vLLM takes long to start, so that tests that end an
engine are at the end of this file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch
from msgspec import structs
from transformers import DynamicCache

from millstream.clock import RealClock
from millstream.engine import Engine
from millstream.engine.native.lines import LineEngine
from millstream.errors import EngineError, EngineGone, RequestRefused
from millstream.events import Span
from millstream.events.sinks import MemorySink
from millstream.testing.engine import EngineSuite
from millstream.types import Completion, Finish, Sampling
from support.tiny import SHAPE, VOCABULARY, plain, prompts, request
from support.vllm_engines import DEVICE, SLOTS, Started, model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

T = TypeVar("T")
CLOSE = 1e-4 if DEVICE == "cpu" else 2e-3
"""Of log-probabilities in float32. A GPU multiplies in TensorFloat-32 here and there, and adds in another order."""


STARTED: dict[str, Started] = {}


def start(kind: Literal["shared", "file"]) -> Started:
    if kind not in STARTED:
        STARTED[kind] = Started(kind)
    return STARTED[kind]


@pytest.fixture(params=["shared", "file"])
def started(request: pytest.FixtureRequest) -> Started:
    one = start(request.param)
    run(one.load(0))
    return one


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    for one in STARTED.values():
        asyncio.run(one.engine.close())


class TestVllmWithSharedMemory(EngineSuite):
    vocabulary, context, longest = VOCABULARY, SHAPE["max_position_embeddings"], 230
    kind: Literal["shared", "file"] = "shared"
    is_shared = True
    limit_s = 300.0
    continues_requests = False  # with new randomness: see below
    cache_after_load = "computed again"
    test_closing_ends_what_is_in_flight_as_aborted_and_refuses_what_comes_later = None  # below: it takes a start

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return CLOSE

    async def make_engine(self) -> Engine:
        await start(self.kind).load(0)
        return start(self.kind).engine

    def make_reference(self, number: int) -> Any:
        return twin_of(number)

    @classmethod
    def teardown_class(cls) -> None:
        """The engine goes on."""
        if cls._runner is not None:
            cls._runner.close()
        cls._runner = cls._engine = None


class TestVllmWithFiles(TestVllmWithSharedMemory):
    kind = "file"
    cache_after_load = "kept"


def run(program: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(program, 300))


@torch.no_grad()
def teacher_forced(twin: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]])
    logprobs = torch.log_softmax(twin(ids).logits[0].float(), -1)
    return logprobs[torch.arange(len(prompt) - 1, ids.shape[1] - 1), torch.tensor(tokens)]


@torch.no_grad()
def over_kept_cache(twins: dict[int, Any], prompt: tuple[int, ...], tokens: tuple[int, ...], versions: Any) -> Any:
    """Every token under the version recorded for it, over keys and values as they were computed at their time."""
    cache, fed, found = DynamicCache(), list(prompt), []
    for token, version in zip(tokens, versions, strict=True):
        logits = twins[version](torch.tensor([fed]), past_key_values=cache).logits[0, -1]
        found.append(float(torch.log_softmax(logits.float(), -1)[token]))
        fed = [token]
    return torch.tensor(found)


@cache
def twin_of(seed: int = 0) -> Any:
    return plain(model(seed))


async def some_tokens(started: Started, count: int) -> None:
    """Until so many more were generated."""
    before = started.engine.stats().tokens_generated
    while started.engine.stats().tokens_generated < before + count:
        await asyncio.sleep(0.01)


def long(number: int, max_tokens: int = 240) -> Any:
    return request(number, (4, 5, 6), max_tokens=max_tokens)


def test_sampling_frequencies_fit_the_distribution_and_its_log_probabilities(started: Started) -> None:
    sampling = Sampling(max_tokens=1, temperature=0.25, top_k=12, top_p=0.85)
    prompt, number = (4, 5, 6), 3000

    async def program() -> list[Completion]:
        asked = [structs.replace(request(n, prompt), sampling=sampling) for n in range(number)]
        return await asyncio.gather(*map(started.engine.generate, asked))

    found = run(program())
    logits = twin_of()(torch.tensor([prompt])).logits[0, -1].detach()
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    order = probabilities.argsort(descending=True).tolist()[: sampling.top_k]
    total, kept = float(probabilities[order].sum()), list[int]()
    for token in order:
        if sum(float(probabilities[one]) for one in kept) / total < sampling.top_p:
            kept.append(token)
    left = torch.zeros_like(probabilities)
    left[kept] = probabilities[kept]
    left /= left.sum()
    assert 4 <= len(kept) < sampling.top_k, "both limits are in force"
    counts = torch.bincount(torch.tensor([one.tokens[0] for one in found]), minlength=VOCABULARY)
    assert int(counts[kept].sum()) == number, "what is cut off is never sampled"
    chi_square = float(((counts[kept] - number * left[kept]) ** 2 / (number * left[kept])).sum())
    assert chi_square < 31.3, "above the 99.9% quantile of chi-square with 11 degrees of freedom"
    assert all(abs(one.logprobs[0] - float(left[one.tokens[0]].log())) < 10 * CLOSE for one in found)


def test_a_continued_request_goes_on_with_randomness_of_its_own(started: Started) -> None:
    async def program() -> tuple[Completion, list[Completion], Completion]:
        whole = await started.engine.generate(request(0, (4, 5, 6), max_tokens=20))
        tokens = (4, 5, 6, *whole.tokens[:7])
        rest = structs.replace(request(0, tokens, max_tokens=13), num_sampled=7)
        again = [await started.engine.generate(rest) for _ in range(2)]
        return whole, again, await started.engine.generate(structs.replace(rest, num_sampled=0))

    whole, (rest, again), afresh = run(program())
    assert rest.tokens == again.tokens and len(rest.tokens) == 13
    assert rest.tokens != afresh.tokens, "not the numbers that the first tokens were drawn with"
    expected = teacher_forced(twin_of(), (4, 5, 6, *whole.tokens[:7]), rest.tokens)
    assert torch.allclose(torch.tensor(rest.logprobs), expected, atol=CLOSE)


def test_after_swaps_in_flight_every_token_has_the_log_probability_of_the_version_recorded_for_it(
    started: Started,
) -> None:
    async def program() -> tuple[list[Completion], dict[int, int]]:
        seeds = {started.engine.version: 0}
        flights = [asyncio.ensure_future(started.engine.generate(long(n))) for n in range(4)]
        for seed in (1, 2, 3, 4):
            await some_tokens(started, 60)
            seeds[await started.load(seed)] = seed
        return await asyncio.gather(*flights), seeds

    completions, seeds = run(program())
    twins = {version: twin_of(seed) for version, seed in seeds.items()}

    def expected(completion: Completion, versions: tuple[int, ...]) -> torch.Tensor:
        if started.keeps_cache:
            return torch.as_tensor(over_kept_cache(twins, (4, 5, 6), completion.tokens, versions))
        rows = {version: teacher_forced(twin, (4, 5, 6), completion.tokens) for version, twin in twins.items()}
        return torch.stack([rows[version][at] for at, version in enumerate(versions)])

    for completion in completions:
        versions, found = completion.versions, torch.tensor(completion.logprobs)
        assert len(set(versions)) >= 3 and versions == tuple(sorted(versions))
        assert torch.allclose(found, expected(completion, versions), atol=CLOSE)
        later, earlier = (versions[0], *versions[:-1]), (*versions[1:], versions[-1])
        for wrong in (later, earlier):  # a label that is off by one token is noticed
            assert not torch.allclose(found, expected(completion, wrong), atol=10 * CLOSE)


def test_a_request_that_begins_after_a_swap_never_sees_a_cache_of_older_weights(started: Started) -> None:
    prompt = prompts(1, seed=5)[0] * 8  # several blocks of the cache

    async def program() -> list[Completion]:
        found = []
        for seed in (1, 2):
            await started.load(seed)
            in_flight = asyncio.ensure_future(started.engine.generate(request(1, prompt, max_tokens=60)))
            found += [await started.engine.generate(request(0, prompt, max_tokens=10)) for _ in range(2)]
            await in_flight
        return found

    for seed, completion in zip((1, 1, 2, 2), run(program()), strict=True):
        expected = teacher_forced(twin_of(seed), prompt, completion.tokens)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=CLOSE)


def test_a_request_that_waits_during_a_swap_is_computed_under_the_new_weights_alone(started: Started) -> None:
    """More requests than there are slots, with a prompt that others of the old weights share."""
    prompt = prompts(1, seed=6)[0] * 8

    async def program() -> list[Completion]:
        await started.load(3)
        flights = [
            asyncio.ensure_future(started.engine.generate(request(n, prompt, max_tokens=60))) for n in range(3 * SLOTS)
        ]
        await some_tokens(started, 4 * SLOTS)
        await started.load(4)
        return await asyncio.gather(*flights)

    newest = [one for one in run(program()) if set(one.versions) == {started.engine.version}]
    assert len(newest) >= SLOTS
    for completion in newest:
        expected = teacher_forced(twin_of(4), prompt, completion.tokens)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=CLOSE)


def test_a_stop_string_ends_a_request_at_the_token_that_completes_it(started: Started) -> None:
    async def program() -> tuple[Completion, Completion, Completion]:
        whole = await started.engine.generate(request(0, (4, 5, 6), max_tokens=40))
        text = started.tokenizer.decode(whole.tokens)
        sampling = Sampling(max_tokens=40, stop_strings=("no such", text[10:12]))
        asked = structs.replace(request(0, (4, 5, 6), max_tokens=40), sampling=sampling)
        return whole, await started.engine.generate(asked), await started.engine.generate(request(1, (4, 5, 6)))

    whole, cut, _ = run(program())
    assert cut.finish is Finish.STOP and cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) <= 12
    assert len(cut.logprobs) == len(cut.versions) == len(cut.tokens)
    text = started.tokenizer.decode(whole.tokens)[10:12]
    assert started.tokenizer.decode(cut.tokens).endswith(text) and text not in started.tokenizer.decode(cut.tokens[:-1])


def test_weights_of_another_shape_are_refused(started: Started) -> None:
    async def program() -> None:
        fitting = {name: p.detach() for name, p in model().to(DEVICE).named_parameters()}
        with pytest.raises(EngineError, match=r"do not fit.*norm"):
            await started.engine.load(started.engine.version + 1, {**fitting, "model.norm.weight": torch.zeros(1)})

    run(program())


def test_a_request_that_can_never_run_is_refused_and_the_engine_goes_on(started: Started) -> None:
    async def program() -> None:
        with pytest.raises(RequestRefused, match=rf"the token {VOCABULARY} in the prompt.*less than {VOCABULARY}"):
            await started.engine.generate(request(0, (4, VOCABULARY)))
        with pytest.raises(RequestRefused, match="context of 256"):
            await started.engine.generate(request(0, (4,) * 250, max_tokens=7))
        with pytest.raises(RequestRefused, match="temperature = -1: expected 0"):
            await started.engine.generate(request(0, (4, 5), temperature=-1.0))
        full = await started.engine.generate(request(0, (4,) * 249, max_tokens=7))
        assert len(full.tokens) == 7

    run(program())


def test_work_is_reported_as_spans_and_statistics(started: Started) -> None:
    async def program() -> int:
        before = sum(span.num_tokens for span in started.sink.of(Span))
        flights = [asyncio.ensure_future(started.engine.generate(long(n))) for n in range(3 * SLOTS)]
        await some_tokens(started, 20 * SLOTS)
        stats = started.engine.stats()
        assert stats.running == SLOTS and stats.waiting == 2 * SLOTS and 0 < stats.cache_used < 1, stats
        await asyncio.gather(*flights)
        await started.engine.pause()
        await started.engine.resume()
        return sum(span.num_tokens for span in started.sink.of(Span)) - before

    assert run(program()) == 3 * SLOTS * 240
    assert started.engine.stats().swap_s > 0 and started.engine.stats().running == 0
    print(f"\n{started.kind}: the last swap held decoding up for {1000 * started.engine.stats().swap_s:.1f} ms")


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])
    except OSError:
        return -1


def descendants(pid: int) -> list[int]:
    children = [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(int(path.name)) == pid]
    return [*children, *(below for child in children for below in descendants(child))]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def are_gone(pids: list[int], seconds: float = 60) -> bool:
    limit = time.monotonic() + seconds
    while any(name_of(pid) for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


def test_requests_on_lines_get_their_own_answers_and_a_line_hears_of_new_weights(started: Started) -> None:
    async def program() -> None:
        changed = asyncio.Event()
        lines = [await open_line(started, changed) for _ in range(2)]
        engines: list[Engine] = [started.engine, *lines]
        keys = [request(n, (4, 5, 6 + n % 3), max_tokens=4, temperature=0.0) for n in range(12)]
        found = await asyncio.gather(*(engines[n % 3].generate(one) for n, one in enumerate(keys)))
        twin = twin_of(0)
        for one, completion in zip(keys, found, strict=True):
            expected = teacher_forced(twin, one.tokens, completion.tokens)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=CLOSE, rtol=0)
        with pytest.raises(RequestRefused, match="vocabulary"):
            await lines[0].generate(request(90, (VOCABULARY + 5,)))
        changed.clear()
        version = await started.load(1)
        while any(line.version != version for line in lines):
            await changed.wait()
            changed.clear()
        assert set((await lines[0].generate(keys[0])).versions) == {version}
        lost = [asyncio.ensure_future(lines[0].generate(long(n))) for n in range(3)]
        mine = asyncio.ensure_future(started.engine.generate(long(3)))
        await some_tokens(started, 5)
        await lines[0].close()
        assert all(isinstance(one, EngineGone) for one in await asyncio.gather(*lost, return_exceptions=True))
        assert (await lines[1].generate(request(91, (4, 5), max_tokens=2))).tokens
        await started.engine.abort(long(3).key)
        assert (await mine).finish is Finish.ABORT
        assert started.engine.stats().running == 0, "requests of the line that was closed have ended"
        await lines[1].close()

    run(program())


async def open_line(started: Started, changed: asyncio.Event) -> LineEngine:
    address = await started.engine.line()
    return LineEngine("line", 4, address, changed.set, lambda engine, error: None, clock=RealClock(), sink=MemorySink())


def test_a_killed_core_is_an_error_for_everybody_who_waits_and_everybody_who_comes_later(started: Started) -> None:
    """The engine with files. That with shared memory is closed instead: what is in flight then ends as aborted."""
    children = descendants(os.getpid())
    ours = started.engine._host.remote.process.pid  # type: ignore[attr-defined]
    cores = [pid for pid in children if "EngineCore" in name_of(pid) and parent_of(pid) == ours]

    async def killed() -> None:
        flights = [asyncio.ensure_future(started.engine.generate(long(n))) for n in range(3)]
        await some_tokens(started, 5)
        for pid in cores:
            os.kill(pid, signal.SIGKILL)
        for found in await asyncio.gather(*flights, return_exceptions=True):
            assert isinstance(found, EngineError) and "engine broke: vLLM's core ended" in str(found)
        with pytest.raises(EngineError, match="core ended"):
            await started.engine.generate(long(9))
        with pytest.raises(EngineError, match="core ended"):
            await started.engine.pause()

    async def closed() -> None:
        flight = asyncio.ensure_future(started.engine.generate(long(0)))
        await some_tokens(started, 5)
        await started.engine.close()
        completion = await flight
        assert completion.finish is Finish.ABORT and completion.tokens
        with pytest.raises(EngineError, match="closed"):
            await started.engine.generate(long(1))

    assert len(cores) == 1
    workers = descendants(cores[0])
    run(killed() if started.kind == "file" else closed())
    vllms = [*cores, *workers]
    assert are_gone(vllms), [name_of(pid) for pid in vllms]


def test_nothing_of_vllm_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = (
        tmp_path / "parent.py"
    )  # without a guard around its main part: the engine's process has a main module of its own
    script.write_text(
        f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.tiny import request
from support.vllm_engines import Started

async def program():
    one = Started("shared")
    await one.engine.generate(request(0, (4, 5, 6)))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(program())
"""
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    (child,) = (
        pid for pid in descendants(parent.pid) if "vllm.worker:serve_vllm" in name_of(pid).split("multiproc")[0]
    )
    below = descendants(parent.pid)
    assert any("EngineCore" in name_of(pid) for pid in below)
    os.kill(child, signal.SIGKILL)  # the worst case: no process is left that could stop vLLM
    parent.kill()
    parent.wait()
    assert are_gone(below), [name_of(pid) for pid in below]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_trains_with_vllm_and_its_audit_is_clean(tmp_path: Path, workers: int) -> None:
    from support.runs import assert_clean, command, step_rows

    changes = {
        "engine.kind": "vllm",
        "engine.process": "true",
        "engine.slots": 16,
        "engine.vllm.memory": 0.2,
        "engine.vllm.cache_gib": 1,
        "engine.vllm.enforce_eager": "true",
        "model.tiny.hidden": 64,
        "model.tiny.heads": 2,
        "pipeline.steps": 4,
        "pipeline.max_lag": 1,
        "data.holdout": 4,
        "rollout.workers": workers,
    }
    done = subprocess.run(command(tmp_path / "run", changes), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(step_rows(tmp_path / "run")) == 4
    assert_clean(tmp_path / "run")
