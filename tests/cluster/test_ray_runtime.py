"""Runs on Ray whose processes are killed: some cells of `bench/crash_matrix.py`. `make test-ray`; all of them: `make crash-matrix`."""

from __future__ import annotations

import random
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from crash_matrix import (
    LOCAL,
    MOMENTS,
    NUM_WORKERS,
    RANDOM,
    ROLLOUT,
    VICTIMS,
    Cell,
    Plan,
    Result,
    carry_out,
    plans,
    table,
)
from crash_run import ENGINES, Books
from millstream.cluster.resources import ResourcesConfig, placement_of


def survived(plan: Plan, folder: Path) -> dict[str, Result]:
    """All cells of a plan, and the end of each run, by name."""
    done: dict[Cell, Result] = {}
    carry_out(plan, folder, done, random.Random(0), seed=0)
    failures = {cell.name: result.how for cell, result in done.items() if not result.is_ok}
    assert not failures
    return {cell.name: result for cell, result in done.items()}


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_whoever_is_killed_the_run_goes_on_comes_to_its_end_and_leaves_nothing_behind(tmp_path: Path) -> None:
    cells = (
        Cell("engine", "publishing"),
        Cell("reward", "generating"),
        Cell("driver", "checkpointing"),
        Cell("coordinator", "training"),
        Cell("learner", "training"),
    )
    done = survived(Plan("some", cells), tmp_path)
    assert "engine joined" in done["engine:publishing"].how
    assert "resumed" in done["driver:checkpointing"].how
    assert "learner restarted" in done["learner:training"].how


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_node_that_is_killed_with_all_that_is_on_it_does_not_end_the_run(tmp_path: Path) -> None:
    done = survived(Plan("node", (Cell("node", "training"),), has_nodes=True), tmp_path)
    assert "learner restarted" in done["node:training"].how
    assert "engine joined" in done["node:training"].how


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_a_rollout_worker_that_is_killed_is_replaced_and_its_rollouts_are_tried_again(tmp_path: Path) -> None:
    cells = (Cell(ROLLOUT, "generating"), Cell(ROLLOUT, "checkpointing"))
    done = survived(Plan("workers", cells, num_workers=NUM_WORKERS), tmp_path)
    assert "rollout tried again" in done["rollout:generating"].how


def test_a_worker_that_closed_its_connection_has_died_unless_ray_knows_that_it_finished() -> None:
    from millstream.cluster.actor import RayHello
    from millstream.cluster.driver import RayWorker

    def worker(ended: str | None) -> RayWorker:
        exited: Future[None] = Future()
        if ended is not None:
            exited.set_exception(RuntimeError(ended))
        return RayWorker(None, exited, line, RayHello(ticket="", pid=7, node="there"))

    with socket.socket() as line:
        unknown, lost = worker(None), worker("The actor died because its node has died. Node Id: 12")
        crashed, done = worker("The actor died unexpectedly on node 12"), worker("The actor exited by exit_actor()")
        assert unknown.exit_reason(0) is None and unknown.has_died
        assert lost.exit_reason(0) == "its process ended: its node is gone" and lost.has_died
        assert crashed.exit_reason(0) == "its process ended: killed or crashed" and crashed.has_died
        assert not done.has_died


def test_an_engine_that_is_added_is_placed_freely_and_one_that_is_replaced_keeps_its_bundle() -> None:
    from millstream.cluster.driver import Cluster

    cluster: Any = Cluster.__new__(Cluster)
    cluster._group = object()
    cluster._placement = placement_of(ResourcesConfig(), replicas=1, ranks=2)
    for _ in range(2):
        strategy = cluster._options("engine", "engine")["scheduling_strategy"]
        assert strategy.placement_group_bundle_index == 2 and strategy.placement_group is cluster._group
    assert cluster._options("learner", "rank 1")["scheduling_strategy"].placement_group_bundle_index == 1
    assert cluster._options("engine", "engine-0") == cluster._options("stage", "reference") == {}


def test_the_matrix_has_every_victim_at_every_moment_and_twenty_at_random() -> None:
    cells = [cell for plan in plans(seed=0) for cell in plan.cells]
    aimed = [(cell.victim, cell.moment) for cell in cells if cell.moment != RANDOM]
    assert sorted(aimed) == sorted((victim, moment) for victim in (*VICTIMS, ROLLOUT, LOCAL) for moment in MOMENTS)
    assert len({cell.name for cell in cells}) == len(cells) == 56


def test_a_table_counts_every_attempt_and_gives_the_reason_of_each_that_failed() -> None:
    def result(how: str, seconds: float, *, is_ok: bool = True) -> Result:
        cell = Cell("engine", "training")
        return Result(
            cell=cell, is_ok=is_ok, how=how, seconds=seconds, usual_s=1.0, replaced_s=seconds, checks=int(seconds)
        )

    shown = table([result("went on", 1.0), result("waited in vain", 0.0, is_ok=False), result("went on", 3.0)])
    assert "| engine | not run | 2 of 3: 1.0 to 3.0 s | not run | not run | not run |" in shown
    assert "kills: 2 of 3 survived" in shown
    assert "engine:training, seed 0: waited in vain" in shown


def test_moments_are_told_from_events() -> None:
    books = Books()
    for engine in ENGINES:
        books.add({"kind": "worker_started", "worker": engine, "what": "engine", "pid": 1, "node": ""})
    books.add({"kind": "rollout_started", "group_id": 0, "member": 1})
    assert books.in_flight and not books.num_taken and not books.is_publishing
    books.add({"kind": "group_taken"})
    assert books.num_taken == 1
    books.add({"kind": "stepped", "version": 1})
    assert books.is_publishing and not books.num_taken
    books.add({"kind": "weights_loaded", "engine": "engine-0", "version": 1})
    assert books.is_publishing
    books.add({"kind": "replica_left", "engine": "engine-1"})
    assert not books.is_publishing and books.serving == {"engine-0"}
    books.add({"kind": "replica_joined", "engine": "engine-1"})
    assert books.is_publishing
    books.add({"kind": "resumed", "version": 1})
    assert not books.in_flight and not books.is_publishing and books.serving == set(ENGINES)
