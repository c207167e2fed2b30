"""A run on Ray is the run that it is on one machine. `make test-ray`."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from millstream import RunConfig
from millstream.algo.recipe import Recipe
from millstream.cluster.resources import ResourcesConfig
from millstream.engine import EngineConfig
from millstream.env.data import DataConfig
from millstream.learner import LearnerConfig
from millstream.model.load import model_weights
from millstream.rpc.frames import Frames, frame
from millstream.run.config import ModelConfig, TinyConfig
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.slots import OWNER_SUFFIX
from support.runs import assert_clean
from support.tiny import CONFIGS, make

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

RECIPE = """
seed = 0
[model.tiny]
hidden = 32
[data]
toy = "sort_digits"
size = 2000
holdout = 16
[warmup]
learning_rate = 2e-3
max_steps = 80
check_every = 80
[engine]
slots = 64
[rollout]
group_size = 4
max_tokens = 8
[pipeline]
steps = 6
groups_per_step = 4
max_lag = 0
[algorithm]
loss = "ppo"
[learner]
learning_rate = 4e-4
"""


def train(folder: Path, name: str, *changes: str) -> Path:
    recipe, run = folder / "recipe.toml", folder / name
    recipe.write_text(RECIPE)
    changes = (*changes, f"run_dir={run}")
    words = [sys.executable, "-m", "millstream.cli.main", "train", str(recipe)]
    words += [word for change in changes for word in ("--set", change)]
    subprocess.run(words, check=True, timeout=500, stdout=subprocess.DEVNULL)
    assert_clean(run)
    return run


def test_with_max_lag_0_a_run_on_ray_has_the_weights_of_a_local_one_bit_for_bit(tmp_path: Path) -> None:
    local, ray = train(tmp_path, "local"), train(tmp_path, "ray", "runtime=ray")
    assert (local / "model/model.safetensors").read_bytes() == (ray / "model/model.safetensors").read_bytes()


def test_a_connection_without_a_ticket_is_closed_and_a_ticket_is_valid_once() -> None:
    from millstream.cluster.actor import RayHello
    from millstream.cluster.driver import ConnectionListener

    listener = ConnectionListener("127.0.0.1")
    coming = listener.expect("secret")

    def call(message: bytes) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", listener.port), timeout=10)
        line.sendall(message)
        return line

    strangers = [call(frame(RayHello("guess", os.getpid(), "n"))), call(b"GET / HTTP/1.1\r\n\r\n"), call(frame(["x"]))]
    strangers[1].shutdown(socket.SHUT_WR)
    assert [Frames(line).first() for line in strangers] == [None, None, None]
    assert not coming.done()
    call(frame(RayHello("secret", 7, "n")))
    _, hello = coming.result(10)
    assert hello.pid == 7
    assert Frames(call(frame(RayHello("secret", 8, "n")))).first() is None
    listener.close()


class Tired:
    """A listening socket that is out of descriptors for once."""

    def __init__(self, server: socket.socket) -> None:
        self._server, self.num_asked = server, 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._server.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._server, name)


def test_a_listener_that_could_not_accept_one_connection_accepts_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.cluster.actor import RayHello
    from millstream.cluster.driver import ConnectionListener

    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *address, **options: Tired(create(*address, **options)))
    listener = ConnectionListener("127.0.0.1")
    coming = listener.expect("secret")
    with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as line:
        line.sendall(frame(RayHello("secret", 7, "n")))
        assert coming.result(10)[1].pid == 7
    listener.close()


def test_a_process_whose_work_raises_is_gone_at_once_and_its_log_says_why() -> None:
    ours, theirs = socket.socketpair()
    program = "import socket, sys; from millstream.cluster.actor import serve_connection; serve_connection('json:loads', socket.socket(fileno=int(sys.argv[1])))"
    with (
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", f"{program}; import time; time.sleep(600)", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            process_group=0,
        ) as process,
    ):
        theirs.close()
        ours.settimeout(60)
        assert ours.recv(1) == b""
        assert process.wait(10) != 0 and b"the JSON object must be str" in process.communicate()[1]


def test_of_a_cluster_that_is_closed_nothing_is_ended_and_none_is_started_to_look_for_it() -> None:
    import ray

    from millstream.cluster.actor import RayHello
    from millstream.cluster.driver import RayWorker

    line, _ = socket.socketpair()
    RayWorker(object(), Future(), line, RayHello(ticket="", pid=7, node="there")).kill()
    assert not ray.is_initialized()


def test_a_stop_while_a_cluster_is_being_opened_waits_for_it_and_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from millstream.run import ray_backend as ray_site

    begun, told = threading.Event(), list[str]()

    class Slow:
        def __init__(self, resources: Any, placement: Any, stopping: threading.Event) -> None:
            begun.set()
            told.append("stopped" if stopping.wait(10) else "not told")

        def close(self) -> None:
            told.append("closed")

    monkeypatch.setattr(ray_site, "Cluster", Slow)
    config = RunConfig(model=ModelConfig(tiny=TinyConfig()), data=DataConfig(toy="sort_digits", size=8), runtime="ray")
    site: Any = ray_site.RayBackend(config)

    async def program() -> None:
        opening = asyncio.create_task(site.open(SimpleNamespace(model=None, folder=Path("nowhere"))))
        await asyncio.to_thread(begun.wait, 10)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await site.close()

    asyncio.run(program())
    assert told == ["stopped", "closed"]


def test_a_run_waits_for_nodes_that_are_still_joining_but_not_longer_than_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Ray's own way of several nodes on one machine; the second one joins while the first reservation waits."""
    import threading

    import ray
    from ray.cluster_utils import Cluster as Nodes

    from millstream.cluster.driver import Cluster
    from millstream.cluster.resources import ResourcesConfig, placement_of
    from millstream.errors import ClusterError

    folder = tempfile.mkdtemp(prefix="ms-")  # a short name: Ray's sockets are in it
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    memory = 100 << 20
    nodes = Nodes(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": memory, "include_dashboard": False}
    )
    try:
        impatient = ResourcesConfig(address=nodes.address, patience_s=1.0)
        placement = placement_of(impatient, replicas=1, ranks=2)
        with pytest.raises(ClusterError, match="too small: engines and ranks need 3 CPU, and it has 1 CPU"):
            Cluster(impatient, placement, threading.Event())
        patient = ResourcesConfig(address=nodes.address, patience_s=60.0)
        with ThreadPoolExecutor(1) as thread:
            opening = thread.submit(lambda: Cluster(patient, placement, threading.Event()))
            assert not futures.wait([opening], 2.0).done, "it waits"
            nodes.add_node(num_cpus=2, object_store_memory=memory)
            opening.result(60).close()
        stopping = threading.Event()
        threading.Timer(1.0, stopping.set).start()
        with pytest.raises(ClusterError, match="stopped while waiting for all of 9 CPU"):
            Cluster(ResourcesConfig(address=nodes.address), placement_of(impatient, replicas=1, ranks=8), stopping)
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def site_of(config: RunConfig, **cluster: Any) -> Any:
    """A site whose cluster is this process alone."""
    from millstream.run.ray_backend import RayBackend

    site: Any = RayBackend(config)
    alone = {"node": "", "host": "127.0.0.1", "is_on_loopback": True, "close": lambda: None}
    site._cluster = SimpleNamespace(**alone | cluster)
    return site


