"""An engine with continuous batching whose steps cost virtual time and nothing else. Keeps the promises of
`millstream.engine.Engine`.

The path of a request: queued, first come, first served; admitted when a slot is free and its prompt fits into the cache; its
prompt is computed, during which no other request decodes; one token a step together with all others (`sim.pace`); done at its
length, drawn from its seed. When the cache runs over, the request that was admitted last goes back to the head of the queue
with the tokens it has, waits until another request leaves, and pays for its prompt and those tokens again. A request that
ends, is aborted or whose `generate` is cancelled gives its slot and its cache back in that moment. Work is done where the
batch changes, never per token."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Sequence

from millstream.engine import EngineStats, OnSampled
from millstream.errors import EngineError, EngineGone, RequestRefused
from millstream.seeds import derive_seed
from millstream.sim.batch import PrefixCache, SimBatch, SimRequest
from millstream.sim.costs import Costs
from millstream.sim.draws import Draw, constant, uniform
from millstream.sim.meter import DecodeMeter
from millstream.sim.pace import Pace
from millstream.sim.sharing import Sharing
from millstream.types import Completion, Finish, Request, RequestKey, Weights

UP_TO_100, FREE = uniform(1, 100), constant(0.0)


class SimEngine:
    """`token_s` is short for `costs` with a constant rate. `kv_tokens` None: the cache has no end. `news_s`: how often requests
    that are watched hear of their tokens; None: never, as the seam allows. With `has_prefix_cache` what was computed for a
    conversation, or for the prompt of its group, is not computed again until new weights come; it takes no room. `sharing`:
    GPUs that it shares with a learner. `meter`: reports its decoding. `prompts`: lengths of the prompt that a request's first
    token names, instead of `num_tokens`."""

    def __init__(
        self,
        *,
        name: str = "engine",
        slots: int = 64,
        token_s: float = 0.01,
        costs: Costs | None = None,
        kv_tokens: int | None = None,
        num_tokens: Draw = UP_TO_100,
        prompts: Sequence[Draw] = (),
        load_s: Draw = FREE,
        version: int = 0,
        seed: int = 0,
        news_s: float | None = None,
        has_prefix_cache: bool = False,
        sharing: Sharing | None = None,
        meter: DecodeMeter | None = None,
    ) -> None:
        self.name = name
        self.slots = slots
        self._news_s = news_s
        self._is_reporting = False
        self._prefixes = PrefixCache(is_on=has_prefix_cache)
        self._gone: EngineGone | None = None
        self.num_computed = 0
        self.num_reused = 0  # tokens of prompts
        self._costs = Costs(step_s=token_s) if costs is None else costs
        self._kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self._num_tokens = num_tokens
        self._prompts = prompts
        self._load_s = load_s
        self._rng = random.Random(derive_seed(seed, name))
        self._batch = SimBatch(self._costs, kv_tokens=self._kv_tokens, version=version)
        self._jobs: dict[RequestKey, SimRequest] = {}
        self._waiting: deque[SimRequest] = deque()
        self._pace = Pace()
        self._sharing = Sharing() if sharing is None else sharing
        self._sharing.listeners.append(self._turn)
        self._meter = meter
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
        return self._batch.version

    @property
    def tokens_held(self) -> int:
        """Of the cache: prompts and whole tokens of the requests that run."""
        position = self._pace.position(_now())
        return sum(job.size + self._batch.progress(job, position) for job in self._batch.jobs)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._batch),
            waiting=len(self._waiting),
            tokens_generated=self._tokens,
            requests_finished=self._finished,
            cache_used=self._cache_used(),
            num_preempted=self.num_preempted,
        )

    def _cache_used(self) -> float:
        has_end = len(self._batch) > 0 and self._kv_tokens < math.inf
        return self._batch.held(self._pace.position(_now())) / self._kv_tokens if has_end else 0.0

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
        self._sharing.leave(self.name, self._turn)

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
        """Takes `load_s`, during which decoding continues; the swap itself takes no time."""
        await asyncio.sleep(self._load_s(self._rng))
        self._raise_if_gone()
        if version < self.version:
            raise EngineError(f"version {version} after {self.version}")
        self._batch.load(self._pace.position(_now()), version)
        self._prefixes.clear()

    async def close(self) -> None:
        self._is_closed = True
        if self.is_gone:  # an engine of the same name may have replaced it
            return
        for job in list(self._jobs.values()):
            self._abort(job)
        self._turn()
        self._sharing.leave(self.name, self._turn)

    # ---- the batch -------------------------------------------------------------------------------------------------

    def _queue(self, request: Request, on_sampled: OnSampled | None) -> SimRequest:
        self._raise_if_gone()
        if self._is_closed:
            raise EngineGone(f"{self.name} is closed")
        if request.key in self._jobs:
            raise EngineError(f"{request.key} is in flight already")
        if (most := len(request.tokens) + request.sampling.max_tokens) > self._kv_tokens:
            raise RequestRefused(
                f"{request.key} may need {most} tokens of cache, {self.name} has {self._kv_tokens}: set sim.cache_tokens "
                "higher, or rollout.max_tokens lower"
            )
        draw = self._prompts[request.tokens[0]] if self._prompts else self._num_tokens
        length = max(1, round(draw(random.Random(request.seed))) - request.num_sampled)
        limit, done = request.sampling.max_tokens, asyncio.get_running_loop().create_future()
        finish = Finish.STOP if length <= limit else Finish.LENGTH
        job = SimRequest(request, min(length, limit), finish, None if self._news_s is None else on_sampled, done)
        self._jobs[request.key] = job
        self._report_later()
        self._waiting.append(job)
        self._turn()
        return job

    def _turn(self, arrived: float = -math.inf) -> None:
        """The batch may have changed: end what is done, admit what fits, and wait for whatever comes next."""
        now = _now()
        self._pace.arrive(arrived)
        position = self._pace.position(now)
        if self._meter is not None:
            self._meter.advance(position, self._batch.held(position))
        self._end_the_done(position)
        self._preempt(position)
        self._admit(now, position)
        num_running, step_s = len(self._batch), self._costs.step_s
        held, is_busy = self._batch.held(position), num_running > 0 and not self._is_paused
        self._sharing.set_decoding(self.name, is_busy)
        slower = self._sharing.slowdown
        slope = self._costs.of_step(num_running, held) / step_s
        bend = self._costs.context_token_s * num_running / step_s**2
        self._pace.change(now, slope=slower * slope, bend=slower * bend)
        if self._meter is not None:
            tokens = self._batch.num_sampled(position)
            self._meter.begin(now, position, held, is_busy=is_busy, tokens=tokens, prompt=self.num_computed)
        self._set_timer(position)

    def _end_the_done(self, position: float) -> None:
        while (job := self._batch.pop_done(position)) is not None:
            self._is_crowded = False
            self._forget(job)
            job.complete()

    def _preempt(self, position: float) -> None:
        while len(self._batch) > 1 and self._batch.until_full(position) <= 0:
            job = self._batch.newest
            self._batch.remove(job, self._batch.progress(job, position))
            self._waiting.appendleft(job)
            self._prefixes.drop(job.request.key)
            self.num_preempted += 1
            self._is_crowded = True

    def _admit(self, now: float, position: float) -> None:
        """First come, first served: a request that does not fit holds up those behind it."""
        while self._waiting and not self._is_paused and not self._is_crowded and len(self._batch) < self.slots:
            if not self._batch.fits(self._waiting[0], position):
                break
            job = self._waiting.popleft()
            self._pace.stall(now, self._sharing.slowdown * self._costs.prefill_token_s * self._to_compute(job))
            self._batch.add(job, position)

    def _to_compute(self, job: SimRequest) -> int:
        """Tokens that it needs and that are not in the cache."""
        known = self._prefixes.reuse(job.request.key, job.size)
        self.num_computed += job.size - known
        self.num_reused += known
        return job.size - known

    def _report_later(self) -> None:
        if self._news_s is not None and not self._is_reporting:
            self._is_reporting = True
            asyncio.get_running_loop().call_later(self._news_s, self._report_sampled)

    def _report_sampled(self) -> None:
        self._is_reporting = False
        position = self._pace.position(_now())
        for job in self._batch.jobs:
            job.report(self._batch.sampled_versions(job, position))
        if self._jobs:
            self._report_later()

    def _cut(self, job: SimRequest) -> None:
        """End it before its time, whether it runs or waits."""
        if job in self._batch:
            self._batch.remove(job, self._batch.progress(job, self._pace.position(_now())))
            self._is_crowded = False
        else:
            self._waiting.remove(job)
        self._forget(job)

    def _abort(self, job: SimRequest) -> None:
        self._cut(job)
        job.finish = Finish.ABORT
        job.complete()

    def _forget(self, job: SimRequest) -> None:
        del self._jobs[job.request.key]
        if job.ticket >= 0:
            self._prefixes.keep(job.request.key, job.size)
        self._finished += 1
        self._tokens += len(job.versions)

    def _set_timer(self, position: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end = self._batch.next_end()
        if self._is_paused or not self._batch:
            return
        full = position + self._batch.until_full(position) if len(self._batch) > 1 else math.inf
        target = min(end, full)
        self._timer = asyncio.get_running_loop().call_at(self._pace.time(target), self._turn, target)


def _now() -> float:
    return asyncio.get_running_loop().time()
