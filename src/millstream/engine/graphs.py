"""Captured decode steps: one graph for each size of the batch, made when that size first comes, all in one pool of memory.

Whatever a graph reads stands in memory that does not move: a batch is put there and the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Restrictions = tuple[Tensor, Tensor]
Step = Callable[[int, Restrictions | None], tuple[Tensor, Tensor]]


def size_for(num: int, most: int) -> int:
    """The smallest size of a graph with room for so many: 1, 2, 4, 8, then in steps of about an eighth."""
    if num <= 8:
        size = 1 << (num - 1).bit_length()
    else:
        step = max(8, (1 << (num - 1).bit_length()) // 16)
        size = -(-num // step) * step
    return min(size, most)


class Graphs:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, bool], tuple[Any, Restrictions | None, tuple[Tensor, Tensor]]] = {}

    def replay(
        self,
        size: int,
        rehearse: Callable[[int], AbstractContextManager[None]],
        step: Step,
        restrictions: Restrictions | None,
    ) -> tuple[Tensor, Tensor]:
        """What `step` returned when its graph was made, and holds what this replay computed."""
        key = (size, restrictions is not None)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, rehearse, step, restrictions)
        graph, own, outputs = self._graphs[key]
        if own is not None and restrictions is not None:
            for mine, theirs in zip(own, restrictions, strict=True):
                mine.copy_(theirs)
        graph.replay()
        return outputs

    def _capture(
        self,
        size: int,
        rehearse: Callable[[int], AbstractContextManager[None]],
        step: Step,
        restrictions: Restrictions | None,
    ) -> tuple[Any, Restrictions | None, tuple[Tensor, Tensor]]:
        own = None if restrictions is None else (restrictions[0].clone(), restrictions[1].clone())
        with rehearse(size):
            step(size, own)  # kernels are compiled, libraries set up
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = step(size, own)
            finally:
                graph.capture_end()
        return graph, own, outputs
