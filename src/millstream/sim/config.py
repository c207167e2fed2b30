"""The `[sim]` table: what things cost in a simulated run (`millstream sim`). `millstream train` does not read it.

How many engines, ranks, slots and rollouts there are is in the other tables of the config. Rates are of one engine and of one
rank. A length or a latency is a distribution (`DrawConfig`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct, field

from millstream.errors import ConfigError
from millstream.events import RolloutEnded, RunStarted
from millstream.events.sinks import read_kinds
from millstream.seeds import request_seed
from millstream.sim.costs import Costs
from millstream.sim.draws import Draw, constant, lognormal, mixture, truncated_normal
from millstream.types import Finish, RequestKey


class Distribution(NamedTuple):
    """A distribution whose file, if any, has been read."""

    draw: Draw
    most: float
    """The highest number that it gives. inf: it has none."""
    prompts: tuple[Draw, ...] = ()
    """Of kind "prompts": a draw for each prompt."""


class DrawConfig(Struct, frozen=True, kw_only=True):
    """A distribution of lengths (tokens) or latencies (seconds)."""

    kind: Literal["fixed", "geometric", "lognormal", "normal", "file", "prompts", "run"] = "fixed"
    """fixed: always the mean. geometric: without memory, as tokens of a model with random weights. lognormal: a heavy tail.
    normal: values below 0 are drawn again. file: the numbers of a file, one a line. prompts: as file, and a line has the
    numbers of one prompt; as lengths, the run's data are these prompts, epoch after epoch. run: lengths of a run's rollouts,
    each of all of its turns; with the seed of that run, a rollout that it had too has the length that it had there."""
    mean: float | None = None
    """Of fixed, geometric, lognormal and normal."""
    sigma: float | None = None
    """Of lognormal: the deviation of the logarithm. Of normal: the deviation."""
    path: str | None = None
    """Of file and prompts: the file, in which a line that begins with # is a comment. Of run: the run folder."""

    def __post_init__(self) -> None:
        of_file = self.kind in ("file", "prompts", "run")
        needed = {"path"} if of_file else {"mean"} if self.kind in ("fixed", "geometric") else {"mean", "sigma"}
        given = {key for key in ("mean", "sigma", "path") if getattr(self, key) is not None}
        if given != needed:
            words = " and ".join(sorted(needed))
            raise ValueError(f'kind = "{self.kind}" has {words}, found {" and ".join(sorted(given)) or "none"}')
        least = 0.0 if self.kind in ("fixed", "normal") else math.ulp(0.0)
        if self.mean is not None and self.mean < least:
            raise ValueError(f"mean = {self.mean:g}: expected {'at least' if not least else 'a number above'} 0")
        if self.sigma is not None and self.sigma <= 0:
            raise ValueError(f"sigma = {self.sigma:g}: expected a number above 0")

    def read(self) -> Distribution:
        """Raises `ConfigError` if its file cannot be read, or has no numbers."""
        match self.kind:
            case "fixed":
                return Distribution(constant(self.mean or 0.0), self.mean or 0.0)
            case "geometric":
                return Distribution(_geometric(self.mean or 1.0), math.inf)
            case "lognormal":
                return Distribution(lognormal(self.mean or 1.0, self.sigma or 1.0), math.inf)
            case "normal":
                return Distribution(truncated_normal(self.mean or 0.0, self.sigma or 1.0), math.inf)
            case "file":
                return one_of([number for line in _numbers_in(Path(self.path or "")) for number in line])
            case "prompts":
                lines = _numbers_in(Path(self.path or ""))
                every = one_of([number for line in lines for number in line])
                return every._replace(prompts=tuple(one_of(line).draw for line in lines))
            case "run":
                return _lengths_of_run(Path(self.path or ""))


def one_of(numbers: Sequence[float]) -> Distribution:
    """One of these, each equally likely."""
    return Distribution(lambda rng: rng.choice(numbers), max(numbers))


def _geometric(mean: float) -> Draw:
    """The number of trials up to the first success, of which the mean is given; of a mean below 1, the exponential."""
    if mean <= 1:
        return lambda rng: rng.expovariate(1 / mean)
    scale = math.log1p(-1 / mean)

    def draw(rng: random.Random) -> float:
        return math.floor(math.log(1 - rng.random()) / scale) + 1

    return draw


