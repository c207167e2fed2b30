"""The real client of a training service: clients, data and steps. Tests that import this are skipped where it is not installed."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from support.lazy import lazy_module
from support.training_server import KEY

tinker = lazy_module("tinker")
types = lazy_module("tinker.types")
HOLDER = "tinker.lib.internal_client_holder"
ADAM = {"learning_rate": 5e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
TEXT = [3, 4, 5, 6, 7, 8, 9, 10]


def client_of(url: str, *, key: str = KEY, **more: Any) -> Any:
    """Its heartbeats go on after a test, when nothing answers; other tests read what is logged."""
    vars(importlib.import_module(HOLDER))["logger"] = logging.Logger("heartbeats", logging.CRITICAL)
    return tinker.ServiceClient(base_url=url, api_key=key, **more)


def trainer(url: str, *, seed: int = 1, **more: Any) -> Any:
    return client_of(url, **more).create_lora_training_client(base_model="tiny", rank=4, seed=seed)


def datum(tokens: list[int], weight: float = 1.0) -> Any:
    inputs = {"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def sampled(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """As the client's reinforcement learning loop makes them."""
    num_before = len(prompt) - 1
    inputs = {
        "target_tokens": [0] * num_before + sequence.tokens,
        "logprobs": [0.0] * num_before + sequence.logprobs,
        "advantages": [0.0] * num_before + [advantage] * len(sequence.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]), loss_fn_inputs=inputs)


def prompt_of(tokens: list[int]) -> Any:
    return types.ModelInput.from_ints(tokens)


def step(client: Any, data: list[Any], loss: str = "cross_entropy") -> Any:
    passed, stepped = client.forward_backward(data, loss), client.optim_step(types.AdamParams(**ADAM))
    stepped.result()
    return passed.result()


def logprobs_of(client: Any, tokens: list[int]) -> list[float]:
    (found,) = client.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs
    return list(found["logprobs"].data)
