"""bench/quality.py: what it concludes, what it refuses, and that a run of it may be stopped at any moment."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import quality
from curves import Difference, paired
from millstream.events import GroupTaken, RolloutEnded
from millstream.types import Finish
from quality import Job, alone_in
from quality_cells import (
    LAGS,
    LOSSES,
    UNCORRECTED,
    WARM_UP,
    Cell,
    Result,
    Results,
    Settings,
    WarmUp,
    cells,
    lags_of,
    read_results,
)
from quality_report import BEGIN, END, beside_synchronous, json_rows, read_finished, write_report
from support.commands import run_command, start_command
from support.quality_jobs import SMALL, Processes, made_up, runner

BENCH = Path(quality.__file__)


def accuracy_of(cell: Cell) -> float:
    """Lag 2 costs (0, 1, 2) hundredths by seed, lag 8 costs the uncorrected loss 0.3 and more, and the others nothing."""
    if cell.max_lag == 8:
        return 0.6 - (0.3 + 0.01 * cell.seed if cell.loss == UNCORRECTED else 0.0)
    return 0.6 - 0.01 * cell.seed * (cell.max_lag == 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results = Results(tmp_path, SMALL)
    for cell in cells(3):
        results.add(made_up(cell, accuracy_of(cell)))
    return tmp_path


# ---- what it concludes ---------------------------------------------------------------------------------------------------


def test_a_paired_difference_has_students_interval() -> None:
    found = paired([0.50, 0.60, 0.70], [0.49, 0.57, 0.68])  # 0.01, 0.03, 0.02: mean 0.02, deviation 0.01
    assert found == pytest.approx((0.02, 4.303 * 0.01 / 3**0.5))
    assert found.is_within_noise and not Difference(-0.03, 0.02).is_within_noise


def test_the_report_compares_each_lag_with_lag_0_of_the_same_seed(folder: Path) -> None:
    finished = read_finished(folder)
    assert beside_synchronous(finished, "TIS", 2) == pytest.approx((-0.01, 4.303 * 0.01 / 3**0.5))
    assert beside_synchronous(finished, "TIS", 8) == pytest.approx((0.0, 0.0))
    (row,) = [row for row in json_rows(finished) if row.workload == f"add_numbers, {UNCORRECTED}, max_lag 8"]
    assert (row.ours, row.theirs, row.ratio) == (0.29, 0.6, 0.483)


def test_the_report_writes_between_the_marks_and_nowhere_else(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "quality.md").write_text(f"# before\n{BEGIN}\nlast year's\n{END}\nafter\n")
    write_report(read_finished(folder), folder)
    text = (folder / "quality.md").read_text()
    assert (
        text.startswith(f"# before\n{BEGIN}\n3 seeds; ")
        and text.endswith(f"{END}\nafter\n")
        and "last year" not in text
    )
    assert f"| {UNCORRECTED} | 0.600 | 0.590 | 0.290 | -0.010 ± 0.025 | within noise | -0.310 ± 0.025 | worse |" in text
    assert "| 8 | 8: 2,400 | 100.00% | 8.00 | 8.00 | 0.90 to 0.90 |" in text
    assert "At lag 8 7 of 7 corrected losses are within noise" in text
    for name in ("quality-samples.svg", "quality-seconds.svg"):
        assert all(loss in (folder / name).read_text() for loss in LOSSES), "a panel each"


def test_the_page_in_docs_has_a_place_for_the_tables() -> None:
    page = (BENCH.parent.parent / "docs/quality.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1 and page.index(BEGIN) < page.index(END)


def test_a_page_without_the_marks_is_left_alone(folder: Path) -> None:
    (folder / "quality.md").write_text("mine\n")
    with pytest.raises(SystemExit, match="must have the line"):
        write_report(read_finished(folder), folder)
    assert (folder / "quality.md").read_text() == "mine\n"


def test_only_rows_are_printed_as_json(folder: Path) -> None:
    done = run_command([sys.executable, str(BENCH), "report", str(folder), "--json"])
    rows = json.loads(done.stdout)
    assert len(rows) == len(LOSSES) * (len(LAGS) - 1)
    assert set(rows[0]) == {"workload", "metric", "ours", "peer", "theirs", "ratio"}


# ---- what it refuses -----------------------------------------------------------------------------------------------------


def test_a_cell_whose_lag_was_not_forced_is_refused_by_name(folder: Path) -> None:
    results = Results(folder, SMALL)
    results.add(replace(results.found[Cell("TOPR", 8, 1)], lags={"7": 6, "8": 94}))
    with pytest.raises(SystemExit, match=r"TOPR, max_lag 8, seed 1: 94.0% of its groups have the lag 8, where 95%"):
        read_finished(folder)


def test_a_cell_that_trained_fewer_samples_is_refused_by_name(folder: Path) -> None:
    results = Results(folder, SMALL)
    unequal = results.found[Cell("GSPO", 2, 0)]
    results.add(replace(unequal, curve=[*unequal.curve[:-1], replace(unequal.curve[-1], samples=15)]))
    with pytest.raises(SystemExit, match="GSPO, max_lag 2, seed 0: 15 rollouts were trained, and 16 in the others"):
        read_finished(folder)


def test_a_seed_that_is_not_whole_is_left_out_and_one_seed_is_too_few(tmp_path: Path) -> None:
    results = Results(tmp_path, SMALL)
    for cell in cells(3)[:-1]:
        results.add(made_up(cell, 0.5))
    assert read_finished(tmp_path).seeds == [0, 1]
    del results.found[Cell("TIS", 0, 0)]
    results.add(made_up(Cell("TIS", 2, 0), 0.5))
    with pytest.raises(SystemExit, match="1 seeds are whole, and an interval takes two"):
        read_finished(tmp_path)


def test_results_of_other_settings_are_not_mixed(folder: Path) -> None:
    with pytest.raises(SystemExit, match="Choose another folder"):
        Results(folder, Settings())


def test_lags_are_counted_after_the_first_batches_from_the_oldest_token() -> None:
    def taken(group: int, version: int, lag: int) -> GroupTaken:
        return GroupTaken(at=0.0, group_id=group, version=version, lag=lag, num_rollouts=1)

    def ended(group: int, start: int, end: int) -> RolloutEnded:
        return RolloutEnded(
            at=0.0, group_id=group, member=0, attempt=0, reward=1.0, num_tokens=3, num_sampled=2, start_version=start,
            end_version=end, finish=Finish.STOP, seconds=1.0,
        )  # fmt: skip

    events = [ended(0, 0, 0), taken(0, 1, 1), ended(1, 0, 1), taken(1, 2, 2), ended(2, 2, 2), taken(2, 3, 1)]
    assert lags_of(events, 2) == {"lags": {"1": 1, "2": 1}, "oldest_token": 1.5, "newest_token": 1.0}


# ---- it may be stopped at any moment -------------------------------------------------------------------------------------


def test_a_cell_that_was_cut_short_starts_again_and_a_finished_one_does_not(tmp_path: Path) -> None:
    slow, met, folder = tmp_path / "slow", tmp_path / "met", tmp_path / "folder"
    slow.touch()
    folder.mkdir()
    first, second, third = (Processes(slow) for _ in range(3))
    for seconds in (1.5, 6.0, 24.0):  # until one has met the file: a busy machine may take longer for it
        if not met.exists():
            assert not runner(folder, first, minutes=seconds / 60).run(), "one never ended"
    assert met.exists()
    done = {str(cell) for cell in read_results(folder)[1]}
    assert runner(folder, second).run()
    assert first.started[0] == "warm-up, seed 0" and "warm-up, seed 0" not in second.started
    assert sorted(second.started) == sorted(set(map(str, cells(1))) - done), "exactly what was missing"
    assert runner(folder, third).run() and not third.started
    assert sorted(path.name for path in folder.iterdir()) == ["results.jsonl", "warm-0.tar"], "nothing else travels"


def test_a_killed_run_leaves_complete_results(tmp_path: Path) -> None:
    process = start_command([sys.executable, "-c", KILLED, str(tmp_path)])
    until = time.monotonic() + 30
    while not (tmp_path / "results.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    settings, found = read_results(tmp_path)
    assert settings == SMALL and found
    again = Processes(tmp_path / "slow")
    assert runner(tmp_path, again).run()
    assert set(again.started) == set(map(str, cells(1))) - set(map(str, found))


KILLED = """
import pathlib, sys
from support.quality_jobs import Processes, runner
folder = pathlib.Path(sys.argv[1])
runner(folder, Processes(folder / "slow")).run()
"""


def test_a_cell_that_fails_is_named_with_its_last_output_and_the_others_continue(tmp_path: Path) -> None:
    unlucky = Cell("CISPO", 2, 0)
    running = runner(tmp_path, Processes(tmp_path / "slow", fails=unlucky))
    assert not running.run()
    assert running.failed == [Job(seed=0, cell=unlucky)]
    log = (tmp_path / "errors.log").read_text()
    assert "CISPO, max_lag 2, seed 0: exit status 1" in log and "no luck today" in log
    assert len(read_results(tmp_path)[1]) == len(cells(1)) - 1


def test_no_cell_begins_that_is_not_expected_to_end_in_time(tmp_path: Path) -> None:
    (tmp_path / "warm-0.tar").touch()
    Results(tmp_path, SMALL).add(replace(made_up(Cell("TIS", 0, 0), 0.5), seconds=61.0))
    processes = Processes(tmp_path / "slow")
    assert not runner(tmp_path, processes, minutes=1.0).run() and not processes.started


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(SystemExit, match="another run is at work"):
        runner(tmp_path, Processes(tmp_path / "slow")).run()


# ---- for real ------------------------------------------------------------------------------------------------------------


def test_a_real_cell_has_the_lag_that_it_should_and_a_point_for_every_checkpoint(tmp_path: Path) -> None:
    """The jobs of a real run, here and not in processes of their own: each of those would import torch again."""

    def do(job: Job, model: Path) -> None:
        *_, said, model_word, scratch = quality.words_of(SMALL, job, model, tmp_path)
        quality.do_job(said, Path(model_word), Path(scratch))

    model = tmp_path / "model"
    do(Job(seed=0), model)
    with tarfile.open(tmp_path / "warm.tar") as tar:
        tar.extractall(model, filter="data")
    shutil.rmtree(tmp_path / "run")
    do(Job(seed=0, cell=Cell(UNCORRECTED, 2, 0)), model)
    start = msgspec.json.decode((model / WARM_UP).read_bytes(), type=WarmUp)
    result = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=Result)
    assert [(point.step, point.samples) for point in result.curve] == [(0, 0), (4, 16)]
    assert result.curve[0].accuracy == start.accuracy and result.curve[1].seconds > 0
    assert sum(result.lags.values()) == 4, "the groups of the third and the fourth batch"
    assert result.oldest_token >= result.newest_token >= 0
