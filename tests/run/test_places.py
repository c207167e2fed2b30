"""Which GPUs the learner and the engines get, on machines that are only described: every command line and every environment."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.clock import RealClock
from millstream.cluster.resources import placement_lines, stage_lines
from millstream.config import convert
from millstream.engine.native.process import engine_setup
from millstream.engine.processes import LocalWeights
from millstream.engine.vllm.engine import vllm_setup
from millstream.errors import ConfigError, EngineError, WeightsError
from millstream.events.sinks import MemorySink
from millstream.model.load import load_model, model_weights, save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.run import build, check
from millstream.run.backend import BackendContext, LocalBackend
from millstream.run.build import gpu_share, has_learner_process
from millstream.run.check import check_combinations
from millstream.run.check_machine import checked_machine
from millstream.run.config import RunConfig
from millstream.run.device import find_device, find_shape, visible_gpus, with_places
from millstream.run.places import (
    Gpu,
    Machine,
    Places,
    check_heads,
    check_model_fits,
    parse_machine,
    place,
    placed_bundles,
    stage_numbers,
)
from millstream.run.prepare import prepare_run
from millstream.run.sizes import choose_sizes, shape_from
from millstream.weights.transfer import Delivery
from support.tiny import make

SEVEN_B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
THIRTY_TWO_B = SEVEN_B | {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "head_dim": 128}
THIRTY_TWO_B |= {"num_key_value_heads": 8, "intermediate_size": 25600}


def run(text: str = "") -> RunConfig:
    return convert(tomllib.loads(f"{text}\n[model.tiny]\n[data]\ntoy = 'sort_digits'\n"), RunConfig, where="run.toml")


def node(number: int, free_gb: float = 80) -> Machine:
    return Machine(nodes=(tuple(Gpu(name=str(n), free_bytes=free_gb * 1e9) for n in range(number)),))


def names(places: Places) -> tuple[list[str], list[str]]:
    """Of the ranks, and of each engine."""
    return [gpu.name for gpu in places.ranks], [",".join(gpu.name for gpu in gpus) for gpus in places.engines]


VLLM = "[engine]\nkind = 'vllm'"


@pytest.mark.parametrize(
    ("text", "gpus", "ranks", "engines"),
    [
        ("", 0, [], []),
        ("", 1, ["0"], []),
        ("", 2, ["0"], ["1"]),
        ("", 8, ["0"], ["1", "2", "3", "4", "5", "6", "7"]),
        ("[learner]\nranks = 2", 8, ["0", "1"], ["2", "3", "4", "5", "6", "7"]),
        ("[resources]\ngpus = 4", 8, ["0"], ["1", "2", "3"]),
        ("[engine]\nreplicas = 2", 8, ["0"], ["1", "2"]),
        ("[engine]\nreplicas = 4\ncache_gb = 5", 3, ["0"], ["1", "2", "1", "2"]),
        (f"{VLLM}\n[engine.vllm]\ntensor_parallel = 2", 8, ["0"], ["1,2", "3,4", "5,6"]),
        (f"{VLLM}\n[engine.vllm]\ntensor_parallel = 4\n[learner]\nranks = 4", 8, ["0", "1", "2", "3"], ["4,5,6,7"]),
        (f"{VLLM}\nreplicas = 2\n[engine.vllm]\nmemory = 0.45", 2, ["0"], ["1", "1"]),
        ("[reference]\ndevice = 'cuda:1'", 4, ["0"], ["2", "3"]),
        ("[engine]\nprocess = false", 4, ["0"], []),
        ("[learner]\nranks = 2\n[engine]\nkind = 'http'\n[engine.http]\nurls = ['http://a:1']\nflavour = 'vllm'\n"
         "folder = '/w'", 4, ["0", "1"], []),
        ("[engine]\nkind = 'outside'", 4, ["0"], []),
        ("[engine]\nkind = 'mine.py:Engine'", 4, ["0"], []),
    ],
)  # fmt: skip
def test_the_learner_has_the_first_gpus_and_engines_have_the_others(
    text: str, gpus: int, ranks: list[str], engines: list[str]
) -> None:
    config, places = place(run(text), node(gpus))
    assert names(places) == (ranks, engines)
    assert config.engine.kind in ("http", "outside") or config.engine.replicas == (len(engines) or 1)


REFERENCE = "[reference]\nranks = 2"


@pytest.mark.parametrize(
    ("text", "gpus", "stages", "engines"),
    [
        (REFERENCE, 8, {"reference rank 0": "1", "reference rank 1": "2"}, ["3", "4", "5", "6", "7"]),
        (f"{REFERENCE}\nreplicas = 2\n[learner]\nranks = 2", 8, {
            "reference-0 rank 0": "2", "reference-0 rank 1": "3", "reference-1 rank 0": "4", "reference-1 rank 1": "5",
        }, ["6", "7"]),
        ("[reference]\nreplicas = 2\n[engine]\nprocess = false", 3, {"reference-0": "1", "reference-1": "2"}, []),
        (f"{REFERENCE}\n[engine]\nkind = 'outside'", 3, {"reference rank 0": "1", "reference rank 1": "2"}, []),
        (
            f"{REFERENCE}\n[critic]\nranks = 2\n[proximal]\nreplicas = 2\n[algorithm]\nname = 'ppo'", 8,
            {"reference rank 0": "1", "reference rank 1": "2", "critic rank 0": "3", "critic rank 1": "4",
             "proximal-0": "5", "proximal-1": "6"}, ["7"],
        ),
        ("[critic]\nranks = 2", 4, {}, ["1", "2", "3"]),  # the algorithm has no critic
        (REFERENCE, 0, {}, []),
    ],
)  # fmt: skip
def test_scorers_of_several_processes_have_the_gpus_between_the_learner_and_the_engines(
    text: str, gpus: int, stages: dict[str, str], engines: list[str]
) -> None:
    _, places = place(run(text), node(gpus))
    assert {name: gpu.name for name, gpu in places.stages} == stages and names(places)[1] == engines
    for name, gpu in stages.items():
        assert places.stage_environment(name) == {"CUDA_VISIBLE_DEVICES": gpu}
    assert places.stage_environment("critic rank 7") == {}


def test_what_scorers_take_is_said_in_the_line_of_places() -> None:
    _, places = place(run(f"{REFERENCE}\nreplicas = 2"), node(8))
    assert (
        places.words() == "the learner on GPU 0, 4 processes of the reference on GPUs 1 to 4, 3 engines on GPUs 5 to 7"
    )
    _, places = place(run(f"{REFERENCE}\n[engine]\nprocess = false"), node(8))
    assert places.words() == "the learner on GPU 0, 2 processes of the reference on GPUs 1, 2"


def test_with_ray_a_line_says_how_many_processes_scorers_have() -> None:
    text = "runtime = 'ray'\n[resources]\ngpus = 4\nstage_gpus = 1\n[reference]\nranks = 2\nreplicas = 2\n[proximal]"
    config = run(f"{text}\n[learner]\nmini_batches = 2")
    assert stage_lines(config.resources, stage_numbers(config)) == [
        "4 processes of the reference (1 GPU each), where there is room",
        "1 process of the proximal policy (1 GPU each), where there is room",
    ]
    place(config, parse_machine("9xH100"))
    for machine, to_type in (
        ("8xH100", r"or resources\.gpus = 3"),
        ("4xH100", r"set reference\.ranks or proximal\.ranks lower"),
    ):
        with pytest.raises(ConfigError, match=rf"scorers need 9 GPUs, scorers 5 of them, .*{to_type}"):
            place(config, parse_machine(machine))


@pytest.mark.parametrize("share", ["0.5", "0"])
def test_with_ray_each_of_several_ranks_of_a_scorer_has_a_gpu_of_its_own(share: str) -> None:
    text = f"runtime = 'ray'\n[resources]\ngpus = 4\nstage_gpus = {share}\n[reference]\n"
    place(run(f"{text}replicas = 2"), None)
    with pytest.raises(
        ConfigError, match=rf"reference\.ranks = 2 with .*stage_gpus = {share}.* Set resources.stage_gpus = 1"
    ):
        place(run(f"{text}ranks = 2"), None)


@pytest.mark.parametrize(
    ("text", "gpus", "says"),
    [
        (REFERENCE, 1, "1 GPU can be seen; learner.ranks = 1 and reference.ranks = 2 need 3, and an engine 1: set reference.ranks = 1"),
        ("[reference]\nranks = 4", 4, "need 5, and an engine 1: set reference.ranks = 2"),
        (f"{REFERENCE}\n[learner]\nranks = 2", 2, "need 4, and an engine 1: set reference.ranks = 1, learner.ranks = 1"),
        (f"{REFERENCE}\nreplicas = 4", 6, r"reference.ranks = 2 x replicas = 4 need 9.*set reference.replicas = 2"),
        (f"{REFERENCE}\nreplicas = 2", 3, r"set reference.ranks = 1, reference.replicas = 1"),
        (f"{REFERENCE}\n[engine]\nprocess = false", 2, r"need 3: set reference.ranks = 1"),
        (
            "[reference]\ndevice = 'cuda:1'\n[critic]\nranks = 3\n[algorithm]\nname = 'ppo'\n[engine]\nkind = 'outside'", 4,
            "need 4; 1 more is named by a device: set critic.ranks = 2",
        ),
    ],
)  # fmt: skip
def test_scorers_that_a_machine_has_no_gpus_for_are_refused_with_what_to_type(text: str, gpus: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place(run(text), node(gpus))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{REFERENCE}\ndevice = 'cuda:1'", 'device = "cuda:1" with 2 processes.*leave device out'),
        ("[proximal]\nreplicas = 2\ndevice = 'cpu'", "leave device out, or ranks and replicas"),
        ("[reference]\nranks = 0", "ranks = 0: expected at least 1"),
        ("[critic]\nreplicas = 2", "critic.*replicas"),
    ],
)
def test_ranks_and_replicas_that_cannot_be_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(text)


@given(
    gpus=st.integers(1, 16),
    ranks=st.integers(1, 8),
    parallel=st.sampled_from([1, 2, 4]),
    replicas=st.none() | st.integers(1, 16),
)
def test_no_gpu_has_two_parts_unless_memory_shares_are_asked_for(
    gpus: int, ranks: int, parallel: int, replicas: int | None
) -> None:
    number = "" if replicas is None else f"\nreplicas = {replicas}"
    text = f"{VLLM}{number}\n[engine.vllm]\ntensor_parallel = {parallel}\n[learner]\nranks = {ranks}"
    try:
        config, places = place(run(text), node(gpus))
    except ConfigError as refused:
        assert "set " in str(refused), "it says what to type"
        return
    if gpus > 1:
        used = Counter(gpu.name for gpu in (*places.ranks, *sum((*places.engines, *places.spare), ())))
        assert set(used.values()) == {1} and set(used) <= {str(number) for number in range(gpus)}
        assert len(places.engines) == config.engine.num_replicas and {len(one) for one in places.engines} == {parallel}


def test_vllm_takes_what_its_gpu_has_left_for_it() -> None:
    def memory(text: str, machine: Machine | None) -> float | None:
        vllm = place(run(text), machine)[0].engine.vllm
        assert vllm is not None
        return vllm.memory

    assert memory(VLLM, node(1)) == 0.4, "the learner needs the rest"
    assert memory(VLLM, node(8)) == 0.9, "it has a GPU to itself"
    assert memory(f"{VLLM}\n[engine.vllm]\nmemory = 0.7", node(8)) == 0.7
    halves = f"runtime = 'ray'\n{VLLM}\n[resources]\nengine_gpus = 0.5\nlearner_gpus = 0.5\ncolocate = true"
    assert memory(halves, None) == 0.45
    assert memory(f"runtime = 'ray'\n{VLLM}\n[resources]\ngpus = 8", None) == 0.9


@pytest.mark.parametrize(
    ("text", "gpus", "says"),
    [
        ("[resources]\ngpus = 8", 4, "resources.gpus = 8, and 4 GPUs can be seen: set resources.gpus = 4"),
        ("[resources]\ngpus = 2", 0, "the run has no GPU"),
        ("[learner]\nranks = 4", 2, "learner.ranks = 4, and 2 GPUs can be seen: set learner.ranks = 2"),
        ("[learner]\nranks = 2", 2, "set learner.ranks = 1"),
        (f"{VLLM}\n[engine.vllm]\ntensor_parallel = 4", 4, "set engine.vllm.tensor_parallel = 2"),
        (f"{VLLM}\n[engine.vllm]\ntensor_parallel = 2\n[learner]\nranks = 3", 4, "set learner.ranks = 2"),
        ("[engine]\nreplicas = 8", 4, "GPUs for 3 .*set engine.replicas = 3, or let 3 share a GPU.*engine.cache_gb"),
        (f"{VLLM}\nreplicas = 6", 4, "engine.vllm.memory = 0.45"),
        (
            f"{VLLM}\nreplicas = 6\n[engine.vllm]\nmemory = 0.6",
            4,
            "more than the GPU: set it to 0.45, or .*replicas = 3",
        ),
    ],
)
def test_what_a_machine_does_not_have_is_refused_with_what_to_type(text: str, gpus: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place(run(text), node(gpus))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[resources]\nengine_gpus = 2",
            r"engine_gpus = 1 and engine.replicas = 2, or engine.kind = \"vllm\" with .* = 2",
        ),
        (
            f"{VLLM}\n[resources]\nengine_gpus = 2",
            "tensor_parallel = 1, and resources.engine_gpus = 2.*engine_gpus = 1",
        ),
        (
            f"{VLLM}\n[engine.vllm]\ntensor_parallel = 2\n[resources]\nengine_gpus = 0.5",
            "Set resources.engine_gpus = 2",
        ),
        ("[resources]\nstage_gpus = 2", "Set resources.stage_gpus = 1"),
        (
            "[resources]\ngpus = 8\n[learner]\nranks = 8",
            "resources.gpus = 8, and 8 learner ranks .* need 9: .*ranks = 7",
        ),
        ("[resources]\ngpus = 8\n[engine]\nreplicas = 8", "need 9: set engine.replicas = 7"),
        ("[resources]\ngpus = 1", "need 2: set resources.gpus = 2"),
        ("[resources]\ngpus = 8\ncolocate = true\n[learner]\nranks = 9", "set learner.ranks = 8"),
    ],
)
def test_a_share_that_a_process_would_not_use_or_a_run_does_not_have_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_combinations(run(f"runtime = 'ray'\n{text}"))


@pytest.mark.parametrize(
    ("text", "machine", "says"),
    [
        ("[resources]\ngpus = 32", "8xH100", "need 32 GPUs, and there are 8 GPUs on 1 node"),
        (f"{VLLM}\n[engine.vllm]\ntensor_parallel = 8\n[resources]\ngpus = 12", "3x4xH100", "8 GPUs on one node"),
        (
            f"{VLLM}\n[engine.vllm]\ntensor_parallel = 4\n[resources]\ngpus = 18\n[learner]\nranks = 2",
            "3x6xH100",
            "4 GPUs",
        ),
        ("[resources]\ngpus = 8", "cpu", "there are 0 GPUs on 0 nodes"),
        (f"[resources]\ngpus = 8\nstage_gpus = 1\n{REFERENCE}", "8xH100", "scorers need 10 GPUs"),
    ],
)
def test_what_a_described_cluster_does_not_have_is_refused(text: str, machine: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place(run(f"runtime = 'ray'\n{text}"), parse_machine(machine))


@pytest.mark.parametrize(
    ("text", "bundles"),
    [
        ("[resources]\ngpus = 8", [1.0] + [1.0] * 7),
        ("[resources]\ngpus = 8\n[learner]\nranks = 2", [1.0] * 8),
        (
            f"{VLLM}\n[engine.vllm]\ntensor_parallel = 2\n[resources]\ngpus = 8\n[learner]\nranks = 2",
            [1.0] * 2 + [2.0] * 3,
        ),
        ("[resources]\ngpus = 8\ncolocate = true\n[learner]\nranks = 8", [1.0] * 8),
        ("[resources]\ngpus = 2\nengine_gpus = 0.5", [1.0, 0.5, 0.5]),
    ],
)
def test_the_gpus_of_a_cluster_are_divided_by_one_key(text: str, bundles: list[float]) -> None:
    config, _ = place(run(f"runtime = 'ray'\n{text}"), parse_machine("8xH100"))
    assert [bundle["GPU"] for bundle in placed_bundles(config).bundles] == bundles
    said = placement_lines(
        config.resources, replicas=config.engine.num_replicas, ranks=config.learner.ranks, has_proximal=False
    )
    assert f"{sum(bundles):g} GPU in all" in said[0]


def test_a_tensor_parallel_size_must_divide_the_heads() -> None:
    engine = run(f"{VLLM}\n[engine.vllm]\ntensor_parallel = 8").engine
    with pytest.raises(
        ConfigError, match="= 8 does not divide the model's 28 attention heads: set it to one of 1, 2, 4"
    ):
        check_heads(engine, SEVEN_B)
    check_heads(engine, THIRTY_TWO_B)
    check_heads(engine, {})


@pytest.mark.parametrize(
    ("text", "model", "machine", "says"),
    [
        ("", SEVEN_B, "8xH100", r"training needs at least \d+.\d GB on each GPU of learner.ranks = 1 .* 80.0 GB free: set "
         r"learner.ranks = [23]"),
        ("", THIRTY_TWO_B, "2xH100", r"learner.ranks = 1 .*set \[learner.lora\], more GPUs"),
        ("[learner]\nranks = 4\n[learner.lora]\nrank = 8", SEVEN_B | {"num_hidden_layers": 200}, "8xH100", "tensor_parallel = 2"),
    ],
)  # fmt: skip
def test_a_model_that_fits_no_gpu_is_refused_with_what_to_type(
    text: str, model: dict[str, Any], machine: str, says: str
) -> None:
    there = parse_machine(machine)
    has_adapters = "lora" in text
    shape = shape_from(model, trained=10_000_000 if has_adapters else None)
    with pytest.raises(ConfigError, match=says):
        check_model_fits(place(run(text), there)[0], there, shape)


def test_a_model_of_the_hub_is_measured_when_it_is_loaded_and_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = Machine(nodes=((Gpu(name="0", free_bytes=1e4),),))
    monkeypatch.setattr(build, "find_machine_here", lambda config: small)
    monkeypatch.setattr(check, "find_shape", lambda config: None)
    config = replace(run("[engine]\nprocess = true\n[rollout]\nmax_tokens = 8"), run_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"training needs at least .* GB on each GPU of learner\.ranks = 1"):
        prepare_run(config)
    assert not (tmp_path / "run").exists()


def test_adapters_count_as_adapters_before_the_model_is_loaded(tmp_path: Path) -> None:
    """From `config.json` alone: no more than an estimate, near what peft would train."""
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    there, config = parse_machine("1xH100"), run("[learner.lora]\nrank = 16")
    config = replace(config, model=replace(config.model, tiny=None, path=str(tmp_path)))
    found, whole = find_shape(config), shape_from(SEVEN_B)
    assert found is not None and whole is not None
    assert found.trained == pytest.approx(40.4e6, rel=0.01) and found.parameters == whole.parameters + found.trained
    check_model_fits(place(config, there)[0], there, found)
    with pytest.raises(ConfigError, match=r"set \[learner\.lora\], more GPUs, or a smaller model"):
        check_model_fits(place(run(), there)[0], there, whole)
    with pytest.raises(ConfigError, match=r"set more GPUs, or a smaller model"):
        small = parse_machine("1xL4")
        check_model_fits(place(config, small)[0], Machine(nodes=((Gpu(name="0", free_bytes=1e10),),)), found)


def test_a_model_in_the_hub_s_cache_has_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run()
    config = replace(config, model=replace(config.model, tiny=None, path="some/model"))
    assert find_shape(config, is_cache_read=True) is None
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert find_shape(config, is_cache_read=True) == shape_from(SEVEN_B)
    assert find_shape(config) is None, "what is refused is refused once the model is loaded and counted"


@pytest.mark.parametrize("name", ["run--1", "my..model", "x.git", "models/step-1-", "x" * 97, "a/b"])
def test_a_name_that_the_hub_could_not_have_has_no_shape(name: str) -> None:
    config = run()
    assert find_shape(replace(config, model=replace(config.model, tiny=None, path=name)), is_cache_read=True) is None


def test_a_config_whose_sizes_are_no_numbers_has_no_shape() -> None:
    assert shape_from({**SEVEN_B, "intermediate_size": [1, 2]}) is None


def test_a_model_that_fits_and_a_machine_that_is_not_known_are_not_refused() -> None:
    ranks, there = run("[learner]\nranks = 4"), parse_machine("8xH100")
    check_model_fits(place(ranks, there)[0], there, shape_from(SEVEN_B))
    check_model_fits(ranks, Machine(nodes=((Gpu(name="0"),),)), shape_from(THIRTY_TWO_B))
    check_model_fits(run(), there, None)
    for nothing_trained in ("[pipeline]\nrollouts_only = true", "[learner]\nkind = 'outside'"):
        check_model_fits(place(run(nothing_trained), there)[0], there, shape_from(SEVEN_B))


def test_engines_on_gpus_of_their_own_get_all_of_their_memory_and_the_learner_all_of_its() -> None:
    text, shape = "[rollout]\nmax_tokens = 4096\n[pipeline]\ngroups_per_step = 64", shape_from(SEVEN_B)
    shared = choose_sizes(run(text), find_device(run(text), node(1, 180)), shape)
    config, places = place(run(text), node(8, 180))
    apart = choose_sizes(config, with_places(find_device(config, node(8, 180)), places), shape)
    assert apart.cache_gb is not None and shared.cache_gb is not None and apart.cache_gb > shared.cache_gb + 20
    assert apart.needed_gb is not None and shared.needed_gb is not None and apart.needed_gb < shared.needed_gb
    assert apart.replicas == 7 and shared.replicas == 1
    few = run("[pipeline]\ngroups_per_step = 4\nmax_lag = 1")
    assert gpu_share(few, few.learner) < gpu_share(few, few.learner, is_apart=True) == 1.0
    more = replace(few, rollout=replace(few.rollout, extra_members=1000))
    assert gpu_share(more, more.learner) == 1.0, "extra members decode, too"


def test_what_is_placed_where_is_one_line() -> None:
    def words(text: str, gpus: int) -> str:
        return place(run(text), node(gpus))[1].words()

    assert words("", 1) == words("", 0) == ""
    assert words("", 2) == "the learner on GPU 0, 1 engine on GPU 1"
    assert words("[learner]\nranks = 2", 8) == "2 learner ranks on GPUs 0, 1, 6 engines on GPUs 2 to 7"
    named = Machine(nodes=(tuple(Gpu(name=f"GPU-{letter}") for letter in "abcd"),))
    assert place(run(), named)[1].words() == "the learner on GPU GPU-a, 3 engines on GPUs GPU-b, GPU-c, GPU-d"
    parallel = f"{VLLM}\n[engine.vllm]\ntensor_parallel = 2"
    with pytest.raises(ConfigError, match="tensor_parallel = 2, and 1 GPU can be seen: set it to 1"):
        words(parallel, 1)
    assert words(parallel, 5) == "the learner on GPU 0, 2 engines on GPUs 1 to 4, 2 each"


@pytest.mark.parametrize("text", ["8xG100", "x", "", "4x", "0xH100"])
def test_a_machine_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--machine"):
        parse_machine(text)


def test_the_driver_s_tool_names_the_gpus_that_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\necho 1000\necho 2000\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [(gpu.name, gpu.free_bytes) for gpu in visible_gpus()] == [("0", 1000 * 2**20), ("1", 2000 * 2**20)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8f")
    assert [gpu.name for gpu in visible_gpus()] == ["3", "GPU-8f"]
    assert "--id=3,GPU-8f" in (tmp_path / "asked").read_text()
    tool.write_text("#!/bin/sh\necho 1000, Exclusive_Process\necho 2000, Default\n")
    assert [(gpu.free_bytes, gpu.is_exclusive) for gpu in visible_gpus()] == [
        (1000 * 2**20, True),
        (2000 * 2**20, False),
    ]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert [(gpu.name, gpu.free_bytes) for gpu in visible_gpus()] == [("3", None), ("GPU-8f", None)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


# ---- what processes get ------------------------------------------------------------------------------------------------


class Recorded:
    """In the place of `subprocess.Popen`: what would have been started."""

    started: list[tuple[list[str], str | None]]

    def __init__(self, words: list[str], *, env: dict[str, str], **_: Any) -> None:
        Recorded.started.append((words, env.get("CUDA_VISIBLE_DEVICES")))
        raise OSError("only recorded")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str | None]]:
    Recorded.started = []
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr("millstream.run.build.check_installed", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Recorded.started


async def made(config: RunConfig, places: Places, tmp_path: Path, *names: str) -> None:
    """The engines of these names, started by the backend of a local run. The model itself is on this machine's CPU."""
    backend = LocalBackend(config, places)
    context = BackendContext(model=make("llama"), tokenizer=None, folder=tmp_path, clock=RealClock(), sink=MemorySink())
    await backend.open(context)
    for name in names:  # one after another, so that they are recorded in this order
        engine = backend.make_engine(name)
        with pytest.raises(EngineError, match="only recorded"):
            await engine.resume()
        await engine.close()
    await backend.close()


