"""Is what was kept a fair sample of what was admitted, or did the long, the slow, the hard ones get lost? From events alone.

Kept is a rollout that reached its reward in a group that was trained, or filtered, which is declared. Lost is one whose
attempt failed or was aborted, be it tried again or not (a second attempt is a new draw: under a time limit, a shorter one),
whose group failed, was aborted, or began anew. Only groups whose fate is told are compared: what is in flight when the log
ends is not lost, and is in the table alone.

How long a lost rollout would have become is often unknown: it was cut off. Its length is then censored, "at least so much",
and the mean over all admitted has two ends. At one, it would have gone on like the others that came as far (Kaplan-Meier); at
the other, it would have ended where it was cut. The two agree for a time limit. Elsewhere events cannot tell a failure that
hits the long ones more often, being in them longer, from one that hits all alike, at their end or on the way (Tsiatis 1975),
and Kaplan-Meier alone would raise a false alarm in every run with failures at random. So the `bias` is what both ends grant,
the interval spans both, and a verdict needs both on one side of 0.

A rollout that failed after a time that none of the others came near did not take long, it hung: how long it would have taken
is not known, and nothing is said of its seconds. A time limit that cuts slow ones off looks otherwise: others end shortly
before it.

The interval and the p-values are by bootstrap over whole groups (by permutation for the sources), for rollouts of a group are
alike and fail together. The p-values are adjusted (Holm 1979): a run that loses at random is called biased, by any of the
tests, in at most 5% of cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from millstream.events import (
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
)
from millstream.types import Fate, Mask

LEVEL = 0.05
RESAMPLES = 1000
CHUNK = 100
"""Resamples at once: bounds the memory."""
MAX_EDGES = 16
"""Distinct lengths of rollouts that were cut off, in the bootstrap: more are rounded to as many."""
ROUNDING = 1e-9
HUNG = 0.25
"""Rollouts that ended near a time, for each that failed there: with fewer it hung."""
MAX_SOURCES = 32
"""Smaller ones are counted together."""
CLASSES = ("trained", "filtered", "failed", "aborted", "in flight", "open")
TRAINED, FILTERED, FAILED, ABORTED, IN_FLIGHT, OPEN = range(len(CLASSES))
KEPT = 1
"""Trained or filtered. `TRAINED` and `KEPT` number the two choices that are compared with all admitted."""
UNNAMED = "unnamed"
BIASED, UNBIASED, UNTESTED, DECLARED = "biased", "no bias found", "not tested", "declared"

Column = NDArray[np.float64]
Index = NDArray[np.int64]


class ClassRow(Struct, frozen=True, kw_only=True):
    """Rollouts of one class. `aborted`: on purpose, or thrown away with its group; `in flight`: when the log ends; `open`:
    done, or between two attempts, in a group whose fate is not told yet. None: not known of any."""

    name: str
    rollouts: int
    tokens_mean: float | None
    """Sampled tokens."""
    tokens_p50: float | None
    tokens_p95: float | None
    seconds_mean: float | None
    reward_mean: float | None
    sources: dict[str, float]
    """The share of each."""
    is_lower_bound: bool
    """Some were cut off: tokens and seconds are at least these."""


class BiasTest(Struct, frozen=True, kw_only=True):
    """One quantity of the rollouts that were kept, compared with all that were admitted."""

    quantity: str
    bias: float
    """In percent of the mean over all admitted: what both ends grant, 0 if they lie on two sides of it. Of the source: the
    share that went from some to others, in percent."""
    kaplan_meier: float
    """The bias if those that were cut off had gone on like the others."""
    low: float
    high: float
    """95% interval."""
    p_value: float
    """In `tests`, adjusted for their number."""
    verdict: str
    rollouts: int
    lost: int
    note: str


class BiasReport(Struct, frozen=True, kw_only=True):
    rows: list[ClassRow]
    tests: list[BiasTest]
    """Kept against admitted."""
    declared: list[BiasTest]
    """Trained against admitted: with the filter of groups without signal, which is intended. No verdict."""
    is_biased: bool


def bias_report(events: Iterable[Event], *, seed: int = 0) -> BiasReport:
    """`events` are the history of a run. The same events and seed give the same report."""
    log = _Log(events)
    table, sources = log.table(), log.sources
    settled, rng = _settled(table), np.random.default_rng(seed)
    samples = [
        _measured("sampled tokens", settled, settled.first_tokens, settled.tokens),
        _measured("seconds", settled, np.where(_is_hung(settled), 0.0, settled.first_seconds), settled.seconds),
        _difficulty(settled),
    ]
    drawn = _bootstrap([*samples, *map(_logarithm, samples[:2])], rng)
    scales = [(drawn[0], drawn[3]), (drawn[1], drawn[4]), (drawn[2],)]
    moved = _compare_sources(settled, sources, rng)
    declared, tests = (
        [*(_compare(sample, means, which) for sample, means in zip(samples, scales, strict=True)), moved[which]]
        for which in (TRAINED, KEPT)
    )
    tests = _judge(tests)
    return BiasReport(
        rows=[_row(name, table, sources) for name in ("admitted", *CLASSES)],
        tests=tests,
        declared=[replace(test, verdict=DECLARED) for test in declared],
        is_biased=any(test.verdict == BIASED for test in tests),
    )


# ---- 1. from events to a table with a line for every rollout ------------------------------------------------------


class _Member(Struct):
    """One place of a group, over all its attempts."""

    since: float | None = None
    """When the attempt in flight began."""
    is_done: bool = False
    """Some attempt has ended or failed."""
    is_lost: bool = False
    is_aborted: bool = False
    is_first_cut: bool = False
    is_first_failed: bool = False
    """Cut off by a failure, not on purpose."""
    first_tokens: float = 0.0
    first_seconds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    reward: float | None = None

    def finish(self, tokens: float, seconds: float, reward: float | None) -> None:
        if not self.is_done:
            self.is_done = True
            self.is_first_cut = reward is None
            self.first_tokens = tokens
            self.first_seconds = seconds
        self.tokens = tokens
        self.seconds = seconds
        self.reward = reward
        self.since = None

    def draw_again(self) -> None:
        self.is_aborted = False
        self.is_lost = False
        self.reward = None
        self.since = None


class _Group(Struct):
    task: str = ""
    source: str = ""
    fate: Fate | None = None
    has_begun_anew: bool = False
    members: dict[int, _Member] = {}

    def member(self, number: int) -> _Member:
        found = self.members.get(number)
        if found is None:
            found = self.members[number] = _Member()
        return found

    def resume(self, event: GroupResumed) -> None:
        for number in event.to_do:  # the same draws come again, but for those of before it began anew
            if self.has_begun_anew:
                self.member(number).draw_again()
            else:
                self.members[number] = _Member()
        for number, member in self.members.items():
            if number not in event.kept and number not in event.to_do:
                member.is_lost = True
                member.since = None

    def begin_anew(self) -> None:
        """Every member draws again; what it drew first is remembered."""
        self.has_begun_anew = True
        for member in self.members.values():
            member.draw_again()


class _Table(NamedTuple):
    """A line for every rollout. Of rollouts that were cut off, tokens and seconds are what was seen; NaN is unknown."""

    group: Index
    task: Index
    source: Index
    is_settled: Mask
    kind: Index
    is_first_cut: Mask
    is_first_failed: Mask
    first_tokens: Column
    first_seconds: Column
    tokens: Column
    seconds: Column
    reward: Column


_KINDS = (np.int64, np.int64, np.int64, np.bool_, np.int64, np.bool_, np.bool_, *[np.float64] * 5)


class _Log:
    def __init__(self, events: Iterable[Event]) -> None:
        self._groups: dict[int, _Group] = {}
        self._last_at = 0.0
        for event in events:
            self._last_at = event.at
            self._add(event)

    def _add(self, event: Event) -> None:
        match event:
            case RolloutStarted():
                self._group(event.group_id).member(event.member).since = event.at
            case RolloutEnded():
                member = self._group(event.group_id).member(event.member)
                member.finish(event.num_sampled, event.seconds, event.reward)
            case RolloutFailed():
                self._fail(event)
            case RolloutAborted():
                member = self._group(event.group_id).member(event.member)
                member.finish(event.num_sampled, event.seconds, None)
                member.is_aborted = True
            case GroupRestarted():
                self._group(event.group_id).begin_anew()
            case GroupAdmitted():
                group = self._group(event.group_id)
                group.task = event.task_id
                group.source = event.source
            case GroupLeft():
                self._group(event.group_id).fate = event.fate
            case GroupResumed():
                self._group(event.group_id).resume(event)

    def _group(self, group_id: int) -> _Group:
        found = self._groups.get(group_id)
        if found is None:
            found = self._groups[group_id] = _Group()
        return found

    def _fail(self, event: RolloutFailed) -> None:
        member = self._group(event.group_id).member(event.member)
        began = event.at if member.since is None else member.since
        member.is_first_failed = member.is_first_failed or not member.is_done
        member.finish(event.num_sampled, event.seconds or event.at - began, None)
        member.is_lost = event.is_final

    @property
    def sources(self) -> list[str]:
        """The largest in the order of their names, then one name for all others."""
        counts = Counter(group.source for group in self._groups.values())
        names = sorted(name for name, _ in counts.most_common(MAX_SOURCES))
        return names if len(names) == len(counts) else [*names, "others"]

    def table(self) -> _Table:
        tasks, sources = dict[str, int](), {name: number for number, name in enumerate(self.sources)}
        lines = list[tuple[float, ...]]()
        for number, group in enumerate(self._groups.values()):
            task = tasks.setdefault(group.task, len(tasks))
            labels = number, task, sources.get(group.source, len(sources) - 1), group.fate is not None
            lines += [labels + self._line(member, group.fate) for member in group.members.values()]
        columns = np.array(lines, dtype=np.float64).reshape(-1, len(_Table._fields)).T
        return _Table._make(column.astype(kind) for column, kind in zip(columns, _KINDS, strict=True))

    def _line(self, member: _Member, fate: Fate | None) -> tuple[float, ...]:
        """The columns of a rollout from `kind` on."""
        kind, tokens, seconds = _kind(member, fate), member.tokens, member.seconds
        if kind == IN_FLIGHT and member.since is not None:
            tokens, seconds = np.nan, self._last_at - member.since
        reward = np.nan if member.reward is None else member.reward
        is_cut = member.is_first_cut or not member.is_done
        return kind, is_cut, member.is_first_failed, member.first_tokens, member.first_seconds, tokens, seconds, reward


def _kind(member: _Member, fate: Fate | None) -> int:
    if member.is_aborted or fate is Fate.ABORTED:
        return ABORTED
    if member.is_lost or fate is Fate.FAILED or (fate is not None and member.reward is None):
        return FAILED
    if member.reward is not None:
        return OPEN if fate is None else TRAINED if fate is Fate.TRAINED else FILTERED
    return OPEN if member.since is None else IN_FLIGHT


def _select(table: _Table, mask: Mask) -> _Table:
    return _Table._make(column[mask] for column in table)


def _settled(table: _Table) -> _Table:
    """The rollouts of groups whose fate is told; groups are numbered anew."""
    found = _select(table, table.is_settled)
    return found._replace(group=np.unique(found.group, return_inverse=True)[1])


# ---- 2. what each class is made of --------------------------------------------------------------------------------


def _row(name: str, table: _Table, sources: list[str]) -> ClassRow:
    some = table if name == "admitted" else _select(table, table.kind == CLASSES.index(name))
    tokens, shares = some.tokens[~np.isnan(some.tokens)], _shares(some.source, len(sources))
    return ClassRow(
        name=name,
        rollouts=len(some.kind),
        tokens_mean=_mean(tokens),
        tokens_p50=float(np.quantile(tokens, 0.5)) if len(tokens) else None,
        tokens_p95=float(np.quantile(tokens, 0.95)) if len(tokens) else None,
        seconds_mean=_mean(some.seconds),
        reward_mean=_mean(some.reward[~np.isnan(some.reward)]),
        sources={source or UNNAMED: float(share) for source, share in zip(sources, shares, strict=True) if share},
        is_lower_bound=bool(np.isnan(some.reward).any()),
    )


def _mean(values: Column) -> float | None:
    return float(values.mean()) if len(values) else None


def _shares(source: Index, num_sources: int) -> Column:
    return np.bincount(source, minlength=num_sources) / max(1, len(source))


# ---- 3. tokens, seconds, difficulty: the mean over the kept and over all admitted -----------------------------------


class _Sample(NamedTuple):
    """One quantity. `value` is of the first attempt, for that is what was admitted; `outcome` is of the one that was kept."""

    quantity: str
    group: Index
    value: Column
    is_cut: Mask
    """The value is a lower bound."""
    outcome: Column
    chosen: tuple[Mask, Mask]
    """By `TRAINED` and `KEPT`."""
    lost: int
    known: int
    """Of those lost: how many tell something."""


class _Means(NamedTuple):
    """An entry a resample."""

    kaplan_meier: Column
    seen: Column
    """As if all had ended where they were cut off."""
    chosen: tuple[Column, Column]


def _measured(quantity: str, table: _Table, first: Column, last: Column) -> _Sample:
    is_lost = _is_lost(table) | table.is_first_cut
    return _Sample(
        quantity=quantity,
        group=table.group,
        value=first,
        is_cut=table.is_first_cut,
        outcome=last,
        chosen=_choices(table),
        lost=int(is_lost.sum()),
        known=int((is_lost & (~table.is_first_cut | (first > 0))).sum()),
    )


def _is_hung(table: _Table) -> Mask:
    """Of the failed: those after which so few of the others ended, from half that time on, that no tail reaches there. A tail
    as heavy as Pareto's with exponent 1/2 has 0.4 such for every one that was cut off."""
    cut = np.sort(table.first_seconds[table.is_first_failed])
    ended = np.sort(table.first_seconds[~table.is_first_cut])
    num_cut = len(cut) - np.searchsorted(cut, table.first_seconds, side="left")
    num_near = len(ended) - np.searchsorted(ended, table.first_seconds / 2, side="left")
    return table.is_first_failed & (num_near < HUNG * num_cut)


