"""What every process of a run gets on a machine with faked GPUs: its command line, CUDA_VISIBLE_DEVICES, and the device and the
rank that its setup names."""

from __future__ import annotations

import asyncio
import math
import platform
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from millstream.algo.recipe import Recipe
from millstream.clock import RealClock
from millstream.config import convert
from millstream.env.rewards import RewardConfig
from millstream.env.rewards.pool import REWARD_WORKER, RewardWorkers
from millstream.errors import ConfigError, MillstreamError
from millstream.events.sinks import MemorySink
from millstream.learner.messages import RankPlace
from millstream.learner.share import own_device
from millstream.rpc.process import Kind, Launcher, LocalLauncher, engine_names
from millstream.run import build, build_scorers, one_gpu, weight_ways
from millstream.run.backend import BackendContext, LocalBackend
from millstream.run.check import check_combinations, check_config
from millstream.run.config import RunConfig, is_model_on_host
from millstream.run.device import find_device, with_places
from millstream.run.places import Gpu, Machine, Places, parse_machine, place
from millstream.run.prepare import Prepared, prepare_run
from millstream.run.sizes import ModelDevice, choose_sizes, shape_from
from millstream.types import Task
from support.processes import eventually
from support.seen_worker import ask
from support.started import Recorder, Started, recorder
from support.tiny import make

__all__ = ["recorder"]
ENGINE = "millstream.engine.native.process:serve_engine"
VLLM = "millstream.engine.vllm.worker:serve_vllm"
RANK = "millstream.learner.rank_worker:serve_rank"
SEVEN_B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
SMALL_SHAPE = shape_from({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100})
SMALL = "[model.tiny]\n[rollout]\nmax_tokens = 8\n[data]\ntoy = 'sort_digits'\nsize = 64\nholdout = 0\n"


def config_of(text: str) -> RunConfig:
    return convert(tomllib.loads(f"{text}\n{SMALL}"), RunConfig, where="run.toml")