@pytest.mark.parametrize(
    ("text", "target", "seen"),
    [
        ("", "millstream.engine.native.process:serve_engine", ["1", "2", "3"]),
        (VLLM, "millstream.engine.vllm.worker:serve_vllm", ["1", "2", "3"]),
        (f"{VLLM}\n[engine.vllm]\ntensor_parallel = 3", "millstream.engine.vllm.worker:serve_vllm", ["1,2,3"]),
        ("[engine]\nreplicas = 2", "millstream.engine.native.process:serve_engine", ["1", "2"]),
    ],
)
def test_every_engine_is_a_process_that_sees_its_gpus_and_no_others(
    recorded: list[tuple[list[str], str | None]], tmp_path: Path, text: str, target: str, seen: list[str]
) -> None:
    config, places = place(run(text), node(4))
    engines = ["engine"] if len(seen) == 1 else [f"engine-{number}" for number in range(len(seen))]
    asyncio.run(made(config, places, tmp_path, *engines))
    for words, _ in recorded:
        assert words[:4] == [sys.executable, "-m", "millstream.rpc.worker", target]
    assert [found for _, found in recorded] == seen


def test_an_engine_that_is_added_gets_a_gpu_that_is_free_and_one_that_is_replaced_the_same_as_before(
    recorded: list[tuple[list[str], str | None]], tmp_path: Path
) -> None:
    config, places = place(run("[engine]\nreplicas = 1"), node(4))
    asyncio.run(made(config, places, tmp_path, "engine", "engine-0", "engine", "engine-1", "engine-0"))
    assert [found for _, found in recorded] == ["1", "2", "1", "3", "2"]
    with pytest.raises(EngineError, match=r"no GPU for engine-2.*Ask for fewer"):
        asyncio.run(made(config, places, tmp_path, "engine", "engine-0", "engine-1", "engine-2"))