def _is_lost(table: _Table) -> Mask:
    return np.isin(table.kind, (FAILED, ABORTED))


def _choices(table: _Table) -> tuple[Mask, Mask]:
    return table.kind == TRAINED, table.kind <= FILTERED


def _logarithm(sample: _Sample) -> _Sample:
    """The same on a scale without a long tail, where the test holds for few losses too: nobody is alarmed because ten lost
    rollouts had no giant among them."""
    scale = max(sample.value.sum() / max(1, len(sample.value)), 1e-9)
    return sample._replace(value=np.log1p(sample.value / scale), outcome=np.log1p(sample.outcome / scale))


def _difficulty(table: _Table) -> _Sample:
    """1 - reward. For a lost rollout, that of its group's others; without any, that of the same task in other epochs."""
    reward, is_lost = table.reward, _is_lost(table)
    for label in (table.group, table.task):
        reward = np.where(np.isnan(reward), _mean_of_same(label, table.reward)[label], reward)
    known = ~np.isnan(reward)
    some = _select(table, known)
    return _Sample(
        quantity="difficulty",
        group=some.group,
        value=1 - reward[known],
        is_cut=np.zeros(len(some.kind), dtype=np.bool_),
        outcome=1 - reward[known],
        chosen=_choices(some),
        lost=int(is_lost.sum()),
        known=int((is_lost & known).sum()),
    )


