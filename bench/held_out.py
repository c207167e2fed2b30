"""One engine on which held-out tasks are measured: of several configs at the same time, or of several versions of one model.

Every answer is kept with its reward, its length and whether `max_tokens` cut it. Accuracy is the share of tasks whose reward is
at least 1 (solved); a generator's rule may give a fraction to an answer that is not right.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec import Struct, structs

from internals import MemorySink, Pin, Router
from internals_torch import (
    Evaluator,
    Prepared,
    RealClock,
    build_engine,
    build_environment,
    build_sampling,
    check_config,
    new_waits,
    prepare_run,
)
from millstream import RunConfig
from millstream.types import Completion, Finish, Request, Task, Weights


class HeldOutAnswer(Struct, frozen=True, kw_only=True):
    reward: float
    num_tokens: int
    is_cut: bool
    text: str = ""


class HeldOut(Struct, frozen=True, kw_only=True):
    """Answers to all held-out tasks, in their order."""

    sampled: list[HeldOutAnswer]
    greedy: list[HeldOutAnswer]

    @property
    def accuracy(self) -> float:
        return solved_share(self.sampled)

    @property
    def greedy_accuracy(self) -> float:
        return solved_share(self.greedy)


def solved_share(answers: Sequence[HeldOutAnswer]) -> float:
    return statistics.mean(answer.reward >= 1.0 for answer in answers)


class _Recorded:
    """A router's `generate` that keeps the completions of each task. Keys are moved by an offset, because all evaluations
    number their tasks in the same way; seeds are those of the evaluation."""

    def __init__(self, router: Router, offset: int) -> None:
        self._router = router
        self._offset = offset
        self.pins = router.pins
        self.engines = router.engines
        self.completions: dict[int, list[Completion]] = {}

    async def generate(self, request: Request, *, floor: int, pin: Pin | None = None) -> Completion:
        key = request.key
        moved = structs.replace(request, key=structs.replace(key, group_id=key.group_id - self._offset))
        completion = await self._router.generate(moved, floor=floor, pin=pin)
        self.completions.setdefault(-1 - key.group_id, []).append(completion)
        return completion


class Measurer:
    """Measures through one engine. All configs have the model of the first."""

    def __init__(self, first: Prepared, engine: Any) -> None:
        self._first = first
        self._engine = engine
        self._router = Router([engine])
        self._num_tasks = 0

    async def load(self, version: int, weights: Weights) -> None:
        await self._engine.load(version, weights)

    async def measure(self, config: RunConfig | None = None) -> HeldOut:
        """None: the first config. The random numbers are those of the config's seed, whichever the model."""
        prepared = self._first if config is None else self._prepared(config)
        sampling = prepared.sampling
        try:
            sampled, greedy = await asyncio.gather(
                self._answers(prepared, "sampled after", sampling),
                self._answers(prepared, "greedy after", structs.replace(sampling, temperature=0.0)),
            )
        finally:
            if prepared is not self._first:
                await prepared.environment.close()
        return HeldOut(sampled=sampled, greedy=greedy)

    def _prepared(self, config: RunConfig) -> Prepared:
        first, checked = self._first, check_config(config)
        assert checked.data is not None, "a data set of the hub is not measured here"
        return structs.replace(
            first,
            config=config,
            data=checked.data,
            environment=build_environment(checked.kinds, first.text, first.rewards),
            sampling=build_sampling(config, first.model, first.tokenizer),
        )

    async def _answers(self, prepared: Prepared, name: str, sampling: Any) -> list[HeldOutAnswer]:
        recorded = _Recorded(self._router, self._num_tasks)
        self._num_tasks += len(prepared.held_out)
        clock, sink = RealClock(), MemorySink()
        evaluator = Evaluator(prepared, cast(Router, recorded), clock, sink, new_waits(prepared.config, clock, sink))
        _, samples = await evaluator.measure(name, prepared.held_out, sampling)
        answers = []
        for number, sample in enumerate(samples):
            completions = recorded.completions.get(number, [])
            answers.append(
                HeldOutAnswer(
                    reward=sample.reward,
                    num_tokens=sum(len(completion.tokens) for completion in completions),
                    is_cut=any(completion.finish is Finish.LENGTH for completion in completions),
                    text=sample.completion,
                )
            )
        return answers


@asynccontextmanager
async def measurer(config: RunConfig, held_out: Sequence[Task] | None = None) -> AsyncIterator[Measurer]:
    """With the config's model in an engine on a thread. `held_out`: other tasks than those of the config."""
    prepared = prepare_run(structs.replace(config, engine=structs.replace(config.engine, process=False)))
    if held_out is not None:
        data = structs.replace(prepared.data, held_out=tuple(held_out))
        prepared = structs.replace(prepared, data=data)
    engine = build_engine(
        prepared.config.engine, prepared.model, clock=RealClock(), sink=MemorySink(), tokenizer=prepared.tokenizer
    )
    try:
        yield Measurer(prepared, engine)
    finally:
        await prepared.environment.close()
        await engine.close()


def measure_configs(configs: Mapping[str, RunConfig]) -> dict[str, HeldOut]:
    """All at the same time, on one model."""

    async def measure() -> dict[str, HeldOut]:
        async with measurer(next(iter(configs.values()))) as measuring:
            found = await asyncio.gather(*(measuring.measure(config) for config in configs.values()))
        return dict(zip(configs, found, strict=True))

    return asyncio.run(measure())


def measure_versions(
    config: RunConfig, held_out: Sequence[Task], versions: Mapping[int, Weights]
) -> dict[int, HeldOut]:
    """The config's model as it is, which is version 0, and with each of these weights, one after the other, on these tasks."""

    async def measure() -> dict[int, HeldOut]:
        async with measurer(config, held_out) as measuring:
            found = {0: await measuring.measure()}
            for number, (version, weights) in enumerate(sorted(versions.items()), start=1):
                await measuring.load(number, weights)
                found[version] = await measuring.measure()
        return found

    return asyncio.run(measure())
