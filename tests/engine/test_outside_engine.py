"""The engine whose other end is outside: it keeps the promises of an engine through a program that claims and puts, refuses by
name what it did not ask for, and loses nothing with a program that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from millstream.clock import RealClock
from millstream.engine import Engine, EngineConfig
from millstream.engine.outside import ROLLOUT, OutsideEngine, RefusedRows
from millstream.errors import EngineError, StreamEnded
from millstream.events.sinks import MemorySink
from millstream.run.build import build_engine
from millstream.store import Lease, Want
from millstream.testing.engine import EngineSuite
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Sampling, Weights
from support.tiny import SHAPE, VOCABULARY, make, plain

TWINS = [plain(make("llama", seed)) for seed in range(3)]
SLOTS = 4


class Program:
    """A program outside, around an engine of ours: it claims requests, generates them, and puts the tokens as they come."""

    def __init__(self, outside: OutsideEngine, inner: Engine, weights: dict[int, Weights]) -> None:
        self._outside = outside
        self._inner = inner
        self._weights = weights
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_loaded = asyncio.Event()
        outside.on_loaded = lambda version, where: self._start(self._load(version))
        self._start(self._claim())

    @staticmethod
    def said(logprobs: tuple[float, ...], temperature: float) -> tuple[float, ...]:
        return logprobs

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, version: int) -> None:
        await self._inner.load(version, self._weights[version])
        self._has_loaded.set()

    async def _claim(self) -> None:
        free = asyncio.Semaphore(SLOTS)
        while True:
            await free.acquire()
            want = Want(rows=1, versions=(0, self._inner.version), deadline_s=0.05)
            try:
                lease = await self._outside.offers.claim(ROLLOUT, want)
            except StreamEnded:
                return
            except Exception:  # nothing in time: perhaps there are newer weights now
                free.release()
                continue
            self._start(self._answer(lease.rows[0].columns, free))

    async def _answer(self, asked: dict[str, Any], free: asyncio.Semaphore) -> None:
        key = RequestKey(group_id=asked["request"], member=0)  # the run may ask again for what it has aborted
        how = {name: asked[name] for name in ("max_tokens", "temperature", "top_k", "top_p")}
        sampling = Sampling(stop=tuple(asked["stop"]), **how)
        tokens, num_sampled = tuple(asked["prompt"].tolist()), asked["num_sampled"]
        request = Request(key=key, tokens=tokens, sampling=sampling, seed=asked["seed"], num_sampled=num_sampled)
        parts: asyncio.Queue[Sampled | None] = asyncio.Queue()
        putting = asyncio.create_task(self._put(asked, key, parts))
        count = 0

        def on_sampled(new: Sampled) -> None:
            nonlocal count
            count += len(new.tokens)
            parts.put_nowait(new)

        try:
            done = await self._inner.generate(request, on_sampled)
            parts.put_nowait(Sampled(done.tokens[count:], done.logprobs[count:], done.versions[count:]))
        finally:
            parts.put_nowait(None)
            await putting
            free.release()

    async def _put(self, asked: dict[str, Any], key: RequestKey, parts: asyncio.Queue[Sampled | None]) -> None:
        begin = asked["begin"]
        while (new := await parts.get()) is not None:
            if new.tokens:
                logprobs = self.said(new.logprobs, asked["temperature"])
                row = {"request": asked["request"], "tokens": new.tokens, "logprobs": logprobs, "begin": begin}
                try:
                    await self._outside.put({name: [cell] for name, cell in {**row, "versions": new.versions}.items()})
                except RefusedRows as error:
                    assert "late" in str(error), error
                    await self._inner.abort(key)
                begin += len(new.tokens)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()


class ClosedWith(OutsideEngine):
    program: Program

    async def close(self) -> None:
        await super().close()
        await self.program.close()


class UnscaledProgram(Program):
    """Its log-probabilities are not of the distribution that it sampled from."""

    @staticmethod
    def said(logprobs: tuple[float, ...], temperature: float) -> tuple[float, ...]:
        return tuple(value * temperature for value in logprobs)


class TestOutsideEngine(EngineSuite):
    vocabulary = VOCABULARY
    program: type[Program] = Program
    context = SHAPE["max_position_embeddings"]
    limit_s = 20.0
    # A program that has not loaded yet may answer what was offered before with older weights, within the group's bounds.
    test_a_load_while_paused_holds_for_all_that_comes_after_it = None  # type: ignore[assignment]

    async def make_engine(self) -> Engine:
        weights: dict[int, Weights] = {}
        names = {name: tuple(tensor.shape) for name, tensor in self.make_weights(0).items()}

        def write(version: int, new: Weights) -> str:
            if {name: tuple(tensor.shape) for name, tensor in new.items()} != names:
                raise EngineError("they do not fit")
            weights[version] = new
            return "in memory"

        engine = ClosedWith(
            slots=SLOTS,
            max_length=self.context,
            num_words=VOCABULARY,
            write=write,
            clock=RealClock(),
            sink=MemorySink(),
        )
        config = EngineConfig(slots=SLOTS, process=False, cache="slots")
        inner = build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())
        engine.program = self.program(engine, inner, weights)
        return engine

    def make_reference(self, number: int) -> Any:
        return TWINS[number]


def test_a_program_that_breaks_a_promise_which_the_run_cannot_check_is_caught_by_the_suite() -> None:
    suite = TestOutsideEngine()
    suite.program = UnscaledProgram
    with pytest.raises(AssertionError):
        suite.test_every_token_has_the_log_probability_of_the_distribution_it_was_sampled_from()


# ---- what is refused, and what dies ----------------------------------------------------------------------------------------


def bare(version: int = 3) -> OutsideEngine:
    engine = OutsideEngine(
        slots=4,
        max_length=64,
        num_words=50,
        write=lambda version, weights: "here",
        clock=RealClock(),
        sink=MemorySink(),
    )
    engine.place_of = lambda group_id: (2, 4) if group_id >= 0 else None
    engine._version = version
    return engine


def asked(member: int = 0, group_id: int = 7) -> Request:
    key = RequestKey(group_id=group_id, member=member)
    return Request(key=key, tokens=(5, 6), sampling=Sampling(max_tokens=4, stop=(1,)), seed=11)


async def claimed(engine: OutsideEngine, rows: int = 1, expires_s: float | None = None) -> Lease:
    await asyncio.sleep(0)  # until all are offered
    return await engine.offers.claim(ROLLOUT, Want(rows=rows, patience_s=0.0, deadline_s=5.0, expires_s=expires_s))


def answer(number: Any, **changes: Any) -> dict[str, list[Any]]:
    row = {"request": number, "tokens": [9, 8, 1], "logprobs": [-1.0, -2.0, -0.5], "versions": [2, 3, 3], **changes}
    return {name: [cell] for name, cell in row.items()}


def run(program: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await program()

    asyncio.run(limited())


def test_a_request_is_offered_with_its_group_its_prompt_its_start_and_its_deadline() -> None:
    async def program() -> None:
        engine = bare()
        answering = asyncio.create_task(engine.generate(asked(member=2)))
        lease = await claimed(engine)
        row = lease.rows[0].columns
        assert (row["group_id"], row["member"], row["start_version"], row["deadline"]) == (7, 2, 2, 4)
        assert row["prompt"].tolist() == [5, 6] and row["max_tokens"] == 4 and row["stop"] == [1]
        await engine.put(answer(row["request"]))
        found = await answering
        assert found == Completion(
            tokens=(9, 8, 1), logprobs=(-1.0, -2.0, -0.5), versions=(2, 3, 3), finish=Finish.STOP
        )
        assert engine.stats().running == engine.stats().waiting == 0
        await engine.offers.acknowledge(lease)  # it has ended by itself: nothing to do

    run(program)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"versions": [1, 3, 3]}, "wrong version"),  # older than the start
        ({"versions": [2, 3, 4]}, "wrong version"),  # newer than any that was announced
        ({"versions": [3, 2, 3]}, "wrong version"),  # falling
        ({"versions": [3, 3]}, "malformed"),
        ({"versions": "three"}, "malformed"),
        ({"logprobs": [-1.0, float("nan"), -1.0]}, "malformed"),
        ({"logprobs": [-1.0, 0.5, -1.0]}, "malformed"),
        ({"tokens": [9, 50, 1]}, "malformed"),  # outside of the vocabulary
        ({"tokens": [9, 1, 8]}, "malformed"),  # after the stop token
        ({"tokens": [], "logprobs": [], "versions": []}, "malformed"),
        ({"tokens": [[9], [8, 1]]}, "malformed"),
        ({"tokens": [9.5, 8.0, 1.0]}, "malformed"),
        ({"tokens": [9] * 5, "logprobs": [-1.0] * 5, "versions": [3] * 5}, "malformed"),  # longer than was asked for
        ({"begin": 2}, "twice"),
        ({"request": 10_000}, "not admitted"),
        ({"request": "the first"}, "not admitted"),
    ],
)
def test_a_row_that_is_wrong_is_refused_by_name_and_changes_nothing(changes: dict[str, Any], why: str) -> None:
    async def program() -> None:
        engine, told = bare(), list[str]()
        engine.on_refused = told.append
        answering = asyncio.create_task(engine.generate(asked()))
        number = (await claimed(engine))["request"][0]
        with pytest.raises(RefusedRows, match=f"1 of 1 rows were refused: request .*: {why}"):
            await engine.put(answer(number, **changes))
        assert not answering.done() and why in told[0] and not engine.stats().tokens_generated
        await engine.put(answer(np.int64(number)))
        assert (await answering).tokens == (9, 8, 1)

    run(program)


def test_what_comes_twice_or_late_is_refused_by_name_and_rows_beside_it_are_taken() -> None:
    async def program() -> None:
        engine = bare()
        first, second, third = (asyncio.create_task(engine.generate(asked(member))) for member in range(3))
        numbers = (await claimed(engine, rows=3))["request"]
        await engine.put(answer(numbers[0]))
        await engine.abort(asked(1).key)
        assert (await second).finish is Finish.ABORT and (await first).finish is Finish.STOP
        rows = [answer(number) for number in numbers]
        with pytest.raises(RefusedRows, match=r"2 of 3 rows .*: twice: .*; .*: late: the run has aborted it"):
            await engine.put({name: [row[name][0] for row in rows] for name in rows[0]})
        assert (await third).tokens == (9, 8, 1)
        with pytest.raises(RefusedRows, match="malformed: no column logprobs"):
            await engine.put({"request": [0], "tokens": [[9]], "versions": [3]})

    run(program)


def test_requests_of_a_program_that_dies_go_to_the_next_after_the_tokens_that_are_there() -> None:
    async def program() -> None:
        engine = bare()
        both = [asyncio.create_task(engine.generate(asked(member))) for member in range(2)]
        dead = await claimed(engine, rows=2, expires_s=0.05)
        part = {"tokens": [9, 8], "logprobs": [-1.0, -2.0], "versions": [2, 2]}
        await engine.put(answer(dead["request"][0], **part))
        again = await claimed(engine, rows=2)  # waits until the lease has expired
        rows = {row.columns["member"]: row.columns for row in again.rows}
        assert rows[0]["prompt"].tolist() == [5, 6, 9, 8] and (rows[0]["begin"], rows[0]["max_tokens"]) == (2, 2)
        assert rows[1]["prompt"].tolist() == [5, 6] and rows[1]["begin"] == 0
        rest = {"tokens": [7, 1], "logprobs": [-0.1, -0.2], "versions": 3, "begin": 2}
        await engine.put(answer(rows[0]["request"], **rest))
        with pytest.raises(RefusedRows, match="twice: it was answered"):  # the dead one was only slow
            await engine.put(answer(dead["request"][0], **rest))
        await engine.put(answer(dead["request"][1]))  # what it did first counts
        assert [(await one).tokens for one in both] == [(9, 8, 7, 1), (9, 8, 1)]
        assert (await both[0]).versions == (2, 2, 3, 3)
        assert (await engine.offers.stats()).rows == 0, "nothing is left"

    run(program)


def test_what_is_acknowledged_or_given_back_without_an_answer_is_offered_again() -> None:
    async def program() -> None:
        engine = bare()
        answering = asyncio.create_task(engine.generate(asked()))
        lease = await claimed(engine)
        await engine.offers.acknowledge(lease)
        lease = await claimed(engine)
        await engine.offers.give_back(lease)
        lease = await claimed(engine)
        await engine.put(answer(lease["request"][0]))
        await answering
        later = asyncio.create_task(claimed(engine))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(StreamEnded):
            await later

    run(program)


def test_a_program_with_older_weights_is_not_offered_what_it_may_not_answer() -> None:
    async def program() -> None:
        engine = bare()
        engine.place_of = lambda group_id: (group_id, group_id + 1)
        waiting = [asyncio.create_task(engine.generate(asked(group_id=group_id))) for group_id in (3, 2)]
        old = await engine.offers.claim(ROLLOUT, Want(rows=9, versions=(0, 2), patience_s=0.0))
        assert old["group_id"] == [2]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(program)
