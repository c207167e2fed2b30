"""Rollouts of real runs: kept, shown, compared, trained again bit for bit, and kept without training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

from millstream import EnvironmentConfig, RewardConfig, resume, train
from millstream.audit import audit
from millstream.cli.main import app
from millstream.config import load
from millstream.errors import ConfigError, DataError
from millstream.events import GroupTaken, RolloutEnded, Stepped
from millstream.events.rollouts.reader import KeptRollout, RolloutDump
from millstream.events.rollouts.writer import SAMPLED_FILE, stratum_of
from millstream.events.sinks import read_history
from millstream.learner.state import read_state
from millstream.pipeline.recorded import RecordedBatches
from millstream.pipeline.sync import WeightSync
from millstream.run.config import RunConfig
from millstream.types import Weights
from support.runs import assert_clean, kill_at, recipe_in, step_rows
from support.runs import resume as resume_in_a_process

REWARD = """
def digits(task, completion):
    return sum(c.isdigit() for c in completion) / 8

def short(task, completion):
    return float(len(completion) < 8)
"""
STEPS = 6


def config_in(folder: Path, name: str, *changes: str) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(REWARD)
    path = recipe_in(folder)
    tables = "".join(
        f"\n[[reward]]\nfunction = '{folder}/mine.py:{name}'\nweight = {weight}\n"
        for name, weight in (("digits", 1.0), ("short", 0.5))
    )
    path.write_text(path.read_text() + tables)
    usual = (
        f"run_dir={folder / name}",
        f"pipeline.steps={STEPS}",
        "pipeline.groups_per_step=4",
        "rollout.group_size=4",
        "data.size=200",
        "data.holdout=8",
        "checkpoint.every_steps=1",
        "checkpoint.keep=100",
        "engine.process=false",
        "evaluation.every_steps=3",
    )
    return load(path, RunConfig, [*usual, *changes])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; beside it, what it published."""
    folder = tmp_path_factory.mktemp("kept")
    digests = trained(config_in(folder, "first"))
    (folder / "digests").write_text(repr(digests))
    return folder / "first"


def digests_of(kept: Path) -> Digests:
    found: Digests = eval((kept.parent / "digests").read_text())
    assert len(set(found.values())) == STEPS, "every step changes the weights"
    return found


def rollouts_of(run_dir: Path) -> list[KeptRollout]:
    dump = RolloutDump(run_dir)
    return [one for group in dump.groups() for one in dump.rollouts(group)]


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


Digests = dict[int, str]  # by version: of the weights that a run published


def trained(config: RunConfig, run: Callable[[], object] | None = None) -> Digests:
    """Train, or resume with `run`, and watch what is published."""
    found: Digests = {}
    publish = WeightSync.publish

    async def watched(self: WeightSync, version: int, weights: Weights, began: float) -> None:
        found[version] = sha256(repr(_flat(weights)).encode()).hexdigest()
        await publish(self, version, weights, began)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WeightSync, "publish", watched)
        train(config) if run is None else run()
    return found


def last_state(run_dir: Path) -> str:
    """Weights, masters and moments of the last checkpoint."""
    return repr(_flat(read_state(run_dir / "checkpoints" / f"step-{STEPS:06d}")))


def _flat(state: object) -> object:
    if hasattr(state, "numpy"):
        tensor = state.detach().contiguous()
        return tensor.numpy().tobytes()
    if isinstance(state, Mapping):
        return {key: _flat(value) for key, value in state.items()}
    return [_flat(one) for one in state] if isinstance(state, list | tuple) else state


# ---- kept ----------------------------------------------------------------------------------------------------------------


def test_every_rollout_of_a_run_is_kept_with_its_reward_by_part_its_lag_and_its_fate(kept: Path) -> None:
    found, events = rollouts_of(kept), list(read_history(kept / "events.jsonl"))
    ended = [event for event in events if isinstance(event, RolloutEnded)]
    assert len(found) == len(ended)
    by_key = {(one.group_id, one.member): one for one in found}
    for event in ended:
        one = by_key[event.group_id, event.member]
        assert one.reward == event.reward == pytest.approx(one.reward_parts["digits"] + 0.5 * one.reward_parts["short"])
        assert one.num_sampled == event.num_sampled
    taken = {event.group_id: event for event in events if isinstance(event, GroupTaken)}
    for group_id, event in taken.items():
        own = [one for one in found if one.group_id == group_id]
        assert {one.step for one in own} == {event.version + 1}
        assert max(one.lag for one in own if one.lag is not None) == event.lag
        assert sum(one.advantage for one in own) == pytest.approx(0.0, abs=1e-4)
    assert {one.fate for one in found} >= {"trained"}