def _numbers_in(path: Path) -> list[list[float]]:
    """By line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
        numbers = [[float(word) for word in line] for line in lines if line]
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. Expected a file with a number on each line"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Expected a number on each line") from error
    if not numbers or not all(0 <= number < math.inf for line in numbers for number in line):
        raise ConfigError(f"{path} has no numbers, or negative ones: expected a number of at least 0 on each line")
    return numbers


def _lengths_of_run(path: Path) -> Distribution:
    """Of the rollouts that ended and that no resume has undone. A rollout that was cut counts with the length that it had. One
    that the run has (the generator has the seed of its request) has its length, any other that of one of them."""
    log = path / "events.jsonl"
    events = [event for _, event in read_kinds(log, RolloutEnded, RunStarted, is_history=True)]
    ended = [event for event in events if isinstance(event, RolloutEnded) and event.finish is not Finish.ABORT]
    lengths = [float(event.num_sampled) for event in ended if event.num_sampled]
    if not lengths:
        raise ConfigError(f"{log} has no rollout that ended: name a run that has trained for some steps")
    seed, known = next((event.seed for event in events if isinstance(event, RunStarted)), 0), dict[float, float]()
    for event in ended:
        key = RequestKey(group_id=event.group_id, member=event.member, attempt=event.attempt)
        known[random.Random(request_seed(seed, "train", key)).random()] = float(max(1, event.num_sampled))

    def draw(rng: random.Random) -> float:
        number = rng.random()
        return known.get(number) or lengths[int(number * len(lengths))]

    return Distribution(draw, max(lengths))


class SimEnvironmentConfig(Struct, frozen=True, kw_only=True):
    """The `[sim.environment]` table: rollouts have turns, each followed by a step, and a reward of 0 or 1."""

    turns: DrawConfig = field(default_factory=lambda: DrawConfig(mean=1.0))
    latency_s: DrawConfig = field(default_factory=lambda: DrawConfig(mean=0.0))
    """Of one step, or of the reward of a rollout of one turn."""
    failure: float = 0.0
    """The probability that a step fails; the rollout is then tried again, as rollout.retries says."""
    success: float = 0.5
    """The probability of a reward of 1."""
    graded: bool = False
    """Whether rewards are any number between 0 and 1, so that a group has no signal only where its prompt has none."""
    no_signal: float = 0.0
    """The share of prompts that are always or never solved. With pipeline.filter_zero_signal their groups are replaced."""

    def __post_init__(self) -> None:
        for key in ("failure", "success", "no_signal"):
            if not 0 <= (value := getattr(self, key)) <= 1:
                raise ValueError(f"{key} = {value:g}: expected a probability, 0 to 1")

    def chance(self) -> Draw:
        """Of a prompt, that a rollout of it gets a reward of 1."""
        solved, coin = mixture((self.success, constant(1.0)), (1 - self.success, constant(0.0))), constant(self.success)
        return mixture((self.no_signal, solved), (1 - self.no_signal, coin))


class PlannedFailure(Struct, frozen=True, kw_only=True):
    """A `[[sim.failures.planned]]` table."""

    at_s: float  # simulated seconds since the start of the run
    node: int
    """Engines of node i are i * engines_per_node and those that follow."""

    def __post_init__(self) -> None:
        if self.at_s < 0 or self.node < 0:
            raise ValueError("at_s and node must be at least 0")


class SimFailuresConfig(Struct, frozen=True, kw_only=True):
    """The `[sim.failures]` table: nodes die with all of their engines, each of which is replaced, as in a real run."""

    node_mean_s: float | None = None
    """The mean time between two failures of one node. None: only planned ones."""
    planned: tuple[PlannedFailure, ...] = ()
    engines_per_node: int = 1  # these fail together
    restart_s: float = 60.0
    """From the failure of an engine to a new one that can load weights; the fleet's back-off comes before it."""

    def __post_init__(self) -> None:
        if self.node_mean_s is not None and self.node_mean_s <= 0:
            raise ValueError(f"node_mean_s = {self.node_mean_s:g}: expected a number above 0")
        if self.engines_per_node < 1 or self.restart_s < 0:
            raise ValueError("engines_per_node must be at least 1, restart_s at least 0")

    @property
    def is_on(self) -> bool:
        return self.node_mean_s is not None or bool(self.planned)


