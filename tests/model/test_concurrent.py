"""A model that computes while another thread compiles."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from millstream.engine import EngineConfig
from millstream.engine.native.build import batcher_of
from millstream.model.concurrent import shield_from_tracers
from millstream.model.load import new_model
from support.decoding import drain
from support.tiny import CONFIGS, plain, prompts, request

WAIT_S = 60.0


class Tracing:
    """Another thread that traces, as the compiler does, from `with` to its end."""

    def __enter__(self) -> None:
        self._is_tracing, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: fx.symbolic_trace(lambda x: self._traced(x)))
        self._thread.start()
        assert self._is_tracing.wait(WAIT_S)

    def _traced(self, x: Tensor) -> Tensor:
        self._is_tracing.set()
        assert self._is_over.wait(WAIT_S)
        return x + 1

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_a_model_that_is_not_shielded_breaks_while_another_thread_traces() -> None:
    model = plain(new_model(CONFIGS["qwen3"](), seed=0))
    with Tracing(), pytest.raises(NameError, match="not installed as a submodule"):
        model(torch.tensor([[1, 2]]))


def test_a_shielded_model_gives_its_numbers_while_another_thread_traces_and_is_still_of_its_class(
    tmp_path: Path,
) -> None:
    model = plain(new_model(CONFIGS["qwen3"](), seed=0))
    tokens = torch.tensor([[1, 2, 3]])
    kind, expected = type(model), model(tokens).logits
    for _ in range(2):
        shield_from_tracers(model)
    with Tracing():
        assert torch.equal(model(tokens).logits, expected)
    assert isinstance(model, kind) and type(model).__name__ == kind.__name__
    assert torch.equal(copy.deepcopy(model)(tokens).logits, expected)
    model.save_pretrained(tmp_path)
    assert torch.allclose(kind.from_pretrained(tmp_path)(tokens).logits, expected, atol=1e-5)


@pytest.mark.parametrize("cache", ["slots", "pages"])
def test_an_engine_decodes_while_another_thread_traces(cache: str) -> None:
    config = EngineConfig(slots=4, cache=cache, cache_gb=0.01 if cache == "pages" else "auto")  # type: ignore[arg-type]
    alone, beside = (batcher_of(new_model(CONFIGS["llama"](), seed=0), config) for _ in range(2))
    for number, prompt in enumerate(prompts(4)):
        alone.add(request(number, prompt))
        beside.add(request(number, prompt))
    expected, found = {}, {}  # type: ignore[var-annotated]
    drain(alone, expected)
    with Tracing():
        drain(beside, found)
    assert found == expected
