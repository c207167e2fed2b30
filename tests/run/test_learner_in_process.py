"""A learner that is a process on the device of the engine's process and publishes its weights by itself, as on one GPU. Here on
a CPU, through the host's memory instead of the GPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs
from safetensors.torch import load_file

from millstream import train
from millstream.audit import audit
from millstream.config import load
from millstream.engine.processes import LocalWeights
from millstream.errors import ConfigError
from millstream.events import Event, Stepped
from millstream.run import build
from millstream.run.check import check_config
from millstream.run.config import RunConfig
from millstream.run.one_gpu import with_process
from millstream.run.places import Gpu, Machine
from millstream.run.replay import ReplayedLearner
from millstream.run.sizes import CPU, ModelDevice
from millstream.types import Weights
from millstream.weights.remote import RemoteChannel
from millstream.weights.transfer.remote_weights import RemoteWeights
from support.runs import ROOT, step_rows

REWARD = "def spread(task, completion):\n    return sum(map(ord, completion)) % 7\n"


def config_of(folder: Path, *changes: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(REWARD)
    reward = f"reward=[{{function='{folder}/rewards.py:spread'}}]"
    small = [
        "data.size=100",
        "data.holdout=0",
        "evaluation.every_steps=",
        "rollout.max_tokens=8",
        "warmup=",
        "engine.process=true",
        "pipeline.steps=3",
        reward,
    ]
    return load(ROOT / "recipes/demo.toml", RunConfig, [*small, f"run_dir={folder / 'run'}", *changes])


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What learners publish while the backend does on a CPU what it does on a GPU."""
    found: list[Any] = []
    original = LocalWeights.publish

    def publish(self: LocalWeights, version: int, weights: Any) -> Any:
        found.append(weights)
        return original(self, version, weights)

    monkeypatch.setattr(build, "publishes_by_itself", lambda *_, **__: True)
    monkeypatch.setattr(LocalWeights, "publish", publish)
    return found


def test_in_lockstep_its_run_gives_the_weights_of_one_process_bit_for_bit(
    tmp_path: Path, published: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = ("pipeline.max_lag=0", "checkpoint.every_steps=1")
    train(config_of(tmp_path / "apart", *same))
    assert len(published) >= 3 and all(isinstance(weights, RemoteWeights) for weights in published)
    monkeypatch.undo()
    train(config_of(tmp_path / "one", *same, "engine.process=false"))
    found = [(tmp_path / name / "run/model/model.safetensors").read_bytes() for name in ("apart", "one")]
    assert found[0] == found[1]
    assert all(row["grad_norm"] > 0 for row in step_rows(tmp_path / "one/run")), "something was trained"
    assert audit(tmp_path / "apart/run").is_clean


def kill_learners() -> list[int]:
    ranks = [one for one in psutil.Process().children(recursive=True) if "rank_worker" in " ".join(one.cmdline())]
    for rank in ranks:
        rank.kill()
    return [rank.pid for rank in ranks]


class Killer:
    """Kills the learner's process after the second step."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.version == 2:
            self.killed += kill_learners()


def test_engines_get_a_version_that_was_lost_with_the_learner_before_they_had_fetched_it(
    tmp_path: Path, published: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, weights_of = RemoteChannel.publish, ReplayedLearner.weights_of
    killed, staged_again = list[int](), list[int]()

    def lose(weights: RemoteWeights) -> None:
        """The process that has staged them, and the memory that they are in."""
        killed.extend(kill_learners())
        Path(weights.ref.path).unlink()

    async def publish_and_lose(self: RemoteChannel, version: int, weights: Weights) -> None:
        await publish(self, version, weights)
        if version == 2 and isinstance(weights, RemoteWeights):
            lose(weights)

    async def stage_again(self: ReplayedLearner, version: int) -> Weights | None:
        staged_again.append(version)
        return await weights_of(self, version)

    monkeypatch.setattr(RemoteChannel, "publish", publish_and_lose)
    monkeypatch.setattr(ReplayedLearner, "weights_of", stage_again)
    train(config_of(tmp_path, "pipeline.steps=4", "checkpoint.every_steps=1"))
    assert len(killed) == 1 and staged_again == [2]
    assert [row["step"] for row in step_rows(tmp_path / "run")][-1] == 4
    assert audit(tmp_path / "run").is_clean


def test_a_killed_learner_is_replaced(tmp_path: Path, published: list[Any]) -> None:
    killer = Killer()
    train(config_of(tmp_path, "pipeline.steps=6", "checkpoint.every_steps=1"), sinks=[killer])
    assert len(killer.killed) == 1
    assert [row["step"] for row in step_rows(tmp_path / "run")][-1] == 6
    assert audit(tmp_path / "run").is_clean


def test_adapters_begin_with_what_the_warm_up_has_trained(tmp_path: Path, published: list[Any]) -> None:
    """`published`: as on a GPU. No step of the run itself changes them."""
    adapters = "learner.lora={rank=4}"
    warm_up = "warmup={max_steps=6, batch_size=8, learning_rate=0.01}"
    config = config_of(tmp_path, "pipeline.steps=1", "learner.learning_rate=1e-12", adapters, warm_up)
    train(config)
    saved = load_file(tmp_path / "run/model/adapter/adapter_model.safetensors")
    trained = [float(value.abs().sum()) for name, value in saved.items() if "lora_B" in name]
    assert trained and min(trained) > 0.01, "before any step of training all of them are zero"
    assert published


def test_a_run_that_only_keeps_rollouts_has_no_learner_to_start(tmp_path: Path, published: list[Any]) -> None:
    config = config_of(tmp_path, "pipeline.rollouts_only=true", "pipeline.steps=1")
    assert not build.has_learner_process(config, "cuda", config.learner)
    train(config)
    assert not any(isinstance(weights, RemoteWeights) for weights in published)
    assert audit(tmp_path / "run").is_clean


def test_a_share_of_the_gpu_and_processes_that_take_turns_on_it_are_refused_together(tmp_path: Path) -> None:
    config, one = config_of(tmp_path, "learner.gpu_share=0.5"), ModelDevice(is_gpu=True, free_bytes=80e9)
    with pytest.raises(ConfigError, match=r"gpu_share with engine\.process = true.*take turns"):
        with_process(config, one, None)
    machine = Machine(nodes=((Gpu(name="0", free_bytes=80e9),),))
    with pytest.raises(ConfigError, match="take turns"):
        check_config(config, machine=machine)
    for elsewhere in (CPU, structs.replace(one, engine_bytes=80e9)):
        assert with_process(config, elsewhere, None) is config