def _mean_of_same(label: Index, values: Column) -> Column:
    """For every label, over the values that are known; NaN where none is."""
    known, size = ~np.isnan(values), int(label.max(initial=-1)) + 1
    counts = np.bincount(label[known], minlength=size)
    sums = np.bincount(label[known], values[known], minlength=size)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def kaplan_meier_mean(values: Column, is_cut: Mask) -> float:
    """Kaplan & Meier 1958: the mean up to the largest value, where some values are lower bounds. At a tie ends come first."""
    order = np.lexsort((is_cut, values))
    values, is_cut = values[order], is_cut[order]
    at_risk = np.arange(len(values), 0, -1)
    survival = np.cumprod(np.where(is_cut, 1.0, 1 - 1 / at_risk))
    ended = np.concatenate(([1.0], survival[:-1])) - survival
    return float(ended @ values + survival[-1] * values[-1])


def _compare(sample: _Sample, scales: Sequence[_Means], which: int) -> BiasTest:
    """`scales`: the resamples, as they are and perhaps as logarithms; a bias is one that all of them show."""
    chosen = sample.chosen[which]
    empty = _untested(sample.quantity, chosen, sample.lost)
    if empty.note:
        return empty
    if sample.lost and not sample.known:
        return replace(empty, note=f"nothing is known of the {sample.lost} lost")
    drawn, mean = scales[0], sample.outcome[chosen].mean()
    longest = float(_percent(mean, np.float64(kaplan_meier_mean(sample.value, sample.is_cut))))
    shortest = float(_percent(mean, sample.value.mean()))
    return replace(
        empty,
        bias=float(np.clip(0.0, longest, shortest)),
        kaplan_meier=longest,
        low=float(np.quantile(_percent(drawn.chosen[which], drawn.kaplan_meier), LEVEL / 2)),
        high=float(np.quantile(_percent(drawn.chosen[which], drawn.seen), 1 - LEVEL / 2)),
        p_value=max(_p_value(means, which) for means in scales),
        verdict=UNBIASED,
        note=_note(sample, longest),
    )


