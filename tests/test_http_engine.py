"""Servers as engines: the promises of the seam, over a stand-in for SGLang and over our own service; and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from contract_sglang import Contract, Faults
from millstream.clock import RealClock
from millstream.engine import Engine, EngineConfig
from millstream.engine.http_config import HttpConfig
from millstream.events.sinks import MemorySink
from millstream.runtime.build import build_engine
from millstream.testing.engine import EngineSuite
from servers import Close, millstream_serve, serving, thread_engine
from tiny import SHAPE, VOCABULARY, make, plain

CONTEXT = SHAPE["max_position_embeddings"]
TWINS = {number: plain(make("llama", seed=number)) for number in range(3)}


@contextmanager
def contract(faults: Faults | None = None, **more: Any) -> Iterator[tuple[str, Contract]]:
    made: list[Contract] = []

    def start() -> tuple[ASGIApp, Close]:
        engine = thread_engine(make("llama", seed=7))  # other weights than the client's: it must be given them
        made.append(Contract(engine, faults, **more))
        return made[0].app(), engine.close

    with serving(start) as url:
        yield url, made[0]


def http_engine(urls: list[str], folder: Path, flavour: str = "sglang", *, slots: int = 4, **more: Any) -> Engine:
    http = HttpConfig(urls=tuple(urls), flavour=flavour, folder=str(folder), **{"timeout_s": 20.0} | more)  # type: ignore[arg-type]
    config = EngineConfig(kind="http", http=http, slots=slots)
    return build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())


class OverHttp(EngineSuite):
    """One server for all tests of a class; an engine of its own for each."""

    vocabulary = VOCABULARY
    context = CONTEXT
    url: str
    folder: Path
    flavour = "sglang"

    async def make_engine(self) -> Engine:
        return http_engine([self.url], self.folder, self.flavour)

    def make_reference(self, number: int) -> Any:
        return TWINS[number]


class TestHttpEngineOverTheContractOfSgLang(OverHttp):
    has_top_k = has_top_p = False
    cache_after_load = "computed again"
    is_incremental = False

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with contract(is_incremental=cls.is_incremental) as (url, _):
            cls.url, cls.folder = url, tmp_path_factory.mktemp("weights")
            yield


class TestHttpEngineOverMillstreamServe(OverHttp):
    flavour = "millstream"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("weights")
        with serving(lambda: millstream_serve(make("llama", seed=7), VOCABULARY, CONTEXT, folder)) as url:
            cls.url, cls.folder = url, folder
            yield
