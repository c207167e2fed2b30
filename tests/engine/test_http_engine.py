"""Servers as engines: the promises of the seam, over a stand-in for SGLang and over our own service; and what goes wrong."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs
from starlette.applications import Starlette
from starlette.types import ASGIApp

from millstream.clock import RealClock
from millstream.engine import Engine, EngineConfig
from millstream.engine.http import engine as http_engine_module
from millstream.engine.http import weight_folder
from millstream.engine.http.config import HttpConfig
from millstream.engine.http.dialects import OpenAi, SgLang, Vllm
from millstream.engine.http.weight_folder import WeightFolder, WeightWrite
from millstream.errors import EngineError, EngineGone, EngineMisconfigured, RequestRefused, WeightsError
from millstream.events.sinks import MemorySink
from millstream.run.build import HttpServers, build_engine
from millstream.serving.fleet import Fleet
from millstream.serving.router import Router
from millstream.testing.engine import EngineSuite
from millstream.testing.engine_base import TrackedRequest
from millstream.types import Completion, Finish, Sampling
from support.contract_sglang import Contract, Faults
from support.servers import Close, millstream_serve, serving, thread_engine
from support.tiny import SHAPE, VOCABULARY, make, plain, prompts, request

CONTEXT = SHAPE["max_position_embeddings"]
TWINS = {number: plain(make("llama", seed=number)) for number in range(3)}


@contextmanager
def contract(faults: Faults | None = None, *, port: int = 0, **more: Any) -> Iterator[tuple[str, Contract]]:
    made: list[Contract] = []

    def start() -> tuple[ASGIApp, Close]:
        engine = thread_engine(make("llama", seed=7))  # other weights than the client's: it must be given them
        made.append(Contract(engine, faults, **more))
        return made[0].app(), engine.close

    with serving(start, port) as url:
        yield url, made[0]


def http_config(urls: list[str], folder: Path, flavour: str = "sglang", *, slots: int = 4, **more: Any) -> EngineConfig:
    http = HttpConfig(urls=tuple(urls), flavour=flavour, folder=str(folder), **{"timeout_s": 20.0} | more)  # type: ignore[arg-type]
    return EngineConfig(kind="http", http=http, slots=slots)


def http_engine(url: str, folder: Path, flavour: str = "sglang", **more: Any) -> Engine:
    config = http_config([url], folder, flavour, **more)
    return build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())


@asynccontextmanager
async def fleet_of(urls: list[str], folder: Path, flavour: str = "sglang", **more: Any) -> AsyncIterator[Fleet]:
    """As a run has it: an engine for each server, and engines that are gone are replaced."""
    config, clock, sink = http_config(urls, folder, flavour, **more), RealClock(), MemorySink()
    servers = HttpServers(config, make("llama"), clock=clock, sink=sink)
    options: dict[str, Any] = {"is_queueing": True, "patience_s": 60.0, "is_lone_replaced": True, "is_given_up": False}
    fleet = Fleet(servers.engine, config.num_engines, clock=clock, sink=sink, **options)
    replacing = asyncio.create_task(fleet.replace(lambda engine: False))
    try:
        yield fleet
    finally:
        replacing.cancel()
        await fleet.close()
        servers.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.01)


class OverHttp(EngineSuite):
    """One server for all tests of a class; an engine of its own for each."""

    vocabulary = VOCABULARY
    context = CONTEXT
    url: str
    folder: Path
    flavour = "sglang"

    async def make_engine(self) -> Engine:
        return http_engine(self.url, self.folder, self.flavour)

    def make_reference(self, number: int) -> Any:
        return TWINS[number]


class TestHttpEngineOverTheContractOfSgLang(OverHttp):
    has_top_k = has_top_p = False
    cache_after_load = "computed again"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with contract() as (url, _):
            cls.url, cls.folder = url, tmp_path_factory.mktemp("weights")
            yield


def test_a_server_that_streams_new_tokens_alone_is_understood_as_well(tmp_path: Path) -> None:
    async def program(url: str) -> list[Completion]:
        engine = http_engine(url, tmp_path)
        try:
            return await asyncio.gather(*(engine.generate(request(n, p)) for n, p in enumerate(prompts(4))))
        finally:
            await engine.close()

    with contract() as (url, _):
        expected = asyncio.run(program(url))
    with contract(is_incremental=True) as (url, _):
        found = asyncio.run(program(url))
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.versions == other.versions and one.finish == other.finish
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


class TestHttpEngineOverMillstreamServe(OverHttp):
    flavour = "millstream"
    keeps_cache_over_pause = False  # a swap goes on in flight; for a pause the streams are cut

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("weights")
        with serving(lambda: millstream_serve(make("llama", seed=7), VOCABULARY, CONTEXT, folder)) as url:
            cls.url, cls.folder = url, folder
            yield


class TestHttpEngineOverOpenAisApi(OverHttp):
    """Our service, asked for nothing that others do not have: no weights, no stop tokens, no randomness that goes on."""

    takes_weights = has_top_k = is_repeatable_by_seed = False

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("weights")
        with serving(lambda: millstream_serve(make("llama"), VOCABULARY, CONTEXT, folder)) as url:
            cls.url = url
            yield

    async def make_engine(self) -> Engine:
        http = HttpConfig(urls=(self.url,), flavour="openai", weights="none")
        config = EngineConfig(kind="http", http=http, slots=4)
        return build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())


def test_vllm_is_asked_in_its_own_words_and_raw_log_probabilities_are_refused() -> None:
    vllm, one = Vllm(), structs.replace(request(3, (4, 5, 6)), sampling=Sampling(max_tokens=9, stop=(7,), top_k=5))
    body = vllm.body(one, model="m", name="n")
    assert body["prompt"] == [4, 5, 6] and body["stop_token_ids"] == [7] and body["top_k"] == 5 and body["ignore_eos"]
    gone_on = vllm.body(structs.replace(one, num_sampled=2), model="m", name="n")
    assert gone_on["seed"] != body["seed"], "else it would draw the same numbers again"
    (first,) = vllm.first_calls
    shown = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
    assert "start vLLM with --logprobs-mode processed_logprobs" in str(first.check(shown))
    assert first.check({"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}) is None


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "a", "logprobs": {"token_logprobs": [-1.0]}},
        {"token_ids": ["5"], "logprobs": {"token_logprobs": [-1.0]}},
        {"token_ids": [5], "logprobs": {"token_logprobs": [None]}},
        {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "tool_calls"},
    ],
)
def test_an_answer_without_tokens_or_log_probabilities_is_not_taken(choice: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        OpenAi().read({"choices": [choice]}, 0)


def test_where_a_token_follows_itself_a_missing_log_probability_is_noticed() -> None:
    """All that SGLang sends so far has the right tokens: only how many there are shows that one is missing."""

    def event(tokens: list[int], logprobs: list[list[object]]) -> dict[str, Any]:
        return {"output_ids": tokens, "meta_info": {"completion_tokens": 3, "output_token_logprobs": logprobs}}

    triples: list[list[object]] = [[-1.0, 8, None], [-2.0, 5, None], [-3.0, 5, None]]
    assert SgLang().read(event([8, 5, 5], triples), 2)[:2] == ([5], [-3.0])
    assert SgLang().read(event([5], triples[2:]), 2)[:2] == ([5], [-3.0])
    assert SgLang().read(event([5], triples), 2)[:2] == ([5], [-3.0])
    with pytest.raises(ValueError, match="expected 1 new tokens of 3, each with its log-probability, found 3 with 2"):
        SgLang().read(event([8, 5, 5], triples[:2]), 2)


# ---- what goes wrong -------------------------------------------------------------------------------------------------------


CHAOS = {"error": 0.05, "busy": 0.05, "hang": 0.02, "cut": 0.15, "wrong_lengths": 0.05, "garbage": 0.05, "call": 0.1}


@pytest.mark.parametrize(("seed", "slow_update_s"), [(5, 0.0), (6, 1.5)])
def test_in_chaos_every_request_is_answered_once_without_gap_or_repeat_and_with_exact_versions(
    seed: int, slow_update_s: float, tmp_path: Path
) -> None:
    """Log-probabilities are the proof: behind a token that is missing, or there twice, or of other weights, none would fit."""
    suite = TestHttpEngineOverTheContractOfSgLang()
    rng, chaos = random.Random(seed), CHAOS | {"slow_update_s": slow_update_s}
    asked = [request(number, prompt, max_tokens=rng.randint(1, 50)) for number, prompt in enumerate(prompts(45))]

    async def program(urls: list[str]) -> list[Completion]:
        async with fleet_of(urls, tmp_path, timeout_s=0.5, retries=30, slots=8) as fleet, asyncio.timeout(90):
            turns = list[asyncio.Task[Completion]]()
            for number, one in enumerate(asked):
                turns.append(asyncio.create_task(fleet.router.generate(one, floor=0)))
                if number % 15 == 14:
                    await asyncio.sleep(0.2)
                    version = (number + 1) // 15
                    await fleet.load(version, suite.make_weights(version % 3))
            found = await asyncio.gather(*turns)
            stats = [engine.stats() for engine in fleet.router.engines]
            assert not any(one.running or one.waiting for one in stats)
            return found

    faults = [Faults(seed=2 * seed + number, **chaos) for number in range(2)]
    with contract(faults[0]) as (one, first), contract(faults[1]) as (other, second):
        found = asyncio.run(program([one, other]))
        assert first.num_faults > 5 and second.num_faults > 5
    references = {version: suite.reference(version % 3) for version in range(4)}
    for one_request, completion in zip(asked, found, strict=True):
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
        assert completion.finish is Finish.LENGTH and len(completion.tokens) == one_request.sampling.max_tokens
        suite.check_logprobs(one_request, completion, references)
    assert len({version for completion in found for version in completion.versions}) > 2
    assert sum(len(set(completion.versions)) > 1 for completion in found) > 3, "some lived through a swap"


def check_all_at(version: int, found: list[Completion]) -> None:
    suite = TestHttpEngineOverTheContractOfSgLang()
    for number, (prompt, completion) in enumerate(zip(prompts(len(found)), found, strict=True)):
        assert set(completion.versions) == {version}
        suite.check_logprobs(request(number, prompt), completion, {version: suite.reference(version)})


def answers(fleet: Fleet, num: int) -> Awaitable[list[Completion]]:
    return asyncio.gather(*(fleet.router.generate(request(n, p), floor=0) for n, p in enumerate(prompts(num))))


def test_an_update_that_comes_late_does_not_bring_older_weights_back(tmp_path: Path) -> None:
    """The client has stopped waiting for it, and the server has newer weights: while another is still to load them, and after
    that."""
    suite = TestHttpEngineOverTheContractOfSgLang()

    async def program(urls: list[str], first: Contract, second: Contract) -> list[Completion]:
        async with fleet_of(urls, tmp_path, slots=8) as fleet, httpx.AsyncClient() as client:
            await fleet.load(1, suite.make_weights(1))
            (old,) = first.updates
            second.faults = Faults(slow_update_s=2.0)
            loading = asyncio.ensure_future(fleet.load(2, suite.make_weights(2)))
            await until(lambda: first.label != old["weight_version"])
            for _ in range(2):
                late = await client.post(f"{urls[0]}/update_weights_from_disk", json=old)
                assert late.status_code == 400 and old["model_path"] in late.text
                await loading
            return await answers(fleet, 8)

    with contract() as (one, first), contract() as (other, second):
        check_all_at(2, asyncio.run(program([one, other], first, second)))
        assert len(first.updates) == 4 and "/generate" in first.calls, "it was not given them again, and was used"


def test_a_server_that_does_not_confirm_its_weights_in_time_is_not_used_until_it_does(tmp_path: Path) -> None:
    suite = TestHttpEngineOverTheContractOfSgLang()

    async def program(urls: list[str], slow: Contract) -> list[Completion]:
        async with fleet_of(urls, tmp_path, slots=8, retries=30, weights_timeout_s=1.0) as fleet:
            await fleet.load(1, suite.make_weights(1))
            slow.faults, slow.calls = Faults(slow_update_s=6.0), []
            await fleet.load(2, suite.make_weights(2))
            assert [engine.name for engine in fleet.router.engines] == ["engine-0"]
            assert slow.calls.count("/update_weights_from_disk") == 1, "not asked for once more on top"
            slow.faults = Faults()
            first = await answers(fleet, 12)
            await until(lambda: len(fleet.router.engines) == 2)
            return first + await answers(fleet, 12)

    with contract() as (one, _), contract() as (other, slow):
        found = asyncio.run(program([one, other], slow))
        assert "/model_info" in slow.calls[: slow.calls.index("/generate")], "it was used when it had confirmed them"
    check_all_at(2, found[:12])
    check_all_at(2, found[12:])


def test_weights_are_written_once_for_all_servers_and_each_has_a_path_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = list[int](), WeightFolder._write

    def count(self: WeightFolder, one: WeightWrite, weights: Any) -> None:
        written.append(one.version)
        write(self, one, weights)

    monkeypatch.setattr(WeightFolder, "_write", count)
    suite = TestHttpEngineOverTheContractOfSgLang()

    async def program(urls: list[str]) -> None:
        async with fleet_of(urls, tmp_path) as fleet:
            for version, number in ((0, 1), (0, 2), (1, 1), (2, 2)):  # of version 0, other weights than before
                await fleet.load(version, suite.make_weights(number))
            check_all_at(2, await answers(fleet, 4))

    with contract() as (one, first), contract() as (other, second):
        asyncio.run(program([one, other]))
    assert written == [0, 0, 0, 1, 2]
    for mine, others in zip(first.updates, second.updates, strict=True):
        assert mine["weight_version"] == others["weight_version"] and mine["model_path"] != others["model_path"]
    assert len({update["weight_version"] for update in first.updates}) == 4
    assert not list(tmp_path.iterdir())


def test_an_engine_whose_server_does_not_confirm_weights_in_time_breaks_and_names_it(tmp_path: Path) -> None:
    async def program(url: str, server: Contract) -> None:
        engine = http_engine(url, tmp_path, weights_timeout_s=0.5)
        try:
            await engine.load(1, TestHttpEngineOverTheContractOfSgLang().make_weights(1))
            server.faults = Faults(slow_update_s=4.0)
            said = rf"{url}/update_weights_from_disk: ReadTimeout.*engine\.http\.weights_timeout_s is 0\.5.*set that higher"
            with pytest.raises(EngineGone, match=said):
                await engine.load(2, TestHttpEngineOverTheContractOfSgLang().make_weights(2))
        finally:
            await engine.close()

    with contract() as (url, server):
        asyncio.run(program(url, server))


def test_a_connection_that_dies_in_the_middle_changes_no_token(tmp_path: Path) -> None:
    """By seed, and greedily: what goes on elsewhere is what would have come."""

    async def program(url: str) -> list[Completion]:
        engine = http_engine(url, tmp_path, retries=30)
        asked = [request(n, p, max_tokens=30, temperature=n % 2) for n, p in enumerate(prompts(12))]
        try:
            return await asyncio.gather(*map(engine.generate, asked))
        finally:
            await engine.close()

    with contract() as (url, server):
        undisturbed = asyncio.run(program(url))
        server.faults = Faults(cut=0.6)
        disturbed = asyncio.run(program(url))
        assert server.num_faults >= 3
    assert [c.tokens for c in disturbed] == [c.tokens for c in undisturbed]


def test_a_server_that_is_gone_is_named_with_what_to_look_at(tmp_path: Path) -> None:
    async def program(url: str) -> Completion:
        engine = http_engine(url, tmp_path, retries=2)
        try:
            return await engine.generate(request(0, (4, 5, 6)))
        finally:
            await engine.close()

    with contract() as (gone, _):
        pass
    with pytest.raises(EngineGone, match=rf"{gone}.*ConnectError.*look whether the server is up"):
        asyncio.run(program(gone))


def test_a_request_that_fails_too_often_breaks_the_engine_and_the_router_does_not_start_over(tmp_path: Path) -> None:
    async def program(url: str) -> list[Completion | BaseException]:
        engine = http_engine(url, tmp_path, slots=1, retries=2)
        router = Router([engine])
        try:
            asked = [request(number, (4, 5, 6)) for number in range(2)]  # the second waits for a slot
            found = await asyncio.gather(*(router.generate(one, floor=0) for one in asked), return_exceptions=True)
            with pytest.raises(EngineGone, match="broke"):
                await engine.generate(request(9, (4, 5, 6)))
            return found
        finally:
            await engine.close()

    with contract(Faults(error=1.0)) as (url, server):
        found = asyncio.run(program(url))
    assert all(isinstance(one, EngineError) and f"{url}/generate answered 500" in str(one) for one in found)
    assert server.calls.count("/generate") == 3


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"top_k": -1}, {"top_p": 0.0}], ids=str)
def test_what_no_engine_can_do_is_refused_before_a_server_is_asked(change: dict[str, Any], tmp_path: Path) -> None:
    async def program(url: str) -> None:
        engine = http_engine(url, tmp_path)
        with pytest.raises(RequestRefused, match=next(iter(change))):
            asked = request(0, (4, 5, 6))
            await engine.generate(structs.replace(asked, sampling=structs.replace(asked.sampling, **change)))
        await engine.close()

    asyncio.run(program("http://127.0.0.1:1"))


def test_a_server_that_was_restarted_is_given_the_newest_weights_again(tmp_path: Path) -> None:
    """Its own have another name: not one of its tokens is taken before."""

    async def program(url: str, restart: Callable[[], None]) -> tuple[Completion, Completion]:
        engine = http_engine(url, tmp_path, retries=30)
        one = request(0, (4, 5, 6), temperature=0.0)
        try:
            await engine.load(1, TestHttpEngineOverTheContractOfSgLang().make_weights(1))
            before = await engine.generate(one)
            await asyncio.to_thread(restart)
            return before, await engine.generate(one)
        finally:
            await engine.close()

    with ExitStack() as stack:
        servers = [stack.enter_context(contract())]

        def restart() -> None:
            url, _ = servers[0]
            stack.pop_all().close()
            servers.append(stack.enter_context(contract(port=int(url.rsplit(":", 1)[1]))))

        before, after = asyncio.run(program(servers[0][0], restart))
        assert after == before and after.versions == (1,) * 16
        assert "/update_weights_from_disk" in servers[1][1].calls


def test_one_of_several_servers_may_go_and_the_others_take_its_requests_and_the_next_weights(tmp_path: Path) -> None:
    """And when it is back, restarted with weights of its own, it gets the newest before it is used."""
    asked = [request(number, prompt, max_tokens=60) for number, prompt in enumerate(prompts(8))]
    suite = TestHttpEngineOverTheContractOfSgLang()

    async def program(urls: list[str], stop: Callable[[], None], restart: Callable[[], None]) -> list[Completion]:
        async with fleet_of(urls, tmp_path, retries=1, slots=8) as fleet:
            turns = [asyncio.create_task(fleet.router.generate(one, floor=0)) for one in asked]
            first, _ = fleet.router.engines
            await until(lambda: first.stats().tokens_generated > 8)
            await asyncio.to_thread(stop)
            await fleet.load(1, suite.make_weights(1))
            found = await asyncio.gather(*turns)
            await until(lambda: len(fleet.router.engines) == 1)
            await asyncio.to_thread(restart)
            await until(lambda: len(fleet.router.engines) == 2)
            check_all_at(1, await answers(fleet, 12))
            return found

    with contract() as (stays, _), ExitStack() as stack:
        goes, _ = stack.enter_context(contract())
        again: list[Contract] = []

        def restart() -> None:
            again.append(stack.enter_context(contract(port=int(goes.rsplit(":", 1)[1])))[1])

        found = asyncio.run(program([goes, stays], lambda: stack.pop_all().close(), restart))
        assert again[0].calls.index("/update_weights_from_disk") < again[0].calls.index("/generate")
    for one, completion in zip(asked, found, strict=True):
        assert completion.finish is Finish.LENGTH and completion.versions[0] == 0
        suite.check_logprobs(one, completion, {0: suite.reference(0), 1: suite.reference(1)})


def test_a_server_of_another_kind_ends_it_at_once_with_what_to_set(tmp_path: Path) -> None:
    async def program(url: str) -> None:
        async with fleet_of([url], tmp_path, "vllm") as fleet, asyncio.timeout(5):
            for _ in range(2):
                with pytest.raises(EngineMisconfigured, match=rf"{url}/v1/models answered 404.*engine.http.flavour"):
                    await fleet.router.generate(request(0, (4, 5, 6)), floor=0)
            with pytest.raises(EngineMisconfigured, match=r"engine\.http\.flavour"):
                await fleet.load(1, TestHttpEngineOverTheContractOfSgLang().make_weights(1))

    with contract() as (url, _):
        asyncio.run(program(url))


def test_a_server_of_another_kind_is_left_out_while_another_serves_and_used_when_it_is_the_right_one(
    tmp_path: Path,
) -> None:
    async def nothing() -> None: ...

    async def program(urls: list[str], replace_wrong: Callable[[], None]) -> None:
        async with fleet_of(urls, tmp_path) as fleet:
            check_all_at(0, await answers(fleet, 12))
            await fleet.load(1, TestHttpEngineOverTheContractOfSgLang().make_weights(1))
            assert [engine.name for engine in fleet.router.engines] == ["engine-1"]
            await asyncio.to_thread(replace_wrong)
            await until(lambda: len(fleet.router.engines) == 2)
            check_all_at(1, await answers(fleet, 12))

    with contract() as (right, _), ExitStack() as stack:
        wrong = stack.enter_context(serving(lambda: (Starlette(), nothing)))

        def replace_wrong() -> None:
            stack.pop_all().close()
            stack.enter_context(contract(port=int(wrong.rsplit(":", 1)[1])))

        asyncio.run(program([wrong, right], replace_wrong))


def test_a_load_that_is_cancelled_halfway_breaks_the_engine_and_hangs_nobody(tmp_path: Path) -> None:
    async def program(url: str, server: Contract) -> None:
        engine = http_engine(url, tmp_path)
        await engine.generate(request(0, (4, 5, 6), max_tokens=1))
        flight = TrackedRequest(engine, request(1, (4, 5, 6), max_tokens=200))
        await flight.until_reported(2)
        server.faults = Faults(call=1.0)
        loading = asyncio.ensure_future(engine.load(1, TestHttpEngineOverTheContractOfSgLang().make_weights(1)))
        while not server.num_faults:  # until it has begun
            await asyncio.sleep(0.01)
        loading.cancel()
        with pytest.raises(EngineGone, match="broke: a load was cancelled halfway"):
            await asyncio.wait_for(flight.future, 10)
        with pytest.raises(EngineError, match="broke"):
            await engine.pause()
        await engine.close()

    with contract() as (url, server):
        asyncio.run(program(url, server))


def test_a_server_that_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    async def program(url: str) -> Completion:
        engine = http_engine(url, tmp_path, retries=20)
        try:
            return await engine.generate(request(0, (4, 5, 6)))
        finally:
            await engine.close()

    with contract(Faults(start_s=0.7)) as (url, server):
        assert len(asyncio.run(program(url)).tokens) == 16
        assert server.calls[0] == server.calls[1] == "/pause_generation"


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        (Faults(wrong_lengths=1.0, at=0), r"/generate: not an answer of sglang .*expected \d+ new tokens"),
        (Faults(garbage=1.0, at=0), "/generate: an event that is no JSON"),
        (Faults(error=1.0), "/generate answered 500: .*on purpose"),
        (Faults(hang=1.0, at=0), "/generate: ReadTimeout"),
        (Faults(call=1.0), "/pause_generation answered 500"),
    ],
)
def test_a_server_that_is_always_wrong_breaks_the_request_with_its_url_and_what_was_wrong(
    faults: Faults, match: str, tmp_path: Path
) -> None:
    async def program(url: str) -> None:
        engine = http_engine(url, tmp_path, retries=2, timeout_s=0.3)
        try:
            with pytest.raises(EngineGone, match=match):
                await engine.generate(request(0, (4, 5, 6)))
        finally:
            await engine.close()

    with contract(faults) as (url, _):
        asyncio.run(program(url))


def test_weights_in_the_folder_are_the_newest_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    def names() -> list[tuple[str, str]]:
        return [(folder.parent.name, folder.name) for folder in tmp_path.glob("*/version-*")]

    async def program(url: str) -> None:
        engine = http_engine(url, tmp_path)
        for version in (1, 2, 3):
            await engine.load(version, TestHttpEngineOverTheContractOfSgLang().make_weights(version % 3))
            assert [name[1].split(".")[0] for name in names()] == [f"version-{version:06d}"]
        await engine.close()

    with contract() as (url, _):
        asyncio.run(program(url))
    assert not list(tmp_path.iterdir())


def test_while_one_engine_writes_newer_weights_another_moves_its_link_and_then_shares_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_end, written = threading.Event(), threading.Event(), list[int]()
    original = weight_folder.write_weights

    def write(folder: Path, version: int, *arguments: Any) -> Any:
        written.append(version)
        if version == 2:
            is_writing.set()
            assert may_end.wait(30)
            if written.count(2) == 1:
                raise WeightsError("the disk is full")
        return original(folder, version, *arguments)

    monkeypatch.setattr(weight_folder, "write_weights", write)
    weights = [TestHttpEngineOverTheContractOfSgLang().make_weights(number) for number in (0, 1, 2)]
    folder = WeightFolder(tmp_path, make("llama"))
    one, other = folder.new_link("engine-0"), folder.new_link("engine-1")
    for link in (one, other):
        link.write(1, weights[1])
    one.move()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(one.write, 2, weights[2])
        assert is_writing.wait(30)
        pool.submit(other.move).result(timeout=10)
        second = pool.submit(other.write, 2, weights[2])
        late = folder.new_link("engine-2")
        assert late.written.version == other.written.version == 1 and Path(late.path).is_dir()
        may_end.set()
        errors = [future.exception(timeout=30) for future in (first, second)]
        assert any(
            isinstance(error, EngineError) and "disk is full. Set engine.http.folder" in str(error) for error in errors
        )
        for future in [pool.submit(link.write, 2, weights[2]) for link in (one, other)]:
            future.result(timeout=30)
    for link in (one, other):
        link.move()
        assert link.written.version == 2 and Path(link.path).is_dir()
    assert one.written == other.written and written == [0, 1, 2, 2]
    for link in (one, other, late):
        link.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_broken", [True, False])
def test_closing_the_engine_of_a_hung_server_takes_one_timeout_at_most_however_many_streams_it_has(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_engine_module, "ABORT_S", 1.0)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def program() -> float:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        http = HttpConfig(urls=(url,), flavour="sglang", weights="none")
        config = EngineConfig(kind="http", http=http, slots=8)
        engine: Any = build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())
        turns = [asyncio.create_task(engine.generate(request(number, (4, 5, 6)))) for number in range(6)]
        await until(lambda: engine.stats().running == 6)
        await asyncio.sleep(0.2)
        if is_broken:
            engine._break("on purpose")
        began = time.monotonic()
        await engine.close()
        seconds = time.monotonic() - began
        await asyncio.gather(*turns, return_exceptions=True)
        server.close()
        return seconds

    assert asyncio.run(program()) < (0.8 if is_broken else 4.0)


def test_what_a_server_cannot_sample_is_refused_by_name(tmp_path: Path) -> None:
    async def program(url: str) -> None:
        engine = http_engine(url, tmp_path)
        one = request(0, (4, 5, 6))
        with pytest.raises(RequestRefused, match="SGLang's log-probabilities are those of all tokens"):
            await engine.generate(structs.replace(one, sampling=Sampling(max_tokens=3, top_k=4)))
        await engine.close()

    with contract() as (url, _):
        asyncio.run(program(url))
