"""Small run folders for the dashboard, made without a model, and a client in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from millstream.config import load
from millstream.dash.runs import RunCatalog
from millstream.dash.server import dash_app
from millstream.events import Event, RunEnded
from millstream.events.rollouts.writer import ROLLOUTS_FOLDER, RolloutWriter
from millstream.events.sinks import JsonlSink, MemorySink, MetricsSink
from millstream.run.config import RunConfig
from millstream.run.simulate import costs_of, simulate
from support import simulated

ROOT = Path(__file__).parents[2]
SMALL = (
    "pipeline.steps=6",
    "pipeline.groups_per_step=4",
    "rollout.group_size=4",
    "engine.replicas=2",
    "engine.slots=8",
    "sim.lengths.mean=100",
)


def sim_run(folder: Path, *changes: str) -> Path:
    """As `millstream sim` writes it."""
    config = load(ROOT / "recipes/sim/one_gpu.toml", RunConfig, [*SMALL, *changes])
    simulate(config, costs_of(config), out=folder)
    return folder


def write_run(folder: Path, events: Sequence[Event], config: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config)
    for sink in (JsonlSink(folder / "events.jsonl"), MetricsSink(folder / "metrics.jsonl")):
        for event in events:
            sink.emit(event)
        sink.close()
    return folder


def run_with_rollouts(folder: Path, **world: Any) -> Path:
    """Of a simulated pipeline, with its kept rollouts: tokens are numbers, since there is no tokenizer."""
    writers: list[RolloutWriter] = []

    def keep(sink: MemorySink) -> RolloutWriter:
        writers.append(RolloutWriter(folder / ROLLOUTS_FOLDER, max_bytes=1e12, last_seq=lambda: len(sink.events) - 1))
        return writers[-1]

    found = simulated.simulate(simulated.World(steps=4, **world), rollouts=keep)
    writers[0].close()
    return write_run(folder, [*found.sink.events, RunEnded(at=1e3, outcome="finished", version=4)])


def client_of(*paths: Path, token: str | None = None, host: str = "localhost") -> TestClient:
    return TestClient(dash_app(RunCatalog(paths), token=token), base_url=f"http://{host}")


def ask(client: TestClient, path: str) -> Any:
    response = client.get(f"/api/{path}")
    assert response.status_code == 200, response.text
    return response.json()