def test_on_one_gpu_and_on_a_cpu_nothing_is_changed(tmp_path: Path) -> None:
    for gpus in (0, 1):
        config, places = place(run(), node(gpus))
        assert places.environment("engine") == {} and config.engine.replicas == 1
    assert not has_learner_process(run("[engine]\nprocess = false"), "cpu", run().learner)


def test_on_one_gpu_an_engine_may_be_a_process_that_sees_the_same_gpu(
    recorded: list[tuple[list[str], str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, places = place(run("[engine]\nprocess = true"), node(1))
    assert list(checked_machine(node(1), config)) == [] and names(places) == (["0"], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr("millstream.rpc.warm.WARM.fork", lambda *_, **__: None)
    asyncio.run(made(config, places, tmp_path, "engine"))
    ((words, seen),) = recorded
    assert words[:4] == [sys.executable, "-m", "millstream.rpc.worker", "millstream.engine.native.process:serve_engine"]
    assert seen == "5" and gpu_share(config, config.learner) == 1.0, "they take turns"


def test_no_setup_of_an_engine_names_the_model_s_folder(tmp_path: Path) -> None:
    """A node of a cluster needs no copy of it: it gets the description and the tokenizer as bytes, the weights by reference."""
    tokenizer = character_tokenizer("abc")
    save_model(tiny_model(TinyShape(hidden=16, layers=1, heads=2, context=32), tokenizer, seed=0), tokenizer, tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
    weights = LocalWeights(run().engine, model)
    try:
        first = weights.first()
        own = engine_setup(model, run().engine, tokenizer, device="cpu", first=first)
        vllm = vllm_setup(model, run(VLLM).engine, tokenizer, is_cpu=True, first=first)
        for setup in (own, vllm):
            assert {"config.json", "tokenizer.json"} <= setup.files.keys()
            assert str(tmp_path).encode() not in msgspec.msgpack.encode(setup)
    finally:
        weights.close()


def test_a_version_is_staged_once_for_all_engines_of_a_machine() -> None:
    model = make("llama")
    weights = LocalWeights(run().engine, model)
    try:
        first = weights.first()
        assert weights.first() == first
        newest = {name: tensor.clone() for name, tensor in model_weights(model).items()}
        refs = [weights.publish(1, newest) for _ in range(4)]
        assert all(ref == refs[0] for ref in refs) and weights.publish(2, newest) != refs[0]
    finally:
        weights.close()
    assert not Path(first.path).exists() and not Path(refs[0].path).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_engines_on_the_model_s_gpu_get_versions_from_its_memory_and_the_first_weights_from_the_host() -> None:
    model = make("llama")
    weights = LocalWeights(run().engine, model, lambda: Delivery(ways=("ipc",)))
    try:
        assert list(weights.first().offers) == ["shared"]
        with pytest.raises(WeightsError, match="ipc"):  # there is no GPU here
            weights.publish(1, model_weights(model))
    finally:
        weights.close()


# ---- the command -------------------------------------------------------------------------------------------------------


def dry_run(folder: Path, text: str, machine: str) -> tuple[int, str]:
    small = "[model.tiny]\n[rollout]\nmax_tokens = 8\n[data]\ntoy = 'sort_digits'\nsize = 64\nholdout = 0\n"
    (folder / "run.toml").write_text(f"run_dir = '{folder / 'run'}'\n{text}\n{small}")
    done = CliRunner().invoke(app, ["train", str(folder / "run.toml"), "--dry-run", "--machine", machine])
    return done.exit_code, " ".join(done.output.split())


def test_a_dry_run_says_in_one_line_what_would_be_where_on_a_described_machine(tmp_path: Path) -> None:
    code, said = dry_run(tmp_path, "", "8xH100")
    assert code == 0 and "checked: the learner on GPU 0, 7 engines on GPUs 1 to 7" in said
    assert "estimated: on a GPU bfloat16" in said
    code, said = dry_run(tmp_path, "[resources]\ngpus = 16", "8xH100")
    assert code == 1 and "resources.gpus = 16, and 8 GPUs can be seen" in said
    code, said = dry_run(tmp_path, "", "cpu")
    assert code == 0 and "the learner on" not in said and "estimated: on a CPU float32" in said


def test_a_small_model_on_one_gpu_has_processes_to_which_weights_go_as_asked(tmp_path: Path) -> None:
    asked = "[resources]\nweights = ['shared']"
    code, said = dry_run(tmp_path, asked, "1xH100")
    assert code == 0 and "engine and learner as processes" in said and "weights reach engines by shared" in said
    code, said = dry_run(tmp_path, f"{asked}\n[engine]\nprocess = false", "1xH100")
    assert code == 1 and "the engine is a thread of the run: set engine.process = true, or leave it out" in said
    code, said = dry_run(tmp_path, "[engine]\nprocess = true\n[learner]\ngpu_share = 0.5", "1xH100")
    assert code == 1 and "Leave one of the two out" in said


def test_a_machine_is_described_for_a_dry_run_alone(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "recipes/demo.toml", "--machine", "8xH100"])
    assert done.exit_code == 1 and "type --dry-run with it" in " ".join(done.output.split())
