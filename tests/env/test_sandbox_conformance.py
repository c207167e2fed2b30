"""The drivers of `Sandbox` keep its promises, and so does the fake in the place of docker."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from millstream.env.sandbox.base import Limits, Sandbox
from millstream.env.sandbox.config import SandboxConfig, sandbox_maker
from millstream.env.sandbox.container import ContainerSandbox
from millstream.env.sandbox.keepers import SandboxBroken
from millstream.env.sandbox.programs import what_is_contained
from millstream.env.sandbox.walled import WalledSandbox
from millstream.errors import ConfigError, SandboxLost
from millstream.testing.sandbox import SandboxSuite

FAKE = Path(__file__).parents[1] / "support/fake_docker.sh"


class TestWalls(SandboxSuite):
    def make_sandbox(self, limits: Limits) -> Sandbox:
        return WalledSandbox(limits)


class TestUserWalls(SandboxSuite):
    """As one who is not root, or as root in a user namespace."""

    def make_sandbox(self, limits: Limits) -> Sandbox:
        try:
            what_is_contained("user")
        except SandboxBroken as error:
            pytest.skip(f"no user namespaces here: {error}")
        return WalledSandbox(limits, walls="user")


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the containers of a fake docker."""
    home, programs = tmp_path / "docker", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    (programs / "docker").symlink_to(FAKE)
    monkeypatch.setenv("FAKE_DOCKER", str(home))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr("millstream.env.sandbox.container._swept", set())
    return home


def calls(docker: Path) -> list[list[str]]:
    return [call.split("\0") for call in (docker / "calls").read_text().split("\0\n")[:-1]]


def containers(docker: Path) -> list[Path]:
    return [path for path in docker.iterdir() if path.is_dir()]


@pytest.mark.usefixtures("docker")
class TestContainer(SandboxSuite):
    is_isolated = False

    def make_sandbox(self, limits: Limits) -> Sandbox:
        return ContainerSandbox(limits, image="debian:12")


def test_a_container_has_no_network_no_rights_and_the_limits_of_the_config(docker: Path) -> None:
    config = SandboxConfig(use="docker", args={"image": "debian:12", "options": ["--runtime", "runsc"]}, memory_mb=512)

    async def program() -> None:
        sandbox = sandbox_maker(config)()
        await sandbox.start()
        await sandbox.close()

    asyncio.run(program())
    sweep, run, remove = calls(docker)
    assert sweep[:2] == ["ps", "--all"] and remove == ["rm", "--force", run[run.index("--name") + 1]]
    pairs = set(itertools.pairwise(run))
    expected = {
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--memory", str(512 << 20)),
        ("--memory-swap", str(512 << 20)),
        ("--pids-limit", "64"),
        ("--ulimit", "cpu=60"),
        ("--runtime", "runsc"),
        ("debian:12", "sleep"),
    }
    assert expected <= pairs and {"--rm", "--detach", "--init", "--read-only"} <= set(run)
    assert any(word.startswith("/scratch:rw,exec,nosuid,nodev") and word.endswith(f"size={64 << 20}") for word in run)


def test_containers_of_a_killed_run_are_removed_by_the_next_start(docker: Path) -> None:
    for name, owner in (("old", f"{os.uname().nodename}/999999999/5"), ("other", "elsewhere/1/5")):
        (docker / name).mkdir()
        (docker / name / "owner").write_text(owner)

    async def program() -> set[str]:
        first, second = ContainerSandbox(image="i"), ContainerSandbox(image="i")
        await first.start()
        await second.start()
        try:
            return {path.name for path in containers(docker)}
        finally:
            await first.close()
            await second.close()

    left = asyncio.run(program())
    assert "old" not in left and "other" in left and len(left) == 3
    assert sum(call[0] == "ps" for call in calls(docker)) == 1


def test_a_container_that_is_removed_meanwhile_is_lost_by_name(docker: Path) -> None:
    async def program() -> None:
        sandbox = ContainerSandbox(image="i")
        await sandbox.start()
        (folder,) = containers(docker)
        shutil.rmtree(folder)
        with pytest.raises(SandboxLost, match=r"does not run any more: .*No such container"):
            await sandbox.exec("true")

    asyncio.run(program())


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"use": "chroot"}, "use walls, docker, podman, or one of your own"),
        ({"use": "podman", "args": {"image": "i"}}, "there is no program 'podman' in PATH"),
        ({"use": "docker"}, 'needs an image: .* args = { image = "python:3.12-slim" }'),
        ({"args": {"image": "i"}}, "image"),
        ({"use": "asyncio:Lock"}, "Lock"),
        ({"use": "no_module:Cloud"}, "cannot import no_module"),
    ],
)
@pytest.mark.usefixtures("docker")
def test_a_driver_that_cannot_be_made_is_refused_by_name(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        sandbox_maker(SandboxConfig(**config))
