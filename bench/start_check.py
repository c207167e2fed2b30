"""What the start-up check of a model costs: seconds of the engine's check and of the learner's, for a Qwen3 of some shapes with
random weights. On a GPU in bfloat16, else in float32.

*First*: in a process that has computed nothing yet, with all that CUDA and Triton set up for a model anyway. *Again*: with
nothing remembered. *Remembered*: from the second start on.

    .venv/bin/python bench/start_check.py [--json] [--smoke] [--shapes 474M,1.7B] [--device cuda]
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

from internals_torch import cache_kind, check_engine, check_learner, model_of, qwen3, set_up_cpu
from millstream import EngineConfig
from report import Options, Row, alone, publish, say

SHAPES = {
    "demo": {"hidden": 64, "layers": 2, "heads": 4, "dim": 16, "words": 32, "context": 32},
    "474M": {"hidden": 1024, "layers": 28, "heads": 16, "dim": 128, "words": 32768, "context": 4608},
    "1.7B": {"hidden": 2048, "layers": 28, "heads": 16, "dim": 128, "words": 151936, "context": 4608},
}


def main(argv: Sequence[str] | None = None) -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(__doc__)
    options.add("--shapes", "474M,1.7B" if here == "cuda" else "demo", smoke="demo")
    options.add("--device", here)
    chosen = options.parse(argv)
    set_up_cpu()
    rows = [row for name in chosen.shapes.split(",") for row in measure(name, chosen.device)]
    publish(rows, chosen)


def measure(name: str, device: str) -> list[Row]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = model_of(qwen3(**SHAPES[name]), device=device, dtype=dtype).eval()
    kind = cache_kind(EngineConfig(), device)
    checks: dict[str, Callable[[], object]] = {
        f"engine ({kind})": lambda: check_engine(model, kind),
        "learner": lambda: check_learner(model),
    }
    rows = []
    for what, check in checks.items():
        for when, folder in (("first", None), ("again", None), ("remembered", "same")):
            seconds = timed(check, device, is_fresh=folder is None)
            say(f"{name}, {what}, {when}: {seconds:.3f} s")
            rows.append(alone(f"{name}, {str(dtype).removeprefix('torch.')}, {device}", f"{what}, {when}, s", seconds))
    return rows


def timed(check: Callable[[], object], device: str, *, is_fresh: bool) -> float:
    if is_fresh:
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="millstream-checked-")
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    check()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
