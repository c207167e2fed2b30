"""Faults of the fused engine, to be planted: each leaves every shape right and changes the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.plain import PLAIN

Plant = Callable[[pytest.MonkeyPatch, PreTrainedModel], None]


def rope_off_by_one(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Of decode steps: what they write is turned by one position more than what the prompt wrote."""
    right = PagedRunner._decode_inputs

    def wrong(self: Any, *args: Any) -> Any:
        model = self._model
        self._model = lambda *, position_ids, **others: model(position_ids=position_ids + 1, **others)
        try:
            return right(self, *args)
        finally:
            self._model = model

    monkeypatch.setattr(PagedRunner, "_decode_inputs", wrong)


def missing_norm_weight(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Of the second norm of one layer."""
    right, calls = PLAIN.rms_norm, [0]
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]

    def wrong(x: Any, weight: Any, epsilon: float, is_gemma: bool) -> Any:
        calls[0] += 1
        is_hit = calls[0] % len(norms) == 2
        nothing = weight.new_full(weight.shape, 0.0 if is_gemma else 1.0)
        return right(x, nothing if is_hit else weight, epsilon, is_gemma=is_gemma)

    monkeypatch.setattr(PLAIN, "rms_norm", wrong)


def swapped_gate_and_up(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    right = PLAIN.gated
    monkeypatch.setattr(PLAIN, "gated", lambda x, activation: right(x.roll(x.shape[-1] // 2, -1), activation))


def _rule(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, int], Any]) -> None:
    right = PLAIN.decode_attention
    monkeypatch.setattr(PLAIN, "decode_attention", lambda q, pages, rule: right(q, pages, change(rule, q.shape[-1])))


def scale_off_by_two_percent(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    _rule(monkeypatch, lambda rule, dim: rule._replace(scaling=1.02 * (rule.scaling or dim**-0.5)))


def wrong_window(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """One token less than the model's, or less than the sequences of the check have."""
    _rule(monkeypatch, lambda rule, dim: rule._replace(window=(rule.window or 17) - 1))


def one_layer_of_another(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """The second layer attends to the keys and values of the first."""
    right, pools = PLAIN.decode_attention, list[list[Any]]()

    def wrong(query: Any, pages: Any, rule: Any) -> Any:
        if not pools or pools[-1][0].table is not pages.table:
            pools.append([])
        layers = pools[-1]
        if not any(one.keys is pages.keys for one in layers):
            layers.append(pages)
        of = layers[0] if len(layers) > 1 and pages.keys is layers[1].keys else pages
        return right(query, pages._replace(keys=of.keys, values=of.values), rule)

    monkeypatch.setattr(PLAIN, "decode_attention", wrong)


def forgotten_adapter(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Only for a model that has some."""
    from millstream.engine.native.adapted import Product

    right = Product.__init__

    def wrong(self: Any, weight: Any, bias: Any, down: Any, adapters: Any, rows: Any) -> None:
        right(self, weight, bias, down, adapters[1:] if len(adapters) > 2 else adapters, rows)

    monkeypatch.setattr(Product, "__init__", wrong)


FAULTS: dict[str, Plant] = {
    "rope off by one": rope_off_by_one,
    "a missing norm weight": missing_norm_weight,
    "gate and up swapped": swapped_gate_and_up,
    "a softmax scale off by 2%": scale_off_by_two_percent,
    "a wrong window": wrong_window,
    "a layer with the cache of another": one_layer_of_another,
}