def test_the_learners_log_probability_of_each_trained_token_is_kept(kept: Path) -> None:
    metrics = {
        event.version: event.metrics for event in read_history(kept / "events.jsonl") if isinstance(event, Stepped)
    }
    ratios: dict[int, list[float]] = {}
    for one in rollouts_of(kept):
        assert (one.trained_logprobs is None) == (one.step is None)
        for part, found in zip(one.parts, one.trained_logprobs or (), strict=False):
            assert np.array_equal(np.isfinite(found), part.loss_mask)
            ratios.setdefault(one.step or 0, []).extend(np.exp(found - part.logprobs)[part.loss_mask])
    assert sorted(ratios) == sorted(metrics)
    for step, own in ratios.items():
        assert np.mean(own) == pytest.approx(metrics[step]["ratio"], abs=1e-3)
        assert max(own) == pytest.approx(metrics[step]["max_ratio"], rel=1e-2)
    lines = [json.loads(line) for line in shown("rollouts", kept, "--json").splitlines()]
    for one in lines:
        for part in one["parts"]:
            are_trained = [value is not None for value in part["trained_logprobs"] or []]
            assert are_trained == ([version >= 0 for version in part["versions"]] if one["step"] is not None else [])


def test_rollouts_of_a_step_are_shown_with_the_environments_turn_and_sorted(kept: Path) -> None:
    output = shown("rollouts", kept, "--step", 3, "--sort", "reward", "--worst", 2)
    assert output.count("step 3") == 2 and output.count("environment") == 2 and output.count("  model ") == 2
    assert "reward" in output and "advantage" in output and "lag" in output and "trained" in output
    lines = shown("rollouts", kept, "--step", 3, "--json").splitlines()
    every = [json.loads(line) for line in lines]
    assert len(every) == 16 and {one["step"] for one in every} == {3}
    worst = [json.loads(line) for line in shown("rollouts", kept, "--step", 3, "--worst", 2, "--json").splitlines()]
    assert [one["reward"] for one in worst] == sorted(one["reward"] for one in every)[:2]
    longest = json.loads(shown("rollouts", kept, "--sort", "length", "--best", 1, "--json"))
    assert longest["num_sampled"] == max(one.num_sampled for one in rollouts_of(kept))
    one = every[0]
    turns = one["parts"][0]["turns"]
    assert [speaker for speaker, _ in turns] == ["environment", "model"] and turns[0][1] == one["task"]
    group = one["group"]
    assert {json.loads(line)["group"] for line in shown("rollouts", kept, "--group", group, "--json").splitlines()} == {
        group
    }
    assert "no kept rollout matches" in shown("rollouts", kept, "--fate", "failed")


GAME = """
from millstream.env import Step

class Echo:
    is_quick = True

    def reset(self, task, seed):
        self.turns = 0
        return "12>"

    def step(self, action):
        self.turns += 1
        if self.turns == 2 and "7" in action:
            raise RuntimeError("no sevens")
        return Step(observation="34>", reward=float(len(action) % 3), is_done=self.turns == 2)

    @staticmethod
    def tasks(num, seed):
        from millstream.types import Task
        return [Task(id=str(n), prompt="play") for n in range(num)]
"""


def test_turns_of_the_environment_and_what_a_failed_rollout_had_played_are_shown(tmp_path: Path) -> None:
    config = config_in(tmp_path, "game", "pipeline.steps=2", "data.holdout=0", "data.toy=", "checkpoint.every_steps=")
    (tmp_path / "game.py").write_text(GAME)
    environment = EnvironmentConfig(use=f"{tmp_path}/game.py:Echo")
    train(structs.replace(config, environment=(environment,), reward=(RewardConfig(),)))
    found = rollouts_of(tmp_path / "game")
    ended = next(one for one in found if one.fate == "trained")
    failed = next(one for one in found if one.fate == "failed")
    assert "no sevens" in failed.why and len(failed.parts) == 1 and failed.num_sampled
    output = shown("rollouts", tmp_path / "game", "--group", ended.group_id)
    assert "34>" in output and "[earned" in output
    (line, *_) = shown(
        "rollouts", tmp_path / "game", "--group", ended.group_id, "--fate", "trained", "--json"
    ).splitlines()
    (part,) = json.loads(line)["parts"]
    assert [speaker for speaker, _ in part["turns"]] == ["environment", "model"] * 2
    assert part["turns"][2][1] == "34>" and sum(part["turn_rewards"]) == part["reward"]


