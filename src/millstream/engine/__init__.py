"""Engines: token ids in, token ids out, with log-probabilities and a version per token.

`base` has the protocol, `config` the `[engine]` table. `native` is our own engine, `http` a server as an engine, `vllm` vLLM.
"""

from millstream.engine.base import Engine, EngineContext, EngineStats, OnSampled
from millstream.engine.config import EngineConfig
from millstream.engine.vllm.config import OnUpdate

__all__ = ["Engine", "EngineConfig", "EngineContext", "EngineStats", "OnSampled", "OnUpdate"]
