"""Events: what happened in a run, as typed structs, their sinks, and what is computed from them.

types.py     every event; the `EventSink` protocol        encoding.py  events as JSON
sinks.py     memory, `events.jsonl`, `metrics.jsonl`; reading a log back
metrics.py   one row per step        summary.py  a run in numbers        trace.py  a Perfetto trace
bottleneck.py  what holds a run up most        prometheus.py  the text that Prometheus reads
bias/        whether the rollouts that were trained are a fair sample of those that were admitted
"""

from millstream.events.depths import PartitionNow as PartitionNow
from millstream.events.depths import StoreNow as StoreNow
from millstream.events.depths import WaitNow as WaitNow
from millstream.events.encoding import AnyEvent as AnyEvent
from millstream.events.encoding import decode_event as decode_event
from millstream.events.encoding import encode_event as encode_event
from millstream.events.types import *  # noqa: F403