class Faked:
    """A machine with GPUs: as torch and the driver's tool would find it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: Sequence[str]) -> None:
        self.model_devices: list[str] = []  # of the driver's model: cpu, or auto, which is the first GPU
        self._build_model = build.build_model
        found = tuple(Gpu(name=name, free_bytes=80e9) for name in gpus)
        monkeypatch.setattr(build, "find_machine_here", lambda config: Machine(nodes=(found,)))
        device = ModelDevice(is_gpu=True, free_bytes=80e9)
        monkeypatch.setattr(build, "measure_device", lambda config: device)
        monkeypatch.setattr(build, "build_model", self._build)

    def _build(self, config: Any, **more: Any) -> Any:
        self.model_devices.append(config.device)
        return self._build_model(replace(config, device="cpu"), **more)

    def prepare(self, text: str, folder: Path) -> Prepared:
        return prepare_run(replace(config_of(text), run_dir=str(folder / "run")))


def numbered(gpus: int) -> list[str]:
    return [str(number) for number in range(gpus)]


def context_of(prepared: Prepared, folder: Path) -> BackendContext:
    return BackendContext(model=prepared.model, tokenizer=None, folder=folder, clock=RealClock(), sink=MemorySink())


async def all_started(prepared: Prepared, recorder: Recorder, folder: Path) -> list[Started]:
    """Engines, then ranks; each in the order of their numbers."""
    backend, config = prepared.backend, prepared.config
    assert isinstance(backend, LocalBackend)
    await backend.open(context_of(prepared, folder))
    for name in engine_names(config.engine.num_engines) if config.engine.is_placed else ():
        engine = backend.make_engine(name)
        with suppress(MillstreamError):  # its process has ended
            await engine.resume()
        await engine.close()
    if backend.has_learner_processes(config.learner):
        recorder.together = config.learner.ranks
        recipe = Recipe(algorithm=config.algorithm)
        learner = backend.build_learner(prepared.tokenizer, learner=config.learner, recipe=recipe, num_steps=1)
        with suppress(MillstreamError):
            await learner.ready()
        await learner.close()
    await backend.close()
    ranks = sorted((one for one in recorder.started if one.target == RANK), key=lambda one: one.setup["place"]["rank"])
    return [one for one in recorder.started if one.target != RANK] + ranks


def device_of(one: Started) -> str:
    """That its setup names."""
    if one.target == VLLM:
        return "cpu" if one.setup["is_cpu"] else "cuda"
    return str(one.setup["plan"]["device"] if one.target == RANK else one.setup["device"])


@pytest.mark.parametrize(
    ("text", "gpus", "model", "engines", "ranks"),
    [
        ("", 2, "auto", ["1"], 0),
        ("", 4, "auto", ["1", "2", "3"], 0),
        ("[learner]\nranks = 2", 4, "cpu", ["2", "3"], 2),
        ("[learner]\nranks = 2\n[engine]\nkind = 'vllm'", 4, "cpu", ["2", "3"], 2),
        ("[learner]\nranks = 4\n[engine]\nkind = 'vllm'\n[engine.vllm]\ntensor_parallel = 2", 8, "cpu", ["4,5", "6,7"], 4),
        ("[learner]\nranks = 2\n[engine]\nkind = 'http'\n[engine.http]\nurls = ['http://127.0.0.1:1']\nflavour = 'vllm'\n"
         "folder = 'weights'", 2, "cpu", [], 2),
    ],
)  # fmt: skip
def test_a_driver_that_computes_nothing_has_its_model_in_the_host_s_memory_and_ranks_and_engines_have_the_gpus(
    text: str, gpus: int, model: str, engines: list[str], ranks: int,
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    faked = Faked(monkeypatch, numbered(gpus))
    prepared = faked.prepare(text, tmp_path)
    assert faked.model_devices == [model] and prepared.model.dtype == torch.bfloat16
    started = asyncio.run(all_started(prepared, recorder, tmp_path))
    target = VLLM if prepared.config.engine.kind == "vllm" else ENGINE
    assert [one.words for one in started] == [
        [sys.executable, "-m", "millstream.rpc.worker", what] for what in [target] * len(engines) + [RANK] * ranks
    ]
    assert [one.sees for one in started] == [*engines, *[None] * ranks], "a rank sees all GPUs, and takes its own"
    assert [device_of(one) for one in started] == ["cuda"] * (len(engines) + ranks)
    assert not any(one.is_warm for one in started), "a process that uses CUDA is never forked"
    setups = [one.setup for one in started if one.target == RANK]
    found = [(setup["place"]["rank"], setup["place"]["num_ranks"], setup["plan"]["dtype"]) for setup in setups]
    assert found == [(number, ranks, "bfloat16") for number in range(ranks)]


def test_on_one_gpu_engine_and_learner_are_processes_that_pass_weights_through_its_memory_if_the_config_says_so(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = Faked(monkeypatch, ["0"]).prepare("[engine]\nprocess = true", tmp_path)
    started = asyncio.run(all_started(prepared, recorder, tmp_path))
    assert [one.target for one in started] == [ENGINE, RANK]
    assert [one.sees for one in started] == [None, None] and [device_of(one) for one in started] == ["cuda", "cuda"]
    assert not any(one.is_warm for one in started), "a process that uses CUDA is never forked"
    assert started[1].setup["delivery"]["ways"] == ["ipc"] and started[1].setup["memory"] is None
    assert started[0].setup["first"] == started[1].setup["weights"], "both begin with one staged copy"


@pytest.mark.parametrize(
    ("text", "limit", "are_processes"),
    [
        ("", 1e9, True),
        ("", 1.0, False),
        ("[pipeline]\nmax_lag = 0", 1e9, False),
        ("[engine]\nprocess = true", 1.0, True),
    ],
    ids=["small", "large", "small, lockstep", "large, as typed"],
)
def test_on_one_gpu_a_small_model_is_given_processes_at_the_start(
    text: str, limit: float, are_processes: bool,
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(one_gpu, "SMALL_MODEL", limit)
    prepared = Faked(monkeypatch, ["0"]).prepare(text, tmp_path)
    assert prepared.sizes.has_processes is are_processes
    assert (prepared.config.engine.process is True) == are_processes
    if are_processes:
        started = asyncio.run(all_started(prepared, recorder, tmp_path))
        assert [one.target for one in started] == [ENGINE, RANK]


def test_ways_of_weights_are_checked_once_the_size_of_the_model_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the hub has none before it is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weight_ways, "find_shape", lambda config: None)
    faked, text = Faked(monkeypatch, ["0"]), "[resources]\nweights = ['shared']"
    one = Machine(nodes=((Gpu(name="0", free_bytes=80e9),),))
    assert any("not checked: resources.weights" in line for line in check_config(config_of(text), machine=one).findings)
    assert faked.prepare(text, tmp_path).config.engine.process
    monkeypatch.setattr(one_gpu, "SMALL_MODEL", 1.0)
    with pytest.raises(ConfigError, match=r"the engine is a thread of the run: set engine\.process = true"):
        faked.prepare(text, tmp_path)


def test_scorers_of_a_driver_whose_model_is_in_the_host_s_memory_are_where_the_learner_is_or_the_config_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that needs no GPU is in the place of one."""
    made: list[tuple[str, str]] = []
    for part in ("TorchScorer", "TorchCritic"):
        record = partial(lambda part, model, *_, **more: made.append((more.get("name", part), model.device.type)), part)
        monkeypatch.setattr(build_scorers, part, record)
    text = "[algorithm]\nadvantage = 'gae'\n[reference]\n[proximal]\n[learner]\nranks = 2\nmini_batches = 2\n"
    for device, where in (("", "meta"), ("device = 'cpu'\n", "cpu")):
        made.clear()
        config = convert(
            tomllib.loads(f"{text}[critic]\n{device}{SMALL}".replace("[reference]\n", f"[reference]\n{device}")),
            RunConfig,
            where="run.toml",
        )
        on_threads: Any = SimpleNamespace(device="meta", has=lambda table: False)
        build_scorers.build_scorers(config, make("llama"), None, on_threads)
        assert made == [("TorchScorer", where), ("proximal", "meta"), ("TorchCritic", where)]


