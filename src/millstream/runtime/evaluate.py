"""Accuracy on held-out tasks, beside training: takes no budget, pauses nothing, and says which version it measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millstream.clock import Clock
from millstream.env import Environment
from millstream.errors import EngineError, InvariantError
from millstream.events import Evaluated, EventSink
from millstream.runtime.episode import Episode
from millstream.runtime.router import Router
from millstream.runtime.waits import Waits
from millstream.types import Completion, Request, RequestKey, Sampling, Task


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
) -> Evaluated:
    """The mean reward of one rollout a task. A rollout that fails, for whatever reason, counts 0."""
    versions, failures = set[int](), list[str]()

    async def generate(request: Request) -> Completion:
        owner, turn = _owner(name, request.key), router.generate(request, floor=0)
        completion = await waits.on(owner, "an engine", turn, has_deadline=False, has_alarm=False)
        versions.update(completion.versions)
        return completion

    async def one(index: int, task: Task) -> float:
        key = RequestKey(group_id=-1 - index, member=0)
        owner = _owner(name, key)
        episode = Episode(
            task,
            key,
            generate=generate,
            waiting=lambda what, work: waits.on(owner, what, work, has_deadline=False, has_alarm=False),
            sampling=sampling,
            run_seed=seed,
            role=f"eval/{name}",
        )
        try:
            async with asyncio.timeout(timeout_s):
                return episode.finish(await environment.rollout(episode)).reward
        except (EngineError, InvariantError):
            raise
        except Exception as error:  # whatever an environment or a reward raises is a failed rollout
            failures.append(f"{type(error).__name__}: {error}")
            return 0.0

    rewards = await asyncio.gather(*(one(index, task) for index, task in enumerate(tasks)))
    result = Evaluated(
        at=clock.now(),
        name=name,
        version=versions.pop() if len(versions) == 1 else None,
        accuracy=sum(rewards) / max(1, len(rewards)),
        num_tasks=len(rewards),
        num_failed=len(failures),
        failure=failures[-1] if failures else "",
    )
    sink.emit(result)
    return result


def _owner(name: str, key: RequestKey) -> str:
    return f"evaluation {name} task {-1 - key.group_id}"
