"""Write the golden traces anew, after a change that is meant to change them: `.venv/bin/python tests/make_golden.py`."""

from __future__ import annotations

from pathlib import Path

from millstream.sim.draws import uniform
from support.simulated import World, simulate

GOLDEN = Path(__file__).parent / "golden"

if __name__ == "__main__":
    for max_lag in (0, 0.5, 2):
        world = World(
            steps=4, group_size=3, max_lag=max_lag, num_engines=2, num_turns=2, latency=0.5, failure=0.1, load=1.0
        )
        trace = simulate(world, num_tokens=uniform(1, 50)).sink.trace()
        (GOLDEN / f"max_lag_{max_lag}.jsonl").write_bytes(trace)
