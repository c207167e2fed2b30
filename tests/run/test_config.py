"""Configs: unknown keys fail with the nearest name, wrong values say where, and no option is dead."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from millstream.algo.presets import PRESETS
from millstream.config import OTHER_NAMES, convert, load, to_toml
from millstream.env.config import EnvironmentConfig
from millstream.errors import ConfigError, MillstreamError
from millstream.learner import LearnerConfig
from millstream.run.check import check_combinations, check_config
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder

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
        ("[rollout]\nxyz = 1", r"unknown key rollout\.xyz\. Known here: extra_members, group_size, keep_gb"),
        ("[rollout]\ntop_p = 0.9", r"rollout\.top_p is refused: training needs the log-probability"),
        ('[pipeline]\nsteps = "many"', r"pipeline\.steps: expected `int`, got `str`"),
        ("[pipeline]\nsteps = -1", r"pipeline: steps = -1: expected a finite number of at least 0"),
        ("[pipeline]\ngroups_per_step = 0", r"pipeline: groups_per_step = 0: expected a finite number of at least 1"),
        ("[pipeline]\nmax_lag = -0.5", r"pipeline: max_lag = -0\.5: expected a finite number of at least 0"),
        (
            "[pipeline]\nextra_groups = 17",
            r"extra_groups = 17 cannot all be trained within max_lag = 1, which allows 16",
        ),
        (
            '[algorithm]\nloss = "gpo"',
            r"algorithm: no loss 'gpo': use truncated_is, .* or one of your own.* mean gspo\?",
        ),
        ('[algorithm]\nadvantage = "critic"', r"algorithm: no advantage 'critic': use grpo, dr_grpo"),
        ('[algorithm]\nname = "grppo"', r"algorithm\.name = 'grppo': expected .*dapo, .*\. Did you mean grpo\?"),
        ('[learner]\nschedule = "x"', r"learner: no schedule 'x': use constant, linear, cosine, or one of your own"),
        ('[engine]\ncache = "page"', r"engine\.cache = 'page': expected slots, pages\. Did you mean pages\?"),
        ('[algorithm]\nname = "dapo"\ndual_clip = 0.5', r"algorithm: dual_clip must be above 1"),
        ('[pipeline]\nmax_lag = 0\noverdue = "restart"', r'overdue = "restart" has nothing to do here'),
        ("[[reward]]\nfunktion = 'f'", r"unknown key reward\[0\]\.funktion\. Did you mean function\?"),
        ("[engine]\nslots = 0", r"engine: slots, prefill_tokens and replicas must be at least 1"),
        ("[reference]\ndevice = 'gpu'", r"reference: device = 'gpu': expected cpu, cuda or cuda:NUMBER"),
        ("[proximal]\ndevice = 'gpu'", r"proximal: device = 'gpu': expected cpu, cuda or cuda:NUMBER"),
        ("[proximal]\nmicro_batch_tokens = 0", r"proximal: micro_batch_tokens must be at least 1"),
        ("[proximal]\npath = 'm'", r"unknown key proximal\.path\. Did you mean"),
        ("[critic]\nvalue_clip = 0", r"critic: learning_rate, max_grad_norm and value_clip must be above 0"),
        ('[algorithm]\nkl = "loss"\nkl_coefficient = nan', r"algorithm\.kl_coefficient = nan: expected a finite"),
        ('[algorithm]\nkl = "loss"\nkl_coefficient = inf', r"algorithm\.kl_coefficient = inf: expected a finite"),
        ("[algorithm]\nclip_high = nan", r"algorithm\.clip_high = nan: expected a finite number"),
        ("[critic]\nlearning_rate = nan", r"critic\.learning_rate = nan: expected a finite number"),
        (
            "[rollout]\ngroup_size = 1\nmin_group_size = 3",
            r"rollout: min_group_size must be between 1 and group_size",
        ),
        ("= 3", "is not TOML"),
        ("[reward]\nfunction = 'f'", r"reward is a list of tables, each a \[\[reward\]\] with two brackets"),
        ("[[environment]]\n[environment.sandbox]\nmemory = 5", r"sandbox\.memory\. Did you mean memory_mb\?"),
        ("[learner]\nlr = 1e-5", r"unknown key learner\.lr\. Did you mean learning_rate\?"),
        ("[rollout]\nlr = 1e-5", r"Did you mean warmup\.learning_rate or|Did you mean learner\.learning_rate or"),
        ("[[pipeline]]\nsteps = 1", r"pipeline is not a list"),
        ("[seed]\nx = 1", r"seed is not a table"),
        ('"a\\nb" = 1', r'unknown key data\."a\\nb"\. Known here'),
        ("[engine]\nmax_lag = 3", r"unknown key engine\.max_lag\. Did you mean pipeline\.max_lag\?"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_a_way_out(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, MINIMAL + text), RunConfig)


def test_several_mistakes_are_shown_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key pipeline\.maxlag") as raised:
        load(written(tmp_path, MINIMAL), RunConfig, ["pipeline.maxlag=1", "learner.lr=nan", "rollout.temperature=inf"])
    assert raised.value.__notes__ == [
        "And: unknown key learner.lr. Did you mean learning_rate?",
        "And: rollout.temperature = inf: expected a finite number",
    ]


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
    paths = (
        r"model\.path or data\.path or learner\.lora\.path or reference\.path or critic\.path or evaluation\.data\.path or "
        r"sim\.lengths\.path or sim\.environment\.turns\.path or sim\.environment\.latency_s\.path"
    )
    with pytest.raises(ConfigError, match=rf"Did you mean {paths}\?"):
        load(path, RunConfig, ["path=x"])


def test_an_override_without_a_value_leaves_the_key_unset(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "[warmup]\nmax_steps = 3\n")
    assert load(path, RunConfig, ["warmup="]).warmup is None
    assert load(path, RunConfig, ["evaluation.tasks="]).evaluations[0].tasks is None


def test_evaluations_are_one_table_or_a_list_of_tables(tmp_path: Path) -> None:
    one = load(written(tmp_path, MINIMAL + "[evaluation]\nevery_steps = 5\n"), RunConfig, ["evaluation.samples=4"])
    assert [(table.name, table.every_steps, table.samples) for table in one.evaluations] == [("held_out", 5, 4)]
    text = MINIMAL + '[[evaluation]]\n[[evaluation]]\nname = "mine"\ntop_p = 0.9\ndata = {path = "mine.jsonl"}\n'
    two = load(written(tmp_path, text), RunConfig, ["evaluation.1.temperature=0.7"])
    held_out, mine = two.evaluations
    assert held_out.is_held_out and not mine.is_held_out and (mine.temperature, mine.top_p) == (0.7, 0.9)
    for config in (one, two):
        assert load(written(tmp_path, to_toml(config)), RunConfig) == config
    with pytest.raises(ConfigError, match=r"two \[\[evaluation\]\] tables are named 'held_out': give each a name"):
        check_combinations(load(written(tmp_path, MINIMAL + "[[evaluation]]\n[[evaluation]]\n"), RunConfig))
    for wrong, message in (
        ("samples = 0", "at least 1"),
        ("temperature = 0.0", 'greedy: decoding = "greedy"'),
        ('name = "a b"', "expected letters, digits"),
        ('name = "warmup"', "and not warmup"),
        ("data = {toy = 'sort_digits', holdout = 3}", "all tasks of this data are evaluated"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(written(tmp_path, MINIMAL + f"[[evaluation]]\n{wrong}\n"), RunConfig)


def test_top_p_of_an_evaluation_is_refused_where_the_server_has_none(tmp_path: Path) -> None:
    http = '[engine]\nkind = "http"\n[engine.http]\nurls = ["http://h:1"]\nflavour = "sglang"\nfolder = "w"\n'
    path = written(tmp_path, MINIMAL + http)
    check_combinations(load(path, RunConfig))
    with pytest.raises(ConfigError, match=r"evaluation held_out: top_p = 0\.9 with SGLang"):
        check_combinations(load(path, RunConfig, ["evaluation.top_p=0.9"]))


def test_an_evaluation_with_data_of_its_own_is_checked_before_the_run(tmp_path: Path) -> None:
    text = '[model.tiny]\n[rollout]\nmax_tokens = 32\n[data]\ntoy = "sort_digits"\n[[evaluation]]\nname = "mine"\ndata = {path = "no.jsonl"}\n'
    with pytest.raises(ConfigError, match=r"evaluation mine: cannot read data\.path = no\.jsonl"):
        check_config(load(written(tmp_path, text), RunConfig))
    toy = ["evaluation.0.data={toy = 'sort_digits', size = 20}", "evaluation.0.tasks=12", "evaluation.0.samples=4"]
    found = check_config(load(written(tmp_path, text), RunConfig, toy)).findings
    assert "checked: the evaluation mine has 12 tasks, 4 samples of each" in found
    with pytest.raises(ConfigError, match=r"no\.py"):
        check_config(load(written(tmp_path, text), RunConfig, [*toy, "evaluation.0.reward=[{function='no.py:f'}]"]))


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


# ---- numbers and texts ---------------------------------------------------------------------------------------------------


def nested(key: str, value: object) -> dict[str, Any]:
    """The data that sets one key."""
    data: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}
    table: Any = data
    for name, child in itertools.pairwise(key.split(".")):
        table = table[0] if name == "0" else table.setdefault(name, [{}] if child == "0" else {})
    table[key.rpartition(".")[2]] = value
    return data


def number_keys(kind: type[Struct], place: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        kinds = get_args(field.type) or (field.type,)
        if {int, float} & set(kinds):
            yield f"{place}{field.name}"
        number = "0." if get_origin(field.type) is tuple else ""
        for struct in (one for one in kinds if isinstance(one, type) and issubclass(one, Struct)):
            yield from number_keys(struct, f"{place}{field.name}.{number}")


@pytest.mark.parametrize("key", list(number_keys(RunConfig)))
def test_every_number_is_finite_and_of_64_bits(key: str) -> None:
    for value in (math.nan, math.inf, -math.inf, 2**63, -(2**64), 16**5000):
        with pytest.raises(
            ConfigError, match=r"expected a finite number|expected a number of at most 64 bits"
        ) as error:
            convert(nested(key, value), RunConfig, where="here")
        assert str(error.value).replace("[0]", ".0").startswith(f"here: {key} = ") and len(str(error.value)) < 200


@pytest.mark.parametrize("key", [key for key in number_keys(RunConfig) if key.endswith("_s")])
def test_every_time_fits_into_a_timer(key: str) -> None:
    for value in (1e10, 1e300, 2**62):
        with pytest.raises(ConfigError, match=r"= \S+: expected at most 1e\+09 seconds"):
            convert(nested(key, value), RunConfig, where="here")


def test_a_number_that_is_not_finite_is_refused_in_a_config_made_in_python() -> None:
    config = convert({"model": {"path": "m"}, "data": {"path": "d"}}, RunConfig, where="here")
    learner = LearnerConfig(max_grad_norm=math.nan)
    with pytest.raises(ConfigError, match=r"learner\.max_grad_norm = nan: expected a finite number"):
        check_combinations(structs.replace(config, learner=learner))
    with pytest.raises(ConfigError, match=r"seed: expected `int`, got `str`"):
        check_combinations(structs.replace(config, seed="x"))


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run_dir = \\udcff: expected text"):
        load(written(tmp_path, MINIMAL), RunConfig, ["run_dir=\udcff"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed = {'1' * 5000}", r"run\.toml, line 5: an integer of more than 4,000 digits"),
        (f"stop = {'[' * 3000}{']' * 3000}", r"run\.toml, line 5: tables or lists nested too deeply"),
        (f"stop = {'{a=' * 3000}1{'}' * 3000}", r"run\.toml, line 5: tables or lists nested too deeply"),
        (f"[[environment]]\nargs.{'a.' * 5000}a = 1", r"environment\[0\]\.args: tables or lists nested"),
    ],
)
def test_what_python_cannot_read_is_one_line_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(written(tmp_path, MINIMAL + text), RunConfig)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("warmpu=", r"--set warmpu=: unknown key warmpu\. Did you mean warmup\?"),
        ("learner.lr=", r"unknown key learner\.lr\. Did you mean learning_rate\?"),
        ("seed.x=", "seed is not a table"),
        ("seed.0=", "seed is not a list"),
        ("0=", "unknown key 0"),
        (".=", "unknown key"),
        (" =", "expected KEY=VALUE"),
        ("reward.weight=", "reward is a list of tables"),
        (f"seed={'1' * 5000}", "--set seed=1+\\.\\.\\.: an integer of more than 4,000 digits"),
        (f"reward.{'1' * 5000}.weight=3", "in a list of 0; they count from 0"),
        (f"rollout.stop={'[' * 3000}{']' * 3000}", "nested too deeply"),
        ("reward.0=5", "reward is a list of tables"),
    ],
)
def test_an_override_that_cannot_be_meant_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, MINIMAL), RunConfig, [override])


def test_unsetting_a_key_makes_no_table(tmp_path: Path) -> None:
    plain = load(written(tmp_path, MINIMAL), RunConfig)
    for override in ("warmup.max_steps=", "critic.value_clip=", "reward.0.weight=", "environment.3.args.x="):
        assert load(written(tmp_path, MINIMAL), RunConfig, [override]) == plain
    two = MINIMAL + "[[reward]]\nweight = 2.0\n[[reward]]\nweight = 3.0\n"
    assert [one.weight for one in load(written(tmp_path, two), RunConfig, ["reward.0="]).reward] == [3.0]
    assert load(written(tmp_path, two), RunConfig, ["reward.1.weight="]).reward[1].weight == 1.0


def test_a_value_of_several_lines_is_text_and_sets_no_other_key(tmp_path: Path) -> None:
    found = load(written(tmp_path, MINIMAL), RunConfig, ["run_dir='a'\nseed = 3"])
    assert (found.run_dir, found.seed) == ("'a'\nseed = 3", 0)


def test_the_names_of_other_trainers_lead_to_keys_that_exist() -> None:
    names = {name for _, name in keys(RunConfig)}
    assert set(OTHER_NAMES.values()) <= names and not set(OTHER_NAMES) & names


# ---- back to TOML --------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WHOLE_TIMES = st.times().map(lambda at: at.replace(fold=0))
LEAVES = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    TEXT,
    st.dates(),
    WHOLE_TIMES,
    st.datetimes().map(lambda at: at.replace(fold=0)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, VALUES, max_size=5))
@settings(max_examples=100, deadline=None)
def test_whatever_arguments_toml_can_hold_read_back_as_the_same(args: dict[str, object]) -> None:
    data = {"model": {"path": "m"}, "data": {"path": "d"}, "environment": [{"args": args}], "reward": [{"args": args}]}
    config = convert(data, RunConfig, where="here")
    again = convert(tomllib.loads(to_toml(config)), RunConfig, where="there")
    assert sorted_repr(again.reward[0].args) == sorted_repr(again.environment[0].args) == sorted_repr(args)


def test_a_run_folder_reads_back_whatever_its_arguments_are(tmp_path: Path) -> None:
    args = {
        "limit": math.inf,
        "a key": {"with.dots": True},
        "mixed": [1, {"x": [{}]}, "y"],
        "on": datetime.date(2026, 1, 2),
    }
    data = {"model": {"tiny": {}}, "reward": [{"args": args}], "run_dir": str(tmp_path / "run")}
    config = convert(data, RunConfig, where="here")
    folder = RunFolder.create(config, "name")
    folder.unlock()
    _, again = RunFolder.reopen(folder.path)
    assert again == config and again.reward[0].args == args


def sorted_repr(value: object) -> str:
    """Tables come last in TOML; NaN is not equal to itself."""
    if isinstance(value, dict):
        return repr(sorted((key, sorted_repr(item)) for key, item in value.items()))
    return repr([sorted_repr(item) for item in value]) if isinstance(value, list) else repr(value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"x": None}, r"environment\[0\]\.args\.x"),
        ({"x": [1, {"y": None}]}, r"environment\[0\]\.args\.x = \[1, \{'y': None\}\]"),
        ({"x": test_a_missing_file_is_named}, r"objects of type function"),
        ({"x": b"a"}, r"environment\[0\]\.args\.x = b'a'"),
        ({"\ud800": {}}, r"environment\[0\]\.args\.\\ud800: expected a text as the key"),
        ({1: 2}, r"environment\[0\]\.args\.1: expected a text as the key"),
        ({"x": {"y": "\ud800"}}, r"environment\[0\]\.args\.x\.y = \\ud800"),
    ],
)
def test_what_toml_cannot_hold_is_refused_before_the_run(args: dict[str, object], message: str) -> None:
    config = convert({"model": {"path": "m"}, "data": {"path": "d"}}, RunConfig, where="here")
    with pytest.raises(ConfigError, match=message):
        check_combinations(structs.replace(config, environment=(EnvironmentConfig(args=args),)))


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
