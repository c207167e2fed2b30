"""Bodies of requests in JSON, as the client of 0.36 writes them. Fields that it may send and that mean nothing here have a
comment that says so; unknown ones are refused by name."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from millstream.decoding import decode_json
from millstream.learner.optimizer import AdamSettings
from millstream.serve.http import HttpError

B = TypeVar("B", bound=Struct)
SmallNumber = Annotated[int, Meta(ge=0, le=(1 << 62))]
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Metadata = dict[str, Any]
MAX_NAMES = 64


class Body(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    type: str | None = None  # the request's own name


class RequestAddress(Struct, kw_only=True, frozen=True):
    """Of a request to a model: where it belongs, whatever is wrong with the rest of it."""

    model_id: str
    seq_id: Annotated[int, Meta(ge=1, le=(1 << 62))]


class ConfigBody(Body, frozen=True, kw_only=True):
    sdk_version: str = ""


class CreateSessionBody(Body, frozen=True, kw_only=True):
    tags: list[str] = []  # not kept
    user_metadata: Metadata | None = None  # max_lag is read; see docs/training_service.md
    sdk_version: str = ""
    project_id: str | None = None  # not kept: there are no projects
    display_name: str | None = None  # not kept


class SessionBody(Body, frozen=True, kw_only=True):
    session_id: str


class LoraBody(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    rank: Annotated[int, Meta(ge=1, le=4096)]
    seed: int | None = None
    train_unembed: bool = True  # the head never has an adapter; weights_info says so
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Struct, kw_only=True, frozen=True):
    type: str = "adamw"


class CreateModelBody(Body, frozen=True, kw_only=True):
    session_id: str
    model_seq_id: SmallNumber
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class ModelBody(Body, frozen=True, kw_only=True):
    model_id: str


class AdamBody(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def settings(self) -> AdamSettings:
        is_range = 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1
        is_positive = min(self.learning_rate, self.eps, self.weight_decay, self.grad_clip_norm) >= 0
        if not (is_range and is_positive and all(map(math.isfinite, msgspec.structs.astuple(self)))):
            raise HttpError(422, f"{self}: expected finite numbers of at least 0, and betas below 1")
        return AdamSettings(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.grad_clip_norm or math.inf,
        )


class OptimStepBody(Body, frozen=True, kw_only=True):
    model_id: str
    seq_id: SmallNumber
    adam_params: AdamBody


class SaveBody(Body, frozen=True, kw_only=True):
    """Of a training state, or of weights to sample from."""

    model_id: str
    seq_id: SmallNumber
    path: str | None = None
    ttl_seconds: Positive | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: SmallNumber | None = None


class LoadBody(Body, frozen=True, kw_only=True):
    model_id: str
    seq_id: SmallNumber
    path: str
    optimizer: bool
    weights_access_token: str | None = None  # checkpoints of other keys cannot be loaded


class WeightsInfoBody(Body, frozen=True, kw_only=True):
    tinker_path: str


class CreateSamplingBody(Body, frozen=True, kw_only=True):
    session_id: str
    sampling_session_seq_id: SmallNumber
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(Struct, kw_only=True, frozen=True):
    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(Struct, kw_only=True, frozen=True):
    chunks: list[TextChunk]

    def tokens(self) -> tuple[int, ...]:
        if kinds := sorted({chunk.type for chunk in self.chunks} - {"encoded_text"}):
            raise HttpError(422, f"the prompt has chunks of type {', '.join(kinds)}: expected encoded_text")
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class SamplingBody(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    max_tokens: Positive | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Body, frozen=True, kw_only=True):
    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: str
    seq_id: SmallNumber
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Positive | None = None
    base_model: str | None = None  # the session has it
    model_path: str | None = None  # the session has it
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def check(self) -> None:
        """Raises `HttpError` for what is not supported."""
        names = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
        for name in (*names, "record_stability_info"):
            if getattr(self, name):
                raise HttpError(422, f"{name} is not supported: leave it out")


class RetrieveBody(Body, frozen=True, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False


class CancelBody(Body, frozen=True, kw_only=True):
    request_id: str


def read_json(body: bytes, kind: type[B]) -> B:
    """Raises `HttpError`."""
    try:
        return decode_json(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        known = f". Known: {', '.join(kind.__struct_fields__)}" if "unknown field" in str(wrong) else ""
        raise HttpError(422, f"{wrong}{known}") from wrong
