"""The training service, by its real client: numbers, order, sampling, checkpoints, crashes, keys, refusals."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from msgspec import structs

from millstream.learner.optimizer import AdamSettings
from millstream.learner.trainer import DirectRow
from millstream.serve.training import models
from millstream.serve.training.base import BaseModel
from millstream.serve.training.bodies import LoraBody
from millstream.serve.training.journal import CheckpointInfo, read_json_file, write_json
from millstream.serve.training.losses import loss_named
from millstream.serve.training.models import shape_of
from support.training_client import (
    ADAM,
    TEXT,
    client_of,
    datum,
    logprobs_of,
    prompt_of,
    sampled,
    step,
    tinker,
    trainer,
    types,
)
from support.training_server import KEY, listening, small_base


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return small_base()


@pytest.fixture
def url(base: BaseModel, tmp_path: Path) -> Iterator[str]:
    with listening(tmp_path, base=base) as at:
        yield at


# ---- training


def test_training_gives_the_numbers_of_the_learner_called_directly(url: str, base: BaseModel) -> None:
    client, texts = trainer(url), [TEXT, TEXT[2:], TEXT[:5]]
    results = [step(client, [datum(text) for text in texts]) for _ in range(3)]
    shape = shape_of(LoraBody(rank=4), base)
    learner, (_, loss) = base.make_trainer(shape, 1), loss_named("cross_entropy", {})
    rows = [
        DirectRow(
            tokens=np.array(text[:-1], np.int32),
            at=np.arange(len(text) - 1),
            targets=np.array(text[1:]),
            advantages=np.ones(len(text) - 1, np.float32),
            behaviour=np.zeros(len(text) - 1, np.float32),
        )
        for text in texts
    ]

    async def directly() -> list[Any]:
        found = []
        for _ in range(3):
            found.append(await learner.forward_backward(rows, loss))
            await learner.step_with(AdamSettings(5e-3, 0.9, 0.95, 1e-8, 0.0, float("inf")))
        return found

    for result, scores in zip(results, asyncio.run(directly()), strict=True):
        assert result.metrics["loss:sum"] == sum(score.loss for score in scores)
        for output, score in zip(result.loss_fn_outputs, scores, strict=True):
            assert output["logprobs"].data == score.logprobs.tolist()


def test_200_requests_in_flight_run_in_their_order_and_results_come_in_any(url: str) -> None:
    client = trainer(url)
    futures = []
    for _ in range(100):
        futures += [
            client.forward_backward([datum(TEXT)], "cross_entropy"),
            client.optim_step(types.AdamParams(**ADAM)),
        ]
    order = list(range(200))
    random.Random(0).shuffle(order)
    results = {number: futures[number].result() for number in order}
    assert [results[number].metrics["version"] for number in range(1, 200, 2)] == list(range(1, 101))
    losses = [results[number].metrics["loss:sum"] for number in range(0, 200, 2)]
    assert losses[-1] < losses[0] / 2


def test_a_request_waits_for_those_before_it_and_the_same_one_again_is_the_same(url: str) -> None:
    client = trainer(url)
    body = {"model_id": client.model_id, "adam_params": ADAM}
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, trust_env=False) as raw:
        late = [raw.post("optim_step", json={**body, "seq_id": number}).json() for number in (2, 2)]
        assert late[0] == late[1]
        first = raw.post("optim_step", json={**body, "seq_id": 1}).json()
        found = [raw.post("retrieve_future", json={"request_id": one["request_id"]}).json() for one in (late[0], first)]
    assert [one["metrics"]["version"] for one in found] == [2.0, 1.0]


def test_a_refused_request_has_its_turn_and_fails_alone(url: str) -> None:
    client = trainer(url)
    wrong = types.Datum(model_input=prompt_of(TEXT), loss_fn_inputs={"target_tokens": TEXT[:3]})
    refused = [
        (client.forward_backward([wrong], "cross_entropy"), r"datum 0: target_tokens are int64 of shape \(3,\)"),
        (client.forward_backward([datum([5000, 1])], "cross_entropy"), "not in the vocabulary of"),
        (client.forward_backward([datum(TEXT * 20)], "cross_entropy"), "expected 1 to 64, the model's context"),
        (client.forward_backward([datum(TEXT)], "ppo"), "datum 0 has no logprobs, advantages in loss_fn_inputs"),
        (
            client.forward_backward([datum(TEXT, float("nan"))], "cross_entropy"),
            "weights has a number that is not finite",
        ),
        (client.optim_step(types.AdamParams(learning_rate=-1.0)), "expected finite numbers of at least 0"),
        (client.save_state("a name"), "the name 'a name': expected letters"),
    ]
    last = client.forward_backward([datum(TEXT)], "cross_entropy")
    for future, message in refused:
        with pytest.raises(tinker.RequestFailedError, match=message) as caught:
            future.result()
        assert caught.value.category == types.RequestErrorCategory.User
    assert last.result().metrics["loss:sum"] > 0


def test_a_loss_of_ones_own_runs_in_the_client(url: str) -> None:
    one, two = trainer(url), trainer(url)

    def nll(data: Any, logprobs: list[Any]) -> Any:
        return -torch.stack([some.sum() for some in logprobs]).sum(), {"mine": 1.0}

    results = []
    for _ in range(2):
        results.append(one.forward_backward_custom([datum(TEXT)], nll).result())
        one.optim_step(types.AdamParams(**ADAM)).result()
        step(two, [datum(TEXT)])
    assert results[0].metrics["mine"] == 1.0 and results[1].metrics["loss:sum"] < results[0].metrics["loss:sum"]
    assert logprobs_of(one, TEXT) == pytest.approx(logprobs_of(two, TEXT), abs=1e-5)


def test_without_adapters_the_whole_model_is_trained_and_sampled_from(url: str) -> None:
    service = client_of(url)
    body = {"session_id": service.holder.get_session_id(), "model_seq_id": 5, "base_model": "tiny"}
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, trust_env=False, timeout=60) as raw:
        model_id = raw.post("create_model", json=body).json()["model_id"]
    client, adapted = tinker.TrainingClient(service.holder, 5, model_id), trainer(url)
    assert logprobs_of(client, TEXT) == pytest.approx(logprobs_of(adapted, TEXT), abs=1e-5)
    losses = [step(client, [datum(TEXT)]).metrics["loss:sum"] for _ in range(3)]
    assert losses[2] < losses[0] and client.get_info().is_lora is False
    (_, *scores) = client.save_weights_and_get_sampling_client().compute_logprobs(prompt_of(TEXT)).result()
    assert scores == pytest.approx(logprobs_of(client, TEXT), abs=1e-5)


# ---- sampling


def test_samples_are_from_the_weights_asked_for_while_training_continues(url: str) -> None:
    client = trainer(url)
    samplers, expected = [], []
    for _ in range(3):
        samplers.append(client.save_weights_and_get_sampling_client())
        expected.append(logprobs_of(client, TEXT))
        step(client, [datum(TEXT)])
    training = [client.forward_backward([datum(TEXT)], "cross_entropy") for _ in range(20)]
    scored = [sampler.compute_logprobs(prompt_of(TEXT)) for sampler in reversed(samplers)]
    for future, logprobs in zip(scored, reversed(expected), strict=True):
        (nothing, *found) = future.result()
        assert nothing is None and found == pytest.approx(logprobs, abs=1e-5)
    params = types.SamplingParams(max_tokens=5, seed=11)
    asked = [samplers[number].sample(prompt_of(TEXT[:3]), 2, params) for number in (0, 1, 2) * 3]
    answers = [future.result() for future in asked]
    for number, answer in enumerate(answers):
        assert [one.sequence_id.rpartition(":v")[2] for one in answer.sequences] == [str(number % 3)] * 2
        for sequence, again in zip(answer.sequences, answers[number % 3].sequences, strict=True):
            assert sequence.tokens == again.tokens and sequence.logprobs == pytest.approx(again.logprobs, abs=1e-5)
            text = TEXT[:3] + sequence.tokens
            (_, *scores) = samplers[number % 3].compute_logprobs(prompt_of(text)).result()
            assert sequence.logprobs == pytest.approx(scores[2:], abs=1e-4)
    assert all(future.result().metrics for future in training)


def test_sampling_parameters_mean_what_they_say(url: str) -> None:
    service = client_of(url)
    sampler = service.create_sampling_client(base_model="tiny")
    assert sampler.get_base_model() == "tiny"

    def tokens(num_samples: int = 1, **params: Any) -> list[list[int]]:
        asked = sampler.sample(prompt_of(TEXT), num_samples, types.SamplingParams(**{"max_tokens": 8, **params}))
        return [list(one.tokens) for one in asked.result().sequences]

    several = tokens(4, seed=1)
    assert tokens(4, seed=1) == several and len({tuple(one) for one in several}) > 1
    assert tokens(4, seed=2) != several and tokens(4) != tokens(4)
    (greedy,) = tokens(temperature=0.0)
    assert tokens(temperature=0.0, seed=9) == [greedy] == tokens(top_k=1)
    stopped = sampler.sample(prompt_of(TEXT), 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=[greedy[2]]))
    (one,) = stopped.result().sequences
    assert one.tokens == greedy[: greedy.index(greedy[2]) + 1] and one.stop_reason == "stop"
    last = sampler.compute_logprobs(prompt_of(TEXT), prompt_logprobs_last_n=2).result()
    assert [one is None for one in last] == [True] * 6 + [False] * 2
    for more in ({"topk_prompt_logprobs": 2}, {"prompt_alt_tokens_k": 2}):
        with pytest.raises(tinker.RequestFailedError, match=f"{next(iter(more))} is not supported"):
            sampler.sample(prompt_of(TEXT), 1, types.SamplingParams(max_tokens=1), **more).result()
    with pytest.raises(tinker.RequestFailedError, match="a prompt of 70 tokens: expected 1 to 63"):
        sampler.sample(prompt_of([3] * 70), 1, types.SamplingParams(max_tokens=1)).result()


def test_a_policy_learns_from_its_own_samples(url: str) -> None:
    client, rewards = trainer(url), []
    for number in range(12):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=4, seed=number)
        sequences = sampler.sample(prompt_of(TEXT[:3]), 32, params).result().sequences
        scores = [sum(token == 5 for token in one.tokens) / 4 for one in sequences]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        data = [sampled(TEXT[:3], one, score - mean) for one, score in zip(sequences, scores, strict=True)]
        client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    assert rewards[-1] > rewards[0] + 0.3, rewards


# ---- checkpoints, restarts, crashes


def test_checkpoints_survive_a_restart_with_and_without_the_optimizer(base: BaseModel, tmp_path: Path) -> None:
    with listening(tmp_path, base=base) as url:
        client = trainer(url)
        step(client, [datum(TEXT)])
        state = client.save_state("one").result().path
        weights = client.save_weights_for_sampler("one").result().path
        with pytest.raises(tinker.RequestFailedError, match="there is a checkpoint 'one' already"):
            client.save_state("one").result()
        before = logprobs_of(client, TEXT)
        step(client, [datum(TEXT)])
        after = logprobs_of(client, TEXT)
    with listening(tmp_path, base=base) as url:
        service = client_of(url)
        (_, *scores) = service.create_sampling_client(model_path=weights).compute_logprobs(prompt_of(TEXT)).result()
        assert scores == pytest.approx(before, abs=1e-5)
        resumed = service.create_training_client_from_state_with_optimizer(state)
        assert logprobs_of(resumed, TEXT) == before
        step(resumed, [datum(TEXT)])
        assert logprobs_of(resumed, TEXT) == after
        fresh = service.create_training_client_from_state(state)
        step(fresh, [datum(TEXT)])
        assert logprobs_of(fresh, TEXT) != pytest.approx(after, abs=1e-4)
        assert resumed.get_info().model_data.model_name == "tiny"
        for path, message in ((f"{state}x", "no checkpoint"), (weights, "weights to sample from")):
            with pytest.raises((tinker.NotFoundError, tinker.RequestFailedError), match=message):
                service.create_training_client_from_state(path)


def test_what_was_acknowledged_is_there_after_a_crash_at_any_moment(base: BaseModel, tmp_path: Path) -> None:
    """A copy of the folder is what kill -9 leaves of it."""
    with listening(tmp_path / "live", base=base) as url:
        client = trainer(url)
        model_id, moments = client.model_id, []
        for number in range(4):
            step(client, [datum(TEXT)])
            if number == 1:
                client.save_state("early").result()
            moments.append((client.forward([datum(TEXT)], "cross_entropy").result().metrics, number))
            shutil.copytree(tmp_path / "live", tmp_path / f"copy-{number}")
        request_id = f"{model_id}:{client._request_id_counter}"
    for metrics, number in moments:
        with (
            listening(tmp_path / f"copy-{number}", base=base) as url,
            httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, trust_env=False, timeout=60) as raw,
        ):
            last = int(request_id.rpartition(":")[2]) - 3 * (3 - number) - (number < 1)
            body = {"model_id": model_id, "seq_id": last + 1, "adam_params": ADAM}
            asked = raw.post("optim_step", json=body).json()["request_id"]
            stepped = raw.post("retrieve_future", json={"request_id": asked}).json()
            assert stepped["metrics"]["version"] == number + 2  # nothing is lost, and nothing counts twice
            again = raw.post("retrieve_future", json={"request_id": f"{model_id}:{last}"})
            expected = np.float64(metrics["loss:sum"]).tobytes()
            assert again.headers["content-type"] == "application/x-protobuf" and expected in again.content


@pytest.mark.parametrize("max_bytes", [models.MAX_JOURNAL_BYTES, 0])
def test_a_model_that_was_unloaded_comes_back_with_its_gradient(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """From the journal, and from snapshots that are taken after every request."""
    monkeypatch.setattr(models, "MAX_JOURNAL_BYTES", max_bytes)
    with listening(tmp_path, base=base, max_models=1) as url:
        alone = trainer(url, seed=7)
        for _ in range(2):
            step(alone, [datum(TEXT)])
        expected = logprobs_of(alone, TEXT)
        service = client_of(url)
        one, two = (service.create_lora_training_client(base_model="tiny", rank=4, seed=7) for _ in range(2))
        for client in (one, two) * 2:  # each call unloads the other one's model, between its pass and its step
            client.forward_backward([datum(TEXT)], "cross_entropy").result()
            logprobs_of(two if client is one else one, TEXT)
            client.optim_step(types.AdamParams(**ADAM)).result()
        assert logprobs_of(one, TEXT) == logprobs_of(two, TEXT) == expected
        service.close("success").result()
    assert any(tmp_path.glob("models/*/snapshot-*")) == (max_bytes == 0)


def test_passes_without_a_step_do_not_make_the_journal_longer(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MAX_JOURNAL_BYTES", 4096)
    with listening(tmp_path, base=base) as url:
        client = trainer(url)
        for _ in range(40):
            client.forward_backward([datum(TEXT)], "cross_entropy").result()
    (model,) = (tmp_path / "models").iterdir()
    sizes = {path.name: path.stat().st_size for path in model.glob("journal-*")}
    assert "journal-0" not in sizes and sum(sizes.values()) < 3 * 4096


def test_a_sampler_whose_weights_were_overwritten_is_refused_and_never_gives_others(url: str) -> None:
    client = trainer(url)
    service = client_of(url)
    path = client.save_weights_for_sampler("same").result().path
    before = service.create_sampling_client(model_path=path)
    step(client, [datum(TEXT)])
    body = {"model_id": client.model_id, "path": "same", "overwrite": True, "seq_id": client._request_id_counter + 1}
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, trust_env=False, timeout=60) as raw:
        asked = raw.post("save_weights_for_sampler", json=body).json()["request_id"]
        assert raw.post("retrieve_future", json={"request_id": asked}).json()["path"] == path
    with pytest.raises(tinker.RequestFailedError, match="version 0, were overwritten by version 1"):
        before.sample(prompt_of(TEXT), num_samples=1, sampling_params=types.SamplingParams(max_tokens=2)).result()
    after = service.create_sampling_client(model_path=path)
    after.sample(prompt_of(TEXT), num_samples=1, sampling_params=types.SamplingParams(max_tokens=2)).result()


def test_checkpoints_are_listed_and_expire(base: BaseModel, tmp_path: Path) -> None:
    with listening(tmp_path, base=base) as url:
        client = trainer(url)
        kept, brief = client.save_state("kept"), client.save_weights_for_sampler("brief", ttl_seconds=3600)
        paths = [kept.result().path, brief.result().path]
        rest = tinker.RestClient(base_url=url, api_key=KEY)

        def listed() -> list[str]:
            return [one.tinker_path for one in rest.list_checkpoints(client.model_id).result().checkpoints]

        assert listed() == paths
        (file,) = tmp_path.glob("models/*/sampler_weights/brief/checkpoint.json")
        info = read_json_file(file, CheckpointInfo)
        assert info.expires_at is not None and info.expires_at - info.time == 3600
        write_json(file, structs.replace(info, expires_at=info.time))
        assert listed() == paths[:1]
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            client_of(url).create_sampling_client(model_path=paths[1])


# ---- keys, bounds, refusals


def test_without_a_key_there_is_no_answer_and_a_key_sees_only_its_own(base: BaseModel, tmp_path: Path) -> None:
    with listening(tmp_path, base=base, tokens=[KEY, "tml-another"]) as url:
        client = trainer(url)
        state = client.save_state("mine").result().path
        sampler = client.save_weights_and_get_sampling_client()
        with pytest.raises(tinker.AuthenticationError):
            client_of(url, key="tml-unknown").create_lora_training_client(base_model="tiny")
        other = client_of(url, key="tml-another")
        with pytest.raises(tinker.NotFoundError):
            other.create_training_client_from_state(state)
        with pytest.raises(tinker.NotFoundError):
            other.create_sampling_client(model_path=state)
        with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": "tml-another"}, trust_env=False) as raw:
            step_of = {"model_id": client.model_id, "seq_id": 9, "adam_params": ADAM}
            sample = {"prompt": {"chunks": []}, "sampling_params": {}, "seq_id": 0}
            for path, body in (
                ("optim_step", step_of),
                ("get_info", {"model_id": client.model_id}),
                ("retrieve_future", {"request_id": f"{client.model_id}:1"}),
                ("asample", {**sample, "sampling_session_id": sampler._sampling_session_id}),
                ("session_heartbeat", {"session_id": client.holder.get_session_id()}),
            ):
                assert raw.post(path, json=body).status_code == 404, path
        for path in ("client/config", "create_session", "retrieve_future"):
            assert httpx.post(f"{url}/api/v1/{path}", json={}, trust_env=False).status_code == 401


def test_data_beyond_max_lag_is_refused_by_name(url: str) -> None:
    client, params = trainer(url, user_metadata={"max_lag": "1"}), types.SamplingParams(max_tokens=4)
    sampler = client.save_weights_and_get_sampling_client()
    (sequence,) = sampler.sample(prompt_of(TEXT[:3]), 1, params).result().sequences
    plain = sampled(TEXT[:3], sequence, 1.0)
    name, length = {"sequence_id": sequence.sequence_id}, len(sequence.tokens)
    spans = [types.PromptProvenanceSpan(**name, length=2), types.SampledProvenanceSpan(**name, length=length)]
    inputs = [types.PromptProvenanceSpan(**name, length=3), types.SampledProvenanceSpan(**name, length=length - 1)]
    data = plain.with_provenance(model_input=inputs, loss_fn_inputs=spans)
    with pytest.raises(tinker.RequestFailedError, match="LagError: datum 0 has no provenance"):
        client.forward_backward([plain], "ppo").result()
    for _ in range(2):
        step(client, [data], "ppo")
    with pytest.raises(
        tinker.RequestFailedError, match="LagError: datum 0 was sampled at version 0, and the model is at 2"
    ):
        client.forward_backward([data], "ppo").result()
    step(client, [datum(TEXT)])


def test_whatever_is_sent_is_refused_with_a_4xx(url: str) -> None:
    session = client_of(url).holder.get_session_id()
    posts = [
        "create_session",
        "create_model",
        "forward_backward",
        "optim_step",
        "save_weights",
        "load_weights",
        "save_weights_for_sampler",
        "create_sampling_session",
        "asample",
        "retrieve_future",
        "cancel_future",
        "get_info",
        "weights_info",
        "session_heartbeat",
    ]
    bodies: list[bytes] = [b"[]", b"{", b"\xff\xfe", b"\x08", b"\x0a\x05ab", b'{"session_id": "../../x"}', b"null"]
    bodies += [
        b'{"model_id": "a", "seq_id": 1}',
        b'{"request_id": "' + session.encode() + b':train:7:1"}',
        b"[" * 100_000,
    ]
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, trust_env=False, timeout=30) as raw:
        for path in posts:
            for body in bodies:
                answer = raw.post(path, content=body)
                assert 400 <= answer.status_code < 500 and answer.json()["error"], (path, body[:40], answer.text)
        assert raw.get("nothing").status_code == 404
        wrong = {"session_id": session, "model_seq_id": 0, "base_model": "other", "lora_config": {"rank": 4}}
        assert "there is 'tiny'" in raw.post("create_model", json=wrong).json()["error"]
