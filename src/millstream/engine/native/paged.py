"""The paged runner, for a GPU: a pool of pages that requests share, a decode step that is one captured graph, prompts in packed
chunks.

Every request in flight has a slot: a row of the page table, and its newest token, which stays on the device. So a decode step
needs from the host only the slots that take part and the position of each, both known before the tokens of the previous step
are: the host is one step ahead.

The same code runs on a CPU, without graphs and with the plain twins of the kernels (`engine.native.plain`).

A step may be *wide*: a draft that it checks, and a short prompt that joins, have a row for each of their tokens: the same slot,
the next position. All keys and values are written before any row attends. Those of a draft that turns out to be wrong are
overwritten by later steps.

Shapes: R rows that decode, N tokens of chunks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millstream.engine.native import fused
from millstream.engine.native.conversations import ConversationPages
from millstream.engine.native.fused_layer import fuse_model
from millstream.engine.native.graphs import CudaRecorder, Graphs, size_for, wide_size
from millstream.engine.native.memory import check_fits
from millstream.engine.native.pages import (
    DecodePass,
    PageAllocator,
    PagePools,
    PrefillPass,
    ShapeProbe,
    SlotAdapters,
    WidePass,
)
from millstream.engine.native.rows import HostInts, StepRows
from millstream.engine.native.runner import Chunk, Drawn
from millstream.engine.native.sampling import is_restricted, restrict, uniforms
from millstream.engine.native.sequence import TokenSequence
from millstream.engine.native.speculation import MAX_ROWS
from millstream.errors import EngineError
from millstream.model.attention import on_device
from millstream.model.gpu_share import URGENT
from millstream.model.load import context_length
from millstream.types import ComputePath, Sampling

PAGE_TOKENS = 32
CPU_GB = 1.0
GPU_SHARE = 1 / 3  # of what is free
JOIN_EVERY = 8
MAX_JOINED = 256  # tokens of prompts in a decode step
MAX_READS = 65_536  # tokens that they read, all together
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


class PagedRunner:
    """See `millstream.engine.native.runner.Runner`. The model is its own from here on. `why_unfused`: why its layers are not
    fused, and empty if they are (`engine.native.check` decides); `max_length`: of a request, if below the context;
    `has_graphs`: whether decode steps are captured on a GPU."""

    can_chunk = True
    can_draft = True

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        *,
        cache_gb: float | None = None,
        page: int = PAGE_TOKENS,
        why_unfused: str = "",
        max_length: int | None = None,
        has_graphs: bool = True,
        max_joined: int | None = None,
    ) -> None:
        """`max_joined`: tokens of prompts that may be rows of a decode step. None: none on a CPU."""
        self._model = model
        self._num_slots = num_slots
        self._page = page
        self._device = next(model.parameters()).device
        self._is_gpu = self._device.type == "cuda"
        self.depth = 1 if self._is_gpu else 0
        self.join_every = JOIN_EVERY if self._is_gpu else 1
        self._stream = torch.cuda.Stream(self._device, priority=URGENT) if self._is_gpu else None  # type: ignore[no-untyped-call]
        shapes = _shapes(model)
        page_bytes = sum(2 * heads * self._page * dim for heads, dim in shapes.values()) * model.dtype.itemsize
        num_pages = int(_cache_bytes(self._device, cache_gb) // page_bytes)
        if num_pages < 2:
            raise EngineError(
                f"a page of the cache has {page_bytes / 1e9:.3g} GB, and {num_pages} would fit: set engine.cache_gb higher"
            )
        limits = [(num_pages - 1) * self._page, context_length(model), max_length]
        self.max_length: int | None = min(limit for limit in limits if limit is not None)
        width = -(-self.max_length // page)
        num_pages = min(num_pages, 1 + num_slots * width)
        check_fits(num_pages * page_bytes, self._device, "engine.cache_gb")
        self._allocator = PageAllocator(num_pages, page)
        self._conversations = ConversationPages(self._allocator)
        self._pools = PagePools(shapes, num_pages, page, num_slots, width, model.dtype, self._device)
        self._max_joined = max_joined if max_joined is not None else MAX_JOINED if self._is_gpu else 0
        self._max_rows = max(num_slots + self._max_joined, MAX_ROWS)
        # The newest token of each slot, and after them those that the host gives to the rows of a step.
        self._last = torch.zeros(num_slots + 1 + self._max_rows, dtype=torch.int64, device=self._device)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Entries of the table that have changed since the last launch: slot, index, page.
        self._table_changes: list[tuple[int, int, int]] = []
        self._adapters = SlotAdapters(model, num_slots, self._device)
        # Of each row: its slot, its position, where its token is and where its sample goes in `_last`; the random number and
        # the temperature (float32).
        self._inputs = torch.zeros(6, wide_size(self._max_rows), dtype=torch.int32, device=self._device)
        self._graphs: Graphs | None = None
        self._wide_graphs: Graphs | None = None
        if self._stream is not None and has_graphs:
            recorder = CudaRecorder(self._stream)
            self._graphs = Graphs(recorder)
            self._wide_graphs = Graphs(recorder)
        self._swaps: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.num_prefilled = 0  # tokens of prompts that were computed, and not found
        self._sample = fused.operations_for(self._device).sample
        if self._stream is not None:  # tensors made above, and the model itself, may still be in another stream
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._why_unfused = why_unfused
        self._fused = fused.FusedCount(0, 0) if why_unfused else self._fuse()

    def _fuse(self) -> fused.FusedCount:
        with self.working():
            found = fuse_model(self._model)
        if self._stream is not None:
            self._stream.synchronize()  # weights that were joined may be another's, too, on another stream
        return found

    def make_graphs(self) -> None:
        """Of all steps that may come."""
        if self._graphs is None or self._wide_graphs is None:
            return
        narrow = {size_for(num, self._num_slots) for num in range(1, self._num_slots + 1)}
        wide = {wide_size(num) for num in range(2, self._max_rows + 1)}
        with torch.inference_mode(), self.working():
            self._graphs.make(narrow, self._rehearse, partial(self._decode_inputs, DecodePass))
            self._wide_graphs.make(wide, self._rehearse, partial(self._decode_inputs, WidePass))
        if self._stream is not None:
            self._stream.synchronize()

    @property
    def path(self) -> ComputePath:
        """The cache, the layers, and on a GPU the decode steps."""
        names, why = ["pages", self._fused.words], [self._why_unfused or self._fused.why(self._model)]
        if self._graphs is not None:
            why_not = self._graphs.why_not
            names.append("decode steps kernel by kernel" if why_not else "decode steps as CUDA graphs")
            why.append(why_not and f"no graph can be made: {why_not}")
        return ComputePath(", ".join(names), "; ".join(filter(None, why)))

    @property
    def cache_used(self) -> float:
        """Without pages that are only kept for later requests."""
        return 1 - self._allocator.num_free / self._allocator.num_pages

    # ---- room ----------------------------------------------------------------------------------------------------------

    def begin(self, sequence: TokenSequence) -> bool:
        """If all of it fits and every running request could still get a page."""
        self._conversations.begin(sequence)
        count = -(-sequence.length // self._page) - len(sequence.pages)
        num_running = self._num_slots - len(self._free_slots)
        taken = self._allocator.take(count) if count + num_running <= self._allocator.num_free else None
        if taken is None:
            self._conversations.end(sequence)
            return False
        sequence.slot = self._free_slots.pop()
        sequence.pages += taken
        self._table_changes += [(sequence.slot, index, page) for index, page in enumerate(sequence.pages)]
        self._adapters.set(sequence.slot, sequence.request.adapter)
        return True

    def will_compute(self, sequence: TokenSequence, end: int) -> None:
        """Requests that start in the same step find these pages: each layer writes them before any request reads them."""
        self._conversations.name(sequence, end)

    def grow(self, sequences: Sequence[TokenSequence]) -> bool:
        """Room for drafts only if every one of these requests could still get a page."""
        full = [sequence for sequence in sequences for _ in range(self._num_missing(sequence))]
        num_kept = len(sequences) if any(sequence.draft for sequence in sequences) else 0
        taken = self._allocator.take(len(full)) if len(full) + num_kept <= self._allocator.num_free else None
        if taken is None:
            return False
        for sequence, page in zip(full, taken, strict=True):
            self._table_changes.append((sequence.slot, len(sequence.pages), page))
            sequence.pages.append(page)
        return True

    def _num_missing(self, sequence: TokenSequence) -> int:
        """Pages for its next token and its draft. It may have more than it needs, from a draft that was wrong."""
        num_tokens = sequence.num_computed + 1 + len(sequence.draft)
        return max(0, -(-num_tokens // self._page) - len(sequence.pages))

    def leave(self, running: list[TokenSequence], leaving: set[int]) -> list[TokenSequence]:
        for index in leaving:
            sequence = running[index]
            self._conversations.end(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        return [sequence for index, sequence in enumerate(running) if index not in leaving]

    def forget(self, *, is_kept: bool) -> None:
        self._conversations.update(is_kept=is_kept)

    # ---- weights -------------------------------------------------------------------------------------------------------

    @property
    def swap_s(self) -> float | None:
        """Of the last swap, as measured on the device. None: on a CPU."""
        if self._swaps is None:
            return None
        began, ended = self._swaps
        return began.elapsed_time(ended) / 1e3 if ended.query() else 0.0  # type: ignore[no-untyped-call]

    def swap(self, own: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        if self._stream is None:
            torch._foreach_copy_(list(own), list(new))
            return
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record(self._stream)
        torch._foreach_copy_(list(own), list(new), non_blocking=True)
        ended.record(self._stream)
        for tensor in new:
            if tensor.is_cuda:  # it may be freed before it has been read
                tensor.record_stream(self._stream)
        self._swaps = began, ended

    def working(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # ---- work ----------------------------------------------------------------------------------------------------------

    def launch(self, decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> Drawn:
        self._update_table()
        are_joined = bool(chunks) and self._can_join(decoding, chunks)
        parts = [self._decode(decoding, chunks if are_joined else ())] if decoding or are_joined else []
        if chunks and not are_joined:
            parts.append(self._prefill(chunks))
        tokens, logprobs = (torch.cat(some) if len(some) > 1 else some[0] for some in zip(*parts, strict=True))
        if not self._is_gpu:
            return lambda: (tokens.tolist(), logprobs.tolist())
        return _copy_to_host(tokens, logprobs)

    def _can_join(self, decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> bool:
        """Whether tokens of prompts are rows of the decode step: so few that a pass of their own, which the host launches
        kernel by kernel, would take longer. Each row reads all tokens before it."""
        num_rows = sum(1 + len(sequence.draft) for sequence in decoding)
        num_tokens = sum(chunk.end - chunk.begin for chunk in chunks)
        num_reads = sum((chunk.end - chunk.begin) * (chunk.begin + chunk.end) // 2 for chunk in chunks)
        return num_tokens <= self._max_joined and num_rows + num_tokens <= self._max_rows and num_reads <= MAX_READS

    def _update_table(self) -> None:
        if self._table_changes:
            slots, indices, pages = on_device(np.array(self._table_changes, np.int64).T.copy(), self._device)
            self._pools.table.index_put_((slots, indices), pages.int())
            self._table_changes.clear()
        self._adapters.update()

    def _decode(self, sequences: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of the rows of these sequences, then of those chunks that are a request's last. Valid
        until the next call."""
        rows = StepRows.of(sequences, chunks, self._num_slots)
        num, is_wide = len(rows.slots), len(rows.slots) > len(sequences)
        graphs = self._wide_graphs if is_wide else self._graphs
        size = num if graphs is None else wide_size(num) if is_wide else size_for(num, self._num_slots)
        inputs = np.zeros((6, size), np.int32)
        inputs[0] = inputs[3] = self._num_slots
        inputs[0, :num] = rows.slots
        inputs[1, :num] = rows.positions
        inputs[2, :num] = self._sources(rows)
        inputs[3, :num] = rows.targets
        numbers, temperatures = inputs[4:].view(np.float32)
        numbers[:num] = np.minimum(uniforms(rows.seeds, rows.numbers), BELOW_ONE)
        temperatures[:num] = [sampling.temperature for sampling in rows.samplings]
        restrictions = _restrictions(rows.samplings, size, self._device)
        self._inputs[:, :size].copy_(self._on_its_way(inputs), non_blocking=True)
        step = partial(self._decode_inputs, WidePass if is_wide else DecodePass)
        if graphs is None:
            tokens, logprobs = step(size, restrictions)
        else:
            tokens, logprobs = graphs.replay(size, self._rehearse, step, restrictions)
        if not chunks:
            return tokens[:num], logprobs[:num]
        self.num_prefilled += sum(chunk.end - chunk.begin for chunk in chunks)
        kept = on_device(rows.kept, self._device)
        return tokens[kept], logprobs[kept]

    def _sources(self, rows: StepRows) -> HostInts:
        """Where the token of each row is in `_last`: in its slot, or behind the slots, if the host gives it."""
        is_given = rows.tokens >= 0
        given = rows.tokens[is_given].astype(np.int64)
        begin, end = self._num_slots + 1, self._num_slots + 1 + len(given)
        if len(given):
            self._last[begin:end].copy_(self._on_its_way(given), non_blocking=True)
        sources = rows.slots.copy()
        sources[is_given] = np.arange(begin, end)
        return sources

    def _on_its_way(self, given: HostInts) -> Tensor:
        """A tensor from which a copy to the device need not be waited for."""
        tensor = torch.from_numpy(given)
        return tensor.pin_memory() if self._is_gpu else tensor

    @contextmanager
    def _rehearse(self, size: int) -> Iterator[None]:
        """While a graph is made, every row is the slot that belongs to no request."""
        saved = self._inputs[:, :size].clone()
        self._inputs[:, :size] = 0
        self._inputs[0, :size] = self._num_slots
        self._inputs[3, :size] = self._num_slots
        try:
            yield
        finally:
            self._inputs[:, :size] = saved

    def _decode_inputs(
        self, kind: type[DecodePass | WidePass], size: int, restrictions: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        slots, positions, sources, targets = self._inputs[:4, :size]
        with self._adapters.using(slots):
            out = self._model(
                input_ids=self._last[sources.long()][None],
                position_ids=positions[None],
                use_cache=False,
                context=kind(self._pools, slots, positions),
            )
        numbers, temperatures = self._inputs[4:, :size].view(torch.float32)
        return self._draw(out.logits[0], targets.long(), numbers, temperatures, restrictions)

    def _draw(
        self,
        logits_RV: Tensor,
        slots_R: Tensor,
        uniforms_R: Tensor,
        temperatures_R: Tensor,
        restrictions: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        if restrictions is not None:
            divisors_R = temperatures_R.where(temperatures_R > 0, 1.0)
            logits_RV = restrict(logits_RV.float() / divisors_R[:, None], *restrictions)
            temperatures_R = temperatures_R.where(temperatures_R == 0, 1.0)
        tokens, logprobs = self._sample(logits_RV, uniforms_R, temperatures_R)
        self._last[slots_R] = tokens
        return tokens, logprobs

    def _prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of those chunks that are a request's last."""
        tokens = [token for chunk in chunks for token in chunk.sequence.all_tokens[chunk.begin : chunk.end]]
        self.num_prefilled += len(tokens)
        context = PrefillPass(self._pools, [(chunk.sequence.slot, chunk.begin, chunk.end) for chunk in chunks])
        ends = np.cumsum([chunk.end - chunk.begin for chunk in chunks])
        last = [index for index, chunk in enumerate(chunks) if chunk.is_last]
        with self._adapters.using(context.slots_N):
            out = self._model(
                input_ids=on_device(np.array(tokens, np.int64)[None], self._device),
                position_ids=context.positions_N[None],
                use_cache=False,
                context=context,
                logits_to_keep=on_device(ends[last] - 1, self._device),
            )
        sequences = [chunks[index].sequence for index in last]
        if not sequences:
            nothing = torch.zeros(0, device=self._device)
            return nothing.long(), nothing
        samplings = [sequence.request.sampling for sequence in sequences]
        drawn = uniforms([one.request.seed for one in sequences], [one.next_number for one in sequences])
        numbers = np.array([np.minimum(drawn, BELOW_ONE), [one.temperature for one in samplings]], np.float32)
        uniforms_R, temperatures_R = on_device(numbers, self._device)
        slots_R = on_device(np.array([sequence.slot for sequence in sequences], np.int64), self._device)
        restrictions = _restrictions(samplings, len(sequences), self._device)
        return self._draw(out.logits[0], slots_R, uniforms_R, temperatures_R, restrictions)


def _restrictions(samplings: Sequence[Sampling], size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """top_k and top_p of each row, if there are any."""
    if not any(is_restricted(one) for one in samplings):
        return None
    top_k, top_p = np.zeros(size, np.int64), np.ones(size, np.float32)
    top_k[: len(samplings)] = [one.top_k for one in samplings]
    top_p[: len(samplings)] = [one.top_p for one in samplings]
    return on_device(top_k, device), on_device(top_p, device)


def _copy_to_host(tokens: Tensor, logprobs: Tensor) -> Drawn:
    """After what the device has to do before; the returned function waits for it."""
    both = torch.stack([tokens.double(), logprobs.double()])
    on_host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
    on_host.copy_(both, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def drawn() -> tuple[list[int], list[float]]:
        arrived.synchronize()
        return on_host[0].long().tolist(), on_host[1].tolist()

    return drawn


def _cache_bytes(device: torch.device, cache_gb: float | None) -> float:
    if cache_gb is not None:
        return cache_gb * 1e9
    return torch.cuda.mem_get_info(device)[0] * GPU_SHARE if device.type == "cuda" else CPU_GB * 1e9


def _shapes(model: PreTrainedModel) -> dict[int, tuple[int, int]]:
    """Layer -> key/value heads and head dimension, as seen in a forward pass: nothing is assumed of the architecture."""
    probe = ShapeProbe()
    fused.unfuse(model)  # it may come from another runner
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False, context=probe)
    probe.check(model)
    return probe.shapes
