"""Hugging Face checkpoints in and out, and a machine set up so that two parts of one process do not fight for it."""

from __future__ import annotations

import copy
import errno
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import ModelError
from millstream.model.attention import NAME
from millstream.model.locate import ROPE_LIMITS, needs_code, no_tokenizer, not_on_hub
from millstream.types import Weights

FEW_CORES = 8
SWITCH_S = 0.0005
NO_INTERFACE = (
    "{} does not use transformers' attention interface: neither engine nor learner can run it. Choose another model"
)


def set_up_cpu() -> None:
    """One torch thread per part where cores are few, no oneDNN on ARM, and an interpreter that changes threads often.

    With the default of one thread per core an engine and a learner in one process collapse (346 tokens/s against 9,408 on
    two cores). oneDNN costs 55 microseconds a matrix product on aarch64, four times the product itself in a small model. A
    learner's thread needs the interpreter after every operation: with the default of 5 ms it waits that long for the event loop
    (650 rollouts/s of the demo against 700).
    """
    sys.setswitchinterval(SWITCH_S)
    if num_cores() <= FEW_CORES:
        torch.set_num_threads(1)
    if platform.machine() == "aarch64":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def num_cores() -> int:
    """Those that this process may use: a container or `taskset` may grant fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_model(
    path: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM with our attention, from a folder or a hub name. No pickle is read, and no code of the folder is run unless
    it is trusted."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            attn_implementation=NAME,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except KeyError as error:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        raise ModelError(_without_interface(config, error)) from error
    except Exception as error:  # a library that raises many kinds for a damaged file: reported as one, with its cause
        raise ModelError(_not_loaded(path, f"no causal language model in {path}: {error}", error)) from error
    return model.to(device)


def new_model(
    config: Any, *, seed: int, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model with random weights. The same config and seed give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=NAME, dtype=dtype, trust_remote_code=trust_remote_code
            )
        except KeyError as error:
            raise ModelError(_without_interface(config, error)) from error


def _without_interface(config: Any, error: KeyError) -> str:
    """Some models look their attention up by its name, in a table of their own."""
    name = (config.architectures or [f"a model of kind {config.model_type}"])[0]
    return NO_INTERFACE.format(name) if error.args == (NAME,) else f"{name} could not be built: no {error}"


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the library's own attention, for code that calls it as any model of transformers."""
    plain = copy.deepcopy(model).eval()
    try:
        plain.set_attn_implementation("sdpa")
    except (ValueError, ImportError):  # the architecture has none
        plain.set_attn_implementation("eager")
    return plain


def dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def model_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Everything that training may change or a checkpoint holds: parameters, and the buffers that are saved with them."""
    parameters = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**parameters, **buffers}


@torch.no_grad()
def load_weights(model: PreTrainedModel, weights: Weights) -> None:
    """Into a model of the same shape, what `model_weights` gave of another, or some of it."""
    own = model_weights(model)
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def check_layers(model: PreTrainedModel) -> None:
    """Only attention whose rule reaches us: full, or over a sliding window."""
    if strange := strange_layers(model.config):
        raise ModelError(f"{type(model).__name__} has layers of kind {', '.join(strange)}: not supported")


def strange_layers(config: Any) -> list[str]:
    """The kinds of its layers that have another state or another rule."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kinds - {"full_attention", "sliding_attention"})


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        raise ModelError(_not_loaded(path, no_tokenizer(str(path), str(error)), error)) from error


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Tokens to text, without the special ones."""
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def _not_loaded(path: str | Path, from_folder: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return needs_code(str(path))
    return from_folder if Path(path).is_dir() else not_on_hub(str(path), str(error))


def context_length(model: PreTrainedModel) -> int | None:
    """The most tokens that the model's positions were made for, or for which its rope does not look at other rows; None if its
    config does not say."""
    config = model.config.get_text_config()
    limits = (getattr(config, "max_position_embeddings", None), rope_limit(config))
    return min((limit for limit in limits if limit is not None), default=None)


def rope_limit(config: Any) -> int | None:
    """The length beyond which its rope changes the frequencies of every row in the pass. None: it never does."""
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    keys = [(table, ROPE_LIMITS.get(table.get("rope_type", ""))) for table in tables]
    found = [table.get(key) or getattr(config, key, None) for table, key in keys if key is not None]
    return min((limit for limit in found if limit is not None), default=None)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, path: Path) -> None:
    """A checkpoint that `AutoModelForCausalLM.from_pretrained` loads. Raises `OSError` if the disk is full."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(path)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error
    usual_mode = (path / "config.json").stat().st_mode
    for weights in path.glob("*.safetensors"):  # safetensors makes them readable by their owner alone
        weights.chmod(usual_mode)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
