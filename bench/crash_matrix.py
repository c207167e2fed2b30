"""SIGKILL to every kind of process of a run on Ray, at every kind of moment: does training continue, is nothing lost or done
twice?

Victims: an engine, an environment's worker, a reward's worker, the store's coordinator, a learner's rank, the driver, a whole
node; in runs of their own, a rollout worker, with Ray and without. Moments: while generating, training, publishing,
checkpointing: 36 cells, and 20 of a random victim at a random moment.
One run is hit many times. After each kill the run must train two more steps than it had, the killed process must have been
replaced, and the audit must be clean; when a driver dies, every process of its run must end. At the end of each run it
finishes, the audit is clean, no process and no shared memory is left.

    .venv/bin/python bench/crash_matrix.py [--json] [--smoke] [--out FOLDER] [--seed 0] [--rounds 1] [--only 'engine:*' ...]
    .venv/bin/python bench/crash_matrix.py --table FOLDER ...

Each round has all cells; its random ones have other victims than the last round's. Results are appended to FOLDER/cells.jsonl,
and cells that succeeded before are not run again. `--table` runs nothing, and puts the results of several folders into one
table. `--smoke` kills the driver of a small run without Ray, once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from crash_run import SETTINGS, Ended, Failed, Run, descendants, is_alive, weights_of
from internals import audit, report_lines
from report import Options, Row, publish, say

VICTIMS = ("engine", "environment", "reward", "coordinator", "learner", "driver", "node")
ROLLOUT, LOCAL = "rollout", "rollout without Ray"
"""Victims of runs that have rollout workers."""
NUM_WORKERS = 2
MOMENTS = ("generating", "training", "publishing", "checkpointing")
RANDOM = "random"
END = "end"
"""Of a run: it finishes, and leaves nothing behind."""
NUM_RANDOM = 20
MOMENT_S = 120.0
RECOVER_S = 300.0
START_S = 600.0
FINISH_S = 600.0
STEPS_PER_CELL = 12
DELAYS = {"generating": 0.2, "training": 0.05, "publishing": 0.01, "checkpointing": 0.01}
"""At most so long after the moment has begun."""
RANDOM_S = 6.0


class Cell(Struct, frozen=True):
    victim: str
    moment: str
    number: int = 0
    """Of the random ones."""
    seed: int = 0
    """Of its round."""

    @property
    def name(self) -> str:
        return f"{self.victim}:{self.moment}" + (f":{self.number}" if self.moment == RANDOM else "")


class Result(Struct, frozen=True, kw_only=True):
    cell: Cell
    is_ok: bool
    how: str
    """How the run went on, or what was wrong."""
    seconds: float
    """From the kill to the next step."""
    usual_s: float
    """Between two steps before it."""
    replaced_s: float
    """From the kill until it was as before."""
    checks: int
    """Of the audit."""


Done = dict[Cell, Result]


class Plan(Struct, frozen=True):
    """The cells of one run."""

    name: str
    cells: tuple[Cell, ...]
    has_nodes: bool = False
    is_local: bool = False  # without Ray
    steps_per_cell: int = STEPS_PER_CELL
    num_workers: int = 0


SMOKE = Plan("smoke", (Cell("driver", "training"),), is_local=True, steps_per_cell=0)


def plans(seed: int, is_wanted: Callable[[Cell], bool] = lambda cell: True) -> list[Plan]:
    """The cells that are wanted, in as few runs as can bear them: engines that die too often are not replaced."""
    local = [victim for victim in VICTIMS if victim != "node"]
    aimed = [cell for moment in MOMENTS for victim in local if is_wanted(cell := Cell(victim, moment, seed=seed))]
    found = [Plan("aimed", tuple(aimed[at : at + len(local)])) for at in range(0, len(aimed), len(local))]
    rng, half = random.Random(f"victims {seed}"), NUM_RANDOM // 2
    on_one = [Cell(rng.choice(local), RANDOM, number, seed) for number in range(half)]
    on_two = [Cell(rng.choice(VICTIMS), RANDOM, number, seed) for number in range(half, NUM_RANDOM)]
    nodes = [Cell("node", moment, seed=seed) for moment in MOMENTS]
    workers = [Cell(ROLLOUT, moment, seed=seed) for moment in MOMENTS]
    here = [Cell(LOCAL, moment, seed=seed) for moment in MOMENTS]
    found.append(Plan("workers", tuple(filter(is_wanted, workers)), num_workers=NUM_WORKERS))
    found.append(Plan("local workers", tuple(filter(is_wanted, here)), is_local=True, num_workers=NUM_WORKERS))
    found.append(Plan("random", tuple(filter(is_wanted, on_one))))
    found += [Plan("two nodes", tuple(filter(is_wanted, cells)), has_nodes=True) for cells in (nodes, on_two)]
    return found


# ---- two nodes on one machine ----------------------------------------------------------------------------------------------


class Nodes:
    """A Ray cluster of two nodes, of which the second one dies and is replaced. The driver is on the first. Engines and ranks
    fill both: what was on a node that died waits for the next one."""

    def __init__(self, folder: str) -> None:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", **SETTINGS}
        from ray.cluster_utils import Cluster

        import internals_ray  # noqa: F401  Ray on loopback

        self._options = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=self._options)
        self.address: str = self._cluster.address
        self.add()

    def add(self) -> None:
        self._second = self._cluster.add_node(num_cpus=2, object_store_memory=100 << 20)

    def of_second(self) -> list[psutil.Process]:
        """The processes of the second node, those of Ray first."""
        pids = [info.process.pid for some in self._second.all_processes.values() for info in some]
        return [psutil.Process(pid) for pid in pids] + [process for pid in pids for process in descendants(pid)]

    def kill(self, processes: Sequence[psutil.Process]) -> None:
        """The second node, all at once."""
        infos = [info for some in self._second.all_processes.values() for info in some]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.worker_nodes.discard(self._second)
        for info in infos:
            info.process.wait()

    @property
    def pids(self) -> list[int]:
        """Of those that have started what is on the nodes."""
        nodes = [self._cluster.head_node, *self._cluster.worker_nodes]
        return [info.process.pid for node in nodes for some in node.all_processes.values() for info in some]

    def close(self) -> None:
        self._cluster.shutdown()


# ---- a kill, and what follows ----------------------------------------------------------------------------------------------


def hit(run: Run, cell: Cell, rng: random.Random, nodes: Nodes | None) -> Result:
    """Wait for the moment, kill, wait until the run is as before. Raises `Failed`, or `Ended` where it was over too soon."""
    others = [] if nodes is None else nodes.pids
    run.until(lambda: run.read().num_steps >= 2 and is_whole(run), "all to be there", START_S, 0.02)
    run.look(*others)  # whatever takes time comes before the moment, so that it is still there when the signal is sent
    victim, with_it = choose(run, cell, rng, others), gone_with(run, cell.victim, nodes)
    await_moment(run, cell, rng)
    while victim is not None and not is_alive(victim):  # an environment's, say, may have ended by itself
        victim = choose(run, cell, rng, others)
        await_moment(run, cell, rng)
    books = run.books
    before, num_steps, counts = books.version, books.num_steps, dict(books.counts)
    usual_s = _usual(list(books.stepped_at))
    killed_at = time.monotonic()
    kill(run, cell.victim, victim, nodes, with_it)
    run.until(lambda: run.read().num_steps > num_steps, "the next step", RECOVER_S, 0.005)
    seconds = run.books.stepped_at[-1] - killed_at
    run.until(lambda: run.read().version >= before + 2, "two more steps", RECOVER_S, 0.02)
    run.until(lambda: is_whole(run) and has_new(run, cell.victim, victim, others), "a replacement", RECOVER_S, 0.02)
    replaced_s = time.monotonic() - killed_at
    how = in_words(cell.victim, counts, run.books.counts)
    checks = must_be_clean(run)
    return Result(
        cell=cell, is_ok=True, how=how, seconds=seconds, usual_s=usual_s, replaced_s=replaced_s, checks=checks
    )


def is_whole(run: Run) -> bool:
    """Whether all engines serve."""
    return run.read().serving == run.books.engines


def await_moment(run: Run, cell: Cell, rng: random.Random) -> None:
    if cell.moment == RANDOM:
        time.sleep(rng.uniform(0, RANDOM_S))
        run.read()
        return

    def is_now() -> bool:
        if not run.is_at(cell.moment):
            return False
        time.sleep(rng.uniform(0, DELAYS[cell.moment]))
        return run.is_at(cell.moment)  # still

    run.until(is_now, f"a moment of {cell.moment}", MOMENT_S)


def choose(run: Run, cell: Cell, rng: random.Random, others: Sequence[int]) -> psutil.Process | None:
    """The process to be killed; none for a node."""
    match cell.victim:
        case "driver":
            return psutil.Process(run.driver.pid)
        case "node":
            return None
        case "coordinator":
            found = run.coordinator(*others)
            if found is None:
                raise Failed("there is no coordinator")
            return found
        case victim:
            what = ROLLOUT if victim == LOCAL else victim
            living = run.living(what)
            if not living:
                raise Failed(f"there is no {what} to kill")
            return rng.choice(living).process


def gone_with(run: Run, what: str, nodes: Nodes | None) -> list[psutil.Process]:
    """Who is to be killed with a node, or must go with a driver."""
    if what == "node":
        assert nodes is not None
        return nodes.of_second()
    return descendants(run.driver.pid) if what == "driver" else []


def kill(
    run: Run, what: str, victim: psutil.Process | None, nodes: Nodes | None, with_it: Sequence[psutil.Process]
) -> None:
    if what == "node":
        assert nodes is not None
        nodes.kill(with_it)
        nodes.add()
    elif what == "driver":
        run.kill_driver()
        run.must_be_gone({*with_it, *(one.process for one in run.read().started.values())})
        run.start()
    elif victim is not None:
        os.kill(victim.pid, signal.SIGKILL)


def has_new(run: Run, what: str, victim: psutil.Process | None, others: Sequence[int]) -> bool:
    """Whether another has the place of the one that was killed. Environments and rewards get one when they need it."""
    if victim is not None and is_alive(victim):
        return False
    match what:
        case "coordinator":
            return run.coordinator(*others) is not None
        case "learner":
            return len(run.living("learner")) == 2
        case "rollout" | "rollout without Ray":
            return len(run.living(ROLLOUT)) == NUM_WORKERS
        case _:
            return True


def in_words(what: str, before: dict[str, int], after: dict[str, int]) -> str:
    """What was said of it in the log, between the kill and the recovery."""
    told = {
        "resumed": "resumed",
        "replica_left": "engine lost",
        "replica_joined": "engine joined",
        "learner_restarted": "learner restarted",
        "rollout_failed": "rollout tried again",
        "checkpoint_failed": "checkpoint failed",
        "stalled": "stalls told",
    }
    new = {words: after.get(kind, 0) - before.get(kind, 0) for kind, words in told.items()}
    said = [words if num == 1 else f"{words} ({num})" for words, num in new.items() if num]
    return ", ".join(said) or "went on"


def must_be_clean(run: Run) -> int:
    report = audit(run.run_dir)
    if not report.is_clean:
        raise Failed("the audit: " + " ".join(report_lines(report)))
    return report.checks


def _usual(times: list[float]) -> float:
    gaps = [later - at for at, later in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


# ---- runs ------------------------------------------------------------------------------------------------------------------


def carry_out(plan: Plan, out: Path, done: Done, rng: random.Random, seed: int) -> None:
    """All cells of the plan that are not done, in one run, or in several if it comes to its end before."""
    attempt = 0
    while missing := [cell for cell in plan.cells if cell not in done]:
        with ExitStack() as stack:
            nodes = None
            if plan.has_nodes:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ms-ray-", ignore_cleanup_errors=True))
                nodes = Nodes(folder)
                stack.callback(nodes.close)
            run_dir = out / f"{plan.name.replace(' ', '-')}-{int(time.time())}"
            attempt += 1
            address = None if nodes is None else nodes.address
            steps = plan.steps_per_cell * len(missing) + 10
            run = Run(
                run_dir,
                steps=steps,
                seed=seed + attempt,
                address=address,
                is_local=plan.is_local,
                num_workers=plan.num_workers,
            )
            stack.callback(run.end)
            hit_all(run, missing, out, done, rng, nodes)


def hit_all(run: Run, cells: Sequence[Cell], out: Path, done: Done, rng: random.Random, nodes: Nodes | None) -> None:
    cell, end = cells[0], Cell(END, run.run_dir.name, seed=cells[0].seed)
    try:
        for cell in cells:
            try:
                keep(out, done, hit(run, cell, rng, nodes))
            except Ended:
                if run.driver.returncode != 0:
                    raise
                break  # it was over too soon: another one has the other cells
        cell = end
        keep(out, done, finished(run, end, [] if nodes is None else nodes.pids))
    except Failed as failed:
        keep(out, done, failure(cell, str(failed)))


def finished(run: Run, cell: Cell, others: Sequence[int]) -> Result:
    """Lets it come to its end. Raises `Failed` if that leaves anything behind."""
    own = set(descendants(run.driver.pid))
    run.look(*others)
    weights = weights_of(own | run.seen)
    deadline = time.monotonic() + FINISH_S
    while run.driver.poll() is None and time.monotonic() < deadline:
        own |= set(descendants(run.driver.pid))
        time.sleep(0.2)
    if run.driver.poll() != 0:
        raise Failed(f"the run did not finish: exit code {run.driver.poll()}: {run.last_output()}")
    run.read()
    run.must_be_gone(own | {one.process for one in run.books.started.values()})
    run.helpers_must_be_gone()
    left = [name for name in weights if list(Path("/dev/shm").glob(f"millstream-weights-*/{Path(name).name}*"))]
    if left := [*left, *run.shared_memory()]:
        raise Failed(f"left in shared memory: {', '.join(left)}")
    checks, usual_s = must_be_clean(run), _usual(list(run.books.stepped_at))
    return Result(cell=cell, is_ok=True, how="finished", seconds=0.0, usual_s=usual_s, replaced_s=0.0, checks=checks)


def failure(cell: Cell, why: str) -> Result:
    return Result(cell=cell, is_ok=False, how=why, seconds=0.0, usual_s=0.0, replaced_s=0.0, checks=0)


def keep(out: Path, done: Done, result: Result) -> None:
    done[result.cell] = result
    with (out / "cells.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")
    sign = "ok" if result.is_ok else "FAILED"
    say(
        f"{result.cell.name}: {sign}, {result.how}; next step after {result.seconds:.1f} s (usually {result.usual_s:.1f}), "
        f"as before after {result.replaced_s:.1f} s"
    )


def known(out: Path) -> list[Result]:
    """All attempts, those that failed as well."""
    path = out / "cells.jsonl"
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]


# ---- what came of it -------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """In Markdown: victim by moment, the random ones by victim, and whatever failed in its own words."""
    rows = ["| killed | " + " | ".join(f"while {moment}" for moment in MOMENTS) + " | at random |", "|---" * 6 + "|"]
    for victim in (*VICTIMS, ROLLOUT, LOCAL):
        of_it = [result for result in results if result.cell.victim == victim]
        cells = [_shown([result for result in of_it if result.cell.moment == moment]) for moment in (*MOMENTS, RANDOM)]
        rows.append(f"| {victim} | " + " | ".join(cells) + " |")
    ends = [result for result in results if result.cell.victim == END]
    kills = [result for result in results if result.cell.victim != END]
    checks = max((result.checks for result in results), default=0)
    rows += [
        "",
        f"kills: {sum(r.is_ok for r in kills)} of {len(kills)} survived; at most {checks:,} checks in an audit",
    ]
    rows += [f"runs that came to their end and left nothing: {sum(r.is_ok for r in ends)} of {len(ends)}"]
    rows += [f"{r.cell.name}, seed {r.cell.seed}: {r.how}" for r in results if not r.is_ok]
    return "\n".join(rows)


def _shown(results: Sequence[Result]) -> str:
    if not results:
        return "not run"
    seconds = [result.seconds for result in results if result.is_ok]
    if not seconds:
        return f"FAILED, all {len(results)}"
    spread = f"{min(seconds):.1f} to {max(seconds):.1f} s" if len(seconds) > 1 else f"{seconds[0]:.1f} s"
    return f"{len(seconds)} of {len(results)}: {spread}"


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Whether each kill was survived, and how long training stood still."""
    return [
        Row(
            workload=f"{one.cell.name}, seed {one.cell.seed}",
            metric=metric,
            ours=ours,
            peer="none",
            theirs=None,
            ratio=None,
        )
        for one in results
        for metric, ours in (("survived", int(one.is_ok)), ("seconds to the next step", round(one.seconds, 2)))
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--out", None, kind=Path)
    parser.add("--seed", 0)
    parser.add("--rounds", 1)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="VICTIM:MOMENT")
    parser.add_argument("--table", nargs="*", type=Path, metavar="FOLDER")
    options = parser.parse(argv)
    with tempfile.TemporaryDirectory() if options.smoke else nullcontext() as scratch:
        if scratch:
            carry_out(SMOKE, Path(scratch), {}, random.Random(0), 0)
            folders = [Path(scratch)]
        else:
            folders = options.table or [run_all(options)]
        results = [result for folder in folders for result in known(folder)]
    if options.json:
        publish(rows_of(results), options)
    else:
        print(table(results))
    if any(not result.is_ok for result in results):
        sys.exit("not every kill was survived")


def run_all(options: argparse.Namespace) -> Path:
    """The folder that has the results."""
    out = options.out or Path(tempfile.mkdtemp(prefix="millstream-crashes-"))
    out.mkdir(parents=True, exist_ok=True)
    out = out.absolute()
    done = {result.cell: result for result in known(out) if result.is_ok}

    def is_wanted(cell: Cell) -> bool:
        return cell not in done and any(fnmatch(cell.name, pattern) for pattern in options.only)

    for seed in range(options.seed, options.seed + options.rounds):
        for plan in plans(seed, is_wanted):
            carry_out(plan, out, done, random.Random(f"{plan.name} {seed}"), seed)
    return out


if __name__ == "__main__":
    main()
