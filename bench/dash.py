"""How quickly does `millstream dash` open and scroll a long run, in how much memory, and what does the index beside the events
cost? A synthetic run of 10 million events: eight engines, groups of eight, 64 groups a step, kinds of events in the proportions
of a real log, written by the writer of a run.

    open      from the start of a server that has read nothing to the answers for the first view: overview, all curves, lanes
    scroll    windows of the timeline, of the whole run down to a thousandth of it, at random places; 95% are quicker
    index     written with the events: microseconds an event, processor time; made afterwards: seconds per million events
    browser   the page in headless Chromium: until curves and lanes are drawn; the time between two frames while the timeline is
              panned, 95% are shorter; memory of the page's objects. Left out without chromium and playwright
              (`make test-browser` installs playwright)
    ten runs  the same run ten times in one server: until every one has answered with its first view

The peer is a view without an index: decoding the events, at the speed at which `millstream report` reads them.

    .venv/bin/python bench/dash.py [--json] [--smoke] [--events 10000000] [--folder /tmp/dash]
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from internals import IndexWriter, RunTiles, encode_event, index_of, read_events
from millstream.events import (
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupTaken,
    RolloutEnded,
    RolloutStarted,
    RunEnded,
    RunStarted,
    Span,
    Status,
    Stepped,
    WaitNow,
    WeightsLoaded,
    WeightsPublished,
)
from millstream.types import Fate, Finish
from report import Options, Row, alone, cost, publish, say

ENGINES = [f"engine-{number}" for number in range(8)]
GROUPS, MEMBERS = 64, 8
SPANS = 20  # of each engine a step
NUM_SAMPLE = 100_000  # events on which costs per event are measured
ZOOMS = (1, 10, 100, 1000)
NUM_PANS, PAN_MS = 40, 50
WAITS = [
    WaitNow(owner="train", what="a complete group", seconds=0.2),
    WaitNow(owner="feed", what="room under the lag bound", seconds=1.5),
    WaitNow(owner="rollouts", what="an engine", seconds=3.0, count=300),
    WaitNow(owner="rollouts", what="its environment", seconds=0.5, count=40),
]


def synthetic_events(num: int) -> Iterator[Event]:
    """As a run with lag 1 writes them: groups of one step are admitted while those of the last are trained."""
    rng, count = random.Random(0), itertools.count()
    yield _started()
    for step in itertools.count():
        begin, ids = 10.0 * step, range(GROUPS * step, GROUPS * (step + 1))
        for group in ids:
            at = begin + 8 * (group % GROUPS) / GROUPS
            yield GroupAdmitted(
                at=at, group_id=group, task_id=f"t{group % 7000}", epoch=0, start_version=step, deadline=step + 1
            )
            for member in range(MEMBERS):
                yield RolloutStarted(at=at, group_id=group, member=member, attempt=0)
        for number in range(SPANS):
            at = begin + 0.5 * (number + 1)
            for engine in ENGINES:
                yield Span(at=at, worker=engine, what="generate", seconds=0.4 + 0.1 * rng.random(), num_tokens=4000)
            yield Span(at=at, worker="learner", what="accumulate", seconds=0.3, num_tokens=16000)
            if number % 2:
                yield _status(at, rng)
        yield from _ended(begin, step, ids, rng)
        if next(count) >= 0 and step * 1390 > num:
            return


def _ended(begin: float, step: int, ids: range, rng: random.Random) -> Iterator[Event]:
    for group in ids:
        at = begin + 8 + 1.5 * (group % GROUPS) / GROUPS
        for member in range(MEMBERS):
            length = rng.randrange(50, 4000)
            yield RolloutEnded(
                at=at, group_id=group, member=member, attempt=0, reward=float(rng.random() < 0.5), num_tokens=length + 90,
                num_sampled=length, start_version=step, end_version=step, finish=Finish.STOP, seconds=length / 500,
            )  # fmt: skip
        yield GroupTaken(at=at, group_id=group, version=step, lag=1, num_rollouts=MEMBERS)
        yield GroupLeft(at=at, group_id=group, fate=Fate.TRAINED, num_members=MEMBERS, mean_reward=0.5)
    at, rollouts = begin + 9.8, GROUPS * MEMBERS
    yield Span(at=at, worker="learner", what="step", seconds=0.2)
    yield Stepped(
        at=at, version=step + 1, num_groups=GROUPS, num_rollouts=rollouts, num_rows=rollouts, num_tokens=10**6, seconds=9.8,
        metrics={"loss": rng.random(), "entropy": 0.8, "grad_norm": 0.1},
    )  # fmt: skip
    yield WeightsPublished(at=at + 0.05, version=step + 1, seconds=0.05)
    for engine in ENGINES:
        yield WeightsLoaded(at=at + 0.1, engine=engine, version=step + 1, seconds=0.05)


def _started() -> RunStarted:
    return RunStarted(
        at=0.0, run_id="bench", seed=0, steps=10**6, num_tasks=7000, filter_zero_signal=False, min_group_size=2,
        groups_per_step=GROUPS, group_size=MEMBERS, max_lag=1, lag_bound=1, budget=2 * GROUPS,
    )  # fmt: skip


def _status(at: float, rng: random.Random) -> Status:
    return Status(
        at=at, requests_running=300, requests_waiting=rng.randrange(50), rows_in_store=rng.randrange(600),
        groups_outstanding=GROUPS, groups_taken=rng.randrange(GROUPS), budget=2 * GROUPS, waits=WAITS,
    )  # fmt: skip


def write_run(folder: Path, num: int) -> int:
    """As `JsonlSink` and `MetricsSink` write them, but with one thread. Returns the number of events."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[model]\npath = "synthetic"\n[pipeline]\nsteps = 1000000\n')
    path, written = folder / "events.jsonl", 0
    with path.open("wb", buffering=1 << 20) as log, (folder / "metrics.jsonl").open("wb", buffering=1 << 20) as metrics:
        index = IndexWriter(path)
        events = itertools.islice(synthetic_events(num), num - 1)
        for seq, event in enumerate(
            itertools.chain(events, [RunEnded(at=10.0 * num / 1390, outcome="finished", version=0)])
        ):
            line = b'{"seq":%d,%b\n' % (seq, encode_event(event)[1:])
            log.write(line)
            index.add(seq, event, len(line))
            written += 1
            if isinstance(event, Stepped):
                names = (
                    "reward",
                    "length",
                    "tokens_per_s",
                    "lag_mean",
                    "step_s",
                    "entropy",
                    "loss",
                    *(f"other_{i}" for i in range(20)),
                )
                metrics.write(
                    json.dumps({"step": event.version, "at": event.at, **dict.fromkeys(names, 0.5)}).encode() + b"\n"
                )
        index.close()
    return written


