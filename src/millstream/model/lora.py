"""The `[learner.lora]` table: small adapters are trained instead of the model. Light: imports no torch."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from millstream.errors import ConfigError, ModelError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Keys of peft's config that make it another kind of adapter."""


class LoraConfig(Struct, frozen=True, kw_only=True):
    """A linear layer W becomes W + alpha / rank * B A (https://arxiv.org/abs/2106.09685). There is no dropout: the
    log-probabilities of a row must not depend on chance."""

    rank: int = 16  # of the matrices A and B
    alpha: float = 32.0  # the update is multiplied by alpha / rank
    # Names of linear layers within the decoder's layers, such as "q_proj". Empty: all of them; never the head.
    targets: tuple[str, ...] = ()
    path: str | None = None
    """The folder of an adapter in peft's format to start from: it sets rank, alpha and targets. None: new adapters."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError("rank must be at least 1, alpha above 0")


def check_lora(config: LoraConfig | None) -> None:
    """Raises `ConfigError` where the library that it needs is not there, `ModelError` for an adapter that cannot be used."""
    if config is not None and find_spec("peft") is None:
        raise ConfigError("[learner.lora] needs the peft library, which is not here: pip install millstream[lora]")
    if config is not None:
        of_adapter(config)


def of_adapter(config: LoraConfig) -> LoraConfig:
    """With the rank and alpha of the adapter in `config.path`, where there is one. Raises `ModelError`."""
    if config.path is None:
        return config
    found = _read_config(Path(config.path))
    what = f"learner.lora.path = {config.path!r}"
    if found.get("peft_type") != "LORA":
        raise ModelError(f"{what} is an adapter of the type {found.get('peft_type')}: expected LORA")
    if others := [key for key in OTHER_KINDS if found.get(key)] + (
        ["bias"] if found.get("bias", "none") != "none" else []
    ):
        settings = ", ".join(f"{key} = {found[key]!r}" for key in others)
        raise ModelError(
            f"{what} has {settings}: expected plain LoRA. Merge it into its model (peft: merge_and_unload)"
        )
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise ModelError(f"{what} has r = {rank!r} and lora_alpha = {alpha!r}: expected numbers above 0")
    shape = structs.replace(config, rank=rank, alpha=float(alpha))
    default = LoraConfig()
    for key in ("rank", "alpha"):
        if getattr(config, key) not in (getattr(shape, key), getattr(default, key)):
            raise ConfigError(
                f"learner.lora.{key} = {getattr(config, key)}, and {what} has {getattr(shape, key)}: leave it out"
            )
    return shape


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise FileNotFoundError(f"no {ADAPTER_WEIGHTS}")
        found = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"learner.lora.path = {str(folder)!r} is not the folder of an adapter: {error}. Expected {ADAPTER_CONFIG} and "
            f"{ADAPTER_WEIGHTS}, as peft's save_pretrained writes them"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{folder / ADAPTER_CONFIG}: expected an object")
    return found
