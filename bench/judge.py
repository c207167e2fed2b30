"""A reward that takes its time, as a judge behind an API does: exact match, after 50 to 500 ms."""

from __future__ import annotations

import asyncio
import random

from millstream.env.rewards import exact_match
from millstream.types import Task


async def judge(task: Task, completion: str) -> float:
    await asyncio.sleep(random.uniform(0.05, 0.5))
    return exact_match(task, completion)