class SimConfig(Struct, frozen=True, kw_only=True):
    """A decode step takes floor_s + weights_s + request_s * requests + context_token_s * tokens in the cache. The defaults are
    those of a model of 474M parameters on one H200."""

    floor_s: float = 1.3e-3
    """Of a decode step: what it costs by itself (launches, sampling)."""
    weights_s: float = 0.0
    """Of a decode step: reading the weights, their bytes divided by the bandwidth of the engine's memory."""
    request_s: float = 0.0
    """Of a decode step, for each running request."""
    context_token_s: float = 29e-9
    """Of a decode step, for each token in the cache: its bytes divided by the bandwidth."""
    prefill_tokens_per_s: float = 400_000.0
    """Decoding waits while prompts are computed."""
    has_prefix_cache: bool = True
    """Whether a prompt that members of a group share, and the history of a conversation, is computed once an engine."""
    cache_tokens: int | None = None
    """Of one engine. When they are used up, the request that began last is preempted. None: without limit."""
    decode_slowdown: float = 1.0
    """How many times as long a decode step takes while the learner works. 1: engines have GPUs of their own."""
    learner_keep: float = 1.0
    """The share of its rate that the learner keeps while an engine decodes. 1: it has GPUs of its own."""
    cores: float | None = None
    """Of a CPU that engines, the learner and the driver share, each of which takes one while it works. Not a whole number: what
    else they share (memory, Python's lock) slows them as well. None: each has what it needs."""
    train_tokens_per_s: float = 104_000.0
    """Of one rank, forward and backward; a learner of n ranks has n times as many."""
    train_step_s: float = 0.1
    """Of an optimizer step, whatever the batch."""
    score_tokens_per_s: float = 312_000.0
    """Of a reference, a proximal policy or a critic, each with GPUs of its own. A critic learns at a third of it."""
    publish_s: float = 0.05
    """From an optimizer step to weights that engines can fetch. The learner waits for it."""
    load_s: float = 0.05
    """Until an engine has fetched and loaded new weights. It decodes meanwhile."""
    driver_s: float = 0.0
    """Of the driver's event loop, for each turn, half of it before the engine has the turn. It works on one turn at a time."""
    prompt_tokens: int = 128
    """Of every turn: the prompt, or what the environment answers."""
    lengths: DrawConfig = field(default_factory=lambda: DrawConfig(kind="lognormal", mean=1000.0, sigma=1.0))
    """Tokens that a turn samples; rollout.max_tokens cuts them."""
    environment: SimEnvironmentConfig = field(default_factory=SimEnvironmentConfig)
    failures: SimFailuresConfig = field(default_factory=SimFailuresConfig)

    def __post_init__(self) -> None:
        for key in (
            "floor_s",
            "weights_s",
            "request_s",
            "context_token_s",
            "train_step_s",
            "publish_s",
            "load_s",
            "driver_s",
        ):
            if (value := getattr(self, key)) < 0:
                raise ValueError(f"{key} = {value:g}: expected at least 0")
        if self.floor_s + self.weights_s <= 0:
            raise ValueError("floor_s + weights_s must be above 0: a decode step takes some time")
        if min(self.prefill_tokens_per_s, self.train_tokens_per_s, self.score_tokens_per_s) <= 0:
            raise ValueError("prefill_tokens_per_s, train_tokens_per_s and score_tokens_per_s must be above 0")
        if self.prompt_tokens < 1 or (self.cache_tokens is not None and self.cache_tokens < 1):
            raise ValueError("prompt_tokens and cache_tokens must be at least 1")
        if self.decode_slowdown < 1 or not 0 < self.learner_keep <= 1:
            raise ValueError("decode_slowdown must be at least 1, learner_keep above 0 and at most 1")
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"cores = {self.cores:g}: expected at least 1")
        if self.lengths.kind == "fixed" and not self.lengths.mean:
            raise ValueError("lengths.mean must be above 0")

    def read_draws(self) -> SimDraws:
        """Raises `ConfigError` if a file cannot be read, or has no numbers."""
        environment = self.environment
        return SimDraws(self.lengths.read(), environment.turns.read(), environment.latency_s.read())

    @property
    def costs(self) -> Costs:
        return Costs(
            step_s=self.floor_s + self.weights_s,
            request_s=self.request_s,
            context_token_s=self.context_token_s,
            prefill_token_s=1 / self.prefill_tokens_per_s,
        )


class SimDraws(NamedTuple):
    """The distributions of a `[sim]` table."""

    lengths: Distribution
    turns: Distribution
    latency_s: Distribution


class CostsFile(Struct, frozen=True, kw_only=True):
    """A file of costs (`--costs`): a `[sim]` table and nothing else."""

    sim: SimConfig