def _p_value(drawn: _Means, which: int) -> float:
    """Two-sided; what is chosen must lie beyond both ends of the mean over all."""
    is_not_short = _percent(drawn.chosen[which], drawn.seen) >= -ROUNDING
    is_not_long = _percent(drawn.chosen[which], drawn.kaplan_meier) <= ROUNDING
    return min(1.0, 2 * _tail(is_not_short), 2 * _tail(is_not_long))


def _untested(quantity: str, chosen: Mask, lost: int) -> BiasTest:
    """What there is to say before any test; its note is empty if there is something to test."""
    is_whole = bool(chosen.all()) and not lost
    return BiasTest(
        quantity=quantity,
        bias=0.0,
        kaplan_meier=0.0,
        low=0.0,
        high=0.0,
        p_value=1.0,
        verdict=UNBIASED if is_whole else UNTESTED,
        rollouts=len(chosen),
        lost=lost,
        note="nothing was lost" if is_whole else "" if chosen.any() else "nothing was kept",
    )


def _note(sample: _Sample, longest: float) -> str:
    unknown, cut, retried = sample.lost - sample.known, sample.is_cut.sum(), (sample.is_cut & sample.chosen[KEPT]).sum()
    notes = [f"nothing is known of {unknown} lost"] if unknown else []
    if cut:
        notes.append(f"{cut} were cut off: {longest:+.1f}% had they gone on like the others")
    if retried:
        notes.append(f"{retried} of them ended at another attempt")
    return "; ".join(notes)


