"""What runs inside vLLM's own worker processes: weights out of shared memory, and an end when nobody needs them any more.

vLLM mixes `Inside` into its worker class. Its names begin with millstream, since vLLM refuses names that it has itself.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import torch

from millstream.errors import WeightsError
from millstream.model.shared_memory import Layout, SharedWeights


class Inside:
    device: Any
    get_model: Any
    reload_weights: Any
    """All three are the worker's own."""

    def millstream_load_memory(self, memory: str, layout: str) -> None:
        """All weights, in the names and shapes of a checkpoint, out of the memory behind this path. Every rank of several reads
        all of it and keeps its part."""
        shared = getattr(self, "_millstream_shared", None)
        if shared is None:
            descriptor = os.open(memory, os.O_RDWR)
            shared = SharedWeights(descriptor, msgspec.json.decode(layout, type=Layout))
            os.close(descriptor)
            self._millstream_shared = shared
        self._millstream_reload(weights_iterator=iter(shared.views.items()))

    def millstream_load_file(self, folder: str) -> None:
        self._millstream_reload(weights_path=folder)

    def _millstream_reload(self, **source: Any) -> None:
        """vLLM's own reload, and what it leaves: it keeps what no weights came for, with a warning. Here that is an error."""
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

    def millstream_stay_while(self, lifeline: str) -> None:
        """End when the process that holds the other end of this pipe does, however it ended: vLLM's core follows."""
        descriptor = os.open(lifeline, os.O_RDONLY)
        threading.Thread(target=_end_after, args=(descriptor,), name="lifeline", daemon=True).start()


def _pack_tied_heads(model: Any) -> None:
    """A head that shares its weights with the embedding has the new ones; on a CPU vLLM computes with a packed copy of them,
    which its reload forgets."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for head in tables:
        is_tied = any(other is not head and other.weight is head.weight for other in tables)
        if isinstance(head, ParallelLMHead) and is_tied:
            head.quant_method.process_weights_after_loading(head)


def _end_after(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: this returns when the other end is closed
    os._exit(1)
