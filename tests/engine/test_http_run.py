"""A whole training run through servers over HTTP, the endpoint that takes its weights, and what a config may say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from starlette.types import ASGIApp
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from millstream.audit import audit
from millstream.cli.main import app
from millstream.config import load
from millstream.engine import EngineConfig
from millstream.events import WeightsLoaded
from millstream.events.sinks import read_events
from millstream.model.load import save_model
from millstream.model.safetensors_io import TENSORS, read_weights, write_weights
from millstream.run.build import build_model
from millstream.run.config import ModelConfig, RunConfig
from millstream.run.serve_model import ServedConfig, build_served
from millstream.serve.openai.app import model_app
from millstream.serve.openai.service import ModelServiceConfig
from support.servers import Close, millstream_serve, serving
from support.tiny import SHAPE, VOCABULARY, make

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "recipes/demo.toml")
DOCS = (ROOT / "docs/engines.md").read_text()
SHORT = {
    "pipeline.steps": 4,
    "pipeline.groups_per_step": 2,
    "pipeline.filter_zero_signal": "false",
    "rollout.group_size": 4,
    "warmup": "",
    "data.size": 100,
    "data.holdout": 4,
    "evaluation.every_steps": 1000,
    "engine.slots": 16,
}


def overrides(keys: dict[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def test_a_run_through_millstream_serve_trains_and_its_last_weights_are_what_is_served(tmp_path: Path) -> None:
    model, tokenizer = build_model(load(Path(DEMO), RunConfig).model, seed=99)  # not the run's: it must be given them
    save_model(model, tokenizer, tmp_path / "base")
    (tmp_path / "weights").mkdir()
    engine = EngineConfig(slots=16, process=False)

    def start() -> tuple[ASGIApp, Close]:
        served = build_served(ServedConfig(model=ModelConfig(path=str(tmp_path / "base")), engine=engine))
        service = ModelServiceConfig(weights_from=str(tmp_path / "weights"))
        return model_app(served, service, token="secret"), served.engine.close

    with serving(start) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVER_TOKEN", "secret")
        http = {
            "engine.kind": "http",
            "engine.http.urls": f'["{url}"]',
            "engine.http.flavour": "millstream",
            "engine.http.folder": tmp_path / "weights",
            "engine.http.token_variable": "SERVER_TOKEN",
            "run_dir": tmp_path / "run",
        }
        result = CliRunner().invoke(app, ["train", DEMO, "--quiet", *overrides(SHORT | http)])
        assert result.exit_code == 0, result.output
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
        prompt = [5, 6, 7, 8]
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "stop_token_ids": []}
        headers = {"Authorization": "Bearer secret"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False).json()
    expected = trained.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert answer["choices"][0]["token_ids"] == expected[0, 4:].tolist()
    loads = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, WeightsLoaded)]
    assert [event.version for event in loads][-1] == 4
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 4
    report = audit(tmp_path / "run")
    assert not report.findings, report.findings
    assert "secret" not in (tmp_path / "run/config.toml").read_text()
    assert not list((tmp_path / "weights").iterdir())


# ---- the endpoint ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def url(allowed: Path) -> Iterator[str]:
    with serving(lambda: millstream_serve(make("llama"), VOCABULARY, SHAPE["max_position_embeddings"], allowed)) as at:
        yield at


def tell(url: str, path: Path | str, version: int) -> httpx.Response:
    body = {"path": str(path), "version": version}
    return httpx.post(f"{url}/v1/millstream/weights", json=body, trust_env=False, timeout=20)


def written(folder: Path, seed: int = 1) -> Path:
    model = make("llama", seed=seed)
    write_weights(folder, 1, dict(model.named_parameters()), model.config)
    return folder


def test_weights_are_taken_from_a_folder_within_the_one_that_was_allowed(url: str, allowed: Path) -> None:
    folder = written(allowed / "one")
    answer = tell(url, folder, 3)
    assert answer.status_code == 200 and answer.json()["version"] == 3
    assert answer.json()["digest"] == read_weights(folder)[0].digest
    assert httpx.get(f"{url}/health", trust_env=False).json()["version"] == 3
    assert tell(url, folder, 2).status_code == 409, "versions never fall"


def test_weights_from_elsewhere_are_refused_however_the_path_is_written(
    url: str, allowed: Path, tmp_path: Path
) -> None:
    outside = written(tmp_path / "outside")
    (allowed / "link").symlink_to(outside)
    for path in (outside, allowed / "../" / outside.name, allowed / "link", allowed, "one", ""):
        answer = tell(url, path, 50)
        assert answer.status_code == 403 and "folder within" in answer.json()["error"]["message"]


@pytest.mark.parametrize("damage", ["shorter", "other", "missing", "shapes"])
def test_weights_that_are_not_what_was_written_are_refused_and_change_nothing(
    url: str, allowed: Path, damage: str
) -> None:
    folder = written(allowed / damage)
    data = (folder / TENSORS).read_bytes()
    match damage:
        case "shorter":
            (folder / TENSORS).write_bytes(data[:-8])
        case "other":
            (folder / TENSORS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "missing":
            (folder / TENSORS).unlink()
        case "shapes":
            write_weights(folder, 1, {"nonsense": torch.zeros(3)}, make("llama").config)
    before = httpx.get(f"{url}/health", trust_env=False).json()["version"]
    answer = tell(url, folder, 60)
    assert answer.status_code == 409 and "was not loaded" in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/health", trust_env=False).json()["version"] == before


def test_a_completion_may_name_its_stop_tokens_and_go_on_where_it_was(url: str) -> None:
    def ask(**more: object) -> httpx.Response:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "seed": 3, "stop_token_ids": []} | more
        return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=20)

    whole = ask().json()["choices"][0]["token_ids"]
    rest = ask(prompt=[5, 6, 7, *whole[:3]], max_tokens=5, num_sampled=3).json()["choices"][0]["token_ids"]
    assert rest == whole[3:]
    stopped = ask(stop_token_ids=[whole[2]]).json()["choices"][0]
    assert stopped["token_ids"] == whole[: whole.index(whole[2]) + 1] and stopped["finish_reason"] == "stop"
    assert ask(num_sampled=3).json()["error"]["param"] == "num_sampled"
    assert ask(top_k=-1).json()["error"]["param"] == "top_k"


# ---- what a config may say -------------------------------------------------------------------------------------------------


CONFIGS = re.findall(r"```toml\n(.*?)```", DOCS, flags=re.S)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_config_in_the_docs_is_one(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "anything")
    text = CONFIGS[number].replace("/shared/weights", str(tmp_path / "weights"))
    demo = Path(DEMO).read_text().replace("[engine]\n", "").replace("slots = 256 ", "#")
    (tmp_path / "run.toml").write_text(f"{demo}\n{text}")
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert ("not checked: the servers at http" in result.output) is ("[engine.http]" in text)


HTTP = {"engine.kind": "http", "engine.http.urls": '["http://127.0.0.1:1"]', "engine.http.flavour": "sglang"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine.http.folder": ""}, 'weights = "disk" needs folder'),
        ({"engine.http.weights_timeout_s": "0"}, "timeout_s and weights_timeout_s must be above 0"),
        ({"engine.http.weights": "none", "engine.http.folder": ""}, "has new weights for its engine after every step"),
        ({"engine.http.urls": "[]"}, "urls is empty"),
        ({"engine.http.urls": '["localhost:8000"]'}, "expected http://host:port"),
        ({"engine.http.urls": '["http://a/v1"]'}, "without a path"),
        ({"engine.http.flavour": "openai"}, "no way to take weights"),
        ({"engine.http.token_variable": "NOT_SET_ANYWHERE"}, "that environment variable is not set: type export"),
        ({"engine.http.token_variable": "sk-1234-abcd"}, "not the token itself"),
        ({"engine.http.folder": "/dev/null/weights"}, "/dev/null is no folder that can be written to"),
        ({"engine.kind": "torch"}, "go together"),
        ({"pipeline.max_lag": 0}, "in no order that could be repeated"),
        ({"learner.lora.rank": 4}, "servers take whole models"),
    ],
)
def test_a_dry_run_finds_what_is_wrong_with_servers(change: dict[str, object], message: str, tmp_path: Path) -> None:
    keys = HTTP | {"engine.http.folder": tmp_path} | change
    result = CliRunner().invoke(app, ["train", DEMO, "--dry-run", *overrides(keys)])
    assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output
