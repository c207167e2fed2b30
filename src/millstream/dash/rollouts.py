"""The kept rollouts of a run: a table to search and sort, and one group with every turn.

The table is read from the files once, and then as far as they have grown; while that takes long, answers are of what was read
so far. A group's times are looked up in the events.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from millstream.dash.api import (
    GroupAnswer,
    MemberRow,
    RolloutLife,
    RolloutRow,
    RolloutsAnswer,
    SkippedRow,
    TokenColumns,
    TurnRow,
)
from millstream.dash.search import TextSearch
from millstream.dash.tiles import RunTiles
from millstream.errors import MillstreamError
from millstream.events import (
    AnyEvent,
    GroupAdmitted,
    GroupLeft,
    GroupScored,
    GroupTaken,
    RolloutEnded,
    RolloutStarted,
)
from millstream.events.rollouts.reader import KeptGroup, KeptRollout, RolloutDump
from millstream.events.rollouts.text import Decode, mask_runs
from millstream.events.rollouts.writer import ROLLOUTS_FOLDER
from millstream.run.keep_rollouts import as_numbers, decoder_in
from millstream.types import Fate, Floats, Rollout

HEAD_TOKENS = 60  # of what the model wrote, in the table
MAX_HEAD = 160  # characters
MAX_DAMAGED = 10
MAX_KEPT_ROWS = 100_000  # in memory, the newest
MAX_SEARCHES = 4  # whose results are held
MAX_TURN_TOKENS = 20_000  # that are sent one by one
MAX_TURN_CHARACTERS = 1_000_000
MAX_LIFE_TILES = 400  # that are searched for a group's events
SORTS: dict[str, Callable[[RolloutRow], float | None]] = {
    "reward": lambda row: row.reward,
    "advantage": lambda row: row.advantage,
    "length": lambda row: row.num_tokens,
    "lag": lambda row: row.lag,
    "step": lambda row: row.step,
}


class RolloutFilter(Struct, frozen=True, kw_only=True):
    """None or "": no restriction."""

    sort: str = ""  # one of `SORTS`; "": the newest first
    descending: bool = True
    query: str = ""  # in the text, or in the name of the task, the environment or the fate
    environment: str = ""
    fate: str = ""
    step: int | None = None
    offset: int = 0
    limit: int = 50


class RolloutList:
    """Hold `lock` to refresh or read."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.lock = threading.RLock()
        self._dump: RolloutDump | None = None
        self._decode: Decode | None = None
        self._rows: dict[tuple[int, float], list[RolloutRow]] = {}  # by group and the number of its departure
        self._order: list[tuple[int, float]] = []
        self._num_dropped = 0  # of `_order`, from its beginning: without rows
        self._to_read: Iterator[KeptGroup] = iter(())
        self._sources: dict[int, str] | None = None
        self._num_kept = 0
        self._stamp: object = None
        self._num_rows = 0
        self._searches: dict[str, TextSearch] = {}  # by words; the newest is last
        self.why_none: str | None = None
        self.damaged: list[SkippedRow] = []  # what could not be read
        self.is_whole = False

    def refresh(self, max_s: float, sources: dict[int, str]) -> bool:
        """Reads for about `max_s`. Returns whether that is all. `sources`: by group; another object for another run."""
        until = time.monotonic() + max_s
        with self.lock:
            if sources is not self._sources:
                self._sources = sources
                self._dump = None
                self._decode = None
                self._rows = {}
                self._searches = {}
            stamp = _stamp_of(self._run_dir / ROLLOUTS_FOLDER)
            if stamp != self._stamp or self._dump is None:
                self._stamp = stamp
                if not self._open():
                    self.is_whole = True
                    return True
            return self._read(until, sources)

    def _open(self) -> bool:
        try:
            self._dump = RolloutDump(self._run_dir)
            groups = list(self._dump.groups())
        except (MillstreamError, OSError, ValueError) as error:
            self._dump = None
            self.why_none = str(error)
            return False
        self.why_none = None
        self.damaged = []
        try:
            if self._decode in (None, as_numbers):  # a run writes its tokenizer after its first file
                self._decode = decoder_in(self._dump.folder)
        except MillstreamError as error:
            self._decode = as_numbers
            self.damaged.append(SkippedRow(file=ROLLOUTS_FOLDER, line=0, why=f"{error}. Tokens are shown as numbers"))
        self._num_dropped = 0
        self._order = [(group.group_id, group.departure) for group in groups]
        known = {key: rows for key in self._order if (rows := self._rows.get(key)) and not math.isinf(key[1])}
        self._rows = known
        self._num_rows = sum(map(len, known.values()))
        self._num_kept = sum(map(self._dump.num_attempts, groups))
        self._to_read = (group for group in reversed(groups) if (group.group_id, group.departure) not in known)
        self.is_whole = False
        return True

    def _read(self, until: float, sources: dict[int, str]) -> bool:
        assert self._dump is not None and self._decode is not None
        for number, group in enumerate(self._to_read):
            try:
                found = [_row(one, self._decode, sources) for one in self._dump.rollouts(group)]
            except (
                MillstreamError,
                OSError,
                ValueError,
                OverflowError,
            ) as error:  # damaged, or just deleted by the run
                why = str(error)
                if len(self.damaged) < MAX_DAMAGED and why not in (row.why for row in self.damaged):
                    self.damaged.append(SkippedRow(file=ROLLOUTS_FOLDER, line=0, why=why))
                continue
            self._rows[group.group_id, group.departure] = found
            self._num_rows += len(found)
            if not self._drop_oldest(group):
                self._to_read = iter(())
                break
            if number % 16 == 15 and time.monotonic() > until:
                return False
        self.is_whole = True
        return True

    def _drop_oldest(self, group: KeptGroup) -> bool:
        """As many as there are too many. Returns whether this group is still there: older ones need not be read."""
        while self._num_rows > MAX_KEPT_ROWS and self._num_dropped < len(self._order):
            self._num_rows -= len(self._rows.pop(self._order[self._num_dropped], ()))
            self._num_dropped += 1
        return (group.group_id, group.departure) in self._rows

    def search(self, query: str, max_s: float) -> TextSearch | None:
        """Continues for about `max_s`. None: there is nothing to search for, or in."""
        until, words = time.monotonic() + max_s, query.casefold()
        with self.lock:
            if not words or self._dump is None:
                return None
            search = self._searches.pop(words) if words in self._searches else TextSearch(words)
            self._searches[words] = search
            search.open(self._dump)
            while len(self._searches) > MAX_SEARCHES:
                del self._searches[next(iter(self._searches))]
        while not search.is_over and time.monotonic() < until:
            with self.lock:  # of each group: other requests come in between
                if self._decode is not None and not search.is_over:
                    search.search_one(self._decode)
        return search

    @property
    def progress(self) -> int:
        """Changes while an answer is not the last one: rollouts are still read, or searched. Needs no lock."""
        searched = sum(1 + one.num_searched for one in list(self._searches.values()) if not one.is_over)
        return searched + (0 if self.is_whole else self._num_rows)

    def answer(self, asked: RolloutFilter, tiles: RunTiles | None, search: TextSearch | None = None) -> RolloutsAnswer:
        with self.lock:
            rows = [row for key in reversed(self._order) for row in self._rows.get(key, ())]
            dump, num_kept = self._dump, self._num_kept
            hits = set() if search is None else set(search.found)
        words = asked.query.casefold()
        found = [
            row
            for row in rows
            if (not asked.fate or row.fate == asked.fate)
            and (not asked.environment or row.environment == asked.environment)
            and (asked.step is None or row.step == asked.step)
            and (not words or (row.group_id, row.member, row.attempt) in hits or _is_named(row, words))
        ]
        if asked.sort:
            found = _sorted(found, SORTS[asked.sort], is_descending=asked.descending)
        return RolloutsAnswer(
            total=len(found),
            num_kept=num_kept,
            num_read=len(rows),
            num_away=0 if tiles is None or dump is None else max(0, _num_attempts(tiles) - num_kept),
            rows=found[asked.offset : asked.offset + asked.limit],
            environments=sorted({row.environment for row in rows} - {""}),
            fates=sorted({row.fate for row in rows}),
            why_none=self.why_none,
            num_searched=None if search is None else search.num_searched,
            is_searching=search is not None and not search.is_over,
        )

    def group(self, group_id: int, tiles: RunTiles | None) -> GroupAnswer | None:
        """None: it is not in the files. Raises `MillstreamError` for what cannot be read."""
        with self.lock:
            if self._dump is None or self._decode is None:
                return None
            group = self._dump.group(group_id)
            if group is None:
                return None
            members, decode = self._dump.rollouts(group), self._decode
            taken = self._dump.taken_rows(group) if group.taken is not None else None
        references = (
            {} if taken is None else dict(zip(taken.places, (row.reference for row in taken.rows), strict=True))
        )
        events, sources = [], {}
        if tiles is not None:
            with tiles.lock:
                events = group_events(tiles, group_id)
                sources = tiles.sources
        return GroupAnswer(
            group_id=group_id,
            task=members[0].task_id if members else group.task_id,
            fate=group.fate or "in flight",
            members=[_member(one, decode, sources, references, events) for one in members],
        )