def test_the_first_gpu_has_room_for_what_the_driver_s_model_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    text, there = "[learner]\nranks = 4\n[rollout]\nmax_tokens = 4096\n", parse_machine("8xH100")
    shape = shape_from(SEVEN_B)
    assert shape is not None

    def needed(more: str) -> float:
        loaded = tomllib.loads(f"{text}{more}\n[model.tiny]\n[data]\ntoy = 'sort_digits'\n")
        config, places = place(convert(loaded, RunConfig, where="run.toml"), there)
        assert is_model_on_host(config) == (len(places.ranks) > 1 and (bool(places.engines) or "http" in more))
        found = choose_sizes(config, with_places(find_device(config, there), places), shape).needed_gb
        return found or 0.0

    http = "[engine]\nkind = 'http'\n[engine.http]\nurls = ['http://a:1']\nflavour = 'vllm'\nfolder = '/w'"
    fixed = "micro_batch_tokens = 4096\n"
    text = text.replace("ranks = 4\n", f"ranks = 4\n{fixed}")
    own = needed("[engine]\nkind = 'mine.py:Engine'")
    assert needed("") == needed(http) < own - 2 * shape.parameters / 1e9


def test_the_memory_of_a_gpu_on_which_the_driver_computes_nothing_is_asked_of_the_driver_s_tool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(build, "choose_device", lambda asked: "cuda")
    monkeypatch.setattr(
        build, "find_device", lambda config: asked.append("tool") or ModelDevice(is_gpu=True, free_bytes=5e9)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: asked.append("torch") or (6e9, 8e9))

    def free(text: str) -> float | None:
        return build.measure_device(config_of(text)).free_bytes

    assert (free("[learner]\nranks = 2"), free("[learner]\nranks = 1")) == (5e9, 6e9)
    assert asked == ["tool", "torch"], "torch would make a context on that GPU"
    monkeypatch.setattr(build, "find_device", lambda config: ModelDevice(is_gpu=True))
    assert free("[learner]\nranks = 2") == 6e9, "there is no such tool"


