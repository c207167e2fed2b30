"""The service of a checkpoint: engine, tokenizer and limits. Imports torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import Struct
from transformers import PreTrainedModel

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.events import Event, PathChosen
from millstream.events.summary import path_words
from millstream.model.load import context_length, set_up_cpu
from millstream.model.locate import check_path
from millstream.paths import program
from millstream.run.build import build_engine, build_model, end_tokens
from millstream.run.config import ModelConfig
from millstream.run.text import TokenizerText
from millstream.serve.auth import check_token
from millstream.serve.openai.app import host_model
from millstream.serve.openai.prompt_scores import PromptScorer
from millstream.serve.openai.service import ModelServiceConfig, Served

logger = logging.getLogger(__name__)
DEFAULT_CONTEXT = 8192  # of a model whose config has no context length


class ServedConfig(Struct, frozen=True, kw_only=True):
    name: str | None = None  # the model's name for clients. None: its path
    max_length: int | None = None  # tokens of a prompt and its answer together. None: the model's context
    model: ModelConfig
    engine: EngineConfig

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError("max_length must be at least 2: a token of the prompt and one of the answer")
        if self.engine.num_engines > 1:
            raise ValueError("engine.replicas and several engine.http.urls are for training: a service has one engine")


class PathSink:
    """Logs what computes where it is not the fastest path, and discards all other events."""

    def emit(self, event: Event) -> None:
        if isinstance(event, PathChosen) and event.why:
            logger.warning("%s: %s", event.worker, path_words(event))


def build_served(config: ServedConfig) -> Served:
    """Must be called on the event loop that serves it. The caller closes the engine."""
    model, tokenizer = build_model(config.model, seed=0)
    text = TokenizerText(tokenizer=tokenizer, max_prompts_kept=1)  # prompts of strangers, of any length
    text.encode(" ")  # the first call settles how it cuts and pads: that must not change while others use it
    limits = [length for length in (context_length(model), config.max_length) if length is not None]
    return Served(
        name=config.name or config.model.path or "tiny",
        engine=build_engine(config.engine, model, clock=RealClock(), sink=PathSink()),
        text=text,
        end_tokens=end_tokens(model, tokenizer),
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        context=min(limits, default=DEFAULT_CONTEXT),
        score_prompt=PromptScorer(lambda: _plain_model(config.model)),
    )


def _plain_model(config: ModelConfig) -> PreTrainedModel:
    """The model once more, with the library's own attention: what one forward pass needs."""
    model = build_model(config, seed=0)[0].eval()
    model.set_attn_implementation("eager")
    return model


def run_model_service(
    config: ServedConfig, service: ModelServiceConfig, *, token: str | None, on_ready: Callable[[str, str], None]
) -> None:
    """Until a signal comes. `on_ready` is called with the URL and the model's name."""
    check_token(service.host, token)
    if config.model.path is not None:
        check_path(config.model.path, "MODEL", f"{program()} serve ")
    set_up_cpu()

    async def serving() -> None:
        served = build_served(config)
        try:
            await host_model(served, service, token=token, on_ready=lambda url: on_ready(url, served.name))
        finally:
            await served.engine.close()

    asyncio.run(serving())