def _is_named(row: RolloutRow, words: str) -> bool:
    return any(words in name.casefold() for name in (row.task, row.environment, row.fate))


def _stamp_of(folder: Path) -> object:
    try:
        return sorted((entry.name, entry.stat().st_size) for entry in folder.iterdir())
    except OSError as error:
        return str(error)


def _num_attempts(tiles: RunTiles) -> int:
    with tiles.lock:
        return sum(int(tiles.tiles.of(f"rollouts_{name}").sum()) for name in ("ended", "failed", "aborted"))


def _sorted(
    rows: list[RolloutRow], key: Callable[[RolloutRow], float | None], *, is_descending: bool
) -> list[RolloutRow]:
    """Those without a value come last."""
    valued = [(value, row) for row in rows if (value := key(row)) is not None]
    valued.sort(key=lambda pair: pair[0], reverse=is_descending)
    return [row for _, row in valued] + [row for row in rows if key(row) is None]


def _row(one: KeptRollout, decode: Decode, sources: dict[int, str]) -> RolloutRow:
    return RolloutRow(
        group_id=one.group_id,
        member=one.member,
        attempt=one.attempt,
        task=one.task_id,
        environment=sources.get(one.group_id, ""),
        step=one.step,
        start_version=min((part.start_version for part in one.parts), default=None),
        lag=one.lag,
        reward=_number(one.reward),
        advantage=_number(one.advantage),
        num_tokens=one.num_sampled,
        fate=one.fate,
        head=_head(one.parts, decode),
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _head(parts: Sequence[Rollout], decode: Decode) -> str:
    for part in parts:
        tokens = part.tokens[part.loss_mask][:HEAD_TOKENS]
        if len(tokens):
            return decode(tokens.tolist())[:MAX_HEAD]
    return ""


# ---- one group -----------------------------------------------------------------------------------------------------------


def _member(
    one: KeptRollout,
    decode: Decode,
    sources: dict[int, str],
    references: dict[tuple[int, int], Floats | None],
    events: Sequence[AnyEvent],
) -> MemberRow:
    nothing = [None] * len(one.parts)
    columns = zip(one.parts, one.advantages or nothing, one.trained_logprobs or nothing, strict=True)
    turns = [
        turn
        for part, advantages, trained in columns
        for turn in _turns(part, decode, advantages, trained, references.get((part.member, part.part)))
    ]
    return MemberRow(
        row=_row(one, decode, sources),
        why=one.why,
        finish=str(one.parts[-1].finish) if one.parts else "",
        reward_parts={name: value for name, value in one.reward_parts.items() if math.isfinite(value)},
        life=_life(one, events),
        turns=turns,
    )


def _turns(
    part: Rollout, decode: Decode, advantages: Floats | None, trained: Floats | None, reference: Floats | None
) -> Iterator[TurnRow]:
    number = 0
    for is_sampled, of in mask_runs(part.loss_mask):
        tokens = part.tokens[of].tolist()
        reward = float(part.turn_rewards[number]) if is_sampled and number < len(part.turn_rewards) else None
        number += is_sampled
        columns = None
        if len(tokens) <= MAX_TURN_TOKENS:
            columns = TokenColumns(
                texts=token_texts(tokens, decode),
                versions=part.versions[of].tolist() if is_sampled else None,
                log_probs=_floats(part.logprobs[of]) if is_sampled else None,
                trained_log_probs=_floats(trained[of]) if is_sampled and trained is not None else None,
                advantages=_floats(advantages[of]) if is_sampled and advantages is not None else None,
                reference_log_probs=_floats(reference[of]) if is_sampled and reference is not None else None,
            )
        yield TurnRow(
            role="model" if is_sampled else "prompt" if of.start == 0 else "environment",
            agent=part.agent,
            part=part.part,
            text=decode(tokens)[:MAX_TURN_CHARACTERS],
            tokens=columns,
            reward=reward if reward is None or math.isfinite(reward) else None,
        )


def _floats(values: Floats) -> list[float | None]:
    found: list[float | None] = np.round(values.astype(np.float64), 5).tolist()
    return found


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds behind the one before: a tokenizer may leave out the space of a token that stands
    alone."""
    alone = [decode([token]) for token in tokens]
    texts = alone[:1]
    for number in range(1, len(tokens)):
        both = decode([tokens[number - 1], tokens[number]])
        is_behind = both.startswith(alone[number - 1])
        texts.append(both[len(alone[number - 1]) :] if is_behind else alone[number])
    return texts


def group_events(tiles: RunTiles, group_id: int) -> list[AnyEvent]:
    """From its admission to its end, as far as that is within `MAX_LIFE_TILES`."""
    low, high = tiles.tiles.of("low_group"), tiles.tiles.of("high_group")
    begins = np.flatnonzero((low <= group_id) & (high >= group_id))
    if not len(begins):
        return []
    found: list[AnyEvent] = []
    end = min(len(tiles.tiles), int(begins[0]) + MAX_LIFE_TILES)
    for number in range(int(begins[0]), end):
        own = list(tiles.events([number], containing=b'"group_id":%d,' % group_id))
        found += own
        if any(isinstance(event, GroupLeft) and event.fate is not Fate.SUPERSEDED for event in own):
            break
    return found


def _life(one: KeptRollout, events: Sequence[AnyEvent]) -> RolloutLife:
    times: dict[str, Any] = dict.fromkeys(RolloutLife.__struct_fields__)
    for event in events:
        match event:
            case GroupAdmitted():
                times["admitted"] = event.at
            case RolloutStarted(member=one.member, attempt=one.attempt):
                times["started"] = event.at
            case RolloutEnded(member=one.member, attempt=one.attempt):
                times["generated"] = event.at
            case GroupScored():
                times["settled"] = event.at
            case GroupTaken() if one.step is not None:
                times["taken"] = event.at
            case GroupLeft(fate=Fate.TRAINED) if one.step is not None:
                times["trained"] = event.at
    return RolloutLife(**times)
