"""Accuracy on held-out tasks, beside training: takes no budget, pauses nothing, and says which version it measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct

from millstream.clock import Clock
from millstream.env import Environment
from millstream.errors import EngineError, InvariantError
from millstream.events import Evaluated, EventSink, Sample
from millstream.pipeline.episode import Episode
from millstream.pipeline.limit import Limit
from millstream.pipeline.waits import Waits
from millstream.serving.router import Router
from millstream.types import Completion, Request, RequestKey, Sampling, Task


class Measured(Struct, frozen=True, kw_only=True):
    """A model on the held-out tasks: mean rewards, and every rollout of the sampled half as text, in the order of the tasks."""

    accuracy: float
    greedy: float
    samples: tuple[Sample, ...]


async def evaluate(
    name: str,
    router: Router,
    environment: Environment,
    tasks: Sequence[Task],
    sampling: Sampling,
    *,
    clock: Clock,
    sink: EventSink,
    waits: Waits,
    seed: int,
    timeout_s: float,
    decode: Callable[[Sequence[int]], str],
    max_parts: int = 1,
) -> tuple[Evaluated, tuple[Sample, ...]]:
    """The mean reward of one rollout a task (of several agents, that of the first), and the rollouts. One that fails, for
    whatever reason, counts 0."""
    versions = set[int]()

    async def generate(request: Request) -> Completion:
        owner, turn = _owner(name, request.key), router.generate(request, floor=0)
        completion = await waits.idle(owner, "an engine", turn)
        versions.update(completion.versions)
        return completion

    async def one(index: int, task: Task) -> Sample:
        key = RequestKey(group_id=-1 - index, member=0)
        owner, limit = _owner(name, key), Limit(timeout_s)
        episode = Episode(
            task,
            key,
            generate=generate,
            waiting=lambda what, work: waits.idle(owner, what, work),
            sampling=sampling,
            run_seed=seed,
            role=f"eval/{name}",
            max_parts=max_parts,
            limit=limit,
        )
        reward, failure = 0.0, ""
        try:
            async with limit:
                reward = episode.finish(await environment.rollout(episode))[0].reward
        except (EngineError, InvariantError):
            raise
        except Exception as error:  # whatever an environment or a reward raises is a failed rollout
            failure = f"{type(error).__name__}: {error}"
        said = "\n".join(decode(turn.tokens) for turn in episode.turns)
        episode.close()
        return Sample(prompt=_as_text(task), completion=said, reward=reward, answer=task.answer, failure=failure)

    samples = await asyncio.gather(*(one(index, task) for index, task in enumerate(tasks)))
    result = _result(name, clock.now(), versions, samples)
    sink.emit(result)
    return result, tuple(samples)


def _result(name: str, at: float, versions: set[int], samples: Sequence[Sample]) -> Evaluated:
    failures = [sample.failure for sample in samples if sample.failure]
    return Evaluated(
        at=at,
        name=name,
        version=min(versions) if len(versions) == 1 else None,
        accuracy=sum(sample.reward for sample in samples) / max(1, len(samples)),
        num_tasks=len(samples),
        num_failed=len(failures),
        failure=failures[-1] if failures else "",
        sample=samples[0] if samples else None,
    )


def _as_text(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(f"{message.role}: {message.content}" for message in task.prompt)


def _owner(name: str, key: RequestKey) -> str:
    return f"evaluation {name} task {-1 - key.group_id}"
