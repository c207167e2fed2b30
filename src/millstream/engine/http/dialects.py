"""What each kind of server is told, and what its answers mean. Pure: nothing here talks.

- `openai`: OpenAI's completions with `return_token_ids`, and nothing else that is not in OpenAI's API.
- `vllm`: the same with vLLM's own sampling parameters; weights by `/collective_rpc`, which its development mode has.
- `sglang`: `/generate` with token ids; weights by `/update_weights_from_disk`.
- `millstream`: `millstream serve`, which says the version of every token, and swaps with requests in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from millstream.engine.http.config import HttpConfig
from millstream.model.safetensors_io import Manifest
from millstream.seeds import derive_seed
from millstream.types import Finish, Request, Sampling

Json = dict[str, Any]
Wrong = Callable[[Any], str | None]
"""What is wrong with an answer, and what to do; None: nothing."""
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
SEEDS = 2**31
"""SGLang's and OpenAI's seeds are smaller than ours."""


class Piece(NamedTuple):
    """New tokens of a stream."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None = None
    """Of each token, as the server counts; None: it does not say."""
    label: str | None = None
    """What the server calls the weights that it has; None: it does not say."""
    finish: Finish | None = None


class Call(NamedTuple):
    """Something to tell a server beside generation."""

    method: str
    path: str
    body: Json | None = None
    wrong: Wrong = lambda answer: None
    is_optional: bool = False
    """A server that does not know the path is not wrong."""
    is_update: bool = False
    """It brings weights, which takes long, and takes place even if nobody waits for it any more."""


class Pushed(NamedTuple):
    """Weights in a folder, as a server is told of them."""

    folder: str
    served_version: int
    label: str
    manifest: Manifest


class Flavour(Protocol):
    path: str
    stops_by_itself: bool
    """It ends an answer at the request's stop tokens."""
    swaps_in_flight: bool
    """Requests go on over an update, and each token says its version. Else they are interrupted for it, and go on after it."""
    hold: Call | None
    """Ends all requests with what they have, and lets none begin, until `release`."""
    release: Call | None
    greetings: tuple[Call, ...]
    """Before anything else; what they answer is checked."""

    def refuses(self, sampling: Sampling) -> str | None:
        """Why it cannot sample so; None: it can."""
        ...

    def body(self, request: Request, *, model: str | None, name: str) -> Json: ...

    def read(self, event: Json, num_before: int) -> Piece:
        """The new tokens of an event of a stream that had so many before. Raises KeyError, TypeError, ValueError or IndexError
        for what is no such event."""
        ...

    def abort(self, name: str) -> Call | None:
        """Tells it once more that nobody waits for this request: something in between may hide that the connection is gone."""
        ...

    def update(self, pushed: Pushed) -> list[Call]: ...


def flavour_of(config: HttpConfig) -> Flavour:
    match config.flavour:
        case "openai":
            return OpenAi()
        case "vllm":
            return Vllm()
        case "sglang":
            return SgLang()
        case "millstream":
            return Millstream()


def _raw_logprobs(answer: Any) -> str | None:
    mode = answer["vllm_config"]["model_config"].get("logprobs_mode", "raw_logprobs")
    if mode == "processed_logprobs":
        return None
    why = f"its logprobs_mode is {mode!r}, which are not those of the distribution that is sampled from"
    return f"{why}: start vLLM with --logprobs-mode processed_logprobs"


class OpenAi:
    path = "/v1/completions"
    stops_by_itself, swaps_in_flight = False, False
    hold: Call | None = None
    release: Call | None = None
    greetings: tuple[Call, ...] = ()

    def refuses(self, sampling: Sampling) -> str | None:
        return "OpenAI's API has no top_k" if sampling.top_k else None

    def body(self, request: Request, *, model: str | None, name: str) -> Json:
        sampling = request.sampling
        return {
            "model": model,
            "prompt": list(request.tokens),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": _seed(request) % SEEDS,
            "logprobs": 0,
            "stream": True,
            "return_token_ids": True,
        }

    def read(self, event: Json, num_before: int) -> Piece:
        if not event["choices"]:
            return Piece([], [])
        choice = event["choices"][0]
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        tokens = choice.get("token_ids")
        if tokens is None and (logprobs or choice.get("text")):
            raise ValueError("it has no token_ids: an engine needs the tokens themselves, which vLLM and SGLang give")
        return Piece(_ints(tokens or []), _floats(logprobs), finish=_finish(choice.get("finish_reason")))

    def abort(self, name: str) -> Call | None:
        return None

    def update(self, pushed: Pushed) -> list[Call]:
        raise NotImplementedError("an OpenAI API takes no weights; HttpConfig refuses it")


class Vllm(OpenAi):
    stops_by_itself = True
    hold: Call | None = Call("POST", "/pause?mode=abort")
    release: Call | None = Call("POST", "/resume")
    greetings: tuple[Call, ...] = (
        Call("GET", "/server_info?config_format=json", wrong=_raw_logprobs, is_optional=True),
    )

    def refuses(self, sampling: Sampling) -> str | None:
        return None

    def body(self, request: Request, *, model: str | None, name: str) -> Json:
        own = {
            "seed": _seed(request),
            "top_k": request.sampling.top_k,
            "stop_token_ids": list(request.sampling.stop),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "return_tokens_as_token_ids": True,  # no text is made of them, and no tokenizer is needed for it
            "request_id": name,
        }
        return super().body(request, model=model, name=name) | own

    def update(self, pushed: Pushed) -> list[Call]:
        kwargs = {"weights_path": pushed.folder}
        return [
            Call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs}, is_update=True),
            Call("POST", "/reset_prefix_cache", wrong=lambda a: _not_done(a, "its prefix cache was not reset")),
        ]