def test_rollouts_can_be_written_as_parquet(kept: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rollouts.parquet"
    assert "wrote 16 rollouts" in shown("rollouts", kept, "--step", 2, "--parquet", path)
    rows = parquet.read_table(path).to_pylist()
    lines = [json.loads(line) for line in shown("rollouts", kept, "--step", 2, "--json").splitlines()]
    assert [row["reward"] for row in rows] == [line["reward"] for line in lines]
    assert [row["parts"][0]["tokens"] for row in rows] == [line["parts"][0]["tokens"] for line in lines]
    assert rows[0]["parts"][0]["turns"][1] == dict(
        zip(("speaker", "text"), lines[0]["parts"][0]["turns"][1], strict=True)
    )


def test_what_cannot_be_shown_is_refused_in_one_line(kept: Path, tmp_path: Path) -> None:
    for words in (["--sort", "size"], ["--best", "1", "--worst", "1"]):
        result = CliRunner().invoke(app, ["rollouts", str(kept), *words])
        assert result.exit_code == 1 and "Traceback" not in result.output
    for words, message in (
        (["--fate", "bogus"], "--fate 'bogus': expected one of 'trained', 'filtered', 'failed', "),
        (["--step", "99"], f"--step 99: no kept rollout was trained in this step: expected 1 to {STEPS}"),
    ):
        result = CliRunner().invoke(app, ["rollouts", str(kept), *words])
        assert result.exit_code == 1 and message in result.output, result.output
    result = CliRunner().invoke(app, ["rollouts", str(tmp_path / "none")])
    assert result.exit_code == 1 and "is not a run folder" in result.output


def test_keep_gb_0_keeps_nothing(tmp_path: Path) -> None:
    train(config_in(tmp_path, "off", "rollout.keep_gb=0", "pipeline.steps=1", "data.holdout=0"))
    assert not (tmp_path / "off" / "rollouts").exists()


def test_diff_shows_settings_metrics_and_rollouts_of_the_same_tasks(kept: Path) -> None:
    folder = kept.parent
    train(config_in(folder, "second", "learner.learning_rate=1e-3", "pipeline.steps=4"))
    found = json.loads(shown("diff", kept, folder / "second", "--json"))
    assert [one["key"] for one in found["settings"]] == ["learner.learning_rate", "pipeline.steps"]
    assert found["num_steps"] == [STEPS, 4]
    assert {one["step"] for one in found["metrics"]} == {0, 1, 2, 3, 4}  # 0: the evaluation before training
    assert found["tasks"] and all(a["task"] == b["task"] for a, b in (one["rollouts"] for one in found["tasks"]))
    output = shown("diff", kept, folder / "second")
    assert "learner.learning_rate" in output and "reward" in output and "environment" in output
    assert f"1: {kept}, {STEPS} steps" in output.replace("\n", "") and "2: " in output, "which run a column is of"
    metrics = output.partition("Metrics at the same steps")[2].partition("tasks were trained")[0]
    assert "reward 1" in metrics and "…" not in metrics, "80 columns are enough for the metrics that are shown"


# ---- trained again -------------------------------------------------------------------------------------------------------


def test_training_from_kept_rollouts_gives_the_weights_of_the_run_at_every_step(kept: Path) -> None:
    assert trained(config_in(kept.parent, "again", f"data.rollouts={kept}")) == digests_of(kept)
    assert last_state(kept.parent / "again") == last_state(kept)
    report = audit(kept.parent / "again")
    assert report.is_clean, "\n".join(map(str, report.findings))
    assert report.groups_trained == 4 * STEPS
    first, again = (step_rows(path) for path in (kept, kept.parent / "again"))
    assert [row["loss"] for row in first] == [row["loss"] for row in again]


@pytest.mark.parametrize(
    "changes",
    [
        ("learner.mini_batches=2", "algorithm.loss=decoupled_ppo"),
        ("pipeline.max_lag=0",),
        ("algorithm.kl=loss", "algorithm.kl_coefficient=0.1"),
        ("algorithm.advantage=lite_ppo",),
        ("pipeline.max_replaced_per_step=0", "reward.0.weight=0"),
        ("pipeline.surplus=abort", "pipeline.extra_groups=6", "rollout.extra_members=1"),
    ],
    ids=["mini-batches", "lockstep", "reference", "over the batch", "empty places", "first to finish"],
)
@pytest.mark.slow
def test_so_it_does_with(tmp_path: Path, changes: tuple[str, ...]) -> None:
    first = trained(config_in(tmp_path, "one", *changes))
    assert trained(config_in(tmp_path, "again", f"data.rollouts={tmp_path / 'one'}", *changes)) == first
    assert last_state(tmp_path / "one") == last_state(tmp_path / "again")
    assert_clean(tmp_path / "again")


def test_rollouts_that_were_sampled_away_or_do_not_fit_are_refused(kept: Path) -> None:
    source = f"data.rollouts={kept}"
    with pytest.raises(DataError, match=rf"pipeline\.steps = 7, and data\.rollouts = .* has {STEPS} finished batches"):
        train(config_in(kept.parent, "not", source, "pipeline.steps=7"))
    for change, key in (("pipeline.groups_per_step=2", r"pipeline\.groups_per_step = 2"), ("seed=1", "seed = 1")):
        with pytest.raises(ConfigError, match=f"{key}, and the run whose rollouts"):
            train(config_in(kept.parent, "not", source, change))
    path, found = kept / "rollouts" / SAMPLED_FILE, rollouts_of(kept)
    away = [one for one in found if stratum_of(one.group_id) == 0]
    num_trained = sum(one.step is not None for one in away)
    path.write_text('{"level":1,"num_lost":0}')
    try:
        with pytest.raises(
            DataError, match=f"{num_trained} rollouts .* are missing.* {len(away)} rollouts were sampled"
        ):
            train(config_in(kept.parent, "not", source))
        assert f"{len(away)} rollouts of the run are not in its files: {len(away)} were sampled away" in shown(
            "rollouts", kept, "--worst", 1
        )
    finally:
        path.unlink()
    assert not (kept.parent / "not").exists(), "a refused start leaves nothing"


def test_rollouts_that_were_never_written_are_counted_by_the_log(kept: Path, tmp_path: Path) -> None:
    """As if the process had been killed before its last write."""
    run_dir, found = shutil.copytree(kept, tmp_path / "run"), rollouts_of(kept)
    assert "not in its files" not in shown("rollouts", run_dir)
    stratum = stratum_of(next(one.group_id for one in found if one.step == STEPS))
    path = run_dir / "rollouts" / f"{stratum:02d}.rollouts"
    lost = [one for one in found if stratum_of(one.group_id) == stratum]
    path.write_bytes(b"")
    assert f"{len(lost)} were not written (the run was killed" in shown("rollouts", run_dir)
    num_trained = sum(one.step is not None for one in lost)
    with pytest.raises(DataError, match=f"{num_trained} rollouts .* are missing.*, and {len(lost)} were not written"):
        train(config_in(tmp_path, "not", f"data.rollouts={run_dir}"))
    first = min(one.step for one in lost if one.step is not None) - 1
    if first:
        train(config_in(tmp_path, "whole", f"data.rollouts={run_dir}", f"pipeline.steps={first}"), progress=False)


def test_rollouts_of_a_run_whose_settings_changed_or_that_began_elsewhere_are_refused(tmp_path: Path) -> None:
    train(config_in(tmp_path, "one", "pipeline.steps=2"), progress=False)
    resume(tmp_path / "one", changes=["pipeline.steps=3", "learner.learning_rate=1e-4"], progress=False)
    with pytest.raises(ConfigError, match=r"that run changed learner\.learning_rate, pipeline\.steps"):
        train(config_in(tmp_path, "again", f"data.rollouts={tmp_path / 'one'}", "pipeline.steps=3"), progress=False)
    train(config_in(tmp_path, "two", "pipeline.steps=2"), from_run=tmp_path / "one", progress=False)
    with pytest.raises(ConfigError, match=r"began with the checkpoint of another one"):
        train(config_in(tmp_path, "again", f"data.rollouts={tmp_path / 'two'}", "pipeline.steps=2"), progress=False)
    assert not (tmp_path / "again").exists()


def test_batches_after_one_that_is_missing_are_counted_and_not_read(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, groups = RolloutDump(kept), RolloutDump.groups
    monkeypatch.setattr(dump, "groups", lambda: (one for one in groups(dump) if one.version != 2))
    found = RecordedBatches(dump, groups_per_step=4)
    assert (len(found), found.num_beyond_gap) == (2, STEPS - 3)
    for number in range(4):  # a batch that lacks any of its groups is not whole
        lost = next(
            one.group_id for one in groups(dump) if one.version == 2 and one.taken and one.taken.number == number
        )
        monkeypatch.setattr(dump, "groups", lambda lost=lost: (one for one in groups(dump) if one.group_id != lost))
        found = RecordedBatches(dump, groups_per_step=4)
        assert (len(found), found.num_beyond_gap) == (2, STEPS - 2)


# ---- kept without training -----------------------------------------------------------------------------------------------


def test_a_run_that_only_keeps_rollouts_trains_nothing_and_can_be_trained_from(tmp_path: Path) -> None:
    config_in(tmp_path, "only")
    changes = [word for change in ("pipeline.steps=3", f"run_dir={tmp_path / 'only'}", "data.size=200", "data.holdout=8", "pipeline.groups_per_step=4", "rollout.group_size=4", "engine.process=false", "checkpoint.every_steps=1", "checkpoint.keep=100") for word in ("--set", change)]  # fmt: skip
    output = shown("train", tmp_path / "recipe.toml", "--rollouts-only", *changes)
    run_dir = tmp_path / "only"
    assert "nothing was trained" in output and not (run_dir / "model").exists()
    found = rollouts_of(run_dir)
    assert {one.fate for one in found} <= {"kept", "filtered"} and sum(one.fate == "kept" for one in found) == 48
    assert_clean(run_dir)
    train(
        load(
            run_dir / "config.toml",
            RunConfig,
            [f"data.rollouts={run_dir}", "pipeline.rollouts_only=false", f"run_dir={tmp_path / 'trained'}"],
        )
    )
    assert (tmp_path / "trained" / "model").exists()
    assert audit(tmp_path / "trained").is_clean


# ---- killed --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_can_be_read_and_after_a_resume_every_trained_row_is_there_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    kill_at(run_dir, 12)
    before = rollouts_of(run_dir)
    assert any(one.fate == "trained" for one in before)
    resume_in_a_process(run_dir)
    assert_clean(run_dir)
    dump = RolloutDump(run_dir)
    events = list(read_history(run_dir / "events.jsonl"))
    taken = [event for event in events if isinstance(event, GroupTaken)]
    groups = {one.group_id: one for one in dump.groups()}
    versions = {one.group_id: one.version for one in groups.values() if one.version is not None}
    assert versions == {event.group_id: event.version for event in taken}
    for event in taken:
        rows = dump.taken_rows(groups[event.group_id])
        assert rows is not None and len(rows.rows) == event.num_rollouts
        assert len(set(rows.places)) == event.num_rollouts
        own = [one for one in dump.rollouts(groups[event.group_id]) if one.fate == "trained"]
        assert sorted(one.member for one in own) == [member for member, _ in rows.places]
        assert all(np.isfinite(one.reward) and one.trained_logprobs is not None for one in own)


@pytest.mark.slow
def test_a_run_that_only_keeps_rollouts_can_be_killed_and_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    kill_at(run_dir, 12, {"pipeline.rollouts_only": "true"})
    resume_in_a_process(run_dir)
    assert_clean(run_dir)
    assert sum(one.fate == "kept" for one in rollouts_of(run_dir)) == 60 * 4 * 4


def test_training_from_kept_rollouts_can_be_stopped_and_resumed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.pipeline.recorded import RecordedBatches

    folder, read = kept.parent, RecordedBatches.read

    def fails(self: RecordedBatches, number: int) -> object:
        if number == 4:
            raise OSError("the disk is gone")
        return read(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(RecordedBatches, "read", fails)
        with pytest.raises(OSError, match="the disk is gone"):
            train(config_in(folder, "cut", f"data.rollouts={kept}"))
    config = config_in(folder, "cut", f"data.rollouts={kept}")
    rest = trained(config, lambda: resume(folder / "cut"))
    assert rest and rest.items() <= digests_of(kept).items()
    assert last_state(folder / "cut") == last_state(kept)
    assert audit(folder / "cut").is_clean
