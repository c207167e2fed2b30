"""The start-up check of a model: our passes compute what the library's own forward pass computes, or the model is refused.

Our passes hand all tokens to the model as one row and replace its attention. Most architectures do not notice. One that makes a
mask of its own, counts positions in its own way or keeps a state of its own gives other numbers without any error.
So sequences of different lengths, some longer than the window, go through the pass that is about to be used, and through the
library's eager pass, one at a time. The log-probabilities must agree, within what the dtype costs.

Each pass is checked on two models: a small one of the same architecture with random weights, in float32 on the CPU; and the
model itself, on its device. If that is too large, or its window is, a small one takes its place there, too. A model in 16 bits
is checked twice: as a copy in float32, where a mistake shows that rounding would hide, and as it is, where it may differ from
float32 by a multiple of what the library's own pass in 16 bits does. Adapters, which begin at 0, have random weights meanwhile.
What has passed is remembered (`Remembered`): the next start costs nothing.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from millstream.errors import ModelError
from millstream.model.adapters import add_adapters, lora_of, random_adapters
from millstream.model.attention import NAME
from millstream.model.load import NO_INTERFACE, check_layers, context_length
from millstream.model.lora import LoraConfig
from millstream.model.shrink import shrunk

MAX_WINDOW = 1024  # a longer one is checked on the small model, where it has 8 tokens, if there is such a model
MAX_PARAMETERS = {"cpu": 50_000_000, "cuda": 4_000_000_000}
FLOAT32_ALLOWED = 1e-3  # nats, of any token
MULTIPLE = 3.0  # of what the library's own rounding to 16 bits costs, in the median of all tokens
MIN_ALLOWED = 5e-3
NOT_OURS = (MemoryError, torch.OutOfMemoryError)


class CheckLengths(NamedTuple):
    """Tokens of three prompts, and of what follows each."""

    prompts: tuple[int, int, int]
    answer: int


class Scored(NamedTuple):
    """A sequence, and the log-probabilities of its last tokens, as one of our passes gave them."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


Pass = Callable[[PreTrainedModel, CheckLengths], list[Scored]]


def check_pass(
    model: PreTrainedModel,
    name: str,
    run: Pass,
    remedy: str,
    *,
    is_small_only: bool = False,
    device: torch.device | None = None,
) -> None:
    """Raises `ModelError` if the pass `run` gives other numbers than the library's own, or fails. `name`: of the pass, in the
    message and the memory; `remedy`: what to set instead. `is_small_only`: the model itself will be elsewhere. `device`: where
    a model without weights will be; a small one takes its place there."""
    check_layers(model)
    found = Remembered(model, name, device or model.device)
    lora = lora_of(model)
    if not found.has("small") and (small := small_model(model.config, torch.float32, lora)) is not None:
        check_itself(small, name, run, remedy)
        found.add("small")
    has_weights = model.device.type != "meta"
    what = "itself" if has_weights else "twin"
    if is_small_only or found.has(what):
        return
    if not _is_affordable(model) and (device_twin := small_model(model.config, model.dtype, lora)) is not None:
        check_itself(device_twin.to(device or model.device), name, run, remedy)
    elif has_weights:
        check_itself(model, name, run, remedy)
    if (device or model.device).type == "cuda":
        torch.cuda.empty_cache()  # a cache is as large as the memory that is free
    found.add(what)


def check_itself(model: PreTrainedModel, path: str, run: Pass, remedy: str) -> None:
    """This very model, whatever is remembered."""
    with random_adapters(model.eval()):
        scored = _scored(model, path, run, remedy)
        if model.dtype == torch.float32:
            _compare(model, scored, model, path, remedy)
            return
        exact = copy.deepcopy(model).float()
        try:
            scored_exactly = _scored(exact, path, run, remedy)
        except ModelError:
            pass  # operations of the device that have no float32: what was computed in 16 bits is all there is
        else:
            _compare(exact, scored_exactly, exact, f"{path} in float32", remedy)
        _compare(model, scored, exact, path, remedy)


def _scored(model: PreTrainedModel, path: str, run: Pass, remedy: str) -> list[Scored]:
    with _refused(model, path, remedy):
        return run(model, lengths_for(model))


def _compare(model: PreTrainedModel, scored: Sequence[Scored], exact: PreTrainedModel, path: str, remedy: str) -> None:
    with _refused(model, path, remedy):
        difference, allowed = difference_from_library(model, scored, exact)
    if not difference <= allowed:
        raise ModelError(
            f"{type(model).__name__} gives other numbers in {path} than in transformers: the log-probability of a token "
            f"differs by {difference:.2g}, expected at most {allowed:.2g}. {remedy}".strip()
        )


@contextmanager
def _refused(model: PreTrainedModel, path: str, remedy: str) -> Iterator[None]:
    """Whatever is raised within the block is a `ModelError` with the remedy."""
    name = type(model).__name__
    try:
        yield
    except NOT_OURS:
        raise
    except ModelError as error:
        said = str(error) if name in str(error) else f"{name}: {error}"
        raise ModelError(f"{said}. {remedy}".strip()) from error
    except Exception as error:  # any error of the library's code, with our inputs: what it says is all that is known
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ModelError(f"{name} cannot run in {path} ({why}). {remedy}".strip()) from error


# ---- the library's own numbers -----------------------------------------------------------------------------------------


