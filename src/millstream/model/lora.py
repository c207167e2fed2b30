"""The `[learner.lora]` table: small adapters are trained instead of the model. Light: imports no torch."""

from __future__ import annotations

from importlib.util import find_spec

from msgspec import Struct

from millstream.errors import ConfigError


class LoraConfig(Struct, frozen=True, kw_only=True):
    """A linear layer W becomes W + alpha / rank * B A (https://arxiv.org/abs/2106.09685). There is no dropout: the
    log-probabilities of a row must not depend on chance."""

    rank: int = 16
    alpha: float = 32.0
    # Names of linear layers within the decoder's layers, such as "q_proj". Empty: all of them; never the head.
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError("rank must be at least 1, alpha above 0")


def check_lora(config: LoraConfig | None) -> None:
    """Raises `ConfigError` where the library that it needs is not there."""
    if config is not None and find_spec("peft") is None:
        raise ConfigError("[learner.lora] needs the peft library, which is not here: pip install millstream[lora]")
