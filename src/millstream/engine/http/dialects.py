"""What each kind of server is asked, and what its answers mean. Pure: nothing here sends anything.

- `openai`: OpenAI's completions with `return_token_ids`, and nothing else that is not in OpenAI's API.
- `vllm`: the same with vLLM's own sampling parameters; weights by `/collective_rpc`, which its development mode has.
- `sglang`: `/generate` with token ids; weights by `/update_weights_from_disk`.
- `millstream`: `millstream serve`, which states the version of every token, and swaps weights with requests in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from millstream.engine.http.config import HttpConfig
from millstream.model.safetensors_io import Manifest
from millstream.seeds import derive_seed
from millstream.types import Finish, Request, Sampling

JsonObject = dict[str, Any]
Check = Callable[[Any], str | None]  # what is wrong with an answer, and what to do; None: nothing
FINISH_REASONS = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
NUM_SEEDS = 2**31  # SGLang's and OpenAI's seeds are smaller than ours


class StreamedTokens(NamedTuple):
    """New tokens of a stream."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None = None  # of each token, as the server counts; None: it does not say
    label: str | None = None  # the server's name for the weights that it has; None: it does not say
    finish: Finish | None = None


class ServerCall(NamedTuple):
    """A call to a server that is not generation."""

    method: str
    path: str
    body: JsonObject | None = None
    check: Check = lambda answer: None
    is_optional: bool = False  # a server that does not know the path is not wrong
    is_update: bool = False  # loads weights: takes long, and is carried out even if the client has stopped waiting


class UpdateArguments(NamedTuple):
    """Weights in a folder, as a server is asked to load them."""

    folder: str
    served_version: int
    label: str
    manifest: Manifest


class Dialect(Protocol):
    path: str
    stops_by_itself: bool
    """It ends an answer at the request's stop tokens."""
    swaps_in_flight: bool
    """Requests continue over an update, and each token states its version. Else they are interrupted for it, and continued
    after it."""
    hold: ServerCall | None
    """Ends all requests with what they have, and lets none start, until `release`."""
    release: ServerCall | None
    first_calls: tuple[ServerCall, ...]
    """Before anything else; what they answer is checked."""

    def refuses(self, sampling: Sampling) -> str | None:
        """Why it cannot sample so; None: it can."""
        ...

    def body(self, request: Request, *, model: str | None, name: str) -> JsonObject: ...

    def read(self, event: JsonObject, num_before: int) -> StreamedTokens:
        """The new tokens of an event of a stream that had `num_before` before. Raises KeyError, TypeError, ValueError or
        IndexError for an event of another form."""
        ...

    def abort(self, name: str) -> ServerCall | None:
        """Cancels a request explicitly: a proxy may hide from the server that its connection is closed."""
        ...

    def update(self, weights: UpdateArguments) -> list[ServerCall]: ...


def dialect_of(config: HttpConfig) -> Dialect:
    match config.flavour:
        case "openai":
            return OpenAi()
        case "vllm":
            return Vllm()
        case "sglang":
            return SgLang()
        case "millstream":
            return Millstream()


def _check_logprobs_mode(answer: Any) -> str | None:
    mode = answer["vllm_config"]["model_config"].get("logprobs_mode", "raw_logprobs")
    if mode == "processed_logprobs":
        return None
    why = f"its logprobs_mode is {mode!r}, which are not those of the distribution that is sampled from"
    return f"{why}: start vLLM with --logprobs-mode processed_logprobs"


class OpenAi:
    path = "/v1/completions"
    stops_by_itself = False
    swaps_in_flight = False
    hold: ServerCall | None = None
    release: ServerCall | None = None
    first_calls: tuple[ServerCall, ...] = ()

    def refuses(self, sampling: Sampling) -> str | None:
        return "OpenAI's API has no top_k" if sampling.top_k else None

    def body(self, request: Request, *, model: str | None, name: str) -> JsonObject:
        sampling = request.sampling
        return {
            "model": model,
            "prompt": list(request.tokens),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": _seed(request) % NUM_SEEDS,
            "logprobs": 0,
            "stream": True,
            "return_token_ids": True,
        }

    def read(self, event: JsonObject, num_before: int) -> StreamedTokens:
        if not event["choices"]:
            return StreamedTokens([], [])
        choice = event["choices"][0]
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        tokens = choice.get("token_ids")
        if tokens is None and (logprobs or choice.get("text")):
            raise ValueError("it has no token_ids: an engine needs the tokens themselves, which vLLM and SGLang give")
        return StreamedTokens(_ints(tokens or []), _floats(logprobs), finish=_finish(choice.get("finish_reason")))

    def abort(self, name: str) -> ServerCall | None:
        return None

    def update(self, weights: UpdateArguments) -> list[ServerCall]:
        raise NotImplementedError("an OpenAI API takes no weights; HttpConfig refuses it")


