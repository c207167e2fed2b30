"""How independent processes scale on this machine: the upper bound for a benchmark of several processes, because two logical
CPUs may be one core, and a core is slower while the others are busy."""

from __future__ import annotations

import functools
import subprocess
import sys

START_S = 60.0
LOOP = """
import json, sys, time
message = {"key": [1, 2, 3], "tokens": list(range(64)), "text": "a turn of a conversation"}
begin, num = time.perf_counter(), 0
while (seconds := time.perf_counter() - begin) < float(sys.argv[1]):
    json.loads(json.dumps(message))
    num += 1
print(num / seconds)
"""


@functools.cache
def scaling(num: int, seconds: float = 2.0) -> float:
    """The mean speed of `num` processes that run at the same time, as a fraction of the speed of one alone."""
    return _loops_per_s(num, seconds) / _loops_per_s(1, seconds)


@functools.cache
def _loops_per_s(num: int, seconds: float) -> float:
    """Of one process, the mean over all."""
    command = [sys.executable, "-c", LOOP, str(seconds)]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num)]
    return sum(float(loop.communicate(timeout=seconds + START_S)[0]) for loop in loops) / num