def _percent(kept: Column | np.float64, everything: Column | np.float64) -> Column:
    scale = np.abs(everything)
    return np.asarray(100 * (kept - everything) / np.where(scale > 0, scale, 1.0))


def _tail(is_against: Mask) -> float:
    """The share of resamples that speak against a bias; never 0, for the sample itself is one."""
    return float((1 + is_against.sum()) / (1 + len(is_against)))


# ---- 4. the bootstrap over groups: sums of every group, weighted -------------------------------------------------------


def _bootstrap(samples: list[_Sample], rng: np.random.Generator) -> list[_Means]:
    """All quantities from the same resamples."""
    num_groups = 1 + max(int(sample.group.max(initial=-1)) for sample in samples)
    edges = [_edges(sample.value[sample.is_cut]) for sample in samples]
    sums = [_group_sums(sample, some, num_groups) for sample, some in zip(samples, edges, strict=True)]
    borders = np.cumsum([columns.shape[1] for columns in sums])[:-1]
    drawn = np.split(_resample(np.hstack(sums), rng), borders, axis=1)
    return [_means(totals, some) for totals, some in zip(drawn, edges, strict=True)]


def _resample(sums: Column, rng: np.random.Generator) -> Column:
    """(group, column) to (resample, column): totals over as many groups, drawn with replacement."""
    size = len(sums)
    if not size:
        return np.zeros((RESAMPLES, sums.shape[1]))
    rows = np.arange(CHUNK)[:, None] * size
    chunks = []
    for _ in range(RESAMPLES // CHUNK):
        picks = rng.integers(size, size=(CHUNK, size)) + rows
        counts = np.bincount(picks.ravel(), minlength=CHUNK * size).reshape(CHUNK, size)
        chunks.append(counts.astype(np.float64) @ sums)
    return np.concatenate(chunks)


def _edges(cuts: Column) -> Column:
    """Where rollouts were cut off; if at many places, those nearest to all, closer in the tail, where a place weighs more."""
    distinct = np.unique(cuts)
    if len(distinct) <= MAX_EDGES:
        return distinct
    return np.unique(np.quantile(cuts, 1 - np.linspace(1, 0, MAX_EDGES) ** 3, method="nearest"))


def _group_sums(sample: _Sample, edges: Column, num_groups: int) -> Column:
    """Between two neighbouring edges nobody is cut off, and Kaplan-Meier needs no more than how many ended, and their sum.

    Columns: for every cell between edges how many ended, their sum, how many were cut off at its end; then five totals."""
    width, is_cut = len(edges) + 1, sample.is_cut
    nearest, below = np.searchsorted((edges[1:] + edges[:-1]) / 2, sample.value), np.searchsorted(edges, sample.value)
    cell = sample.group * width + np.where(is_cut, nearest, below)
    cells = [np.bincount(cell, weights, num_groups * width) for weights in (~is_cut, ~is_cut * sample.value, is_cut)]
    totals = [sample.value, *sample.chosen, *(chosen * sample.outcome for chosen in sample.chosen)]
    return np.hstack(
        [column.reshape(num_groups, width) for column in cells]
        + [np.bincount(sample.group, weights, num_groups)[:, None] for weights in totals]
    )


def _means(totals: Column, edges: Column) -> _Means:
    width = len(edges) + 1
    ended, sums, cut = (totals[:, number * width : (number + 1) * width] for number in range(3))
    everything, num_trained, num_kept, trained, kept = totals[:, 3 * width :].T
    num_rollouts = ended.sum(axis=1) + cut.sum(axis=1)
    return _Means(
        kaplan_meier=_kaplan_meier_means(ended, sums, cut, edges),
        seen=everything / np.maximum(num_rollouts, 1),
        chosen=(trained / np.maximum(num_trained, 1), kept / np.maximum(num_kept, 1)),
    )


def _kaplan_meier_means(ended: Column, sums: Column, cut: Column, edges: Column) -> Column:
    """`kaplan_meier_mean` of every resample, cell by cell."""
    at_risk, survival = ended.sum(axis=1) + cut.sum(axis=1), np.ones(len(ended))
    mean = np.zeros(len(ended))
    for cell, edge in enumerate(np.append(edges, 0.0)):
        share = survival / np.maximum(at_risk, 1)
        mean += share * sums[:, cell]
        survival = share * (at_risk - ended[:, cell])
        at_risk = at_risk - ended[:, cell] - cut[:, cell]
        mean += np.where(at_risk == 0, survival * edge, 0.0)
        survival = np.where(at_risk == 0, 0.0, survival)
    return mean


# ---- 5. sources: shares, and a permutation test over groups ------------------------------------------------------------
# C: admitted, trained, kept; G: groups; R: resamples; S: sources.


def _compare_sources(table: _Table, names: list[str], rng: np.random.Generator) -> list[BiasTest]:
    """By choice. The test is by permutation: without bias, a group's losses might as well be those of any other group."""
    choices, lost = _choices(table), int(_is_lost(table).sum())
    empty = [_untested("source", chosen, lost) for chosen in choices]
    if all(test.note for test in empty):
        return empty
    counts_CG, is_of_GS = _counts(table, choices, len(names))
    if np.count_nonzero(is_of_GS.sum(axis=0)) == 1:
        return [replace(test, verdict=UNBIASED, note=test.note or "there is one source") for test in empty]
    totals_CS = counts_CG @ is_of_GS
    drawn_CRS = np.split(_resample(np.hstack([is_of_GS * counts_G[:, None] for counts_G in counts_CG]), rng), 3, axis=1)
    permuted_CRS = _permuted(counts_CG, is_of_GS, rng)
    return [
        test if test.note else _moved(test, names, totals_CS[[0, c]], _shift(drawn_CRS, c), _shift(permuted_CRS, c))
        for c, test in enumerate(empty, start=1)
    ]


def _moved(test: BiasTest, names: list[str], totals: Column, drawn: Column, permuted: Column) -> BiasTest:
    admitted, chosen = totals / totals.sum(axis=1, keepdims=True)
    shift, least = float(_shift(totals, 1)), int(np.argmin(chosen - admitted))
    high, low = 2 * shift - np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2])  # a shift by chance is above 0, too
    return replace(
        test,
        bias=shift,
        kaplan_meier=shift,
        low=max(0.0, float(low)),
        high=max(0.0, float(high)),
        p_value=_tail(permuted >= shift - ROUNDING),
        verdict=UNBIASED,
        note=f"{names[least] or UNNAMED}: {admitted[least]:.1%} of the admitted, {chosen[least]:.1%} of these",
    )


