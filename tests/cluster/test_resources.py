"""What a run asks of a cluster: shares, bundles, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from millstream import train
from millstream.cluster.resources import ResourcesConfig, placement_of
from millstream.config import convert
from millstream.errors import ClusterError, ConfigError
from millstream.rpc.process import engine_names, rank_name
from millstream.run.backend import BackendContext, LocalBackend
from millstream.run.check import check_combinations, check_config
from millstream.run.config import RunConfig, weight_ways
from millstream.run.evaluate import evaluate

RUN = """
runtime = "ray"
[model.tiny]
context = 512
[data]
toy = "sort_digits"
size = 64
holdout = 0
[algorithm]
loss = "ppo"
"""
COLOCATED = "[resources]\ncolocate = true\nengine_gpus = 0.5\nlearner_gpus = 0.5"
TWO = "[engine]\nreplicas = 2\n[learner]\nranks = 2"


def run(text: str) -> RunConfig:
    return convert(tomllib.loads(RUN + text), RunConfig, where="run.toml")


@given(
    replicas=st.integers(1, 6),
    ranks=st.integers(1, 6),
    cpus=st.floats(0, 4),
    gpus=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_every_engine_and_every_rank_has_a_bundle_of_its_own_that_is_large_enough(
    replicas: int, ranks: int, cpus: float, gpus: float
) -> None:
    config = ResourcesConfig(engine_cpus=cpus, engine_gpus=gpus, learner_cpus=cpus, learner_gpus=gpus)
    placement = placement_of(config, replicas=replicas, ranks=ranks)
    assert sorted([*placement.engines, *placement.ranks]) == list(range(replicas + ranks))
    for number in (*placement.engines, *placement.ranks):
        bundle = placement.bundles[number]
        assert bundle.get("CPU", 0.0) >= cpus and bundle.get("GPU", 0.0) >= gpus
        assert sum(bundle.values()) > 0, "Ray has no empty bundles"


def test_an_engine_and_a_rank_that_share_a_gpu_are_in_one_bundle() -> None:
    config = ResourcesConfig(colocate=True, engine_gpus=0.4, learner_gpus=0.6, engine_cpus=1, learner_cpus=2)
    placement = placement_of(config, replicas=2, ranks=2)
    assert placement.engines == placement.ranks == [0, 1]
    assert placement.bundles == [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert placement.total == {"CPU": 6.0, "GPU": 2.0}


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_bundle_is_its_name_s_and_whoever_bears_a_name_that_nothing_is_reserved_for_has_none(replicas: int) -> None:
    placement = placement_of(ResourcesConfig(), replicas=replicas, ranks=2)
    assert [placement.bundle_of("engine", name) for name in engine_names(replicas)] == placement.engines
    assert [placement.bundle_of("learner", rank_name(number)) for number in range(2)] == placement.ranks
    assert placement.bundle_of("engine", f"engine-{replicas}") is None
    assert placement.bundle_of("learner", rank_name(2)) is placement.bundle_of("stage", "rank 0") is None
    assert (placement.bundle_of("engine", "engine-0") is None) == (replicas == 1), "that one is called engine"


def test_shares_of_every_kind_of_process_are_those_of_the_table() -> None:
    config = ResourcesConfig(
        engine_gpus=1, learner_cpus=3, stage_cpus=2, stage_gpus=0.5, environment_cpus=0.25, reward_cpus=4, reward_gpus=1
    )
    kinds = ("engine", "learner", "stage", "environment", "reward")
    assert [config.shares(kind) for kind in kinds] == [(1, 1), (3, 0), (2, 0.5), (0.25, 0), (4, 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[resources]\nengine_cpus = -1", "at least 0"),
        ("[resources]\nengine_gpus = 1.5", "must be whole numbers"),
        ("[resources]\nstage_gpus = 1.5", "must be whole numbers"),
        ("[resources]\nreward_gpus = 2.5", "must be whole numbers"),
        ("[resources]\nlearner_gpus = 2", "at most 1"),
        ("[resources]\ncolocate = true", "engine_gpus + learner_gpus must be above 0"),
        ("[resources]\nweights = []", "at least one way"),
        ("[resources]\npatience_s = 0", "patience_s above 0"),
        ("[resources]\nengine_cpu = 1", "engine_cpus"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("+", r"\+")):
        run(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[resources]\ncolocate = true\nengine_gpus = 0.5\nlearner_gpus = 0.5\n[engine]\nreplicas = 2", "replicas = 1"),
        ("[engine]\nprocess = true", "Leave engine.process out"),
        (f'{COLOCATED}\nweights = ["ipc"]\n{TWO}', 'add "shared"'),
        ('[resources]\nengine_gpus = 1\nlearner_gpus = 1\nweights = ["ipc"]', 'add "shared"'),
        ('[resources]\nengine_gpus = 1\nlearner_gpus = 1\nweights = ["nccl"]', 'the driver.* add "shared"'),
        ('[resources]\nweights = ["ipc"]', 'which is for GPUs.*use "shared"'),
        ('[resources]\nweights = ["shared", "nccl"]', 'which is for GPUs.*use "broadcast"'),
    ],
)
def test_combinations_that_do_not_go_together_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_combinations(run(text))


@pytest.mark.parametrize(
    ("text", "ways", "said"),
    [
        ("", ("shared",), "shared"),
        (COLOCATED, ("ipc",), "ipc"),
        (f'{COLOCATED}\nweights = ["ipc"]', ("ipc",), "ipc"),
        (f"{COLOCATED}\n{TWO}", ("ipc", "shared"), "ipc on the GPU of rank 0, shared on its node"),
        (f'{COLOCATED}\nweights = ["broadcast"]\n{TWO}', ("broadcast",), "broadcast"),
    ],
)
def test_weights_have_a_way_to_every_engine_on_whichever_gpu_it_is_and_a_dry_run_says_which(
    text: str, ways: tuple[str, ...], said: str
) -> None:
    config = run(text)
    check_combinations(config)
    assert weight_ways(config, is_one_node=True) == ways
    assert f"checked: weights reach engines by {said}" in check_config(config).findings


def test_a_proximal_policy_beside_the_learner_is_on_no_gpu_of_its_and_over_nodes_there_is_a_way_through_the_host() -> (
    None
):
    beside = run(f"{COLOCATED}\n[learner]\nmini_batches = 2\n[proximal]")
    assert weight_ways(beside, is_one_node=True) == ("ipc", "shared")
    assert weight_ways(run(COLOCATED), is_one_node=False) == ("ipc", "shared", "nccl", "broadcast")


def test_a_table_that_nobody_would_read_is_refused() -> None:
    elsewhere = run("[resources]\nengine_cpus = 2")
    with pytest.raises(ConfigError, match='set runtime = "ray", or leave the table out'):
        check_combinations(structs.replace(elsewhere, runtime="local"))
    check_combinations(elsewhere)


@pytest.mark.timeout(120)
def test_the_model_of_a_run_on_ray_is_evaluated_on_this_machine_and_rewards_have_their_processes_here() -> None:
    config = run('[rollout]\nmax_tokens = 2\n[[reward]]\nfunction = "exact_match"\nprocess = true\nworkers = 1\n')
    small = structs.replace(config, data=structs.replace(config.data, holdout=2))
    measured = evaluate(structs.replace(small, resources=ResourcesConfig(engine_cpus=2.0)))
    assert 0.0 <= measured.accuracy <= 1.0


def test_what_was_opened_of_a_place_is_closed_even_where_the_rest_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    async def open_half(site: LocalBackend, around: BackendContext) -> None:
        done.append("opened")
        raise ClusterError("no room")

    async def close(site: LocalBackend) -> None:
        done.append("closed")

    monkeypatch.setattr(LocalBackend, "open", open_half)
    monkeypatch.setattr(LocalBackend, "close", close)
    with pytest.raises(ClusterError, match="no room"):
        train(structs.replace(run("[rollout]\nmax_tokens = 2"), runtime="local", run_dir=str(tmp_path / "run")))
    assert done == ["opened", "closed"]