# ---- what the index costs --------------------------------------------------------------------------------------------------


def index_cost(folder: Path, repeat: int) -> tuple[float, float]:
    """Processor microseconds an event: to encode it and, beyond that, to index it. Medians."""
    events = list(itertools.islice(synthetic_events(NUM_SAMPLE), NUM_SAMPLE))
    encoding, indexing = [], []
    for number in range(repeat):
        began = time.process_time()
        lines = [b'{"seq":%d,%b\n' % (seq, encode_event(event)[1:]) for seq, event in enumerate(events)]
        encoded = time.process_time()
        index = IndexWriter(folder / f"{number}.jsonl")
        for seq, event in enumerate(events):
            index.add(seq, event, len(lines[seq]))
        index.close()
        encoding.append(1e6 * (encoded - began) / len(events))
        indexing.append(1e6 * (time.process_time() - encoded) / len(events))
    return statistics.median(encoding), statistics.median(indexing)


def seconds_per_million(path: Path, num: int) -> tuple[float, float]:
    """To make the index from the events of a run, and to decode them: processor time."""
    began = time.process_time()
    RunTiles(path).refresh()
    made = time.process_time()
    for _ in read_events(path):
        pass
    return 1e6 * (made - began) / num, 1e6 * (time.process_time() - made) / num


