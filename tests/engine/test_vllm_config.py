"""`engine.kind = "vllm"` as far as it can be tested without vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from millstream.clock import RealClock
from millstream.decoding import decode_msgpack
from millstream.engine import EngineConfig
from millstream.engine.base import NO_REQUEST
from millstream.engine.http.config import HttpConfig
from millstream.engine.native.worker import Abort, WorkerReport
from millstream.engine.vllm.arguments import VllmSetup, engine_arguments, set_environment
from millstream.engine.vllm.config import VllmConfig, check_args
from millstream.engine.vllm.extension import WorkerExtension
from millstream.engine.vllm.worker import Commands, VllmRequest, VllmWorker, serve_vllm
from millstream.env.data import DataConfig
from millstream.errors import ConfigError, EngineError, WeightsError
from millstream.events.sinks import MemorySink
from millstream.learner import LearnerConfig
from millstream.model.adapters import add_adapters, merged, trained_weights
from millstream.model.load import model_weights
from millstream.model.lora import LoraConfig
from millstream.model.shared_memory import Layout
from millstream.rpc.call import Packet, PacketKind
from millstream.rpc.frames import Frames, frame
from millstream.run.build import build_engine
from millstream.run.check import check_combinations, check_config
from millstream.run.config import ModelConfig, RunConfig, TinyConfig
from millstream.weights import TransferWay
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.publisher import WeightsPublisher
from support.tiny import make, request

VLLM = EngineConfig(kind="vllm")


def ref(*shapes: tuple[str, tuple[int, ...]]) -> WeightsRef:
    return WeightsRef(
        version=0,
        serial=0,
        layout=Layout(tensors=[(name, "float32", shape) for name, shape in shapes]),
        digests=[],
        bucket_bytes=64,
        node="",
        path="/nowhere",
        offers={"shared": b""},
    )


def setup(*, is_cpu: bool = True, **vllm: object) -> VllmSetup:
    return VllmSetup(
        files={},
        first=ref(("bias", (2,)), ("weight", (2, 2))),
        slots=6000,
        prefill_tokens=4096,
        max_length=256,
        num_words=32,
        dtype="float32",
        is_cpu=is_cpu,
        vllm=VllmConfig(**vllm),  # type: ignore[arg-type]
    )


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_type_before_a_run_and_in_it() -> None:
    expected = r'vLLM is not installed here: pip install vllm.*docs/engines-vllm\.md.*engine\.kind = "torch"'
    with pytest.raises(ConfigError, match=expected):
        build_engine(VLLM, make("llama"), clock=RealClock(), sink=MemorySink())
    with pytest.raises(ConfigError, match=expected):
        check_config(RunConfig(model=ModelConfig(tiny=TinyConfig()), engine=VLLM, data=DataConfig(toy="sort_digits")))


def test_the_guide_that_the_error_names_is_there() -> None:
    assert (Path(__file__).parents[2] / "docs/engines-vllm.md").is_file()


def test_a_table_that_nothing_would_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r'\[engine\.vllm\] table.*kind = "torch"'):
        EngineConfig(vllm=VllmConfig())


@pytest.mark.parametrize("wrong", [{"tensor_parallel": 0}, {"memory": 1.5}, {"cache_gib": 0.0}, {"max_model_len": 1}])
def test_values_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VllmConfig(**wrong)  # type: ignore[arg-type]


def test_adapters_go_with_vllm() -> None:
    learner = LearnerConfig(lora=LoraConfig(rank=4))
    check_combinations(RunConfig(model=ModelConfig(tiny=TinyConfig()), engine=VLLM, learner=learner))


def arguments(setup: VllmSetup) -> dict[str, Any]:
    return engine_arguments(setup, Path("folder"))


def test_every_option_reaches_vllm() -> None:
    options = {"tensor_parallel": 2, "cache_gib": 2.5, "prefix_cache": False, "args": {"quantization": "fp8"}}
    given = arguments(setup(is_cpu=False, **options))
    assert given["quantization"] == "fp8" and given["distributed_executor_backend"] == "mp"
    assert arguments(setup())["distributed_executor_backend"] == "uni", "not Ray, also in its actors"
    assert arguments(setup(memory=0.7))["gpu_memory_utilization"] == 0.7
    assert given["tensor_parallel_size"] == 2 and given["gpu_memory_utilization"] == 0.4
    assert given["kv_cache_memory_bytes"] == int(2.5 * 2**30) and given["enable_prefix_caching"] is False
    assert given["load_format"] == "dummy" and given["enforce_eager"] is False
    assert given["max_num_batched_tokens"] == given["max_num_seqs"] == 6000, "vLLM wants room for a token of each"
    assert arguments(setup(is_cpu=False))["kv_cache_memory_bytes"] is None
    assert given["enable_chunked_prefill"] and not arguments(setup())["enable_chunked_prefill"]
    assert arguments(setup())["kv_cache_memory_bytes"] == 2**30 and arguments(setup())["enforce_eager"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tensor_parallel_size": 2}, r"set engine\.vllm\.tensor_parallel instead"),
        ({"max_num_seqs": 2}, r"set engine\.slots instead"),
        ({"logprobs_mode": "raw_logprobs"}, "which the run itself sets: leave it out"),
        ({"pipeline_parallel_size": 2}, "which the run itself sets"),
    ],
)
def test_arguments_that_have_a_key_or_that_guarantees_depend_on_are_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VllmConfig(args=args)


def test_arguments_that_this_vllm_does_not_have_are_refused_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm/engine").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('it is not imported')")
    source = "class EngineArgs:\n    model: str = ''\n    quantization: str | None = None\n\nclass AsyncEngineArgs(EngineArgs): ...\n"
    (tmp_path / "vllm/engine/arg_utils.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    check_args(VllmConfig(args={"quantization": "fp8"}))
    with pytest.raises(ConfigError, match=r"engine\.vllm\.args has quantisation, .*Did you mean quantization\?"):
        check_args(VllmConfig(args={"quantisation": "fp8"}))


def test_keys_and_values_are_kept_or_computed_again_by_one_key_for_every_engine_that_can() -> None:
    for kind in ("torch", "vllm"):
        assert EngineConfig(kind=kind, on_update="recompute").on_update == "recompute"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whose servers decide"):
        EngineConfig(
            kind="http", on_update="recompute", http=HttpConfig(urls=("http://a:1",), flavour="vllm", folder="/w")
        )


def test_what_the_user_has_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    set_environment(setup())
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and os.environ["OMP_NUM_THREADS"] == "7"


def test_vllm_on_a_thread_of_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r'process = false with kind = "vllm".*leave it out'):
        EngineConfig(kind="vllm", process=False)
    assert EngineConfig(kind="vllm", process=True).process


class Worker(WorkerExtension):
    """A worker of vLLM, as far as a reload of weights needs it: its model takes some of them and returns which."""

    def __init__(self, taken: set[str]) -> None:
        self.device = "cpu"
        self.model: Any = torch.nn.Linear(2, 2)
        self.model.load_weights = lambda weights: taken
        self.get_model = lambda: self.model

    def reload_weights(self, **source: Any) -> None:
        self.model.load_weights(source)


def test_a_layer_that_no_weights_came_for_is_an_error_and_not_a_warning() -> None:
    with pytest.raises(WeightsError, match="no weights for bias"):
        Worker({"weight"})._millstream_reload()


def test_a_token_that_was_sampled_before_the_weights_it_would_be_recorded_for_breaks_the_engine() -> None:
    worker = VllmWorker(setup(), lambda report: None)
    worker._version, worker._loaded_at = 3, 100.0
    asked = VllmRequest(request(0, (4, 5)), None, is_watched=False)

    def sampled_at(seconds: float) -> Any:
        part = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}], finish_reason=None)
        return SimpleNamespace(outputs=[part], finished=False, metrics=SimpleNamespace(last_token_ts=seconds))

    worker._take(asked, sampled_at(100.5))
    assert asked.versions == [3]
    with pytest.raises(EngineError, match="before version 3 came late"):
        worker._take(asked, sampled_at(99.5))


def test_a_report_that_cannot_be_sent_and_a_reader_that_fails_break_the_engine() -> None:
    reports = list[WorkerReport]()

    def send(report: WorkerReport) -> None:
        if report.done:
            raise RuntimeError("a report was lost")
        reports.append(report)

    async def broken_by(*commands: Any) -> str:
        worker = VllmWorker(setup(), send)
        output_handler = asyncio.get_running_loop().create_future()
        worker._llm = SimpleNamespace(output_handler=output_handler, shutdown=lambda timeout: None)
        queue: Commands = asyncio.Queue()
        for command in commands:
            queue.put_nowait(command)
        await asyncio.wait_for(worker.run(queue), 60)
        return str(reports[-1].broken)

    assert asyncio.run(broken_by(Abort(7, NO_REQUEST))) == "RuntimeError: a report was lost"
    assert asyncio.run(broken_by(KeyError("a line"))) == "KeyError: 'a line'"


def test_weights_of_another_shape_or_name_are_refused_when_they_are_offered() -> None:
    worker = VllmWorker(setup(), lambda report: None)
    for wrong in (ref(("bias", (3,)), ("weight", (2, 2))), ref(("weight", (2, 2)))):
        with pytest.raises(EngineError, match=r"do not fit: \['bias'\]"):
            worker.offer(wrong)


def test_with_adapters_they_alone_are_what_is_offered() -> None:
    shapes = {"a.base_layer.weight": (2, 2), "a.lora_A.default.weight": (1, 2), "a.lora_B.default.weight": (2, 1)}
    begun = structs.replace(setup(), first=ref(*shapes.items()), scaling=2.0)
    worker = VllmWorker(begun, lambda report: None)
    fetched = list[WeightsRef]()
    worker._fetch = fetched.append  # type: ignore[method-assign]
    adapters = list(shapes.items())[1:]
    worker.offer(ref(*adapters))
    assert len(fetched) == 1
    for wrong, name in ((shapes.items(), "a.base_layer.weight"), (adapters[1:], "a.lora_A.default.weight")):
        with pytest.raises(EngineError, match=rf"do not fit: \['{name}'\]"):
            worker.offer(ref(*wrong))


def fetched(worker: Worker, published: WeightsRef) -> str:
    """The line that says what became of it."""
    reading, writing = os.pipe()
    worker.millstream_fetch(msgspec.json.encode(published).decode(), f"/proc/{os.getpid()}/fd/{writing}")
    with os.fdopen(reading) as lines:
        line = lines.readline()
    os.close(writing)
    return line


def test_weights_come_out_of_the_memory_that_they_were_published_in_and_are_released_when_they_are_loaded(
    tmp_path: Path,
) -> None:
    publisher = WeightsPublisher(tmp_path / "staged", node="", ways=["shared"])
    worker = Worker({"weight", "bias"})
    found = dict[str, torch.Tensor]()
    worker.model.load_weights = lambda weights: found.update((n, t.clone()) for n, t in weights) or found.keys()
    worker.reload_weights = lambda weights_iterator: worker.model.load_weights(weights_iterator)
    sent = {"weight": torch.randn(2, 2), "bias": torch.randn(2)}
    published = publisher.put(1, sent.items())
    assert fetched(worker, published) == '"shared"\n', "they are there, and nothing is loaded yet"
    assert not found
    with pytest.raises(ImportError):  # after the reload: the packing of heads needs vLLM
        worker.millstream_load()
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    with pytest.raises(WeightsError, match="none were fetched"):
        worker.millstream_load()
    publisher.close()
    before = worker._millstream_fetcher
    assert '"WeightsUnreachable"' in fetched(worker, published), "why not, as the error that the run gets"
    assert worker._millstream_fetcher is before is not None, "it remembers ways that do not work"


class AdaptedWorker(Worker):
    """Its model is an ordinary one, and what is loaded into it can be read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(set())
        self.model = make("qwen2")
        self.model_config = SimpleNamespace(dtype=dtype)
        self.loaded = dict[str, torch.Tensor]()
        self.get_model = self._ready

    def _ready(self) -> Any:
        self.model.load_weights = self._take
        return self.model

    def _take(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        self.loaded = {name: weight.clone() for name, weight in weights}
        return set(self.loaded)

    def reload_weights(self, **source: Any) -> None:
        self.model.load_weights(source["weights_iterator"])


@pytest.mark.parametrize("way", ["shared", "files"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_version_of_adapters_is_merged_with_the_weights_of_the_beginning_and_these_outlive_who_published_them(
    way: TransferWay, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as in a model that is saved. An adapter that comes again gives the weights that it gave before."""
    monkeypatch.setattr("millstream.engine.vllm.extension._pack_tied_heads", lambda model: None)
    model, worker = make("qwen2"), AdaptedWorker(dtype)
    add_adapters(model, LoraConfig(rank=4, alpha=6.0), seed=1)

    def published(number: int, weights: dict[str, torch.Tensor]) -> tuple[WeightsPublisher, WeightsRef]:
        publisher = WeightsPublisher(tmp_path / "staged", node="", ways=[way], files=tmp_path / "files")
        return publisher, publisher.put(number, weights.items())

    for number, seed in enumerate((1, 2, 3, 2)):
        torch.manual_seed(seed)
        for adapter in trained_weights(model).values():
            adapter.data.normal_(std=0.05)
        begins = number == 0
        publisher, version = published(number, model_weights(model) if begins else trained_weights(model))
        assert fetched(worker, version) == f'"{way}"\n'
        if begins:
            worker.millstream_begin(1.5)
        else:
            worker.millstream_load()
        for file in (tmp_path / "files").rglob("*.safetensors"):
            with file.open(
                "r+b"
            ) as opened:  # on a file system of several nodes a removed file takes its mapped pages with it
                opened.write(bytes(file.stat().st_size))
        publisher.close()
        expected = model_weights(merged(model))
        assert worker.loaded.keys() == expected.keys() == model_weights(worker.model).keys()
        for name, found in worker.loaded.items():
            assert torch.equal(found.to(dtype), expected[name].to(dtype)), (number, name)
    assert worker.loaded["model.layers.0.mlp.up_proj.weight"].dtype == dtype, "rounded once, here"
    with pytest.raises(WeightsError, match="none were fetched"):
        worker.millstream_load()


@pytest.mark.timeout(120)
def test_a_vllm_that_does_not_start_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it sets variables, as in a process of its own
    ours, theirs = socket.socketpair()
    ours.sendall(frame((PacketKind.CALL, 1, setup())))
    serve_vllm(theirs)  # there is no such folder, or no vLLM
    packet = decode_msgpack(Frames(ours).first() or b"", Packet)
    assert packet.kind is PacketKind.FAILURE and b"Error: " in bytes(packet.body)
