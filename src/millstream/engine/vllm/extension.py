"""What runs inside vLLM's own worker processes: the fetch of weights while decoding continues, their load, and an exit when the
engine is gone.

Of a model with adapters every worker keeps the weights that the engine began with, on the host, and merges each version's
adapters with them. It begins with these weights each time: nothing of earlier versions is left, and no rounding adds up.

vLLM mixes `WorkerExtension` into its worker class. Its names begin with millstream: vLLM refuses names that it has itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from millstream.decoding import decode_json
from millstream.errors import WeightsError
from millstream.model.adapters import merged_weights
from millstream.rpc.call import ErrorInfo, describe_error
from millstream.rpc.process import own_node
from millstream.types import Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.base import FetchedWeights
from millstream.weights.transfer.fetcher import WeightsFetcher

MAX_REASON = 800  # characters of a reason: a line of a pipe that several ranks write to is written at once


class AdaptedModel(NamedTuple):
    """A model with adapters, as it was in the beginning."""

    taken: FetchedWeights  # never released: all processes of a node that have mapped it share its memory
    scaling: float  # of the adapters


class WorkerExtension:
    device: Any  # this and the next three are the worker's own
    model_config: Any
    get_model: Any
    reload_weights: Any
    _millstream_fetcher: WeightsFetcher | None = None  # kept: it has memory, and knows what does not work here
    _millstream_taken: FetchedWeights | None = None
    _millstream_adapted: AdaptedModel | None = None

    def millstream_fetch(self, ref: str, pipe: str) -> None:
        """Begin to fetch and verify the weights of this `WeightsRef` (JSON), on a thread. Every rank of several fetches all of
        them. A line in the pipe says by which way they came, or why they did not."""
        self._millstream_release()  # of an offer that was never loaded
        arguments = (decode_json(ref, WeightsRef), pipe)
        threading.Thread(target=self._millstream_take, args=arguments, name="weights", daemon=True).start()

    def _millstream_take(self, ref: WeightsRef, pipe: str) -> None:
        said: str | ErrorInfo
        try:
            device = torch.device(self.device) if torch.cuda.is_available() else None
            if device is not None:
                torch.cuda.set_device(device)
            self._millstream_fetcher = self._millstream_fetcher or WeightsFetcher(own_node(), device=device)
            self._millstream_taken = self._millstream_fetcher.take(ref)
            said = self._millstream_taken.way
        except Exception as error:  # process boundary: the engine gets the reason
            reason = describe_error(error)
            said = structs.replace(reason, text=reason.text[:MAX_REASON])
        descriptor = os.open(pipe, os.O_WRONLY)
        os.write(descriptor, msgspec.json.encode(said) + b"\n")
        os.close(descriptor)

    def millstream_begin(self, scaling: float | None) -> None:
        """Load the weights that were fetched, which are the whole model. `scaling`: of its adapters, if it has some; what is
        loaded later is then adapters alone."""
        taken = self._millstream_taken
        if scaling is not None and taken is not None:
            if taken.way == "files":  # they are mapped, and their owner may remove them
                taken.weights = {name: one.clone() for name, one in taken.weights.items()}
            self._millstream_adapted = AdaptedModel(taken, scaling)
        self.millstream_load()

    def millstream_load(self) -> None:
        """The weights that were fetched last, in the names and shapes of a checkpoint. Every rank keeps its part of them."""
        if self._millstream_taken is None:
            raise WeightsError("there are no weights to load: none were fetched")
        try:
            self._millstream_reload(weights_iterator=self._millstream_checkpoint(self._millstream_taken.weights))
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copies have read the memory
        finally:
            self._millstream_release()

    def _millstream_checkpoint(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model. vLLM gets those without an adapter again each time: it joins tensors that may have one and
        tensors that have none, and would keep old ones with a warning."""
        adapted = self._millstream_adapted
        if adapted is None:
            return iter(weights.items())
        dtype, device = self.model_config.dtype, torch.device(self.device)
        return merged_weights(adapted.taken.weights, weights, adapted.scaling, dtype=dtype, device=device)

    def _millstream_release(self) -> None:
        taken, adapted = self._millstream_taken, self._millstream_adapted
        if taken is not None and (adapted is None or adapted.taken is not taken):
            taken.release()
        self._millstream_taken = None

    def _millstream_reload(self, **source: Any) -> None:
        """vLLM's own reload. Where vLLM keeps old weights with a warning, because none came for a layer, this raises."""
        model = self.get_model()
        expected = {name for name, _ in model.named_parameters()}
        load, loaded = model.load_weights, set[str]()

        def load_and_note(weights: Any) -> Any:
            found = load(weights)
            loaded.update(expected if found is None else found)  # some models do not say
            return found

        model.load_weights = load_and_note
        try:
            with torch.device(self.device):
                self.reload_weights(**source)
        finally:
            del model.load_weights
        if missing := expected - loaded:
            raise WeightsError(f"vLLM took no weights for {', '.join(sorted(missing)[:4])}")
        _pack_tied_heads(model)

    def millstream_exit_with(self, pipe: str) -> None:
        """Exit when the process that holds the other end of this pipe does, however it ended: vLLM's core follows."""
        descriptor = os.open(pipe, os.O_RDONLY)
        threading.Thread(target=_exit_after, args=(descriptor,), name="exit with the engine", daemon=True).start()


def _pack_tied_heads(model: Any) -> None:
    """A head that shares its weights with the embedding has the new ones; on a CPU vLLM computes with a packed copy of them,
    which its reload does not update."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for head in tables:
        is_tied = any(other is not head and other.weight is head.weight for other in tables)
        if isinstance(head, ParallelLMHead) and is_tied:
            head.quant_method.process_weights_after_loading(head)


def _exit_after(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: this returns when the other end is closed
    os._exit(1)
