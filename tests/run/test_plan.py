"""`millstream plan`: what GPUs cost, what fits, and what is chosen, against a sweep of all settings."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import msgspec
import pytest
from msgspec import structs
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.config import load, to_toml
from millstream.engine import EngineConfig
from millstream.errors import ConfigError
from millstream.events import Sizes, SizesChosen
from millstream.events.sinks import JsonlSink
from millstream.learner.config import LearnerConfig, ReferenceConfig
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.check import check_combinations
from millstream.run.config import ModelConfig, RunConfig
from millstream.run.plan import (
    MARGIN,
    Expected,
    Planner,
    Settings,
    Tried,
    choose,
    plan_run,
)
from millstream.run.plan_input import plan_notes, planned_costs, planned_shape
from millstream.run.roofline import Placed, costs_on, fit_memory, gpu_table, parse_gpus, with_sharing
from millstream.run.sizes import ModelShape, shape_from
from millstream.sim.config import DrawConfig, SimConfig
from plan import SHAPES, make_scenario, planner_of, sweep

HEADS = "num_attention_heads=16,num_key_value_heads=8,head_dim=128"
SHAPE = (
    f"hidden_size=2048,num_hidden_layers=28,intermediate_size=6144,vocab_size=151936,tie_word_embeddings=true,{HEADS}"
)
SMALL = (
    "hidden_size=1536,num_hidden_layers=28,num_attention_heads=12,num_key_value_heads=2,intermediate_size=8960,"
    "vocab_size=151936,tie_word_embeddings=true"
)
TINY = "hidden_size=64,num_hidden_layers=2,num_attention_heads=2,vocab_size=64"
LARGE = (
    "hidden_size=8192,num_hidden_layers=80,num_attention_heads=64,num_key_value_heads=8,intermediate_size=28672,"
    "vocab_size=128256"
)
ROOT = Path(__file__).parents[2]
ONE_GPU = ROOT / "recipes/sim/one_gpu.toml"
LENGTHS = SimConfig(lengths=DrawConfig(kind="geometric", mean=200))


def config(*, path: str = "hub/name") -> RunConfig:
    return RunConfig(model=ModelConfig(path=path))


def shape(name: str) -> ModelShape:
    found = shape_from({**SHAPES[name], "tie_word_embeddings": True})
    assert found is not None
    return found


def plan_command(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["plan", *words])
    return found.exit_code, found.output


# ---- costs and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "tokens_per_s", "trained_per_s"),
    [("0.5B", 512, 77_000, 103_700), ("2B", 128, 35_900, 42_600), ("2B", 512, 54_100, 42_600)],
)
def test_the_costs_of_an_h200_are_those_that_were_measured(
    name: str, requests: int, tokens_per_s: float, trained_per_s: float
) -> None:
    """docs/benchmarks.md: prompts of 160 tokens on average, 256 sampled ones; a compiled learner of one rank."""
    gpus, placed = parse_gpus("2xH200"), Placed(ranks=1, engines=1, is_shared=False)
    fitted = fit_memory(config(), shape(name), gpus, placed, longest_request=416, batch_tokens=1e5)
    sim = costs_on(LENGTHS, shape(name), gpus, placed, fitted)
    step_s = sim.costs.of_step(requests, requests * (160 + 128))
    assert requests / step_s == pytest.approx(tokens_per_s, rel=0.15)
    assert sim.train_tokens_per_s == pytest.approx(trained_per_s, rel=0.02)


def test_every_kind_of_gpu_has_a_source_and_is_found_however_it_is_written() -> None:
    for name, kind in gpu_table().gpu.items():
        assert kind.source
        assert parse_gpus(f"4x{name}").name == name
    assert parse_gpus("rtx 4090").number == 1
    assert parse_gpus("8 x NVIDIA H200").number == 8


@pytest.mark.parametrize(
    ("text", "expected"), [("8xA100", "A100-40GB or A100-80GB"), ("8xTPU", "Known kinds: A100-40GB"), ("0xH200", "8xH200"), ("8", "8xH200")]
)  # fmt: skip
def test_an_unknown_gpu_is_refused_with_those_that_are_known(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_gpus(text)


@pytest.mark.parametrize("kind", list(gpu_table().gpu))
@pytest.mark.parametrize("name", list(SHAPES))
def test_what_fits_is_within_the_memory_of_a_gpu_and_holds_the_longest_rollout(kind: str, name: str) -> None:
    gpus, longest = parse_gpus(f"8x{kind}"), 4224
    for ranks in (1, 3, 7, 8):
        placed = Placed(ranks=ranks, engines=8 if ranks == 8 else 8 - ranks, is_shared=ranks == 8)
        found = fit_memory(config(), shape(name), gpus, placed, longest_request=longest, batch_tokens=1e6)
        if found.lack_gb <= 0:
            assert max(found.learner_gb, found.engine_gb) <= 0.9 * gpus.kind.memory_gb + 1e-6
            assert min(found.cache_tokens, found.micro_batch_tokens) >= longest
        else:
            assert found.where


@pytest.mark.parametrize("kind", list(gpu_table().gpu))
def test_every_division_of_gpus_that_is_searched_has_room_for_passes_of_the_config_and_a_cache(kind: str) -> None:
    """The recipe has passes of 16,384 tokens."""
    recipe = load(ROOT / "recipes/cluster/eight_gpus.toml", RunConfig)
    small = planned_shape(recipe, SMALL)
    planner = Planner(recipe, LENGTHS, small, parse_gpus(f"8x{kind}"), max_lag=0)
    for point in planner.points([0.0]):
        settings = planner.settings_of(point)
        fit = planner.fit_of(settings)
        assert max(fit.learner_gb, fit.engine_gb) <= 0.9 * planner.gpus.kind.memory_gb + 1e-6
        assert planner.config_of(settings).learner.micro_batch_tokens == 16_384


def test_the_costs_of_a_tiny_model_can_be_written_as_a_config() -> None:
    found = Planner(load(ONE_GPU, RunConfig), LENGTHS, planned_shape(config(), TINY), parse_gpus("2xB200"))
    to_toml(found.config_of(found.settings_of(next(found.points([0.0])))))


def test_the_page_of_plans_names_every_kind_of_gpu() -> None:
    page = (ROOT / "docs/planning.md").read_text()
    assert f"in `src/millstream/run/gpus.toml`: {', '.join(gpu_table().gpu)}." in page


def test_engines_and_learner_slow_each_other_down_on_shared_gpus_alone() -> None:
    shared, apart = Placed(ranks=2, engines=2, is_shared=True), Placed(ranks=1, engines=1, is_shared=False)
    measured = structs.replace(LENGTHS, decode_slowdown=1.4, learner_keep=0.8)
    assert with_sharing(measured, shared) == measured
    assert with_sharing(measured, apart).decode_slowdown == with_sharing(measured, apart).learner_keep == 1
    assert with_sharing(LENGTHS, shared).decode_slowdown == gpu_table().efficiency.decode_slowdown


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_a_plan_is_within_five_percent_of_the_best_of_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the scenarios of `bench/plan.py`, with less lag and fewer steps."""
    monkeypatch.setattr("millstream.run.plan.MAX_STEPS", 6)
    planner = planner_of(make_scenario(1)._replace(max_lag=1.0), 8)
    plan = plan_run(planner)
    found = sweep(planner)
    assert found[plan.chosen.settings] >= 0.95 * max(found.values())
    assert len(plan.tried) < len(found)
    assert plan.synchronous.settings.max_lag == 0
    check_combinations(plan.config)