CONFIG = RunConfig(model=ModelConfig(tiny=TinyConfig()), data=DataConfig(toy="sort_digits"), runtime="ray")


def test_engines_beside_other_ranks_than_the_first_have_a_way_to_its_weights() -> None:
    shared_gpus = ResourcesConfig(colocate=True, engine_gpus=0.5, learner_gpus=0.5)
    two = structs.replace(
        CONFIG, resources=shared_gpus, learner=LearnerConfig(ranks=2), engine=EngineConfig(replicas=2)
    )
    site = site_of(two)
    assert site._delivery(is_of_rank=True).ways == ("ipc", "shared")
    assert site._delivery(is_of_rank=False).ways == ("shared",)
    asked = structs.replace(two, resources=structs.replace(shared_gpus, weights=("nccl", "shared")))
    assert site_of(asked)._delivery(is_of_rank=True).ways == ("nccl", "shared")
    assert site_of(asked)._delivery(is_of_rank=False).ways == ("shared", "broadcast"), "the driver is on no GPU"
    alone = site_of(structs.replace(CONFIG, resources=shared_gpus))
    assert alone._delivery(is_of_rank=True).ways == ("ipc",)
    assert site_of(two, is_on_loopback=False)._delivery(is_of_rank=True).ways == ("ipc", "shared", "nccl", "broadcast")


def test_what_engines_begin_with_stays_however_much_they_are_offered_later() -> None:
    site = site_of(CONFIG)
    site._model = make(next(iter(CONFIGS)))
    first = site._stage_first()
    for _ in range(8):  # engines that are replaced while nobody trains, say
        site._offers.put(model_weights(site._model))
    with WeightsFetcher("").take(first) as taken:
        assert torch.equal(taken.weights["model.norm.weight"], model_weights(site._model)["model.norm.weight"])
    asyncio.run(site.close())
    assert not Path(first.path).exists()


def test_what_a_run_begins_with_is_one_version_in_shared_memory_however_many_learners_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millstream.run import ray_backend as ray_site
    from millstream.weights.transfer import publisher

    def build() -> WeightsRef:
        options = {"learner": CONFIG.learner, "recipe": Recipe(algorithm=None), "num_steps": 1}
        first: WeightsRef = site.build_learner(None, **options)["cluster"].first
        return first

    def num_staged() -> int:
        return sum(path.suffix != OWNER_SUFFIX for path in tmp_path.iterdir())

    monkeypatch.setattr(publisher, "slot_folder", lambda: tmp_path)
    monkeypatch.setattr(ray_site, "FsdpLearner", lambda *parts, **options: options)
    site = site_of(CONFIG)
    site._model = make(next(iter(CONFIGS)))
    site._first = site._stage_first()  # as `open` does
    assert build() == build() == site._first and num_staged() == 1
    with torch.no_grad():
        site._model.get_parameter("model.norm.weight").add_(1.0)  # a warm-up
    warm = build()
    assert warm == build() == site._first and num_staged() == 1
    with WeightsFetcher("").take(warm) as taken:
        assert torch.equal(taken.weights["model.norm.weight"], site._model.get_parameter("model.norm.weight"))
    for _ in range(3):
        site._offers.put(model_weights(site._model))
    assert num_staged() == 2
    asyncio.run(site.close())
    assert not tmp_path.exists() or num_staged() == 0
