"""From a part that a config can name to the tests that it must pass: what `millstream check KIND NAME` collects. Needs pytest.

A part that does not support everything says so with an attribute `promises`, a dictionary with values for attributes of the
suite: `promises = {"has_top_k": False}`. A suite is imported where it is used: that of a filter needs no torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from typing import Any

from millstream import imports
from millstream.clock import RealClock
from millstream.engine import Engine, EngineContext
from millstream.env.sandbox.base import Limits, Sandbox
from millstream.errors import ConfigError
from millstream.events.sinks import MemorySink
from millstream.learner import Learner, LearnerConfig, LearnerContext
from millstream.run.own_parts import BUILT_IN
from millstream.run.tracking.sink import TrackedRun, Tracker
from millstream.store import Reads, Store
from millstream.weights import WeightChannel

VOCABULARY, CONTEXT, SLOTS = 97, 256, 4  # of the model that engines and learners are tried with
LEARNING_RATE = 1e-3


@functools.cache
def _made(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from millstream.model.load import new_model, set_up_cpu

    set_up_cpu()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=CONTEXT)
    plain = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
    )
    plain.load_state_dict(new_model(config, seed=seed).state_dict())
    return plain.eval()


def trial_model(seed: int = 0) -> Any:
    """A causal LM of transformers with random weights: the same for the same seed."""
    return copy.deepcopy(_made(seed))


def _engine_suite(part: Any, args: Mapping[str, Any]) -> type:
    from millstream.testing.engine import EngineSuite

    class TestEngine(EngineSuite):
        vocabulary = VOCABULARY
        context = CONTEXT

        async def make_engine(self) -> Engine:
            context = EngineContext(
                name="engine",
                slots=SLOTS,
                model=trial_model().requires_grad_(False),
                max_length=CONTEXT,
                clock=RealClock(),
                sink=MemorySink(),
            )
            engine: Engine = part(context, **args)
            return engine

        def make_reference(self, number: int) -> Any:
            return trial_model(number)

    return TestEngine


def _learner_suite(part: Any, args: Mapping[str, Any]) -> type:
    from millstream.algo import AlgorithmConfig
    from millstream.algo.recipe import objective
    from millstream.testing.learner import LearnerSuite

    class TestLearner(LearnerSuite):
        vocabulary = VOCABULARY

        def open(self, num_steps: int | None = None) -> Learner:
            context = LearnerContext(
                model=trial_model(),
                tokenizer=None,
                objective=objective(AlgorithmConfig(), max_tokens=32),
                config=LearnerConfig(learning_rate=LEARNING_RATE),
                temperature=1.0,
                num_steps=num_steps,
            )
            learner: Learner = part(context, **args)
            return learner

    return TestLearner


def _store_suite(part: Any, args: Mapping[str, Any]) -> type:
    from millstream.testing.store import StoreSuite

    class TestStore(StoreSuite):
        def open(
            self, tasks: Mapping[str, Reads], capacity_rows: int | None = None, capacity_bytes: int | None = None
        ) -> AbstractAsyncContextManager[Store]:
            @asynccontextmanager
            async def opened() -> AsyncIterator[Store]:
                store = part(tasks, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes, **args)
                try:
                    yield store
                finally:
                    if callable(getattr(store, "close", None)):
                        await store.close()

            return opened()

    return TestStore


def _sandbox_suite(part: Any, args: Mapping[str, Any]) -> type:
    from millstream.testing.sandbox import SandboxSuite

    class TestSandbox(SandboxSuite):
        def make_sandbox(self, limits: Limits) -> Sandbox:
            sandbox: Sandbox = part(limits, **args)
            return sandbox

    return TestSandbox


def _tracker_suite(part: Any, args: Mapping[str, Any]) -> type:
    from millstream.testing.parts import TrackerSuite

    class TestTracker(TrackerSuite):
        def make_tracker(self, run: TrackedRun) -> Tracker:
            tracker: Tracker = part(run, **args)
            return tracker

    return TestTracker


def _channel_suite(part: Any, args: Mapping[str, Any]) -> type:
    from millstream.testing.parts import ChannelSuite

    class TestChannel(ChannelSuite):
        def make_channel(self) -> WeightChannel:
            channel: WeightChannel = part(**args)
            return channel

    return TestChannel


def _of_function(suite: str, name: str, positional: tuple[str, ...]) -> Callable[[Any, Mapping[str, Any]], type]:
    """A suite of a function, which has it as an attribute of this name."""

    def make(part: Any, args: Mapping[str, Any]) -> type:
        module, _, base = suite.partition(":")
        function = imports.bound(part, args, "--args", positional)
        return type(f"Test{base}", (getattr(import_module(module), base),), {name: staticmethod(function)})

    return make


SUITES: dict[str, Callable[[Any, Mapping[str, Any]], type]] = {
    "engine": _engine_suite,
    "learner": _learner_suite,
    "store": _store_suite,
    "weights": _channel_suite,
    "loss": _of_function("millstream.testing.algorithm:LossSuite", "loss", ("x",)),
    "advantage": _of_function("millstream.testing.algorithm:AdvantageSuite", "advantage", ("rewards",)),
    "filter": _of_function("millstream.testing.parts:FilterSuite", "filter", ("group",)),
    "sampler": _of_function("millstream.testing.parts:SamplerSuite", "sampler", ("tasks", "seed")),
    "schedule": _of_function("millstream.testing.parts:ScheduleSuite", "schedule", ("step", "num_steps")),
    "tool_format": _of_function("millstream.testing.parts:ToolFormatSuite", "parse", ("text",)),
    "sandbox": _sandbox_suite,
    "tracker": _tracker_suite,
}


def suite_of(kind: str, name: str, args: Mapping[str, Any], promises: Mapping[str, Any]) -> type:
    """The tests of a part, as a class that pytest collects. Raises `ConfigError`."""
    part = imports.load_part(kind, name, BUILT_IN[kind])
    suite = SUITES[kind](part, args)
    for key, value in {**getattr(part, "promises", {}), **promises}.items():
        if not hasattr(suite, key) or callable(getattr(suite, key)):
            known = sorted(
                key for key in dir(suite) if not key.startswith(("_", "test")) and not callable(getattr(suite, key))
            )
            raise ConfigError(f"the tests of a {kind} have no attribute {key!r}: use {', '.join(known) or 'none'}")
        setattr(suite, key, value)
    return suite
