"""The audit of a training service's folder: clean after crashes, and it finds what is planted, under the rule's name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from millstream.audit import SERVICE_RULES, audit_service
from millstream.cli.main import app
from support.training_client import ADAM, TEXT, client_of, datum, prompt_of, sampled, step, tinker, types
from support.training_server import KEY, listening, small_base

Events = list[dict[str, Any]]


def with_source(prompt: list[int], sequence: Any) -> Any:
    name, length = {"sequence_id": sequence.sequence_id}, len(sequence.tokens)
    prompts, of = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    return sampled(prompt, sequence, 1.0).with_provenance(
        model_input=[prompts(**name, length=len(prompt)), of(**name, length=length - 1)],
        loss_fn_inputs=[prompts(**name, length=len(prompt) - 1), of(**name, length=length)],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A service that was stopped and started again in the middle of a session with max_lag = 1."""
    path, base = tmp_path_factory.mktemp("service"), small_base()
    with listening(path, base=base) as url:
        service = client_of(url, user_metadata={"max_lag": "1"})
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
        sampler = client.save_weights_and_get_sampling_client()
        (sequence,) = sampler.sample(prompt_of(TEXT[:3]), 1, types.SamplingParams(max_tokens=4)).result().sequences
        row = with_source(TEXT[:3], sequence)
        for _ in range(2):
            step(client, [row], "importance_sampling")
        with pytest.raises(tinker.RequestFailedError, match="LagError"):
            client.forward_backward([row], "importance_sampling").result()
        step(client, [datum(TEXT)])
        body = {"model_id": client.model_id, "seq_id": client._request_id_counter + 1, "adam_params": ADAM}
    with (
        listening(path, base=base) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, trust_env=False, timeout=60) as raw,
    ):
        asked = raw.post("optim_step", json=body).json()["request_id"]  # the model comes back with its next request
        assert raw.post("retrieve_future", json={"request_id": asked}).json()["metrics"]["version"] == 4
    return path


def log_of(folder: Path) -> Path:
    """Of the session that has a model."""
    return next(path for path in sorted((folder / "sessions").glob("*.jsonl")) if b"model_made" in path.read_bytes())


def rules_of(folder: Path) -> set[str]:
    return {finding.rule for finding in audit_service(folder).findings}


def test_a_service_that_was_restarted_is_clean_and_its_requests_were_computed_again_bit_for_bit(folder: Path) -> None:
    report = audit_service(folder)
    assert report.is_clean, report.findings
    assert (report.models, report.steps, report.requests_refused, report.lag_max) == (1, 4, 1, 1)
    assert report.replayed == report.replayed_exactly == report.requests - 1 == 8
    assert report.rows_trained == 3 and report.samples == 1


def test_the_command_names_the_folder_and_ends_with_1_where_something_is_wrong(folder: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["audit", str(folder)])
    assert found.exit_code == 0 and ": clean" in found.stdout and "4 with 3 rows" in found.stdout
    shutil.copytree(folder, tmp_path / "copy")
    log_of(tmp_path / "copy").unlink()
    found = CliRunner().invoke(app, ["audit", str(tmp_path / "copy"), "--json"])
    assert found.exit_code == 1 and json.loads(found.stdout)["findings"][0][0] == "session"


def of(events: Events, kind: str, number: int = 0) -> dict[str, Any]:
    return [event for event in events if event["kind"] == kind][number]


def passes(events: Events) -> Events:
    return [event for event in events if event.get("passed")]


def repeat_first(events: Events) -> None:
    events.insert(1, dict(events[0]))
    for number, event in enumerate(events):
        event["seq"] = number


PLANTED: dict[str, Callable[[Events], object]] = {
    "seq": lambda events: events.remove(of(events, "samples_done")),
    "session": repeat_first,
    "order": lambda events: of(events, "request_done", 1).update(seq_id=1),
    "version": lambda events: of(events, "request_done", 2).update(next_version=7),
    "restored": lambda events: of(events, "model_restored", 1).update(next_seq_id=99),
    "replay": lambda events: passes(events)[-2].update(request="optim_step_again"),
    "sampled": lambda events: of(events, "sampler_made").update(version=1),
    "lag": lambda events: events[0].update(max_lag=0),
    "log": lambda events: of(events, "request_accepted").pop("digest"),
}


@pytest.mark.parametrize("rule", PLANTED)
def test_what_is_planted_in_the_log_is_found(folder: Path, tmp_path: Path, rule: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = log_of(tmp_path / "copy")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    PLANTED[rule](events)
    path.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events))
    assert rule in rules_of(tmp_path / "copy")


@pytest.mark.parametrize("num_bytes", [1, 200])
def test_an_acknowledged_request_that_is_not_in_the_journal_is_found(
    folder: Path, tmp_path: Path, num_bytes: int
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (journal,) = (tmp_path / "copy").glob("models/*/journal-*")
    os.truncate(journal, journal.stat().st_size - num_bytes)
    assert rules_of(tmp_path / "copy") == {"acknowledged"}
    assert PLANTED.keys() | {"acknowledged"} == SERVICE_RULES.keys()


def test_a_last_line_that_a_crash_cut_off_is_no_finding_and_the_log_goes_on_after_it(folder: Path) -> None:
    path = log_of(folder)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq":99,"kind":"sam')
    try:
        assert audit_service(folder).is_clean
    finally:
        path.write_bytes(whole)
