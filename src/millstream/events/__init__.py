"""Events: what happened in a run, as typed structs, their sinks, and what is computed from them.

types.py     every event; encoding and decoding; the `EventSink` protocol
sinks.py     memory, `events.jsonl`, `metrics.jsonl`; reading a log back
metrics.py   one row per step        summary.py  a run in numbers        trace.py  a Perfetto trace
bias/        whether the rollouts that were trained are a fair sample of those that were admitted
"""

from millstream.events.types import *  # noqa: F403
