"""Where a model is: a folder in Hugging Face format, or a name on the hub. Light: imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from millstream.errors import ModelError
from millstream.hub import why_not_on_hub
from millstream.model.lora import ADAPTER_CONFIG
from millstream.paths import did_you_mean, kind_of

EXPECTED = (
    "Expected a folder in Hugging Face format (config.json, weights, a tokenizer), as model.save_pretrained and "
    "tokenizer.save_pretrained write it"
)
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
MAX_NAMES = 8
MAX_HEADER = 100_000_000  # bytes of a safetensors file's header, as the library allows
ROPE_LIMITS = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
"""Kinds of rope that pick their frequencies by the longest row of a pass, and the key of the length up to which they do not."""


def check_path(path: str, key: str = "model.path", to_type: str | None = None) -> None:
    """Raises `ModelError` for what is neither a checkpoint's folder nor can be a name on the hub; `key`: who names it;
    `to_type`: what to type before another folder, where it is not a key of a config."""
    to_type = to_type or f"--set {key}="
    expected = f"{EXPECTED}: {to_type}FOLDER"
    folder, kind = Path(path), kind_of(path, key)
    if kind is None:
        if HUB_NAME.fullmatch(path) is None:
            here = f"{key} = {path!r}: no such folder (looked for it from {Path.cwd()})"
            raise ModelError(f"{here}.{did_you_mean(folder)} {expected}")
        if why := why_not_on_hub(path, "models"):
            raise ModelError(not_on_hub(path, why, key, to_type))
    elif kind != "folder":
        raise ModelError(f"{key} = {path!r} is a file. {expected}")
    elif (folder / "config.toml").is_file():
        raise ModelError(
            f"{path} is a run folder, and its model a folder in it: {to_type}{quote(str(folder / 'model'))}"
        )
    elif not (folder / "config.json").is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        found = ", ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])]) or "nothing"
        if ADAPTER_CONFIG in names:
            raise ModelError(
                f"{key} = {path!r} is an adapter of peft's, not a model. To train it further: --set "
                f"{quote(f'learner.lora.path={path}')} "
                f"{to_type}FOLDER, with the folder of the model that it belongs to"
            )
        raise ModelError(f"{key} = {path!r} has no config.json; found: {found}. {expected}")
    elif pickled := _pickled(folder):
        convert = f"AutoModelForCausalLM.from_pretrained({path!r}).save_pretrained('FOLDER')"
        raise ModelError(
            f"{key} = {path!r} has its weights as a pickle ({pickled}), which can run code when it is read. Expected "
            f'safetensors. To convert them: python -c "from transformers import AutoModelForCausalLM; {convert}"'
        )


def check_tokenizer(path: str) -> None:
    """Raises `ModelError` if a checkpoint's folder has no file that a tokenizer could be made from."""
    if not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(no_tokenizer(path, f"none of {', '.join(TOKENIZER_FILES)} is there"))


def no_tokenizer(path: str, why: str) -> str:
    return f"no tokenizer in {path}: {why}. Save one next to the model with tokenizer.save_pretrained({path!r})"


def _pickled(folder: Path) -> str | None:
    """A file with pickled weights, where there are no others."""
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith(".safetensors") for name in names):
        return None
    return next((name for name in names if name.startswith("pytorch_model") and name.endswith((".bin", ".pt"))), None)


def needs_code(path: str) -> str:
    code = ", ".join(sorted(entry.name for entry in Path(path).glob("*.py"))[:MAX_NAMES])
    return (
        f"{path} has code of its own{f' ({code})' if code else ''}, which must run to load it, and is not trusted. Read it, "
        "then --set model.trust_remote_code=true, or millstream serve --trust-remote-code"
    )


def not_on_hub(path: str, why: str, key: str = "model.path", to_type: str = "--set model.path=") -> str:
    here = f"{key} = {path!r}: {path} is neither a folder here (looked for it from {Path.cwd()})"
    hub = f"nor could it be loaded from the Hugging Face hub: {why}.{did_you_mean(Path(path))}"
    return f"{here} {hub} {EXPECTED}: {to_type}FOLDER"


def rope_limit_of(text: Mapping[str, Any]) -> int | None:
    """The length beyond which the rope of a model's `config.json` changes the frequencies of every row in the pass. None: it
    never does. The twin of `model.load.rope_limit`, which reads the loaded config."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    tables = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    keys = [(table, ROPE_LIMITS.get(table.get("rope_type") or table.get("type") or "")) for table in tables]
    found = [table.get(key) or text.get(key) for table, key in keys if key is not None]
    return min((limit for limit in found if limit is not None), default=None)


def check_weights(path: str) -> None:
    """Raises `ModelError` if a folder has no safetensors file, lacks one that its index names, or has one that is cut off."""
    folder = Path(path)
    names = sorted(entry.name for entry in folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(
                f"{index} cannot be read: {type(error).__name__}: {error}. Copy or download it again"
            ) from error
        if missing := sorted(named - set(names)):
            raise ModelError(
                f"{path} lacks {len(missing)} of the {len(named)} files of its weights: {missing[0]} is not there"
            )
    if not names:
        raise ModelError(f"{path} has no weights: expected a file that ends in .safetensors. {EXPECTED}")
    for name in names:
        if why := _why_damaged(folder / name):
            raise ModelError(f"{folder / name} is damaged: {why}. Copy or download it again")


def _why_damaged(path: Path) -> str:
    """From its header alone; empty if its size is what the header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                return f"it has {size:,} bytes, and no header of safetensors"
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "it has no header of safetensors"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"it has {size:,} bytes, and its header says {expected:,}"