class SgLang:
    path = "/generate"
    stops_by_itself, swaps_in_flight = True, False
    hold: Call | None = Call("POST", "/pause_generation", {"mode": "abort"})
    release: Call | None = Call("POST", "/continue_generation", {})
    greetings: tuple[Call, ...] = ()

    def refuses(self, sampling: Sampling) -> str | None:
        if sampling.top_k or sampling.top_p < 1.0:
            return "SGLang's log-probabilities are those of all tokens, not of what top_k and top_p leave"
        return None

    def body(self, request: Request, *, model: str | None, name: str) -> Json:
        sampling = request.sampling
        return {
            "rid": name,
            "input_ids": list(request.tokens),
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "stop_token_ids": list(sampling.stop),
                "ignore_eos": True,
                "skip_special_tokens": False,
                "sampling_seed": request.seed
                % SEEDS,  # with the token's place in the sequence, which stays when it goes on
            },
            "return_logprob": True,
            "stream": True,
        }

    def read(self, event: Json, num_before: int) -> Piece:
        """Its streams have all tokens so far in every event, or the new ones alone, as it was started: the last are new. How
        many there are must fit, too: of a token that follows itself, the log-probability of the one before would pass."""
        about = event["meta_info"]
        num_all = int(about["completion_tokens"])
        num_new = num_all - num_before
        reason = about.get("finish_reason")
        finish = None if reason is None else _finish(reason["type"])
        if num_new == 0:
            return Piece([], [], label=about.get("weight_version"), finish=finish)
        tokens, triples = _ints(event["output_ids"]), about["output_token_logprobs"]
        fit = len(tokens) in (num_all, num_new) and len(triples) in (num_all, len(tokens))
        if num_new < 0 or not fit or [one[1] for one in triples[-num_new:]] != tokens[-num_new:]:
            found = f"found {len(tokens)} with {len(triples)}"
            raise ValueError(f"expected {num_new} new tokens of {num_all}, each with its log-probability, {found}")
        tokens, triples = tokens[-num_new:], triples[-num_new:]
        return Piece(tokens, _floats([one[0] for one in triples]), label=about.get("weight_version"), finish=finish)

    def abort(self, name: str) -> Call | None:
        return Call("POST", "/abort_request", {"rid": name})

    def update(self, pushed: Pushed) -> list[Call]:
        body = {"model_path": pushed.folder, "weight_version": pushed.label, "flush_cache": True}

        def other(answer: Any) -> str | None:
            found = answer.get("weight_version") if isinstance(answer, dict) else None
            return (
                None if found == pushed.label else f"it has the weights {found!r} after an update to {pushed.label!r}"
            )

        taken = Call(
            "POST",
            "/update_weights_from_disk",
            body,
            wrong=lambda a: _not_done(a, "it did not take the weights"),
            is_update=True,
        )
        return [taken, Call("GET", "/model_info", wrong=other)]


class Millstream:
    path = "/v1/completions"
    stops_by_itself, swaps_in_flight = True, True
    hold: Call | None = None
    release: Call | None = None
    greetings: tuple[Call, ...] = ()

    def refuses(self, sampling: Sampling) -> str | None:
        return None

    def body(self, request: Request, *, model: str | None, name: str) -> Json:
        sampling = request.sampling
        return {
            "prompt": list(request.tokens),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop),
            "seed": request.seed,
            "num_sampled": request.num_sampled,
            "stream": True,
        }

    def read(self, event: Json, num_before: int) -> Piece:
        if not event["choices"]:
            return Piece([], [])
        choice = event["choices"][0]
        finish = _finish(choice.get("finish_reason"))
        if "token_ids" not in choice:
            return Piece([], [], [], finish=finish)
        tokens, versions = _ints(choice["token_ids"]), _ints(choice["token_versions"])
        return Piece(tokens, _floats(choice["token_logprobs"]), versions, finish=finish)

    def abort(self, name: str) -> Call | None:
        return None

    def update(self, pushed: Pushed) -> list[Call]:
        def other(answer: Any) -> str | None:
            expected = {"version": pushed.served_version, "digest": pushed.manifest.digest}
            found = {key: answer.get(key) for key in expected} if isinstance(answer, dict) else answer
            return None if found == expected else f"it took {found}, expected {expected}"

        body = {"path": pushed.folder, "version": pushed.served_version}
        return [Call("POST", "/v1/millstream/weights", body, wrong=other, is_update=True)]


def _seed(request: Request) -> int:
    """Of servers whose randomness begins anew with each request: what goes on must not draw the same numbers again."""
    return derive_seed(request.seed, request.num_sampled) if request.num_sampled else request.seed


def _finish(reason: str | None) -> Finish | None:
    return None if reason is None else FINISHES[reason]


def _ints(values: Any) -> list[int]:
    if not all(type(value) is int for value in values):
        raise TypeError("token ids that are no whole numbers")
    return list(values)


def _floats(values: Any) -> list[float]:
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError("log-probabilities that are no numbers")
    return [float(value) for value in values]


def _not_done(answer: Any, why: str) -> str | None:
    """A server that says nothing of success has answered 200, which is as good."""
    if isinstance(answer, dict) and answer.get("success") is False:
        return f"{why}: {answer.get('message', 'it does not say why')}"
    return None