def difference_from_library(
    model: PreTrainedModel, scored: Sequence[Scored], exact: PreTrainedModel
) -> tuple[float, float]:
    """How far ours are from the library's, and how far they may be. In float32: of any token. In 16 bits: from the library's
    pass in float32 (`exact`), of all tokens, in the median: a mixture of experts may choose another one where two are alike."""
    if any(not one.logprobs for one in scored):
        return float("nan"), 0.0
    ours = [torch.tensor(one.logprobs, dtype=torch.float64) for one in scored]
    theirs = library_logprobs(model, scored)
    if model is exact:
        return float((torch.cat(ours) - torch.cat(theirs)).abs().max()), FLOAT32_ALLOWED
    right = torch.cat(library_logprobs(exact, scored))
    found, cost = (float((torch.cat(some) - right).abs().median()) for some in (ours, theirs))
    return found, max(MULTIPLE * cost, MIN_ALLOWED)


@torch.no_grad()
def library_logprobs(model: PreTrainedModel, scored: Sequence[Scored]) -> list[Tensor]:
    """Of the same tokens, in transformers' eager pass: one sequence at a time, its positions left to the model."""
    model.set_attn_implementation("eager")
    try:
        found = []
        for one in scored:
            tokens = torch.tensor(one.tokens, device=model.device)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            at = torch.arange(len(tokens) - len(one.logprobs) - 1, len(tokens) - 1, device=model.device)
            logprobs = torch.log_softmax(logits[at], -1).gather(1, tokens[at + 1, None])[:, 0]
            found.append(logprobs.double().cpu())
        return found
    finally:
        model.set_attn_implementation(NAME)


# ---- what is compared --------------------------------------------------------------------------------------------------


def lengths_for(model: PreTrainedModel) -> CheckLengths:
    """Two prompts longer than the window, and a short one, as far as the context has room."""
    longest = context_length(model)
    wanted = (window_of(model) or 0) + 96
    total = wanted if longest is None else min(wanted, longest)
    answer = max(1, min(24, total // 4))
    first = max(1, total - answer - 9)
    return CheckLengths((first, min(3, first), max(1, total - answer)), answer)


def window_of(model: PreTrainedModel) -> int | None:
    """The sliding window of its attention, if there is one."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return window if isinstance(window, int) else None


def small_model(
    config: Any, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None
) -> PreTrainedModel | None:
    """A model of the same architecture that is small, on the CPU, with weights that let every part matter, and with such
    adapters. None: the library cannot make one of that size."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        generator = torch.default_generator.manual_seed(0)
        try:
            small = AutoModelForCausalLM.from_config(
                shrunk(config), attn_implementation="eager", dtype=dtype, trust_remote_code=False
            ).eval()
            randomize(small, generator)
            if lora is not None:
                add_adapters(small, lora, seed=0)
            with torch.no_grad():
                small(input_ids=torch.arange(4)[None], use_cache=False)
        except Exception:  # any error of the library's code, at sizes that are ours
            return None
    return use_our_attention(small)


def use_our_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Raises `ModelError` for a model whose attention cannot be replaced."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would only warn
    try:
        model.set_attn_implementation(NAME)
    finally:
        transformers.logging.set_verbosity(level)
    if model.config._attn_implementation != NAME:
        raise ModelError(NO_INTERFACE.format(type(model).__name__))
    return model


@torch.no_grad()
def randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """The library's first weights are so small that attention is nearly uniform: a wrong mask would hardly show."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * noise)


def _is_affordable(model: PreTrainedModel) -> bool:
    """Whether the model itself is compared. In 16 bits that needs a copy in float32."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if (window_of(model) or 0) > MAX_WINDOW or count > MAX_PARAMETERS.get(model.device.type, 0):
        return False
    return model.device.type != "cuda" or bool(torch.cuda.mem_get_info(model.device)[0] > 6 * count)


# ---- memory ------------------------------------------------------------------------------------------------------------


class Remembered:
    """Which checks have passed on this machine: empty files in the user's cache folder, named by a digest of all that the
    result depends on. A folder that cannot be read or written remembers nothing."""

    def __init__(self, model: PreTrainedModel, name: str, device: torch.device) -> None:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        config = {key: value for key, value in model.config.to_dict().items() if key not in UNIMPORTANT}
        versions = [transformers.__version__, torch.__version__, own_digest()]
        self._small = [name, config, str(lora_of(model)), *versions]
        self._itself = [*self._small, str(model.dtype), where]

    def _file(self, what: str) -> Path:
        key = json.dumps([what, self._small if what == "small" else self._itself], sort_keys=True, default=str)
        base = os.environ.get("XDG_CACHE_HOME")
        folder = Path(base) if base else Path.home() / ".cache"
        return folder / "millstream" / "checked" / blake2b(key.encode(), digest_size=16).hexdigest()

    def has(self, what: str) -> bool:
        with suppress(OSError, RuntimeError):  # there may be no home
            return self._file(what).is_file()
        return False

    def add(self, what: str) -> None:
        with suppress(OSError, RuntimeError):
            file = self._file(what)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


UNIMPORTANT = ("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache")


@functools.cache
def own_digest() -> str:
    """Of the source of everything that a pass is made of: another version of ours is another program."""
    package = Path(__file__).parents[1]
    found = blake2b(digest_size=16)
    for folder in ("model", "engine/native", "learner"):
        for file in sorted((package / folder).glob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