# ---- a server ------------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def ask(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}api/{path}", timeout=600) as response:
            found: bytes = response.read()
        return found

    def first_view(self, run_id: str) -> None:
        for view in ("overview", "series?points=800", "lanes?points=800"):
            self.ask(f"runs/{run_id}/{view}")

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def serving(*paths: Path) -> Iterator[Server]:
    words = [sys.executable, "-m", "millstream.cli.main", "dash", *map(str, paths), "--port=0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as process:
        assert process.stdout is not None
        yield Server(process, process.stdout.readline().split()[1])
        process.terminate()


def window_times(server: Server, run_id: str, zoom: int, num: int) -> list[float]:
    rng, last = random.Random(zoom), json.loads(server.ask(f"runs/{run_id}/lanes?points=1"))["last"]
    found = []
    for _ in range(num):
        begin = rng.random() * last * (1 - 1 / zoom)
        began = time.perf_counter()
        server.ask(f"runs/{run_id}/lanes?points=800&begin={begin}&end={begin + last / zoom}")
        found.append(time.perf_counter() - began)
    return found


FRAMES = """async ([key, presses, everyMs]) => {
  const times = [];
  let isOver = false;
  const frame = (now) => { times.push(now); if (!isOver) requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  for (let i = 0; i < presses; i++) {
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await new Promise((done) => setTimeout(done, everyMs));
  }
  isOver = true;
  return times.slice(1).map((time, i) => time - times[i]);
}"""


def in_browser(server: Server, run_id: str, workload: str) -> Iterator[Row]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        say("not measured in a browser: playwright is not installed")
        return
    chromium = shutil.which("chromium")
    if chromium is None:
        say("not measured in a browser: there is no chromium")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        for view, drawn in (("overview", ".chart path"), ("timeline", ".lanes canvas")):
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{server.url}#/{run_id}/{view}")
            page.wait_for_selector(drawn, state="attached", timeout=120_000)  # a flat curve has no height
            yield alone(workload, f"seconds in a browser until the {view} is drawn", time.perf_counter() - began)
        for _ in range(3):
            page.keyboard.press("+")
        page.wait_for_timeout(2000)
        frames = sorted(page.evaluate(FRAMES, ["ArrowRight", NUM_PANS, PAN_MS]))
        yield alone(workload, "ms between two frames while panning", frames[int(0.95 * (len(frames) - 1))], digits=1)
        page.wait_for_url("**from=**")  # it did move
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")["usedSize"]
        yield alone(workload, "MB of memory of the page's objects", used / 1e6, digits=1)
        browser.close()


def link_runs(run: Path, folder: Path, num: int) -> None:
    """The same files under other names."""
    for number in range(num):
        target = folder / f"run-{number}"
        target.mkdir(parents=True)
        for file in run.iterdir():
            os.link(file, target / file.name)


def measure(run: Path, folder: Path, num: int, num_windows: int) -> Iterator[Row]:
    million = f"{num / 1e6:g} million events"
    sample = folder / "sample" / "events.jsonl"
    write_run(sample.parent, min(num, 1_000_000))
    index_of(sample).unlink()
    made_s, decoded_s = seconds_per_million(sample, min(num, 1_000_000))
    encoded_us, indexed_us = index_cost(folder, 5)
    yield cost("an event", "microseconds to index it as it is written", indexed_us, "encoding it", encoded_us)
    yield cost("a million events", "seconds to make the index", made_s, "decoding them", decoded_s)
    size = run.joinpath("events.jsonl").stat().st_size
    yield alone(
        million,
        "size of the index, as a share of the events",
        index_of(run / "events.jsonl").stat().st_size / size,
        digits=4,
    )
    with serving(run) as server:
        before, used, began = server.memory_mb(), server.processor_s(), time.perf_counter()
        server.first_view(run.name)
        opened, used = time.perf_counter() - began, server.processor_s() - used
        yield cost(million, "seconds to open", opened, "decoding the events", decoded_s * num / 1e6)
        yield alone(million, "processor seconds of the server to open", used)
        for zoom in ZOOMS:
            times = sorted(window_times(server, run.name, zoom, num_windows))
            yield alone(
                million, f"ms to scroll to 1/{zoom} of the run", 1000 * times[int(0.95 * (len(times) - 1))], digits=1
            )
        yield alone(million, "MB of memory of the server beyond its start", server.memory_mb() - before, digits=0)
        yield from in_browser(server, run.name, million)
    link_runs(run, folder / "ten", 10)
    with serving(folder / "ten") as server, ThreadPoolExecutor(10) as pool:
        began = time.perf_counter()
        list(pool.map(server.first_view, [f"run-{number}" for number in range(10)]))
        yield alone(f"ten runs of {million}", "seconds until all are open", time.perf_counter() - began)
        yield alone(f"ten runs of {million}", "MB of memory of the server", server.memory_mb(), digits=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--events", 10_000_000, smoke=20_000)
    parser.add("--windows", 40, smoke=2)
    parser.add("--folder", Path(), help="of the run, which is kept there; empty: a temporary one")
    options = parser.parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        run = (options.folder if str(options.folder) != "." else Path(scratch)) / "run"
        if not run.exists():
            began = time.perf_counter()
            write_run(run, options.events)
            say(f"{options.events} events were written in {time.perf_counter() - began:.0f} s")
        publish(list(measure(run, Path(scratch), options.events, options.windows)), options)


if __name__ == "__main__":
    main()
