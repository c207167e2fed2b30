"""What ranks hold of a model while they load it: the small version of `bench/rank_memory.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from internals_torch import model_of, qwen3
from rank_memory import measure

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_a_rank_loads_its_shard_and_publishes_it_and_never_has_the_whole_model(tmp_path: Path) -> None:
    """The head is tied to the embedding. Both ranks read their slices from the files."""
    config = qwen3(hidden=512, layers=10, heads=8, dim=64, words=8_192, context=64)
    model_of(config, device="cpu", dtype=torch.float32).save_pretrained(tmp_path)
    sizes, found = measure(tmp_path, 2)
    assert sizes.bound < 0.9 * sizes.whole, "the bound would allow the whole model"
    assert found.loading <= sizes.bound
    assert found.publishing <= 0.25 * sizes.largest, "every rank writes its own slices, and has no copy of them"
    assert found.on_cluster <= 2 * sizes.largest, "rank 0 has one whole tensor at a time, and what arrives of it"