class Vllm(OpenAi):
    stops_by_itself = True
    hold: ServerCall | None = ServerCall("POST", "/pause?mode=abort")
    release: ServerCall | None = ServerCall("POST", "/resume")
    first_calls: tuple[ServerCall, ...] = (
        ServerCall("GET", "/server_info?config_format=json", check=_check_logprobs_mode, is_optional=True),
    )

    def refuses(self, sampling: Sampling) -> str | None:
        return None

    def body(self, request: Request, *, model: str | None, name: str) -> JsonObject:
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

    def update(self, weights: UpdateArguments) -> list[ServerCall]:
        kwargs = {"weights_path": weights.folder}
        return [
            ServerCall("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs}, is_update=True),
            ServerCall("POST", "/reset_prefix_cache", check=lambda a: _not_done(a, "its prefix cache was not reset")),
        ]


class SgLang:
    path = "/generate"
    stops_by_itself = True
    swaps_in_flight = False
    hold: ServerCall | None = ServerCall("POST", "/pause_generation", {"mode": "abort"})
    release: ServerCall | None = ServerCall("POST", "/continue_generation", {})
    first_calls: tuple[ServerCall, ...] = ()

    def refuses(self, sampling: Sampling) -> str | None:
        if sampling.top_k or sampling.top_p < 1.0:
            return "SGLang's log-probabilities are those of all tokens, not of what top_k and top_p leave"
        return None

    def body(self, request: Request, *, model: str | None, name: str) -> JsonObject:
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
                # with the token's place in the sequence, which stays when it is continued
                "sampling_seed": request.seed % NUM_SEEDS,
            },
            "return_logprob": True,
            "stream": True,
        }

    def read(self, event: JsonObject, num_before: int) -> StreamedTokens:
        """Every event has all tokens so far, or only the new ones, depending on how the server was started: the last are new.
        Their number is checked as well: of a token that follows itself, the log-probability of the one before would pass."""
        about = event["meta_info"]
        num_all = int(about["completion_tokens"])
        num_new = num_all - num_before
        reason = about.get("finish_reason")
        finish = None if reason is None else _finish(reason["type"])
        if num_new == 0:
            return StreamedTokens([], [], label=about.get("weight_version"), finish=finish)
        tokens, triples = _ints(event["output_ids"]), about["output_token_logprobs"]
        fit = len(tokens) in (num_all, num_new) and len(triples) in (num_all, len(tokens))
        if num_new < 0 or not fit or [one[1] for one in triples[-num_new:]] != tokens[-num_new:]:
            found = f"found {len(tokens)} with {len(triples)}"
            raise ValueError(f"expected {num_new} new tokens of {num_all}, each with its log-probability, {found}")
        tokens, triples = tokens[-num_new:], triples[-num_new:]
        return StreamedTokens(
            tokens, _floats([one[0] for one in triples]), label=about.get("weight_version"), finish=finish
        )

    def abort(self, name: str) -> ServerCall | None:
        return ServerCall("POST", "/abort_request", {"rid": name})

    def update(self, weights: UpdateArguments) -> list[ServerCall]:
        body = {"model_path": weights.folder, "weight_version": weights.label, "flush_cache": True}

        def other(answer: Any) -> str | None:
            found = answer.get("weight_version") if isinstance(answer, dict) else None
            return (
                None if found == weights.label else f"it has the weights {found!r} after an update to {weights.label!r}"
            )

        taken = ServerCall(
            "POST",
            "/update_weights_from_disk",
            body,
            check=lambda a: _not_done(a, "it did not take the weights"),
            is_update=True,
        )
        return [taken, ServerCall("GET", "/model_info", check=other)]


class Millstream:
    path = "/v1/completions"
    stops_by_itself = True
    swaps_in_flight = True
    hold: ServerCall | None = None
    release: ServerCall | None = None
    first_calls: tuple[ServerCall, ...] = ()

    def refuses(self, sampling: Sampling) -> str | None:
        return None

    def body(self, request: Request, *, model: str | None, name: str) -> JsonObject:
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

    def read(self, event: JsonObject, num_before: int) -> StreamedTokens:
        if not event["choices"]:
            return StreamedTokens([], [])
        choice = event["choices"][0]
        finish = _finish(choice.get("finish_reason"))
        if "token_ids" not in choice:
            return StreamedTokens([], [], [], finish=finish)
        tokens, versions = _ints(choice["token_ids"]), _ints(choice["token_versions"])
        return StreamedTokens(tokens, _floats(choice["token_logprobs"]), versions, finish=finish)

    def abort(self, name: str) -> ServerCall | None:
        return None

    def update(self, weights: UpdateArguments) -> list[ServerCall]:
        def other(answer: Any) -> str | None:
            expected = {"version": weights.served_version, "digest": weights.manifest.digest}
            found = {key: answer.get(key) for key in expected} if isinstance(answer, dict) else answer
            return None if found == expected else f"it took {found}, expected {expected}"

        body = {"path": weights.folder, "version": weights.served_version}
        return [ServerCall("POST", "/v1/millstream/weights", body, check=other, is_update=True)]


def _seed(request: Request) -> int:
    """For servers whose random numbers start over with each request: a continued one must not draw the same again."""
    return derive_seed(request.seed, request.num_sampled) if request.num_sampled else request.seed


def _finish(reason: str | None) -> Finish | None:
    return None if reason is None else FINISH_REASONS[reason]


def _ints(values: Any) -> list[int]:
    if not all(type(value) is int for value in values):
        raise TypeError("token ids that are no whole numbers")
    return list(values)


def _floats(values: Any) -> list[float]:
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError("log-probabilities that are no numbers")
    return [float(value) for value in values]


def _not_done(answer: Any, why: str) -> str | None:
    """None for a server that reports no success field: it has answered 200."""
    if isinstance(answer, dict) and answer.get("success") is False:
        return f"{why}: {answer.get('message', 'it does not say why')}"
    return None
