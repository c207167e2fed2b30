"""The http engine over a real vLLM, where one is given. It needs vLLM in an environment of its own, so it is not started here:

    python -c "import sys; sys.path.insert(0, 'tests'); from support.vllm_engines import model; model(7, ties=False).save_pretrained('tiny-vllm')"
    VLLM_SERVER_DEV_MODE=1 vllm serve tiny-vllm --skip-tokenizer-init --dtype float32 --logprobs-mode processed_logprobs \
        --max-num-seqs 4 --enforce-eager --port 8399
    MILLSTREAM_VLLM_URL=http://127.0.0.1:8399 pytest tests/engine/test_http_vllm.py
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest

from millstream.clock import RealClock
from millstream.engine import Engine, EngineConfig
from millstream.engine.http.config import HttpConfig
from millstream.events.sinks import MemorySink
from millstream.run.build import build_engine
from millstream.testing.engine import EngineSuite
from support.tiny import SHAPE, VOCABULARY, plain
from support.vllm_engines import model

URL = os.environ.get("MILLSTREAM_VLLM_URL")
TWINS: dict[int, Any] = {}


@pytest.mark.skipif(URL is None, reason="MILLSTREAM_VLLM_URL is not set")
class TestHttpEngineOverVllm(EngineSuite):
    vocabulary = VOCABULARY
    context = SHAPE["max_position_embeddings"]
    cache_after_load = "computed again"
    is_repeatable_by_seed = False  # what is interrupted goes on with other numbers; alone it repeats

    async def make_engine(self) -> Engine:
        assert URL is not None
        http = HttpConfig(urls=(URL,), flavour="vllm", folder=tempfile.gettempdir(), timeout_s=60.0)
        config = EngineConfig(kind="http", http=http, slots=4)
        return build_engine(config, model(0, ties=False), clock=RealClock(), sink=MemorySink())

    def make_reference(self, number: int) -> Any:
        TWINS[number] = TWINS.get(number) or plain(model(number, ties=False))
        return TWINS[number]
