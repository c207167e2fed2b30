"""`resources.weights` without Ray: which ways a machine allows, what a dry run says of them, and runs whose weights take them.
`nccl` is tested over gloo, as in `tests/weights/test_nccl.py`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from msgspec import structs
from typer.testing import CliRunner

from millstream import train
from millstream.audit import audit
from millstream.cli.main import app
from millstream.config import convert
from millstream.engine.processes import LocalWeights
from millstream.errors import ConfigError, WeightsError
from millstream.events import WeightsLoaded
from millstream.events.sinks import read_events
from millstream.model.adapters import add_adapters, is_adapter, trained_weights
from millstream.model.load import model_weights
from millstream.model.lora import LoraConfig
from millstream.run.check import check_combinations, check_config
from millstream.run.config import RunConfig
from millstream.run.places import Gpu, Machine, place
from millstream.run.sizes import ModelDevice, choose_sizes, shape_from
from millstream.run.weight_ways import local_ways
from millstream.weights.transfer import Delivery, publisher
from millstream.weights.transfer.device_memory import DeviceBuffers
from millstream.weights.transfer.fetcher import WeightsFetcher
from support.tiny import make

PROCESS = "[engine]\nprocess = true"
VLLM = "[engine]\nkind = 'vllm'"
RANKS = "[learner]\nranks = 2"
SMALL = """
[model.tiny]
layers = 1
[data]
toy = "sort_digits"
size = 64
holdout = 0
"""
CPU = torch.device("cpu")


def run(text: str, weights: str = "") -> RunConfig:
    asked = f"[resources]\nweights = [{weights}]" if weights else ""
    return convert(tomllib.loads(f"{text}\n{asked}\n{SMALL}"), RunConfig, where="run.toml")


def node(number: int) -> Machine:
    return Machine(nodes=(tuple(Gpu(name=str(n), free_bytes=80e9) for n in range(number)),), is_described=True)


def ways(text: str, weights: str, gpus: int) -> tuple[str, ...]:
    config, places = place(run(text, weights), node(gpus))
    return local_ways(config, places, is_gpu=gpus > 0)


def test_where_processes_cannot_open_each_other_s_gpu_memory_weights_pass_through_the_host_s() -> None:
    config, places = place(run(PROCESS), node(1))
    assert local_ways(config, places, is_gpu=True, is_shareable=False) == ("shared",)


@pytest.mark.parametrize(
    ("text", "weights", "gpus", "expected"),
    [
        ("", "", 8, ("shared",)),
        (VLLM, "", 8, ("shared",)),
        (PROCESS, "", 0, ("shared",)),
        ("", "'broadcast'", 0, ("broadcast",)),
        (PROCESS, "", 1, ("ipc",)),
        (VLLM, "", 1, ("shared",)),
        ("", "'nccl', 'shared'", 8, ("nccl", "shared")),
        (VLLM, "'nccl'", 2, ("nccl",)),
        (RANKS, "'nccl', 'shared'", 8, ("nccl", "shared")),
        (PROCESS, "'ipc', 'shared'", 1, ("ipc", "shared")),
        (PROCESS, "'files', 'broadcast'", 0, ("files", "broadcast")),
    ],
)
def test_engines_get_weights_by_the_ways_that_are_named_or_by_the_one_that_was_measured(
    text: str, weights: str, gpus: int, expected: tuple[str, ...]
) -> None:
    assert ways(text, weights, gpus) == expected


@pytest.mark.parametrize(
    ("text", "weights", "gpus", "says"),
    [
        (PROCESS, "'nccl'", 0, '"nccl", which is for GPUs, and the run has none: use "shared"'),
        (PROCESS, "'shared', 'ipc'", 0, '"ipc", which is for GPUs'),
        ("", "'nccl', 'shared'", 1, "set engine.process = true"),
        (PROCESS, "'nccl', 'shared'", 1, 'on the same one: use "ipc" or "shared"'),
        ("", "'ipc', 'shared'", 8, 'on other GPUs than the learner: use "nccl" or "shared"'),
        (RANKS, "'nccl'", 8, r'set it to \["nccl", "shared"\]'),
        ("", "'shared'", 1, "set engine.process = true"),
        ("[engine]\nprocess = false", "'nccl'", 8, "set engine.process = true"),
        ("[engine]\nkind = 'outside'", "'shared'", 8, "leave it out"),
    ],
)
def test_a_way_that_this_machine_does_not_allow_is_refused_with_what_to_type(
    text: str, weights: str, gpus: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ways(text, weights, gpus)


def test_the_ways_of_a_local_run_count_and_other_shares_of_a_cluster_are_refused() -> None:
    check_combinations(run("", "'nccl', 'shared'"))
    with pytest.raises(ConfigError, match=r"leave engine\.vllm\.weights out"):
        check_combinations(run(f"{VLLM}\n[engine.vllm]\nweights = 'file'", "'shared'"))
    more = run("", "'shared'")
    with pytest.raises(ConfigError, match="other keys than gpus, reward_gpus and weights"):
        check_combinations(structs.replace(more, resources=structs.replace(more.resources, engine_cpus=2.0)))


@pytest.mark.parametrize(
    ("weights", "gpus", "said"),
    [
        ("", 4, "checked: weights reach engines by shared"),
        ("'nccl', 'shared'", 4, "checked: weights reach engines by nccl from GPU to GPU, shared on its node"),
        ("", 0, None),
    ],
)
def test_the_check_says_by_which_ways_weights_reach_engines_on_a_described_machine(
    weights: str, gpus: int, said: str | None
) -> None:
    findings = check_config(run("[rollout]\nmax_tokens = 8", weights), machine=node(gpus)).findings
    assert [line for line in findings if "weights reach" in line] == ([] if said is None else [said])


def test_a_dry_run_says_it_too_and_refuses_what_the_machine_does_not_allow(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f"run_dir = '{tmp_path / 'run'}'\n[resources]\nweights = ['nccl', 'shared']\n[rollout]\nmax_tokens = 8\n{SMALL}"
    )

    def said(machine: str) -> str:
        words = ["train", str(tmp_path / "run.toml"), "--dry-run", "--machine", machine]
        return " ".join(CliRunner().invoke(app, words).output.split())

    assert "weights reach engines by nccl from GPU to GPU, shared on its node" in said("2xH100")
    assert 'which is for GPUs, and the run has none: use "shared"' in said("cpu")


def test_versions_that_are_staged_on_the_learners_gpu_alone_count_towards_its_memory() -> None:
    shape = shape_from({"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "vocab_size": 50_000})
    assert shape is not None
    device = ModelDevice(is_gpu=True, free_bytes=80e9, engine_bytes=80e9)

    def needed(weights: str, engine: str = "") -> float:
        config = run(f"[learner]\nmicro_batch_tokens = 4096\n{engine}", weights)
        return choose_sizes(config, device, shape).needed_gb or 0.0

    assert needed("'nccl', 'shared'") == needed("")
    staged = pytest.approx(2 * 2 * shape.parameters / 1e9, abs=0.02)
    assert needed("'nccl'") - needed("") == staged
    shared, ipc = (needed(f"'shared'{way}", VLLM) for way in ("", ", 'ipc'"))
    assert ipc - shared == staged


# ---- the publisher of a local run --------------------------------------------------------------------------------------


def test_weights_go_from_device_to_device_without_a_copy_on_the_host_where_no_way_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "DeviceBuffers", lambda device: DeviceBuffers(CPU))
    model, fetcher = make("llama"), WeightsFetcher("", device=CPU)
    for names, is_on_host in ((("nccl",), False), (("nccl", "shared"), True)):
        weights = LocalWeights(run("").engine, model, lambda names=names: Delivery(ways=names))  # type: ignore[misc]
        try:
            assert list(weights.first().offers) == ["shared"], "what engines begin with"
            sent = model_weights(model)
            ref = weights.publish(1, sent)
            assert list(ref.offers) == list(names)
            assert (Path(ref.path).stat().st_size > ref.num_bytes) == is_on_host
            with fetcher.take(ref) as taken:
                assert taken.way == "nccl" and all(torch.equal(taken.weights[name], sent[name]) for name in sent)
        finally:
            weights.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_where_nccl_does_not_work_the_next_way_is_used_with_one_line_or_it_is_an_error_with_what_to_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, engine = make("llama"), run("").engine
    weights = LocalWeights(engine, model, lambda: Delivery(ways=("nccl", "shared")))
    alone = LocalWeights(engine, model, lambda: Delivery(ways=("nccl",)))
    try:
        for version in (1, 2):
            with WeightsFetcher("").take(weights.publish(version, model_weights(model))) as taken:
                assert taken.way == "shared"
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1 and said[0].startswith("weights do not leave this process by nccl: ")
        with pytest.raises(WeightsError, match='use "shared" on one node'):
            alone.publish(1, model_weights(model))
    finally:
        weights.close()
        alone.close()


def test_engines_that_start_later_get_the_copy_that_others_have_though_adapters_were_trained_since() -> None:
    model = make("llama")
    add_adapters(model, LoraConfig(rank=2), seed=0)
    weights = LocalWeights(run("").engine, model)
    try:
        first = weights.first()
        adapters = trained_weights(model)
        with torch.no_grad():
            for adapter in adapters.values():
                adapter += 1.0
        changed = weights.first()
        assert changed != first, "nothing was published: an engine may serve what it begins with"
        weights.publish(1, adapters)
        with torch.no_grad():
            next(iter(adapters.values())).add_(1.0)
        assert weights.first() == changed
        with torch.no_grad():
            next(value for name, value in model_weights(model).items() if not is_adapter(name)).add_(1.0)
        assert weights.first() != changed
    finally:
        weights.close()


# ---- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("weights", ["'broadcast'", "'files'"])
def test_a_run_whose_weights_take_another_way_has_a_clean_audit_and_its_events_name_the_way(
    tmp_path: Path, weights: str
) -> None:
    small = "[rollout]\nmax_tokens = 4\ngroup_size = 2\n[pipeline]\nsteps = 3\ngroups_per_step = 2\nmax_lag = 1\n"
    small += "filter_zero_signal = false\n[evaluation]\nat_start = false\nat_end = false\n"
    config = run(f"run_dir = '{tmp_path / 'run'}'\n{small}\n{PROCESS}\nreplicas = 2\nslots = 8", weights)
    train(config)
    found = audit(tmp_path / "run")
    assert found.is_clean, found
    loads = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, WeightsLoaded)]
    assert {event.engine for event in loads} == {"engine-0", "engine-1"}
    assert {event.way for event in loads} == {weights.strip("'")}
    assert not (tmp_path / "run/weights").exists(), "what was sent is removed"