@pytest.mark.parametrize(
    ("release", "is_shareable"), [("6.8.0-45-generic", True), ("5.15.90-microsoft-standard-WSL2", False)]
)
def test_on_wsl_no_process_is_expected_to_open_the_memory_of_another_on_the_gpu(
    release: str, is_shareable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_device", lambda asked: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6e9, 8e9))
    monkeypatch.setattr(platform, "release", lambda: release)
    assert build.measure_device(config_of("")).is_shareable == is_shareable
    here = Machine(nodes=((Gpu(name="0", free_bytes=5e9),),))
    assert find_device(config_of(""), here).is_shareable == is_shareable, "a dry run knows it, too"
    assert find_device(config_of(""), parse_machine("1xH100")).is_shareable, "another machine"


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_expand_are_not_expected_to_be_opened_by_other_processes(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Machine(nodes=((Gpu(name="0", free_bytes=5e9),),))
    for value, is_shareable in (("max_split_size_mb:512", True), ("a:1, Expandable_Segments: True", False)):
        monkeypatch.setenv(variable, value)
        assert find_device(config_of(""), here).is_shareable == is_shareable


def test_engines_with_gpus_of_their_own_are_known_where_no_memory_is() -> None:
    unknown = Machine(nodes=((Gpu(name="0"), Gpu(name="1")),))
    config, places = place(config_of(""), unknown)
    for found in (ModelDevice(is_gpu=True), ModelDevice(is_gpu=True, free_bytes=80e9)):
        device = with_places(found, places)
        assert device.engine_bytes == (found.free_bytes or math.inf), "GPUs of one machine are taken to be alike"
        assert one_gpu.with_process(config, device, SMALL_SHAPE) is config
        assert choose_sizes(config, device, SMALL_SHAPE).free_gb == (80.0 if found.free_bytes else None)


def test_an_engine_that_would_be_another_process_is_refused_on_a_gpu_for_one() -> None:
    one = Machine(nodes=((Gpu(name="0", free_bytes=80e9, is_exclusive=True),),))
    for text in ("[engine]\nprocess = true", "[engine]\nkind = 'vllm'"):
        with pytest.raises(ConfigError, match=r"for one process at a time .*type nvidia-smi -c DEFAULT"):
            place(config_of(text), one)


def test_on_a_gpu_for_one_process_a_small_model_has_threads() -> None:
    for is_exclusive in (False, True):
        one = Machine(nodes=((Gpu(name="0", free_bytes=80e9, is_exclusive=is_exclusive),),))
        config, places = place(config_of(""), one)
        device = with_places(find_device(config, one), places)
        assert one_gpu.with_process(config, device, SMALL_SHAPE).engine.process is (None if is_exclusive else True)


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    ("kind", "sees"), [("rollout", ""), ("environment", ""), ("reward", ""), ("engine", "0,1"), ("learner", "0,1")]
)
def test_processes_of_rollouts_environments_and_rewards_see_no_gpu(
    kind: Kind, sees: str, is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert seen_by(LocalLauncher(is_warm=is_warm), kind) == sees


def test_rewards_that_are_models_ask_for_the_gpus_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    asked = config_of("[resources]\nreward_gpus = 1")
    check_combinations(asked)
    launcher = LocalBackend(asked, Places()).launcher
    assert launcher is not None and LocalBackend(config_of(""), Places()).launcher is None
    assert [seen_by(launcher, "reward"), seen_by(launcher, "environment")] == ["0,1", ""]
    with pytest.raises(
        ConfigError, match=r"rollout.workers = 2, and resources.reward_gpus = 1: .* leave reward_gpus out"
    ):
        check_combinations(replace(asked, rollout=replace(asked.rollout, workers=2)))


def seen_by(launcher: Launcher, kind: Kind) -> str | None:
    """CUDA_VISIBLE_DEVICES of a process that is started."""
    worker = launcher.launch(kind, "support.seen_worker:serve_seen", name="a worker")
    with worker.connection:
        found = ask(worker)
    worker.exit_reason(10)
    return found.gpus


def test_gpus_that_have_names_are_given_by_their_names(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UUIDs, and slices of a GPU, as the driver's own CUDA_VISIBLE_DEVICES has them: a rank sees all of these."""
    names = ["GPU-8f", "MIG-5c", "GPU-1a", "GPU-3b", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    text = "[learner]\nranks = 2\n[engine]\nkind = 'vllm'\nreplicas = 1\n[engine.vllm]\ntensor_parallel = 2"
    prepared = Faked(monkeypatch, names).prepare(text, tmp_path)
    started = asyncio.run(all_started(prepared, recorder, tmp_path))
    assert [one.sees for one in started] == ["GPU-1a,GPU-3b", *[",".join(names)] * 2]
    assert started[0].setup["vllm"]["tensor_parallel"] == 2


@pytest.mark.parametrize(("visible", "rank", "own"), [(1, 3, 0), (4, 3, 3), (8, 0, 0)])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(
    visible: int, rank: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert own_device("cuda", RankPlace(rank=rank, num_ranks=4)) == torch.device("cuda", own)
    assert own_device("cpu", RankPlace(rank=rank, num_ranks=4)) == torch.device("cpu")


def test_a_reference_of_several_processes_has_a_gpu_for_each_which_is_all_that_it_sees(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[learner]\nranks = 2\n[reference]\nranks = 2\n"
    prepared = Faked(monkeypatch, numbered(8)).prepare(text, tmp_path)
    backend = prepared.backend

    async def start() -> None:
        await backend.open(context_of(prepared, tmp_path))
        recorder.together = 3  # they do not end until both are here
        scorers = await asyncio.to_thread(backend.build_scorers, None, lambda make: pytest.fail("there is no critic"))
        starting = asyncio.create_task(scorers.ready())
        assert await asyncio.to_thread(eventually, lambda: len(recorder.started) == 2)
        starting.cancel()
        recorder.end_all()
        await scorers.close()
        await backend.close()

    asyncio.run(start())
    found = sorted(recorder.started[:2], key=lambda one: one.setup["place"]["rank"])
    assert [(one.target, one.sees, one.setup["device"], one.is_warm) for one in found] == [
        ("millstream.learner.scorer_worker:serve_scorer", gpu, "cuda", False) for gpu in ("2", "3")
    ]
    assert [(one.setup["place"]["rank"], one.setup["place"]["num_ranks"]) for one in found] == [(0, 2), (1, 2)]
    assert [gpu.name for gpus in prepared.places.engines for gpu in gpus] == ["4", "5", "6", "7"]


def test_a_reward_in_a_process_is_a_program_of_its_own_that_sees_no_gpu(recorder: Recorder) -> None:
    workers = RewardWorkers(RewardConfig(function="exact_match", process=True, workers=1))

    async def call() -> None:
        with pytest.raises(MillstreamError):
            await workers.call(Task(id="0", prompt="", answer=""), "")

    asyncio.run(call())
    assert eventually(lambda: bool(recorder.started))
    assert {(*one.words, one.sees) for one in recorder.started} == {
        (sys.executable, "-m", "millstream.rpc.worker", REWARD_WORKER, "")
    }
