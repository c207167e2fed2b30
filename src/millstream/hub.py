"""Whether the Hugging Face hub can be asked for a name. Answered within seconds: the libraries retry for a minute first. Asked
every time: a network may come back while a notebook is open."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

HUB = "https://huggingface.co"
REACH_S = 5.0
TRUE = ("1", "ON", "YES", "TRUE")

HubKind = Literal["models", "datasets"]


def why_not_on_hub(name: str, kind: HubKind) -> str:
    """Why the libraries could not load this name, in words; empty if it is in the cache, or the hub answers."""
    cache = _cache()
    if (cache / f"{kind}--{name.replace('/', '--')}").is_dir() or (kind == "datasets" and _is_prepared(name)):
        return ""
    for variable in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        *(["HF_DATASETS_OFFLINE"] if kind == "datasets" else []),
    ):
        if os.environ.get(variable, "").upper() in TRUE:
            return f"{variable} is set, and it is not in the cache {cache}"
    return _why_unreachable(os.environ.get("HF_ENDPOINT", HUB))


def _home() -> Path:
    shared = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{shared}/huggingface")).expanduser()


def _cache() -> Path:
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named).expanduser() if named else _home() / "hub"


def _is_prepared(name: str) -> bool:
    """Whether the `datasets` library has tables of it."""
    folder = Path(os.environ.get("HF_DATASETS_CACHE", str(_home() / "datasets"))).expanduser()
    return (folder / name.replace("/", "___").lower()).is_dir() or (folder / name.replace("/", "___")).is_dir()


def _why_unreachable(url: str) -> str:
    """Empty if anything answers there. On a thread: looking up a name has no time limit of its own."""
    found = [f"{url} does not answer within {REACH_S:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=REACH_S).close()
        except urllib.error.HTTPError:  # an answer
            found[0] = ""
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            found[0] = f"{url} cannot be reached from here ({getattr(reason, 'strerror', None) or reason})"
        else:
            found[0] = ""

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(REACH_S + 0.5)
    return found[0]
