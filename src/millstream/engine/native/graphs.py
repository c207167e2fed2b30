"""CUDA graphs of decode steps: one graph for each size of the batch, all in one pool.

All that a graph reads is in memory that does not move: a batch is copied there and the graph is replayed. Graphs of ordinary
steps are made at the start: later each would delay the requests that run, and none can be made while the learner works. Those
of steps with restrictions (top-k, top-p) are made at the first batch of their size.

Not every model can be captured: one whose control flow depends on its own numbers (some mixtures of experts) makes the host
wait within a step. A failed capture leaves torch's allocator and its random numbers in the state of a capture, so this is found
out before: the operations of the first step are checked. Such a model is launched kernel by kernel, and `why_not` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millstream.model.gpu_share import TURNS, URGENT_ROWS

Restrictions = tuple[Tensor, Tensor]
Outputs = tuple[Tensor, Tensor]
MIN_WIDE_ROWS = 8
DecodeStep = Callable[[int, Restrictions | None], Outputs]
Rehearse = Callable[[int], AbstractContextManager[None]]
# torch's tags of an operation whose result the host must read before it can continue
HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def size_for(num: int, max_size: int) -> int:
    """The smallest size of a graph with room for `num` rows: 1, 2, 4, 8, then in steps of about an eighth."""
    if num <= 8:
        size = 1 << (num - 1).bit_length()
    else:
        step = max(8, (1 << (num - 1).bit_length()) // 16)
        size = -(-num // step) * step
    return min(size, max_size)


def wide_size(num: int) -> int:
    """As `size_for`, of a step with several rows for a slot: in steps of about a quarter, since a size occurs less often."""
    power = 1 << (num - 1).bit_length()
    step = max(MIN_WIDE_ROWS, power // 8)
    return -(-num // step) * step


class Recorder(Protocol):
    def record(self, step: Callable[[], Outputs], *, is_urgent: bool) -> tuple[Callable[[], None], Outputs]:
        """A function that repeats this step, and the tensors of its outputs. `is_urgent`: its kernels go before those of other
        streams. Raises `RuntimeError` if it cannot be recorded, and leaves everything as it was."""
        ...


class Graphs:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], Restrictions | None, Outputs]] = {}
        self.why_not = ""  # why no more graphs are made; empty: they are

    def make(self, sizes: Iterable[int], rehearse: Rehearse, step: DecodeStep) -> None:
        """The graphs of these sizes, the largest first, so that the others fit into its memory."""
        with TURNS.capture() as is_free:
            for size in sorted(sizes, reverse=True) if is_free else ():
                if not self.why_not:
                    self._capture(size, rehearse, step, None)

    def replay(self, size: int, rehearse: Rehearse, step: DecodeStep, restrictions: Restrictions | None) -> Outputs:
        """The outputs that `step` returned when its graph was made, with the values of this replay. Without a graph: those that
        it returns now."""
        key = (size, restrictions is not None)
        if key not in self._graphs and not self.why_not:
            with TURNS.capture() as is_free:
                if is_free:
                    self._capture(size, rehearse, step, restrictions)
        if key not in self._graphs:
            return step(size, restrictions)
        again, own, outputs = self._graphs[key]
        if own is not None and restrictions is not None:
            for mine, theirs in zip(own, restrictions, strict=True):
                mine.copy_(theirs)
        again()
        return outputs

    def _capture(self, size: int, rehearse: Rehearse, step: DecodeStep, restrictions: Restrictions | None) -> None:
        own = None if restrictions is None else (restrictions[0].clone(), restrictions[1].clone())
        with rehearse(size):
            if self._graphs:
                step(size, own)  # kernels are compiled, libraries set up
            elif (obstacle := obstacle_in(lambda: step(size, own))) is not None:
                self.why_not = f"{obstacle} makes the host wait"
                return
            try:
                again, outputs = self._recorder.record(lambda: step(size, own), is_urgent=size <= URGENT_ROWS)
            except RuntimeError as error:
                self.why_not = str(error) or type(error).__name__
                return
        self._graphs[size, own is not None] = again, own, outputs


class CudaRecorder:
    """Records steps for replays on this stream, which is that of the calling thread. Other streams may use the device. The
    kernels of a graph have the priority of the stream that they were recorded on."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._ordinary = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Outputs], *, is_urgent: bool) -> tuple[Callable[[], None], Outputs]:
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream if is_urgent else self._ordinary):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = step()
                graph.capture_end()
            except BaseException:  # any error: an open capture would break all later ones
                self._abandon(graph)
                raise
        return graph.replay, outputs

    def _abandon(self, graph: Any) -> None:
        """torch ends a failed capture on the stream only: its allocator would never free what other streams have used, and its
        generator would refuse to draw."""
        device = self._stream.device_index
        generator = torch.cuda.default_generators[device]
        for clean_up in (
            graph.capture_end,
            lambda: torch._C._cuda_endAllocateToPool(device, self._pool),
            lambda: generator.graphsafe_set_state(generator.clone_state()),
        ):
            with suppress(RuntimeError):  # there was nothing to clean up; or, of the first, that the capture has failed
                clean_up()


def obstacle_in(step: Callable[[], Any]) -> str | None:
    """Run it. Returns the name of the first operation that no graph can hold; None: there is none."""
    recording = _ObstacleMode()
    with recording:
        step()
    return recording.found


class _ObstacleMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for obstacles in the operations of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        with self:  # an operation that is made of others is checked as these
            out = func.decompose(*args, **options)
        if out is NotImplemented:
            out = func(*args, **options)
            if self.found is None and _is_obstacle(func, args, options, out):
                self.found = str(func)
        return out


def _is_obstacle(func: Any, args: Any, options: Any, out: Any) -> bool:
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
        return len({tensor.device.type for tensor in _tensors((args, options, out))}) > 1
    return any(tag in func.tags for tag in HOST_TAGS)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