def _counts(table: _Table, choices: tuple[Mask, Mask], num_sources: int) -> tuple[Column, Column]:
    """How many rollouts of each group were admitted, trained, kept; and 1 where a group is of a source."""
    size = int(table.group.max()) + 1
    is_of_GS = np.zeros((size, num_sources))
    is_of_GS[table.group, table.source] = 1
    everything = np.ones(len(table.group))
    return np.stack([np.bincount(table.group, chosen, size) for chosen in (everything, *choices)]), is_of_GS


def _shift(counts_CRS: Sequence[Column] | Column, choice: int) -> Column:
    """The total variation between the admitted and a choice of them, in percent."""
    admitted, chosen = (c / np.maximum(c.sum(axis=-1, keepdims=True), 1) for c in (counts_CRS[0], counts_CRS[choice]))
    return np.asarray(50 * np.abs(admitted - chosen).sum(axis=-1))


def _permuted(counts_CG: Column, is_of_GS: Column, rng: np.random.Generator) -> Column:
    chunks = []
    for _ in range(RESAMPLES // CHUNK):
        order_RG = rng.permuted(np.tile(np.arange(len(is_of_GS)), (CHUNK, 1)), axis=1)
        chunks.append(counts_CG[:, order_RG] @ is_of_GS)
    return np.concatenate(chunks, axis=1)


# ---- 6. the verdict ----------------------------------------------------------------------------------------------------


def _judge(tests: list[BiasTest]) -> list[BiasTest]:
    """Holm 1979: the smallest p-value counts as many times as there are tests, the next once less, and so on."""
    judged, smallest = list(tests), 0.0
    for rank, number in enumerate(sorted(range(len(tests)), key=lambda number: tests[number].p_value)):
        test = tests[number]
        smallest = max(smallest, min(1.0, (len(tests) - rank) * test.p_value))
        verdict = BIASED if smallest <= LEVEL else test.verdict
        judged[number] = replace(test, p_value=smallest, verdict=verdict)
    return judged
