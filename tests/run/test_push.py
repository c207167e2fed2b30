"""`--push-to-hub`, with the real client against a hub of the test's own: the part of its protocol that an upload uses."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from millstream import DataConfig, ModelConfig, RunConfig, TinyConfig, train
from millstream.engine import EngineConfig
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from support.servers import serving

TOKEN = "hf_secret"


class Hub:
    """Repositories by name, each with its files; what was asked in their making."""

    def __init__(self) -> None:
        self.created: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []

    def app(self) -> Starlette:
        repo = "/api/models/{owner}/{name}"
        return Starlette(
            routes=[
                Route("/api/repos/create", self.create, methods=["POST"]),
                Route("/api/validate-yaml", self.validate, methods=["POST"]),
                Route(f"{repo}/preupload/main", self.preupload, methods=["POST"]),
                Route(f"{repo}/commit/main", self.commit, methods=["POST"]),
            ]
        )

    async def create(self, request: Request) -> JSONResponse:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid username or password."}, status_code=401)
        body = await request.json()
        self.created.append(body)
        owner = body.get("organization", "me")
        return JSONResponse({"url": f"http://{request.headers['host']}/{owner}/{body['name']}"})

    async def validate(self, request: Request) -> JSONResponse:
        assert (await request.json())["content"].startswith("---")
        return JSONResponse({"errors": [], "warnings": []})

    async def preupload(self, request: Request) -> JSONResponse:
        files = (await request.json())["files"]
        modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
        return JSONResponse({"files": modes})

    async def commit(self, request: Request) -> JSONResponse:
        for line in map(json.loads, (await request.body()).splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            elif line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"http://{request.headers['host']}/me/model/commit/{'0' * 40}"
        return JSONResponse({"commitUrl": url, "commitOid": "0" * 40, "hookOutput": "", "success": True})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    config = RunConfig(
        model=ModelConfig(tiny=TinyConfig(hidden=16, layers=1, heads=2, context=16)),
        data=DataConfig(toy="sort_digits", size=20, holdout=0),
        run_dir=str(folder / "run"),
        rollout=RolloutConfig(group_size=2, max_tokens=4),
        pipeline=PipelineConfig(steps=1, groups_per_step=2, filter_zero_signal=False),
        engine=EngineConfig(process=False),
    )
    return Path(train(config).run_dir)


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    one = Hub()

    async def close() -> None:
        pass

    with serving(lambda: (one.app(), close)) as url:
        yield one, url


def push(run_dir: Path, url: str, token: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "millstream", "export", str(run_dir), *words, "--push-to-hub", "me/sorter"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_what_is_pushed_is_the_exported_model_with_a_card_in_one_commit(
    run_dir: Path, hub: tuple[Hub, str], tmp_path: Path
) -> None:
    found, url = hub
    out = push(run_dir, url, TOKEN)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("the model of step 1 is in ") and "/me/sorter" in out.stdout
    assert len(found.messages) == 1 and "step 1" in found.messages[0]
    assert found.created[0]["name"] == "sorter" and found.created[0].get("visibility", "private") == "private"
    for name, content in found.files.items():
        (tmp_path / name).write_bytes(content)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() and AutoTokenizer.from_pretrained(tmp_path)
    assert b"library_name: transformers" in found.files["README.md"]


def test_a_refused_push_says_how_to_log_in_and_leaves_the_folder(
    run_dir: Path, hub: tuple[Hub, str], tmp_path: Path
) -> None:
    out = push(run_dir, hub[1], "hf_wrong", str(tmp_path / "model"))
    assert out.returncode == 1 and "hf auth login" in out.stderr and "Traceback" not in out.stderr
    assert f"hf upload me/sorter {tmp_path / 'model'}" in out.stderr and (tmp_path / "model" / "config.json").is_file()
