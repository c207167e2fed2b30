"""An engine with continuous batching whose steps cost virtual time and nothing else. Keeps the promises of
`millstream.engine.Engine`.

The path of a request: queued, first come, first served; admitted when a slot is free and its prompt fits into the cache; its
prompt is computed, during which no other request decodes; one token a step beside all others (`sim.pace`); done at its
length, drawn from its seed. When the cache runs over, the request that was admitted last goes back to the head of the queue
with the tokens it has, waits until another request leaves, and pays for its prompt and those tokens again. A request that
ends, is aborted or whose `generate` is cancelled gives its slot and its cache back in that moment. Work is done where the
batch changes, never per token."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import deque

from msgspec import Struct

from millstream.engine import EngineStats, OnSampled
from millstream.errors import EngineError, EngineGone, RequestRefused
from millstream.seeds import derive_seed
from millstream.sim.draws import Draw, constant, uniform
from millstream.sim.pace import Pace
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Weights

UP_TO_100, FREE = uniform(1, 100), constant(0.0)
ROUNDING = 1e-3  # of a token: so close to full is full
LOGPROBS = tuple(-(1 + byte) / 64 for byte in range(256))


class Costs(Struct, frozen=True, kw_only=True):
    """A decode step takes step_s + request_s * requests + context_token_s * tokens in the cache. With step_s alone every token
    takes the same time, whatever runs at the same time."""

    step_s: float = 0.01  # the weights, read once a step, and what a step costs by itself
    request_s: float = 0.0
    context_token_s: float = 0.0  # reading the cache of one token
    # One token of a prompt. Decoding waits for it. Without a prefix cache a later turn pays for the whole history.
    prefill_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.step_s <= 0 or min(self.request_s, self.context_token_s, self.prefill_token_s) < 0:
            raise ValueError("step_s must be above 0, the other costs at least 0")

    def of_step(self, num_requests: int, num_tokens: float) -> float:
        return self.step_s + self.request_s * num_requests + self.context_token_s * num_tokens


# A Qwen3 shape of 474M parameters in bf16 on one H200, measured: 5.7 ms a step with 128 requests, 10.0 ms with 512, with
# contexts of 288 tokens on average. A token of cache is 115 KB, read at 4.4 TB/s; a token of prompt 0.95 GFLOP at 380
# TFLOP/s.
H200 = Costs(step_s=4.26e-3, request_s=3.7e-6, context_token_s=26e-9, prefill_token_s=2.5e-6)
H200_KV_TOKENS = 1_000_000  # what the memory of that machine holds beside the weights


class _Job:
    """A request on its way. While it runs: `begin` is the position where it was admitted, `before` what it had by then."""

    __slots__ = (
        "before",
        "begin",
        "done",
        "finish",
        "length",
        "num_told",
        "on_sampled",
        "request",
        "ticket",
        "versions",
    )

    def __init__(self, request: Request, wanted: int, on_sampled: OnSampled | None) -> None:
        self.request = request
        self.on_sampled = on_sampled
        self.num_told = 0
        self.length = min(wanted, request.sampling.max_tokens)
        self.finish = Finish.STOP if wanted <= request.sampling.max_tokens else Finish.LENGTH
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.versions: list[int] = []
        self.before = 0
        self.begin = 0.0
        self.ticket = -1

    @property
    def size(self) -> int:
        """Tokens of cache that it needs to begin or to continue."""
        return len(self.request.tokens) + len(self.versions)

    def complete(self) -> None:
        if self.done.done():
            return
        tokens, logprobs, versions = self.sampled(0, self.versions)
        self.done.set_result(Completion(tokens=tokens, logprobs=logprobs, versions=versions, finish=self.finish))

    def tell(self, versions: list[int]) -> None:
        """All that it has sampled has these versions."""
        if self.on_sampled is not None and len(versions) > self.num_told and not self.done.done():
            news = self.sampled(self.num_told, versions)
            self.num_told = len(versions)
            self.on_sampled(Sampled(*news))

    def sampled(self, begin: int, versions: list[int]) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
        """Token i and its log-probability are functions of the seed and of i: a request that was cut has a prefix, and one that
        was interrupted continues after it."""
        first, last = self.request.num_sampled + begin, self.request.num_sampled + len(versions)
        raw = random.Random(self.request.seed + 1).randbytes(4 * math.ceil(last / 2))[2 * first : 2 * last]
        return tuple(raw[0::2]), tuple(map(LOGPROBS.__getitem__, raw[1::2])), tuple(versions[begin:])


class SimEngine:
    """`token_s` is short for `costs` with a constant rate. `kv_tokens` None: the cache has no end. `news_s`: how often requests
    that are watched hear of their tokens; None: never, as the seam allows. With `has_prefix_cache` what was computed for a
    conversation, or for the prompt of its group, is not computed again until new weights come; it takes no room."""

    def __init__(
        self,
        *,
        name: str = "engine",
        slots: int = 64,
        token_s: float = 0.01,
        costs: Costs | None = None,
        kv_tokens: int | None = None,
        num_tokens: Draw = UP_TO_100,
        load_s: Draw = FREE,
        version: int = 0,
        seed: int = 0,
        news_s: float | None = None,
        has_prefix_cache: bool = False,
    ) -> None:
        self.name = name
        self.slots = slots
        self._news_s = news_s
        self._telling = False
        self._prefixes: dict[tuple[int, ...], int] | None = {} if has_prefix_cache else None
        self._gone: EngineGone | None = None
        self.num_computed = 0
        self.num_reused = 0  # tokens of prompts
        self._costs = Costs(step_s=token_s) if costs is None else costs
        self._kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self._num_tokens = num_tokens
        self._load_s = load_s
        self._rng = random.Random(derive_seed(seed, name))
        self._loaded_at: list[float] = [-math.inf]
        self._versions: list[int] = [version]
        self._jobs: dict[RequestKey, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}  # by ticket, in the order of admission
        # A heap of (position, ticket); tickets that no longer run are passed over.
        self._ends: list[tuple[float, int]] = []
        self._tickets = itertools.count()
        self._sizes = 0.0
        self._begins = 0.0  # of those that run: tokens when admitted, and positions, summed
        self._pace = Pace()
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._is_closed = False
        self._is_crowded = False
        self.num_preempted = 0
        self.num_discarded = 0  # tokens of requests whose `generate` was cancelled
        self._tokens = 0
        self._finished = 0

    @property
    def version(self) -> int:
        return self._versions[-1]

    @property
    def tokens_held(self) -> int:
        """Of the cache: prompts and whole tokens of the requests that run."""
        position = self._pace.position(_now())
        return sum(job.size + self._progress(job, position) for job in self._running.values())

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            tokens_generated=self._tokens,
            requests_finished=self._finished,
            cache_used=self._cache_used(),
            num_preempted=self.num_preempted,
        )

    def _cache_used(self) -> float:
        has_end = bool(self._running) and self._kv_tokens < math.inf
        return self._held(self._pace.position(_now())) / self._kv_tokens if has_end else 0.0

    # ---- what the pipeline calls -----------------------------------------------------------------------------------

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        job = self._queue(request, on_sampled)
        try:
            return await job.done
        except asyncio.CancelledError:
            if self._jobs.get(request.key) is job:
                self._cut(job)
                self._turn()
            self.num_discarded += len(job.versions)  # they are not read by any caller
            raise

    def crash(self, why: str) -> None:
        """It breaks for good: every waiting and every later request fails."""
        self._gone = EngineGone(f"{self.name} broke: {why}")
        self._fail_all(self._gone)

    def stumble(self, why: str) -> None:
        """Its present requests fail; it continues to serve."""
        self._fail_all(EngineError(f"{self.name} failed: {why}"))

    @property
    def is_gone(self) -> bool:
        return self._gone is not None

    def _fail_all(self, error: EngineError) -> None:
        for job in list(self._jobs.values()):
            self._cut(job)
            if not job.done.done():
                job.done.set_exception(error)
        self._turn()

    def _raise_if_gone(self) -> None:
        if self._gone is not None:
            raise self._gone

    async def abort(self, key: RequestKey) -> None:
        self._raise_if_gone()
        if key in self._jobs:
            self._abort(self._jobs[key])
            self._turn()

    async def pause(self) -> None:
        self._raise_if_gone()
        self._is_paused = True
        self._pace.pause(_now())
        self._turn()

    async def resume(self) -> None:
        self._raise_if_gone()
        self._is_paused = False
        self._pace.resume(_now())
        self._turn()

    async def load(self, version: int, weights: Weights) -> None:
        """Takes `load_s`, beside decoding; the swap itself takes no time."""
        await asyncio.sleep(self._load_s(self._rng))
        self._raise_if_gone()
        if version < self.version:
            raise EngineError(f"version {version} after {self.version}")
        self._loaded_at.append(self._pace.position(_now()))
        self._versions.append(version)
        if self._prefixes is not None:
            self._prefixes.clear()

    async def close(self) -> None:
        self._is_closed = True
        for job in list(self._jobs.values()):
            self._abort(job)
        self._turn()

    # ---- the batch -------------------------------------------------------------------------------------------------

    def _queue(self, request: Request, on_sampled: OnSampled | None) -> _Job:
        self._raise_if_gone()
        if self._is_closed:
            raise EngineGone(f"{self.name} is closed")
        if request.key in self._jobs:
            raise EngineError(f"{request.key} is in flight already")
        if (most := len(request.tokens) + request.sampling.max_tokens) > self._kv_tokens:
            raise RequestRefused(f"{request.key} may need {most} tokens of cache, {self.name} has {self._kv_tokens}")
        length = round(self._num_tokens(random.Random(request.seed))) - request.num_sampled
        job = _Job(request, max(1, length), None if self._news_s is None else on_sampled)
        self._jobs[request.key] = job
        self._tell_later()
        self._waiting.append(job)
        self._turn()
        return job

    def _turn(self, arrived: float = -math.inf) -> None:
        """The batch may have changed: end what is done, admit what fits, and wait for whatever comes next."""
        now = _now()
        self._pace.arrive(arrived)
        position = self._pace.position(now)
        self._end_the_done(position)
        self._preempt(position)
        self._admit(now, position)
        num_running, step_s = len(self._running), self._costs.step_s
        slope = self._costs.of_step(num_running, self._held(position)) / step_s
        self._pace.change(now, slope=slope, bend=self._costs.context_token_s * num_running / step_s**2)
        self._set_timer(position)

    def _end_the_done(self, position: float) -> None:
        while self._ends and self._ends[0][0] <= position:
            _, ticket = heapq.heappop(self._ends)
            if ticket in self._running:
                job = self._running[ticket]
                self._leave(job, position, job.length - job.before)
                self._forget(job)
                job.complete()

    def _preempt(self, position: float) -> None:
        while len(self._running) > 1 and self._until_full(position) <= 0:
            job = self._running[next(reversed(self._running))]
            self._leave(job, position, self._progress(job, position))
            self._waiting.appendleft(job)
            if self._prefixes is not None:
                self._prefixes.pop((job.request.key.group_id, job.request.key.member, job.request.key.attempt), None)
            self.num_preempted += 1
            self._is_crowded = True

    def _admit(self, now: float, position: float) -> None:
        """First come, first served: a request that does not fit holds up those behind it."""
        while self._waiting and not self._is_paused and not self._is_crowded and len(self._running) < self.slots:
            job, num_after = self._waiting[0], len(self._running) + 1
            if self._held(position) + job.size + num_after > self._kv_tokens:
                break
            self._waiting.popleft()
            self._pace.stall(now, self._costs.prefill_token_s * self._to_compute(job))
            job.begin = position
            job.before = len(job.versions)
            job.ticket = next(self._tickets)
            self._running[job.ticket] = job
            self._sizes += job.size
            self._begins += position
            end = position + (job.length - job.before) * self._costs.step_s
            heapq.heappush(self._ends, (end, job.ticket))

    def _to_compute(self, job: _Job) -> int:
        """Tokens that it needs and that are not there. All but the last may be."""
        key, size, known = job.request.key, job.size, 0
        if self._prefixes is not None:
            conversation, group = (key.group_id, key.member, key.attempt), (key.group_id,)
            known = min(size - 1, max(self._prefixes.get(conversation, 0), self._prefixes.get(group, 0)))
            self._prefixes[conversation] = size
            self._prefixes.setdefault(group, size)
        self.num_computed += size - known
        self.num_reused += known
        return size - known

    def _tell_later(self) -> None:
        if self._news_s is not None and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(self._news_s, self._tell)

    def _tell(self) -> None:
        self._telling = False
        position = self._pace.position(_now())
        for job in list(self._running.values()):
            job.tell(job.versions + self._versions_from(job.begin, self._progress(job, position)))
        if self._jobs:
            self._tell_later()

    def _leave(self, job: _Job, position: float, num_tokens: int) -> None:
        """Its slot and its cache are free."""
        del self._running[job.ticket]
        self._sizes -= job.size
        self._begins -= job.begin
        if not self._running:
            self._sizes = 0.0
            self._begins = 0.0  # and with them what rounding has left
        self._is_crowded = False
        job.versions += self._versions_from(job.begin, num_tokens)

    def _cut(self, job: _Job) -> None:
        """It ends before its time, wherever it is."""
        if job.ticket in self._running:
            position = self._pace.position(_now())
            self._leave(job, position, self._progress(job, position))
        else:
            self._waiting.remove(job)
        self._forget(job)

    def _abort(self, job: _Job) -> None:
        self._cut(job)
        job.finish = Finish.ABORT
        job.complete()

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.request.key]
        if self._prefixes is not None and job.ticket >= 0:
            key = job.request.key
            self._prefixes[key.group_id, key.member, key.attempt] = job.size
        self._finished += 1
        self._tokens += len(job.versions)

    def _progress(self, job: _Job, position: float) -> int:
        """Whole tokens since it was admitted."""
        return min(job.length - job.before, int((position - job.begin) / self._costs.step_s))

    def _versions_from(self, begin: float, num_tokens: int) -> list[int]:
        """A token is of the version that was there when its step began."""
        found: list[int] = []
        while len(found) < num_tokens:
            loaded = bisect_right(self._loaded_at, begin + len(found) * self._costs.step_s)
            until = self._loaded_at[loaded] if loaded < len(self._loaded_at) else math.inf
            steps = min((until - begin) / self._costs.step_s, num_tokens)
            found += [self._versions[loaded - 1]] * max(1, math.ceil(steps) - len(found))
        return found

    # ---- what comes next -------------------------------------------------------------------------------------------

    def _held(self, position: float) -> float:
        return self._sizes + (len(self._running) * position - self._begins) / self._costs.step_s

    def _until_full(self, position: float) -> float:
        """Stretches of position until the cache runs over: every running request adds a token a step."""
        if self._kv_tokens == math.inf or not self._running:
            return math.inf
        room = self._kv_tokens - self._held(position)
        return 0.0 if room < ROUNDING else room * self._costs.step_s / len(self._running)

    def _set_timer(self, position: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if self._is_paused or not self._running:
            return
        full = position + self._until_full(position) if len(self._running) > 1 else math.inf
        target = min(self._ends[0][0], full)
        self._timer = asyncio.get_running_loop().call_at(self._pace.time(target), self._turn, target)


def _now() -> float:
    return asyncio.get_running_loop().time()
