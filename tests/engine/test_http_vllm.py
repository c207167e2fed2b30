"""The http engine over a real vLLM, where one is given. It needs vLLM in an environment of its own, so it is not started here:

    python -c "import sys; sys.path.insert(0, 'tests'); import test_http_vllm; test_http_vllm.model(7).save_pretrained('tiny-vllm')"
    VLLM_SERVER_DEV_MODE=1 vllm serve tiny-vllm --skip-tokenizer-init --dtype float32 --logprobs-mode processed_logprobs \
        --max-num-seqs 4 --enforce-eager --port 8399
    MILLSTREAM_VLLM_URL=http://127.0.0.1:8399 pytest tests/test_http_vllm.py
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedModel

from millstream.clock import RealClock
from millstream.engine import Engine, EngineConfig
from millstream.engine.http.config import HttpConfig
from millstream.events.sinks import MemorySink
from millstream.model.load import new_model, set_up_cpu
from millstream.run.build import build_engine
from millstream.testing.engine import EngineSuite
from support.tiny import SHAPE, VOCABULARY, plain

URL = os.environ.get("MILLSTREAM_VLLM_URL")
TWINS: dict[int, Any] = {}


def model(seed: int) -> PreTrainedModel:
    """Heads of 32: vLLM has no smaller ones on a CPU."""
    set_up_cpu()
    return new_model(LlamaConfig(**{**SHAPE, "hidden_size": 128}), seed=seed)


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
        return build_engine(config, model(0), clock=RealClock(), sink=MemorySink())

    def make_reference(self, number: int) -> Any:
        TWINS[number] = TWINS.get(number) or plain(model(number))
        return TWINS[number]
