"""The rollouts of a run, kept in RUN/rollouts/: what is recorded, the files, and reading them back. See docs/rollouts.md.

records.py   what is recorded, and the `RolloutSink` protocol
chunks.py    records as bytes: what one write appends
writer.py    appends on a thread, within a bound; whole groups are sampled beyond it
reader.py    reads the files of a run, active or not
"""

from millstream.events.rollouts.records import (
    NO_ROLLOUTS,
    Attempt,
    GroupFate,
    Restart,
    RolloutSink,
    TakenRows,
    TrainedRows,
)

__all__ = ["NO_ROLLOUTS", "Attempt", "GroupFate", "Restart", "RolloutSink", "TakenRows", "TrainedRows"]
