"""Configs: unknown keys fail with the nearest name, wrong values say where, and no option is dead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from millstream.algo.presets import PRESETS
from millstream.config import load, to_toml
from millstream.errors import ConfigError, MillstreamError
from millstream.run.check import check_combinations, check_config
from millstream.run.config import RunConfig

ROOT = Path(__file__).parents[2]
MINIMAL = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pipelin]\nsteps = 1", r"unknown key pipelin\. Did you mean pipeline\?"),
        ("[pipeline]\nmaxlag = 1", r"unknown key pipeline\.maxlag\. Did you mean max_lag\?"),
        ("[rollout]\nxyz = 1", r"unknown key rollout\.xyz\. Known here: extra_members, group_size, max_parts"),
        ("[rollout]\ntop_p = 0.9", r"rollout\.top_p is refused: training needs the log-probability"),
        ('[pipeline]\nsteps = "many"', r"pipeline\.steps: expected `int`, got `str`"),
        ("[pipeline]\nsteps = -1", r"pipeline: steps must be at least 0, groups_per_step at least 1"),
        (
            "[pipeline]\nextra_groups = 17",
            r"extra_groups = 17 cannot all be trained within max_lag = 1, which allows 16",
        ),
        (
            '[algorithm]\nloss = "gpo"',
            r"algorithm: no loss 'gpo': use truncated_is, .* or one of your own.* mean gspo\?",
        ),
        ('[algorithm]\nadvantage = "critic"', r"algorithm: no advantage 'critic': use grpo, dr_grpo"),
        ('[algorithm]\nname = "grppo"', r"algorithm\.name: invalid enum value 'grppo'"),
        ('[algorithm]\nname = "dapo"\ndual_clip = 0.5', r"algorithm: dual_clip must be above 1"),
        ('[pipeline]\nmax_lag = 0\noverdue = "restart"', r'overdue = "restart" has nothing to do here'),
        ("[[reward]]\nfunktion = 'f'", r"unknown key reward\[0\]\.funktion\. Did you mean function\?"),
        ("[engine]\nslots = 0", r"engine: slots, prefill_tokens and replicas must be at least 1"),
        ("[reference]\ndevice = 'gpu'", r"reference: device = 'gpu': expected cpu, cuda or cuda:NUMBER"),
        ("[proximal]\ndevice = 'gpu'", r"proximal: device = 'gpu': expected cpu, cuda or cuda:NUMBER"),
        ("[proximal]\nmicro_batch_tokens = 0", r"proximal: micro_batch_tokens must be at least 1"),
        ("[proximal]\npath = 'm'", r"unknown key proximal\.path\. Did you mean"),
        ("[critic]\nvalue_clip = 0", r"critic: learning_rate, max_grad_norm and value_clip must be above 0"),
        ('[algorithm]\nkl = "loss"\nkl_coefficient = nan', r"algorithm: kl_coefficient must be above 0 and finite"),
        ('[algorithm]\nkl = "loss"\nkl_coefficient = inf', r"algorithm: kl_coefficient must be above 0 and finite"),
        ("[algorithm]\nclip_high = nan", r"algorithm: clip_high must be above 0"),
        ("[critic]\nlearning_rate = nan", r"critic: learning_rate, max_grad_norm and value_clip must be above 0"),
        (
            "[rollout]\ngroup_size = 1\nmin_group_size = 3",
            r"rollout: min_group_size must be between 1 and group_size",
        ),
        ("= 3", "is not TOML"),
        ("[reward]\nfunction = 'f'", r"reward is a list of tables, each a \[\[reward\]\] with two brackets"),
        ("[engine]\nmax_lag = 3", r"unknown key engine\.max_lag\. Did you mean pipeline\.max_lag\?"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_a_way_out(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, MINIMAL + text), RunConfig)


@pytest.mark.parametrize("text", ["", '[model]\npath="m"\n[model.tiny]\n[data]\npath="d"', '[model]\n[data]\npath="d"'])
def test_a_model_and_data_must_be_named_and_only_once(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"model|data"):
        load(written(tmp_path, text), RunConfig)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml: No such file"):
        load(Path("nowhere.toml"), RunConfig)


def test_overrides_change_one_key_and_are_checked_like_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    config = load(path, RunConfig, ["pipeline.max_lag=2", "data.path=other.jsonl", "rollout.temperature = 0.7"])
    assert (config.pipeline.max_lag, config.data.path, config.rollout.temperature) == (2, "other.jsonl", 0.7)
    with pytest.raises(ConfigError, match="Did you mean max_lag"):
        load(path, RunConfig, ["pipeline.maxlag=2"])
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        load(path, RunConfig, ["pipeline.max_lag"])
    with pytest.raises(ConfigError, match="seed is not a table"):
        load(path, RunConfig, ["seed=1", "seed.x=2"])


def test_an_override_reaches_into_a_list_of_tables_by_number(tmp_path: Path) -> None:
    first, second = load(
        written(tmp_path, MINIMAL), RunConfig, ["reward.0.weight=2", "reward.1.function=a.py:f"]
    ).reward
    assert (first.weight, second.function) == (2.0, "a.py:f")
    path = written(tmp_path, MINIMAL + "[[reward]]\nweight = 3.0\n")
    (only,) = load(path, RunConfig, ["reward.0.function=a.py:f"]).reward
    assert (only.weight, only.function) == (3.0, "a.py:f")
    with pytest.raises(ConfigError, match=r"no table '2' in a list of 1; they count from 0"):
        load(path, RunConfig, ["reward.2.weight=1"])
    for text in (MINIMAL, MINIMAL + "[[reward]]\n"):
        with pytest.raises(ConfigError, match=r"on the command line: --set reward\.0\.weight="):
            load(written(tmp_path, text), RunConfig, ["reward.weight=1"])


def test_a_key_without_its_table_is_answered_with_the_whole_name(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=r"unknown key max_lag\. Did you mean pipeline\.max_lag\?"):
        load(path, RunConfig, ["max_lag=3"])
    with pytest.raises(
        ConfigError, match=r"Did you mean model\.path or data\.path or reference\.path or critic\.path\?"
    ):
        load(path, RunConfig, ["path=x"])


def test_an_override_without_a_value_leaves_the_key_unset(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "[warmup]\nmax_steps = 3\n")
    assert load(path, RunConfig, ["warmup="]).warmup is None
    assert load(path, RunConfig, ["evaluation.tasks="]).evaluation.tasks is None


def test_the_resolved_config_reads_back_as_the_same_config(tmp_path: Path) -> None:
    config = load(ROOT / "recipes/demo.toml", RunConfig, ["reward=[{weight=2.0},{function='a.py:f'}]"])
    assert load(written(tmp_path, to_toml(config)), RunConfig) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_back_with_every_value_that_it_stands_for(tmp_path: Path, name: str) -> None:
    teacher = ["reference.path=teacher"] if name == "distillation" else []
    changes = [f"algorithm.name={name}", "pipeline.filter_zero_signal=false", *teacher]
    config = load(written(tmp_path, MINIMAL), RunConfig, changes)
    assert f'loss = "{config.algorithm.loss}"' in to_toml(config) and config.algorithm.loss
    again = load(written(tmp_path, to_toml(config)), RunConfig)
    check_combinations(again)
    assert again == config


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(recipe: Path) -> None:
    check_combinations(load(recipe, RunConfig))


def test_combinations_that_no_component_sees_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mini_batches = 3 does not divide pipeline\.groups_per_step = 16"):
        check_combinations(load(written(tmp_path, MINIMAL + "[learner]\nmini_batches = 3"), RunConfig))
    with pytest.raises(ConfigError, match="no off-policy correction"):
        check_combinations(load(written(tmp_path, MINIMAL + '[algorithm]\nloss = "reinforce"'), RunConfig))
    with pytest.raises(ConfigError, match=r"Set pipeline\.filter_zero_signal = false"):
        check_combinations(load(written(tmp_path, MINIMAL + '[algorithm]\nname = "reinforce_plus_plus"'), RunConfig))
    with pytest.raises(ConfigError, match=r"overlong_buffer = 300 is more than rollout\.max_tokens = 256"):
        check_combinations(load(written(tmp_path, MINIMAL + "[algorithm]\noverlong_buffer = 300"), RunConfig))
    game = MINIMAL + '[algorithm]\noverlong_buffer = 30\n[[environment]]\nuse = "frozen_lake"'
    with pytest.raises(ConfigError, match="leave it out, and let the environment's reward say"):
        check_combinations(load(written(tmp_path, game), RunConfig))
    with pytest.raises(ConfigError, match=r'a \[critic\] table, and algorithm\.advantage = "grpo" needs none'):
        check_combinations(load(written(tmp_path, MINIMAL + "[critic]\nlearning_rate = 1e-4"), RunConfig))
    distil = MINIMAL + '[algorithm]\nname = "distillation"\n[pipeline]\nfilter_zero_signal = false\n'
    for table in ("", "[reference]\nmicro_batch_tokens = 100"):
        with pytest.raises(ConfigError, match=r"needs a teacher: set reference\.path"):
            check_combinations(load(written(tmp_path, distil + table), RunConfig))
    check_combinations(load(written(tmp_path, distil + '[reference]\npath = "teacher"'), RunConfig))
    proximal = MINIMAL + "[proximal]\nmicro_batch_tokens = 100\n"
    with pytest.raises(ConfigError, match=r"a \[proximal\] table, and learner\.mini_batches = 1: .* 2 or more"):
        check_combinations(load(written(tmp_path, proximal + '[algorithm]\nname = "decoupled_ppo"'), RunConfig))
    with pytest.raises(ConfigError, match=r'loss = "ppo" does not look at the proximal policy: .* "decoupled_ppo"'):
        check_combinations(
            load(written(tmp_path, proximal + '[learner]\nmini_batches = 2\n[algorithm]\nname = "grpo"'), RunConfig)
        )
    several = proximal + '[learner]\nmini_batches = 2\n[algorithm]\nname = "decoupled_ppo"'
    check_combinations(load(written(tmp_path, several), RunConfig))
    with pytest.raises(ConfigError, match="without a reward"):
        check_combinations(load(written(tmp_path, "reward = []\n" + MINIMAL), RunConfig))


def test_all_errors_of_a_config_are_found_in_one_walk(tmp_path: Path) -> None:
    text = MINIMAL + "[critic]\nlearning_rate = 1e-4\n[learner]\nmini_batches = 3\n"
    with pytest.raises(ConfigError, match=r"a \[critic\] table") as combinations:
        check_config(load(written(tmp_path, text), RunConfig))
    assert any("mini_batches = 3 does not divide" in note for note in combinations.value.__notes__)
    changes = ["data.path=no.jsonl", "reward=[{function='no.py:reward'}]", "model.path=no/such/folder/here"]
    with pytest.raises(MillstreamError, match=r"no\.jsonl") as named:
        check_config(load(written(tmp_path, MINIMAL), RunConfig, changes))
    assert [next(word for word in ("no.py", "no/such") if word in note) for note in named.value.__notes__] == [
        "no.py",
        "no/such",
    ]


def keys(kind: type[Struct], place: str = "") -> Iterator[tuple[str, str]]:
    from millstream.config import _structs

    for field in msgspec.structs.fields(kind):
        yield f"{place}{field.name}", field.name
        for struct in _structs(field.type):
            yield from keys(struct, f"{place}{field.name}.")


def test_every_key_is_read_by_the_package() -> None:
    """No dead options: each key is read as an attribute somewhere outside the checks of its own struct."""
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    without_checks = re.sub(r"def __post_init__.*?(?=\n\n\n|\n\n    (?:def |@)|\Z)", "", source, flags=re.S)
    for place, name in keys(RunConfig):
        assert re.search(rf"\.{name}\b(?! *=[^=])", without_checks), f"nothing reads {place}"
