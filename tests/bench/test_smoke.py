"""Every benchmark on its smallest setting (`--smoke --json`), in this process: it starts, ends, and prints rows. `make smoke`."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
KEYS = {"workload", "metric", "ours", "peer", "theirs", "ratio"}
HAS_MAIN = re.compile(r"^def main\(argv: Sequence\[str\] \| None = None\) -> None:$", re.MULTILINE)
BENCHMARKS = sorted(path.stem for path in BENCH.glob("*.py") if HAS_MAIN.search(path.read_text()))
SHARED = {"internals", "internals_ray", "internals_torch", "report", "run_parts"}
PARTS = {
    "crash_run",
    "curves",
    "end_to_end_cells",
    "end_to_end_costs",
    "end_to_end_loads",
    "end_to_end_report",
    "end_to_end_trl",
    "held_out",
    "limited",
    "losses_peers",
    "machine",
    "modes",
    "one_gpu_parts",
    "published_sides",
    "published_worlds",
    "quality_cells",
    "quality_report",
    "scheduling",
    "step_model",
    "store_nodes",
    "store_nodes_ray",
    "store_sides",
    "time_to_quality_cells",
    "time_to_quality_data",
    "time_to_quality_report",
    "time_to_quality_trl",
    "trl_search",
    "trl_side",
}
"""Of benchmarks that have several files: started by them, or imported."""


@pytest.fixture(autouse=True)
def _restore_global_settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.mark.smoke
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_starts_and_prints_only_rows_as_json(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(name).main(["--smoke", "--json"])
    rows = json.loads(capfd.readouterr().out)
    assert rows and all(row.keys() == KEYS for row in rows)
    for row in rows:
        assert all(isinstance(row[key], str) for key in ("workload", "metric", "peer"))
        assert all(row[key] is None or isinstance(row[key], int | float) for key in ("ours", "theirs", "ratio"))


def test_every_file_in_bench_is_a_benchmark_or_a_named_part_of_one() -> None:
    assert {path.stem for path in BENCH.glob("*.py")} - {"house", "house_paths", "smollm2_folder"} == {
        *BENCHMARKS,
        *SHARED,
        *PARTS,
    }


def test_only_the_internals_files_import_what_is_not_public() -> None:
    """`run_parts.py` is loaded by workers and `store_sides.py` by another Python: they import as little as they can."""
    public = re.compile(r"millstream(\.(types|events|config|clock|errors|engine|env))?$")
    imported = re.compile(r"^\s*(?:from|import) (millstream[.\w]*)", re.MULTILINE)
    for path in BENCH.glob("*.py"):
        if path.stem not in {*SHARED, "house", "house_paths"}:
            found = [module for module in imported.findall(path.read_text()) if not public.match(module)]
            assert not found, f"{path.name} imports {', '.join(found)}: import it in bench/internals.py"
