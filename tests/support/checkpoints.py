"""Checkpoints in a folder of a test."""

from __future__ import annotations

from pathlib import Path

from millstream.clock import RealClock
from millstream.events.sinks import MemorySink
from millstream.pipeline.state import Ledger, PipelineState
from millstream.run.checkpoint import CheckpointConfig, Checkpoints, RunState
from millstream.store import Saved


def standing(version: int) -> PipelineState:
    ledger = Ledger(version=version, next_group=0, groups={}, vacant=[], num_replaced=0, num_failed_in_a_row=0)
    return PipelineState(ledger, Saved(rows=(), is_closed={}, acknowledged={}))


def checkpoints_in(folder: Path, sink: MemorySink, config: CheckpointConfig) -> Checkpoints:
    return Checkpoints(
        folder / "checkpoints",
        config,
        last_step=1000,
        clock=RealClock(),
        sink=sink,
        last_seq=lambda: 0,
        sync=lambda: None,
        run_state=lambda: RunState(run_id="run", data_digest="", generators={}),
    )
