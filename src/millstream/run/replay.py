"""A learner that outlives its processes: what it was told since the newest checkpoint is told again to the one after it.

    told ──► the learner ──► done: it goes into the book ──► a checkpoint is sealed: what it covers leaves the book
                  │
                  └─ gone ──► another one ──► restores that checkpoint ──► hears the book, in order ──► is told again

Guarantees. Whoever trains notices nothing but the time: no version falls, no row is left out, none counts twice in the learner
that survives, and since the same calls in the same order give the same bits, the weights are those of an undisturbed run (on
a CPU; elsewhere, to float tolerance). Rollouts are not made again: the book has the rows themselves, as references, for as
long as no checkpoint covers them. A learner that refuses (`LearnerError`) would refuse again: only one whose processes died
or went silent (`LearnerGone`) is restarted, within a budget.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec import structs

from millstream.clock import Clock
from millstream.errors import InvariantError, LearnerError, LearnerGone
from millstream.events import EventSink, LearnerRestarted, Warned
from millstream.learner import RunLearner, Snapshot
from millstream.run.checkpoint import Sealed
from millstream.types import Floats, Metrics, TrainRow, Weights

T = TypeVar("T")
MOST = 5
"""Restarts; every checkpoint that is sealed gives one back. Where more die there is a fault that no new process mends."""
BACK_OFF_S = 0.5
"""Before the first restart; twice as long before the next."""
MAX_BYTES = 256 << 20
"""Of rows in the book: beyond it the next checkpoint is made as soon as it can be."""
InThread = Callable[..., Coroutine[Any, Any, Any]]


class CheckpointView(Protocol):
    """What has to be known of checkpoints: see `run.checkpoint.Checkpoints`."""

    @property
    def version(self) -> int | None:
        """Of the newest that is sealed; None if there is none."""
        ...

    async def newest_sealed(self) -> Sealed | None:
        """Waits for the one that is being written, if any, to be sealed or to fail. Somebody may have moved its folder."""
        ...

    def hurry(self) -> None:
        """The next one is due as soon as it can be."""
        ...


class Call(NamedTuple):
    what: Literal["begin_batch", "accumulate", "step"]
    rows: tuple[TrainRow, ...] = ()


class ReplayLog:
    """What a learner was told since it had some version, in order. Versions are counted here: a batch with a step is one."""

    def __init__(self, version: int) -> None:
        self.since = self.version = version
        self.num_bytes = 0
        self._told: list[Call] = []
        self._places: dict[int, int] = {}
        """By version: how much had been told when its snapshot was taken."""
        self._has_stepped = False

    def __iter__(self) -> Iterator[Call]:
        return iter(self._told)

    @property
    def num_batches(self) -> int:
        return sum(told.what == "begin_batch" for told in self._told)

    @property
    def num_rows(self) -> int:
        return sum(len(told.rows) for told in self._told)

    def write(self, told: Call) -> None:
        if told.what == "begin_batch":
            self._has_stepped = False
        elif told.what == "step" and not self._has_stepped:
            self._has_stepped = True
            self.version += 1
        self._told.append(told)
        self.num_bytes += _num_bytes(told)

    def mark(self) -> None:
        """A snapshot is taken here, between two batches."""
        self._places[self.version] = len(self._told)

    def cut(self, version: int) -> bool:
        """What the checkpoint of this version covers leaves. Whether anything did."""
        if version == self.since:
            return False
        if version not in self._places:
            known = ", ".join(map(str, [self.since, *self._places]))
            raise InvariantError(f"a checkpoint of version {version} is sealed: snapshots were taken of {known}")
        place = self._places[version]
        self._told = self._told[place:]
        self.since = version
        self._places = {later: at - place for later, at in self._places.items() if later > version}
        self.num_bytes = sum(map(_num_bytes, self._told))
        return True


class Replayable(Protocol):
    """What is common to those who learn: see `millstream.learner`."""

    async def ready(self) -> None: ...
    async def accumulate(self, rows: Sequence[TrainRow]) -> None: ...
    async def step(self) -> Metrics: ...
    async def snapshot(self) -> Snapshot: ...
    def restore(self, folder: Path) -> None: ...
    async def close(self) -> None: ...


InnerT = TypeVar("InnerT", bound=Replayable)


class Replayed(Generic[InnerT]):
    """Whoever learns, as seen by those who must not notice that it died. `make` gives one as it is at the beginning, again and
    again; `version` is that of its weights, or of the checkpoint that `restore` is given; `who` it is, in words.

    `patience_s`: a call that lasts longer is taken for the silence of a dead one. `progress` is called whenever a replay gets
    on. `save` and `restore` must not be called on the event loop's thread once it is ready: they may have to wait for it."""

    def __init__(
        self,
        make: Callable[[], InnerT],
        seals: CheckpointView,
        *,
        who: str = "the learner",
        clock: Clock,
        sink: EventSink,
        version: int = 0,
        patience_s: float = math.inf,
        progress: Callable[[], None] = lambda: None,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._make = make
        self._seals = seals
        self._clock = clock
        self._sink = sink
        self._who = who
        self._patience_s = None if patience_s == math.inf else patience_s
        self._progress = progress
        self._in_thread = in_thread
        self._book = ReplayLog(version)
        self._began_at = version
        """What the book went back to when nothing was cut from it yet."""
        self._began_with: Path | None = None
        """The checkpoint, if it did not begin with what `make` gives."""
        self._num_restarts = 0
        self._has_warned = False
        self._turn = asyncio.Lock()
        """One call at a time: whoever comes while another one is being made waits for it."""
        self._making: asyncio.Future[InnerT] | None = None
        self._loop: tuple[asyncio.AbstractEventLoop, int] | None = None
        self._inner = make()

    @property
    def inner(self) -> InnerT:
        """The one at work."""
        return self._inner

    # ---- the seam ----------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        self._loop = asyncio.get_running_loop(), threading.get_ident()
        await self._do(lambda inner: inner.ready())

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._do(lambda inner: inner.accumulate(rows))
        self._write(Call("accumulate", tuple(rows)))

    async def step(self) -> Metrics:
        metrics: Metrics = await self._do(lambda inner: inner.step())
        self._write(Call("step"))
        return metrics

    async def snapshot(self) -> Snapshot:
        """It is lost with the processes that hold it: then its writing fails, and the book stays as it is."""
        snapshot: Snapshot = await self._do(lambda inner: inner.snapshot())
        self._book.mark()
        return snapshot

    def restore(self, folder: Path) -> None:
        self._do_blocking(lambda inner: inner.restore(folder))
        self._book = ReplayLog(self._book.since)
        self._began_with = folder

    async def close(self) -> None:
        """The one at work, and one that was just being made when whoever waited for it was cancelled."""
        made = [] if self._making is None else await asyncio.gather(self._making, return_exceptions=True)
        for one in {self._inner, *(one for one in made if not isinstance(one, BaseException))}:
            await one.close()

    # ---- calls, and the book -----------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[InnerT], Awaitable[T]]) -> T:
        async with self._turn:
            while True:
                try:
                    return await self._answer(work(self._inner))
                except LearnerGone as error:
                    await self._restart(error)

    def _do_blocking(self, work: Callable[[InnerT], None]) -> None:
        if self._loop is None or self._loop[1] == threading.get_ident():
            work(self._inner)
            return
        loop = self._loop[0]
        asyncio.run_coroutine_threadsafe(self._turn.acquire(), loop).result()
        try:
            while True:
                try:
                    work(self._inner)
                    return
                except LearnerGone as error:
                    asyncio.run_coroutine_threadsafe(self._restart(error), loop).result()
        finally:
            loop.call_soon_threadsafe(self._turn.release)

    async def _answer(self, work: Awaitable[T]) -> T:
        limit = asyncio.timeout(self._patience_s)
        try:
            async with limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise LearnerGone(f"{self._who} has said nothing for {self._patience_s:g} s") from error

    def _write(self, told: Call) -> None:
        self._book.write(told)
        if self._book.num_bytes <= MAX_BYTES:
            return
        self._seals.hurry()
        if self._book.num_bytes > 2 * MAX_BYTES and not self._has_warned:
            self._has_warned = True
            size = f"{self._book.num_bytes >> 20} MiB of rows"
            since = f"since version {self._book.since}"
            self._warn(f"{size} were trained {since} and are kept until a checkpoint covers them: none was written")

    def _cut(self, version: int | None) -> None:
        if version is not None and self._book.cut(version):
            self._num_restarts = max(0, self._num_restarts - 1)
            self._has_warned = False

    # ---- restarts ----------------------------------------------------------------------------------------------------

    async def _restart(self, error: LearnerGone) -> None:
        """Returns when another one is where the last one was. Raises `LearnerError` when the budget is used up."""
        began, why = self._clock.now(), error
        while True:
            self._count(why)
            await self._inner.close()
            await asyncio.sleep(BACK_OFF_S * 2 ** (self._num_restarts - 1))
            try:
                await self._begin_anew()
                break
            except LearnerGone as again:
                why = again
        book = self._book
        self._sink.emit(
            LearnerRestarted(
                at=self._clock.now(),
                who=self._who,
                why=str(why),
                from_version=book.since,
                to_version=book.version,
                num_batches_replayed=book.num_batches,
                num_rows=book.num_rows,
                seconds=self._clock.now() - began,
            )
        )

    def _count(self, why: LearnerGone) -> None:
        if self._num_restarts >= MOST:
            raise LearnerError(
                f"{self._who} was restarted {self._num_restarts} times, and is gone again: {why}. What kills it is not mended "
                "by a restart: look at the memory of the machine, and at what its processes said last"
            ) from why
        self._num_restarts += 1

    async def _begin_anew(self) -> None:
        folder = await self._beginning()
        self._making = asyncio.ensure_future(self._in_thread(self._make))
        self._inner = await asyncio.shield(self._making)
        self._making = None
        await self._answer(self._inner.ready())
        self._progress()
        if folder is not None:
            await self._answer(self._in_thread(self._inner.restore, folder))
        for told in self._book:
            await self._answer(self._tell_again(told))
            self._progress()

    async def _beginning(self) -> Path | None:
        """The checkpoint that the book goes on from; None: what `make` gives. Raises `LearnerError` if it is not there: without
        what the book has forgotten, the weights would be those of another run."""
        sealed = await self._seals.newest_sealed()
        if sealed is not None and sealed.folder.is_dir():
            self._cut(sealed.version)
            return sealed.folder
        if self._book.since == self._began_at:
            return self._began_with
        what = f"a checkpoint of version {self._book.since}" if sealed is None else str(sealed.folder)
        raise LearnerError(
            f"{self._who} has to be begun anew, and {what} is not there any more, without which nobody knows what was trained "
            "before it: bring it back and resume the run, or resume it from the checkpoint before"
        )

    async def _begin_batch_of(self, inner: InnerT) -> None:
        """What whoever learns must hear when a batch begins: nothing, unless somebody says otherwise."""

    async def _tell_again(self, told: Call) -> None:
        match told.what:
            case "begin_batch":
                await self._begin_batch_of(self._inner)
            case "accumulate":
                await self._inner.accumulate(told.rows)
            case "step":
                await self._inner.step()

    def _warn(self, message: str) -> None:
        self._sink.emit(Warned(at=self._clock.now(), message=message))


class ReplayedLearner(Replayed[RunLearner]):
    """See `millstream.learner.Learner` for the promises."""

    async def begin_batch(self) -> None:
        self._cut(self._seals.version)
        await self._do(self._begin_batch_of)
        self._write(Call("begin_batch"))

    async def _begin_batch_of(self, inner: RunLearner) -> None:
        await inner.begin_batch()

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._do(lambda inner: inner.logprobs(rows))

    async def weights(self) -> Weights:
        return await self._do(lambda inner: inner.weights())

    async def weights_of(self, version: int) -> Weights | None:
        """Of this version, for somebody who could not have them; None where training has gone beyond it. A batch that has made
        its first step counts as the next version, so what is given is never half of one."""

        async def look(inner: RunLearner) -> Weights | None:
            return await inner.weights() if self._book.version == version else None

        return await self._do(look)

    def save(self, path: Path) -> None:
        self._do_blocking(lambda inner: inner.save(path))


def _num_bytes(told: Call) -> int:
    columns = (column for row in told.rows for column in structs.astuple(row))
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))
