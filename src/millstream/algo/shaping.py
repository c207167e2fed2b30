"""What is added to rewards before advantages are made of them."""

from __future__ import annotations

import numpy as np

from millstream.algo.advantages import Rewards


def overlong(lengths_G: Rewards, *, max_tokens: int, buffer: int) -> Rewards:
    """0 up to max_tokens - buffer, from there down in a straight line to -1 at max_tokens, and -1 beyond: DAPO, arXiv
    2503.14476."""
    return np.asarray(np.clip((max_tokens - buffer - lengths_G) / buffer, -1.0, 0.0))
