"""The `[engine.http]` table. Light: imports no HTTP client."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class HttpConfig(Struct, frozen=True, kw_only=True):
    """Servers that generate, each of them one engine. See docs/engines.md for how to start them."""

    urls: tuple[str, ...]
    """Of servers with the same model: http://host:port, without a path after it."""
    flavour: Literal["openai", "vllm", "sglang", "millstream"]
    """The API that they have."""
    weights: Literal["none", "disk"] = "disk"
    """How new weights reach them. disk: through `folder`. none: never, which is not enough to train."""
    folder: str | None = None
    """Where weights are written, once for all servers: a folder that the servers see under the same name."""
    timeout_s: float = 300.0
    """A call or stream in which nothing comes for so long has failed."""
    weights_timeout_s: float = 900.0
    """The same for an update of weights. The server may still carry it out: it is not used until it confirms the newest."""
    retries: int = 6
    """Failures of one request without a new token, or of the server without a success that makes up for them (each makes up for
    one), after which a server counts as gone: its requests continue elsewhere, and it is used again when it has loaded the
    newest weights."""
    token_variable: str | None = None
    """The NAME of the environment variable that has the servers' token; the token itself does not belong into a config."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("urls is empty: expected at least one, as in http://127.0.0.1:8000")
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/\s?#@]+/?", url):
                raise ValueError(f"{url!r} in urls: expected http://host:port, without a path")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("urls has a server twice")
        if self.timeout_s <= 0 or self.weights_timeout_s <= 0 or self.retries < 0:
            raise ValueError("timeout_s and weights_timeout_s must be above 0, retries at least 0")
        if self.token_variable is not None and not VARIABLE.fullmatch(self.token_variable):
            raise ValueError("token_variable must be the name of an environment variable, not the token itself")
        if self.weights == "disk" and self.folder is None:
            raise ValueError('weights = "disk" needs folder: one that the servers see under the same name')
        if self.weights == "none" and self.folder is not None:
            raise ValueError('weights = "none" writes none: leave folder out')
        if self.weights == "disk" and self.flavour == "openai":
            raise ValueError('flavour = "openai" has no way to take weights: set weights = "none"')