def test_lag_that_buys_next_to_nothing_is_not_planned() -> None:
    def tried(max_lag: float, rollouts_per_s: float) -> Tried:
        settings = Settings(
            placed=Placed(ranks=1, engines=1, is_shared=True), max_lag=max_lag, slots=8, extra_groups=0, extra_members=0
        )
        expected = Expected(
            step_s=1, rollouts_per_s=rollouts_per_s, tokens_per_s=1, engines_idle=0, learner_idle=0, mean_lag=0
        )
        return Tried(settings=settings, guess_s=1, expected=expected)

    assert choose([tried(0, 80), tried(1, 100 - 90 * MARGIN), tried(2, 100)]).max_lag == 1
    assert choose([tried(0, 80), tried(1, 100 - 110 * MARGIN), tried(2, 100)]).max_lag == 2


def test_a_planned_config_is_simulated_and_read_back_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.run.plan.MAX_STEPS", 8)
    out, small = tmp_path / "planned.toml", ("--set", "pipeline.groups_per_step=2", "--set", "sim.lengths.mean=100")
    words = ("--shape", SHAPE, *small, "--out", str(out))
    code, text = plan_command(str(ONE_GPU), "--gpus", "2xH200", "--max-lag", "0.5", *words)
    assert code == 0 and "times the throughput of synchronous training" in text, text
    config = load(out, RunConfig)
    assert (config.runtime, config.engine.replicas + config.learner.ranks) in [("ray", 2), ("ray", 4)]
    assert CliRunner().invoke(app, ["sim", str(out), "--set", "pipeline.steps=2"]).exit_code == 0
    assert ElementTree.parse(out.with_suffix(".svg")).getroot().tag.endswith("svg")
    assert "runtime=ray" in text and "for the shape of --shape" in text
    assert "planned.toml is there already" in plan_command(str(ONE_GPU), "--gpus", "H200", *words)[1].replace("\n", "")
    given = out.rename(tmp_path / "given.toml")
    out.with_suffix(".svg").unlink()
    code, text = plan_command(str(given), "--gpus", "H200", "--max-lag", "0", "--json", *words)
    assert "runtime=local" in msgspec.json.decode(text)["changed"]
    chosen, config = msgspec.json.decode(text)["chosen"]["settings"], load(out, RunConfig)
    assert (config.runtime, config.pipeline.max_lag, config.engine.slots) == ("local", 0, chosen["slots"])
    assert chosen["placed"] == {"ranks": 1, "engines": 1, "is_shared": True}


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_refused_with_gpus_on_which_it_does() -> None:
    def planner(gpus: str) -> Planner:
        return Planner(config(), LENGTHS, shape("8B"), parse_gpus(gpus))

    with pytest.raises(ConfigError, match=r"does not fit on 2xH100.*--gpus (\S+) or --gpus (\S+),") as refused:
        planner("2xH100")
    words = str(refused.value).split()
    advised = [word.rstrip(",") for before, word in itertools.pairwise(words) if before == "--gpus"]
    assert len(advised) == 2 and all(planner(gpus).places for gpus in advised)


