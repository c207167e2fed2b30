"""Where a model is: a folder in Hugging Face format, or a name on the hub. Light: imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from millstream.errors import ModelError
from millstream.model.lora import ADAPTER_CONFIG
from millstream.paths import kind_of

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


def check_path(path: str, key: str = "model.path", to_type: str | None = None) -> None:
    """Raises `ModelError` for what is neither a checkpoint's folder nor can be a name on the hub; `key`: who names it;
    `to_type`: what to type before another folder, where it is not a key of a config."""
    to_type = to_type or f"--set {key}="
    expected = f"{EXPECTED}: {to_type}FOLDER"
    folder, kind = Path(path), kind_of(path, key)
    if kind is None:
        if HUB_NAME.fullmatch(path) is None:
            raise ModelError(f"{key} = {path!r}: no such folder (looked for it from {Path.cwd()}). {expected}")
    elif kind != "folder":
        raise ModelError(f"{key} = {path!r} is a file. {expected}")
    elif (folder / "config.toml").is_file():
        raise ModelError(f"{path} is a run folder, and its model a folder in it: {to_type}{folder / 'model'}")
    elif not (folder / "config.json").is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        found = ", ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])]) or "nothing"
        if ADAPTER_CONFIG in names:
            raise ModelError(
                f"{key} = {path!r} is an adapter of peft's, not a model. To train it further: --set learner.lora.path={path} "
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


def not_on_hub(path: str, why: str) -> str:
    here = f"{path} is neither a folder here (looked for it from {Path.cwd()})"
    return f"{here} nor could it be loaded from the Hugging Face hub: {why}\n{EXPECTED}: --set model.path=FOLDER"
