"""Does the demo learn whatever the seed? Each seed is one run of `recipes/demo.toml`.

A seed passes if all four hold: sampled accuracy under 0.3 before and over 0.9 after; greedy under 0.75 before and over 0.93
after. Runs are kept in `--out`, and a seed that is there already is not run again: the script can be stopped and restarted.

    .venv/bin/python bench/demo_seeds.py [--json] [--smoke] [--seeds 10-19] [--out runs/demo_seeds]
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from internals import recipe
from millstream import train
from report import ROOT, Options, publish, rate, say

LIMITS = {
    "accuracy_before": (0.0, 0.3),
    "accuracy_after": (0.9, 1.0),
    "greedy_before": (0.0, 0.75),
    "greedy_after": (0.93, 1.0),
}


def summary_of(seed: int, folder: Path, *, is_smoke: bool) -> dict[str, Any]:
    path = folder / f"seed-{seed}" / "summary.json"
    if not path.exists():
        changes = ["pipeline.steps=1"] if is_smoke else []
        train(recipe("demo", f"seed={seed}", f"run_dir={path.parent}", *changes, is_smoke=is_smoke))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def passes(summary: dict[str, Any]) -> bool:
    return all(low < summary[key] < high or summary[key] == high == 1.0 for key, (low, high) in LIMITS.items())


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--seeds", "10-19", smoke="10-10", help="FIRST-LAST")
    parser.add("--out", ROOT / "runs/demo_seeds", kind=Path)
    options = parser.parse(argv)
    first, last = map(int, options.seeds.split("-"))
    say("| seed | sampled before | after | greedy before | after | seconds | passes |\n|---|---|---|---|---|---|---|")
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(first, last + 1):
            out = Path(scratch) if options.smoke else options.out
            summary = found[seed] = summary_of(seed, out, is_smoke=options.smoke)
            accuracies = " | ".join(f"{summary[key]:.3f}" for key in LIMITS)
            say(f"| {seed} | {accuracies} | {summary['seconds']:.0f} | {'yes' if passes(summary) else 'no'} |")
    num_passed = sum(map(passes, found.values()))
    seconds = statistics.median(summary["seconds"] for summary in found.values())
    say(f"{num_passed} of {len(found)} seeds pass; median {seconds:.0f} s of training")
    publish([rate(f"demo, seeds {options.seeds}", "seeds that pass", num_passed, "9 of 10", 0.9 * len(found))], options)


if __name__ == "__main__":
    main()