def test_what_is_advised_for_a_model_that_does_not_fit_is_checked_with_the_rollouts_of_a_step() -> None:
    def planner(gpus: str, groups: int, tokens: int | Literal["auto"] = "auto") -> Planner:
        few = structs.replace(
            config(),
            pipeline=PipelineConfig(groups_per_step=groups),
            rollout=RolloutConfig(group_size=2, max_tokens=16),
            learner=LearnerConfig(micro_batch_tokens=tokens),
        )
        return Planner(few, LENGTHS, shape("8B"), parse_gpus(gpus))

    with pytest.raises(ConfigError, match=r"--gpus (\d+xL4) --set pipeline.groups_per_step=(\d+) or") as refused:
        planner("12xL4", 2)
    found = re.search(r"--gpus (\d+xL4) --set pipeline.groups_per_step=(\d+)", str(refused.value))
    assert found and planner(found[1], int(found[2])).places
    assert "max_tokens" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"Type --set learner\.micro_batch_tokens=auto"):
        planner("8xH100", 8, tokens=10_000_000)
    assert planner("8xH100", 8).places


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": PipelineConfig(steps=1, groups_per_step=4, max_lag=0)},
        {"engine": EngineConfig(replicas=2)},
        {"learner": LearnerConfig(ranks=2)},
    ],
    ids=str,
)
def test_memory_on_one_gpu_is_that_of_the_planned_run_whatever_the_config_says(changes: dict[str, Any]) -> None:
    """A small model: its planned run has processes."""
    gpus, placed = parse_gpus("1xH100"), Placed(ranks=1, engines=1, is_shared=True)
    small = shape_from({"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "vocab_size": 49152})
    assert small is not None

    def fitted(config: RunConfig) -> float:
        return fit_memory(config, small, gpus, placed, longest_request=1000, batch_tokens=1e5).cache_gb

    threads = fitted(structs.replace(config(), engine=EngineConfig(process=False)))
    assert fitted(structs.replace(config(), **changes)) == fitted(config()) < threads


def test_an_engine_whose_weights_one_gpu_cannot_hold_is_named() -> None:
    large = planned_shape(config(), LARGE)
    with pytest.raises(ConfigError, match=r"one GPU, which cannot hold its weights of 141.1 GB. Type --gpus \d+xB200,"):
        Planner(config(), LENGTHS, large, parse_gpus("8xH200"))


def test_costs_of_another_model_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert CliRunner().invoke(app, ["sim", str(ONE_GPU), "--out", str(run), "--set", "pipeline.steps=2"]).exit_code == 0
    costs = tmp_path / "costs.toml"
    costs.write_text(f'[sim.lengths]\nkind = "run"\npath = "{run}"\n')
    same, other = load(ONE_GPU, RunConfig), load(ONE_GPU, RunConfig, ["model.tiny.layers=3"])
    (note,) = planned_costs(same, planned_shape(same), costs)[1]
    assert f"costs are those of {costs}: on which device they were measured is not known" in note
    sizes = Sizes(dtype="float32", slots=8, cache_gb=None, micro_batch_tokens=1024, is_compiled=False)
    sink = JsonlSink(run / "events.jsonl")
    sink.emit(SizesChosen(at=0, sizes=sizes, device="cpu"))
    sink.close()
    assert "measured on a CPU, not on a GPU" in planned_costs(same, planned_shape(same), costs)[1][0]
    with pytest.raises(ConfigError, match=r"of another model: .*layers 2, .* has .*layers 3,[\s\S]*calibrate"):
        planned_costs(other, planned_shape(other), costs)
    costs.write_text("[sim]\n")
    assert "not checked" in planned_costs(other, planned_shape(other), costs)[1][0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "model.path=hub/name", "--set", "model.tiny="], "--shape hidden_size=4096"),
        (["--shape", "hidden_size=64"], "lacks num_hidden_layers, num_attention_heads, vocab_size. Type"),
        (["--shape", f"{SHAPE},num_key_value_head=8"], "Did you mean num_key_value_heads?"),
        (["--shape", f"{SHAPE},foo=3"], "unknown key 'foo'. Known: hidden_size,"),
        (["--shape", "hidden_size=abc"], "hidden_size = 'abc': expected a whole number above 0"),
        (["--shape", "tie_word_embeddings=2"], "expected true or false"),
        (["--set", "pipeline.steps=0"], "--set pipeline.steps=100"),
        (["--out", "no/such/folder/planned.toml"], "mkdir -p no/such/folder"),
        (["--shape", f"{SHAPE},num_experts=8"], "mixture of experts"),
        (["--set", "learner.lora.rank=8"], "--set learner.lora="),
        (["--set", "engine.kind=vllm"], "--set engine.kind=torch"),
        (["--set", "model.dtype=float32"], "--set model.dtype=auto"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_type(words: list[str], expected: str) -> None:
    code, text = plan_command(str(ONE_GPU), "--gpus", "H200", *words)
    assert code == 1 and expected in " ".join(text.split())


def test_a_config_without_lengths_is_planned_with_a_note() -> None:
    found, notes = planned_costs(config(), shape("2B"), None)
    assert found.lengths.mean == config().rollout.max_tokens / 2
    assert "sim.lengths" in notes[0]


def test_a_reference_is_planned_with_a_note_that_its_gpu_is_not_among_these() -> None:
    with_reference = structs.replace(config(), reference=ReferenceConfig())
    (note,) = plan_notes(with_reference, None)
    assert note.startswith("reference: simulated on GPUs of their own, which are not among those of --gpus")
    assert plan_notes(config(), None) == []
