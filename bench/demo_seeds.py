"""Does the demo learn whatever the seed? Each seed is one `millstream train recipes/demo.toml`, in a process of its own.

A seed passes if all four hold: sampled accuracy under 0.3 before and over 0.9 after; greedy under 0.75 before and over 0.93
after. Runs are kept in `--out`, and a seed that is there already is not run again: the script can be stopped and restarted.

    .venv/bin/python bench/demo_seeds.py [--json] [--seeds 10-19] [--out runs/demo_seeds]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIMITS = {
    "accuracy_before": (0.0, 0.3),
    "accuracy_after": (0.9, 1.0),
    "greedy_before": (0.0, 0.75),
    "greedy_after": (0.93, 1.0),
}


def summary_of(seed: int, folder: Path) -> dict[str, Any]:
    path = folder / f"seed-{seed}" / "summary.json"
    if not path.exists():
        changes = [f"seed={seed}", f"run_dir={path.parent}"]
        command = [sys.executable, "-m", "millstream.cli.main", "train", str(ROOT / "recipes/demo.toml"), "--quiet"]
        subprocess.run(
            [*command, *(word for change in changes for word in ("--set", change))],
            check=True,
            cwd=ROOT,
            stdout=sys.stderr,
        )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def passes(summary: dict[str, Any]) -> bool:
    return all(low < summary[key] < high or summary[key] == high == 1.0 for key, (low, high) in LIMITS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", default="10-19", help="FIRST-LAST")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/demo_seeds")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split("-"))
    print(
        "| seed | sampled before | after | greedy before | after | seconds | passes |\n|---|---|---|---|---|---|---|",
        file=sys.stderr,
    )
    found = {}
    for seed in range(first, last + 1):
        summary = found[seed] = summary_of(seed, options.out)
        cells = [
            *(f"{summary[key]:.3f}" for key in LIMITS),
            f"{summary['seconds']:.0f}",
            "yes" if passes(summary) else "no",
        ]
        print(f"| {seed} | {' | '.join(cells)} |", file=sys.stderr, flush=True)
    num_passed = sum(map(passes, found.values()))
    seconds = statistics.median(summary["seconds"] for summary in found.values())
    print(f"{num_passed} of {len(found)} seeds pass; median {seconds:.0f} s of training", file=sys.stderr)
    if options.json:
        row = {"workload": f"demo, seeds {options.seeds}", "metric": "seeds that pass", "peer": "9 of 10"}
        wanted = 0.9 * len(found)
        print(json.dumps([{**row, "ours": num_passed, "theirs": wanted, "ratio": round(num_passed / wanted, 2)}]))


if __name__ == "__main__":
    main()
