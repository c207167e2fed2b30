"""Two keys that train adapters on one base: neither changes what the other gets, and neither has to wait for all of the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream.model.safetensors_io import read_weights, write_weights
from millstream.serve.training.base import BaseModel
from support.training_client import ADAM, TEXT, client_of, datum, tinker, types
from support.training_server import KEY, listening, small_base

OTHER = "tml-the-other-key"


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return small_base()


def model_of(url: str, key: str, rank: int) -> Any:
    return client_of(url, key=key).create_lora_training_client(base_model="tiny", rank=rank, seed=rank)


def steps(client: Any, text: list[int], num_steps: int) -> list[Any]:
    """All in flight at once."""
    futures = []
    for _ in range(num_steps):
        futures += [
            client.forward_backward([datum(text)], "cross_entropy"),
            client.optim_step(types.AdamParams(**ADAM)),
        ]
    return [*futures, client.save_weights_for_sampler("end")]


def weights_of(folder: Path, client: Any) -> dict[str, torch.Tensor]:
    name = client.model_id.replace(":", "_")
    return dict(read_weights(folder / "models" / name / "sampler_weights" / "end" / "tensors")[1])


def test_each_of_two_keys_gets_the_weights_that_it_would_get_alone(base: BaseModel, tmp_path: Path) -> None:
    texts = {(KEY, 4): TEXT, (OTHER, 8): TEXT[::-1]}
    with listening(tmp_path, base=base, tokens=[KEY, OTHER]) as url:
        alone = {}
        for tenant, text in texts.items():
            client = model_of(url, *tenant)
            for future in steps(client, text, 20):
                future.result()
            alone[tenant] = weights_of(tmp_path, client)
        together = {tenant: model_of(url, *tenant) for tenant in texts}
        futures = [steps(together[tenant], text, 20) for tenant, text in texts.items()]
        for pair in zip(*futures, strict=True):
            for future in pair:
                future.result()
        for tenant, client in together.items():
            found = weights_of(tmp_path, client)
            assert found.keys() == alone[tenant].keys()
            for name, weight in found.items():
                torch.testing.assert_close(weight, alone[tenant][name], rtol=1e-5, atol=1e-6)
            assert any(weight.abs().max() > 1e-3 for name, weight in found.items() if "lora_B" in name)


def events_of(folder: Path, client: Any, kind: str) -> list[dict[str, Any]]:
    path = folder / "sessions" / f"{client.holder.get_session_id()}.jsonl"
    return [event for event in map(json.loads, path.read_text().splitlines()) if event["kind"] == kind]


def test_a_key_with_200_requests_in_the_queue_does_not_starve_another(base: BaseModel, tmp_path: Path) -> None:
    with listening(tmp_path, base=base, tokens=[KEY, OTHER]) as url:
        greedy, other = model_of(url, KEY, 4), model_of(url, OTHER, 4)
        queued = steps(greedy, TEXT, 100)
        queued[0].result()
        for future in steps(other, TEXT, 2):
            future.result()
        for future in queued:
            future.result()
        accepted = {event["seq_id"]: event["at"] for event in events_of(tmp_path, other, "request_accepted")}
        done = [event["at"] for event in events_of(tmp_path, greedy, "request_done")]
        for event in events_of(tmp_path, other, "request_done"):
            num_between = sum(accepted[event["seq_id"]] < at < event["at"] for at in done)
            num_before = event["seq_id"] - min(accepted)  # its own, which run first
            assert num_between <= 2 * (num_before + 1), event
        assert len(done) == 201 and done[-1] > event["at"], "the greedy key's requests were done before"


def test_nothing_of_a_key_is_in_the_answers_to_another(base: BaseModel, tmp_path: Path) -> None:
    with listening(tmp_path, base=base, tokens=[KEY, OTHER]) as url:
        one, other = model_of(url, KEY, 4), model_of(url, OTHER, 4)
        state = one.save_state("mine").result().path
        for call in (
            lambda: other.load_state(state).result(),
            lambda: tinker.RestClient(base_url=url, api_key=OTHER).list_checkpoints(one.model_id).result(),
            lambda: client_of(url, key=OTHER).create_sampling_client(model_path=state),
        ):
            with pytest.raises((tinker.RequestFailedError, tinker.NotFoundError), match=r"no (model|checkpoint)"):
                call()


def test_weights_that_are_not_finite_are_refused_and_change_nothing_for_others(base: BaseModel, tmp_path: Path) -> None:
    """They would be side by side with those of others in an engine."""
    with listening(tmp_path, base=base, tokens=[KEY, OTHER]) as url:
        broken, other = model_of(url, KEY, 4), model_of(url, OTHER, 8)
        params, prompt = types.SamplingParams(max_tokens=6, seed=1), types.ModelInput.from_ints(TEXT)
        before = other.save_weights_and_get_sampling_client()
        (expected,) = before.sample(prompt, 1, params).result().sequences
        path = broken.save_weights_for_sampler("end").result().path
        weights = weights_of(tmp_path, broken)
        for weight in weights.values():
            weight.fill_(float("nan"))
        folder = tmp_path / "models" / broken.model_id.replace(":", "_") / "sampler_weights" / "end" / "tensors"
        write_weights(folder, 0, weights, None)
        sampler = client_of(url).create_sampling_client(model_path=path)
        with pytest.raises(tinker.RequestFailedError, match="numbers that are not finite") as caught:
            sampler.sample(prompt, 1, params).result()
        assert caught.value.category == types.RequestErrorCategory.User
        (found,) = other.save_weights_and_get_sampling_client().sample(prompt, 1, params).result().sequences
        assert found.tokens == expected.tokens and found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
