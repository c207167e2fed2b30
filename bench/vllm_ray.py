"""vLLM under Ray on one GPU that it shares with the learner, half each: how long new weights take to reach it through the
memory of the GPU (`ipc`), through that of the node (`shared`), and through files. Real training runs with a model of random
weights; each is audited. About two and a half minutes each on an H200, most of them the start of vLLM. Without a GPU `ipc` is
left out; with `--smoke` and without vLLM our own engine takes its place, which shows that the benchmark runs.

    python bench/vllm_ray.py                         # about 0.5 billion parameters
    python bench/vllm_ray.py --hidden 2048 --layers 24 --steps 12
    python bench/vllm_ray.py --engine torch          # our own engine in the same place
    python bench/vllm_ray.py --ways ipc,files        # not all of them
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from internals import audit, load, must_be_clean, read_events
from millstream import RunConfig, train
from millstream.events import Event, Span, WeightsLoaded, WeightsPublished
from report import Options, Row, alone, cost, not_measured, publish, say

RECIPE = """
seed = 0
runtime = "ray"
[model.tiny]
[data]
toy = "sort_digits"
size = 4000
holdout = 0
[resources]
[rollout]
group_size = 8
max_tokens = 24
[pipeline]
groups_per_step = 16
max_lag = 1
filter_zero_signal = false
[learner]
learning_rate = 1e-5
[checkpoint]
every_s = 100000
"""
PEER = "files"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def trained(way: str, folder: Path, options: argparse.Namespace, *, is_gpu: bool) -> tuple[list[Event], float]:
    (folder / "recipe.toml").write_text(RECIPE)
    sizes = {"hidden": options.hidden, "layers": options.layers, "heads": options.heads, "context": 128}
    changes = {f"model.tiny.{key}": value for key, value in sizes.items()}
    changes |= {"pipeline.steps": options.steps, "run_dir": folder / way, "engine.kind": options.engine}
    changes |= {"resources.weights": f'["{way}"]', "engine.slots": options.slots}
    if is_gpu:
        changes |= {"resources.colocate": "true", "resources.engine_gpus": 0.5, "resources.learner_gpus": 0.5}
        changes |= {"engine.cache_gb": 8} if options.engine == "torch" else {}
    if options.engine == "vllm":
        changes |= {"engine.vllm.cache_gib": 8 if is_gpu else 0.25, "engine.on_update": options.on_update}
    began = time.monotonic()
    config = load(folder / "recipe.toml", RunConfig, [f"{key}={value}" for key, value in changes.items()])
    train(config, progress=False)
    must_be_clean(audit(folder / way))
    return list(read_events(folder / way / "events.jsonl")), time.monotonic() - began


def rows_of(way: str, events: Sequence[Event], seconds: float, what: str) -> list[Row]:
    spans = [event for event in events if isinstance(event, Span) and event.what == "generate"]
    speed = sum(one.num_tokens for one in spans) / max(1e-9, sum(one.seconds for one in spans))
    return [
        alone(f"{what}, by {way}", "publish: ms, median", 1000 * published(events)),
        alone(f"{what}, by {way}", "generated tokens per second of decoding", speed, digits=0),
        alone(f"{what}, by {way}", "the whole run, with its start: s", seconds, digits=1),
    ]


def published(events: Sequence[Event]) -> float:
    return statistics.median([event.seconds for event in events if isinstance(event, WeightsPublished)])


def loaded(events: Sequence[Event]) -> float:
    """The first load includes what vLLM compiles."""
    found = [event.seconds for event in events if isinstance(event, WeightsLoaded)]
    return statistics.median(found[1:] or found)


def run(options: argparse.Namespace) -> list[Row]:
    is_gpu, rows, found = has_gpu(), list[Row](), dict[str, list[Event]]()
    if options.smoke and importlib.util.find_spec("vllm") is None:
        options.engine = "torch"
    if importlib.util.find_spec("ray") is None:
        return [not_measured("vLLM under Ray", "Ray is not installed")]
    where = "half of a GPU each" if is_gpu else "a CPU"
    what = f"{options.engine} under Ray, {options.layers} layers of {options.hidden}, {where}"
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        for way in options.ways.split(","):
            if way == "ipc" and not is_gpu:
                continue
            say(f"{what}: weights by {way}")
            found[way], seconds = trained(way, Path(folder), options, is_gpu=is_gpu)
            rows += rows_of(way, found[way], seconds, what)
    loads = {way: 1000 * loaded(events) for way, events in found.items()}
    for way, load_ms in loads.items():
        workload, metric = f"{what}, by {way}", "load: ms for fetch and swap, median"
        if way == PEER or PEER not in loads:
            rows.append(alone(workload, metric, load_ms))
        else:
            rows.append(cost(workload, metric, load_ms, PEER, loads[PEER]))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add_argument("--engine", choices=["vllm", "torch"], default="vllm")
    parser.add_argument("--on-update", choices=["keep", "recompute"], default="keep")
    parser.add("--ways", f"ipc,shared,{PEER}", help="how weights are sent, by comma")
    parser.add("--hidden", 1536, smoke=64)
    parser.add("--layers", 20, smoke=1)
    parser.add("--heads", 12, smoke=2)
    parser.add("--slots", 128, smoke=16)
    parser.add("--steps", 10, smoke=2)
    options = parser.parse(argv)
    publish(run(options), options)


if __name__ == "__main__":
    main()
