"""The tests of the bias report: tokens, seconds and difficulty by their means, sources by their shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from millstream.events.bias.bootstrap import (
    CHUNK,
    RESAMPLES,
    Quantity,
    ResampledMeans,
    kaplan_meier_mean,
    resample,
)
from millstream.events.bias.table import (
    ABORTED,
    FAILED,
    FILTERED,
    GROUP_FAILED,
    TRAINED,
    Doubles,
    Ints,
    RolloutTable,
    select,
)
from millstream.types import Mask

LEVEL = 0.05
ROUNDING = 1e-9
MIN_NEAR = 0.25  # rollouts that ended near a time, for each that failed there: with fewer, it hung
KEPT = 1  # trained or filtered; `TRAINED` and `KEPT` index the two choices that are compared with all admitted
UNNAMED = "unnamed"
BIASED, UNBIASED, UNTESTED = "biased", "no bias found", "not tested"


class BiasTest(Struct, frozen=True, kw_only=True):
    """One quantity of the rollouts that were kept, compared with all that were admitted."""

    quantity: str
    # In percent of the mean over all admitted: what both ends grant, 0 if they lie on two sides of it. Source: the share
    # that moved between sources, in percent.
    bias: float
    kaplan_meier: float  # the bias if the rollouts that were cut off had continued like the others
    low: float  # 95% interval
    high: float
    p_value: float  # in `BiasReport.tests`: adjusted for their number
    verdict: str
    rollouts: int
    lost: int
    note: str


# ---- tokens, seconds, difficulty: the mean over the kept and over all admitted


def measured_quantity(name: str, table: RolloutTable, first: Doubles, last: Doubles) -> Quantity:
    lost = is_lost(table) | table.is_first_cut
    return Quantity(
        name=name,
        group=table.group,
        value=first,
        is_cut=table.is_first_cut,
        outcome=last,
        chosen=choices(table),
        lost=int(lost.sum()),
        known=int((lost & (~table.is_first_cut | (first > 0))).sum()),
    )


def is_hung(table: RolloutTable) -> Mask:
    """Failed rollouts that hung: too few others ended after half their time for a tail of lengths to reach there. A tail as
    heavy as Pareto's with exponent 1/2 has 0.4 such rollouts for every one that was cut off."""
    cut = np.sort(table.first_seconds[table.is_first_failed])
    ended = np.sort(table.first_seconds[~table.is_first_cut])
    num_cut = len(cut) - np.searchsorted(cut, table.first_seconds, side="left")
    num_near = len(ended) - np.searchsorted(ended, table.first_seconds / 2, side="left")
    return table.is_first_failed & (num_near < MIN_NEAR * num_cut)


def is_lost(table: RolloutTable) -> Mask:
    return np.isin(table.kind, (FAILED, GROUP_FAILED, ABORTED))


def choices(table: RolloutTable) -> tuple[Mask, Mask]:
    return table.kind == TRAINED, table.kind <= FILTERED


def logarithm(quantity: Quantity) -> Quantity:
    """The same on a scale without a long tail, where the test holds for few losses too: ten lost rollouts without a very long
    one among them raise no alarm."""
    scale = max(quantity.value.sum() / max(1, len(quantity.value)), 1e-9)
    return quantity._replace(value=np.log1p(quantity.value / scale), outcome=np.log1p(quantity.outcome / scale))


def difficulty(table: RolloutTable) -> Quantity:
    """1 - reward. For a lost rollout: that of the rest of its group; without any, that of the same task in other epochs."""
    reward, lost = table.reward, is_lost(table)
    for label in (table.group, table.task):
        reward = np.where(np.isnan(reward), _mean_of_same(label, table.reward)[label], reward)
    known = ~np.isnan(reward)
    some = select(table, known)
    return Quantity(
        name="difficulty",
        group=some.group,
        value=1 - reward[known],
        is_cut=np.zeros(len(some.kind), dtype=np.bool_),
        outcome=1 - reward[known],
        chosen=choices(some),
        lost=int(lost.sum()),
        known=int((lost & known).sum()),
    )


def _mean_of_same(label: Ints, values: Doubles) -> Doubles:
    """For every label, the mean over its known values; NaN where none is known."""
    known, size = ~np.isnan(values), int(label.max(initial=-1)) + 1
    counts = np.bincount(label[known], minlength=size)
    sums = np.bincount(label[known], values[known], minlength=size)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def compare(quantity: Quantity, scales: Sequence[ResampledMeans], which: int) -> BiasTest:
    """`scales`: the resamples, linear and possibly logarithmic; a bias must show in all of them."""
    chosen = quantity.chosen[which]
    empty = _untested(quantity.name, chosen, quantity.lost)
    if empty.note:
        return empty
    if quantity.lost and not quantity.known:
        return replace(empty, note=f"nothing is known of the {quantity.lost} lost")
    drawn, mean = scales[0], quantity.outcome[chosen].mean()
    longest = float(_percent(mean, np.float64(kaplan_meier_mean(quantity.value, quantity.is_cut))))
    shortest = float(_percent(mean, quantity.value.mean()))
    return replace(
        empty,
        bias=float(np.clip(0.0, longest, shortest)),
        kaplan_meier=longest,
        low=float(np.quantile(_percent(drawn.chosen[which], drawn.kaplan_meier), LEVEL / 2)),
        high=float(np.quantile(_percent(drawn.chosen[which], drawn.seen), 1 - LEVEL / 2)),
        p_value=max(_p_value(means, which) for means in scales),
        verdict=UNBIASED,
        note=_note(quantity, longest),
    )


def _p_value(drawn: ResampledMeans, which: int) -> float:
    """Two-sided; the mean over the chosen must lie beyond both ends of the mean over all."""
    is_not_short = _percent(drawn.chosen[which], drawn.seen) >= -ROUNDING
    is_not_long = _percent(drawn.chosen[which], drawn.kaplan_meier) <= ROUNDING
    return min(1.0, 2 * _tail(is_not_short), 2 * _tail(is_not_long))


def _untested(name: str, chosen: Mask, lost: int) -> BiasTest:
    """The result without a test; its note is empty if there is something to test."""
    is_whole = bool(chosen.all()) and not lost
    return BiasTest(
        quantity=name,
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


def _note(quantity: Quantity, longest: float) -> str:
    unknown, cut, retried = (
        quantity.lost - quantity.known,
        quantity.is_cut.sum(),
        (quantity.is_cut & quantity.chosen[KEPT]).sum(),
    )
    notes = [f"nothing is known of {unknown} lost"] if unknown else []
    if cut:
        notes.append(f"{cut} were cut off: {longest:+.1f}% had they continued like the others")
    if retried:
        notes.append(f"{retried} of them ended at another attempt")
    return "; ".join(notes)


def _percent(kept: Doubles | np.float64, everything: Doubles | np.float64) -> Doubles:
    scale = np.abs(everything)
    return np.asarray(100 * (kept - everything) / np.where(scale > 0, scale, 1.0))


def _tail(is_against: Mask) -> float:
    """The share of resamples that speak against a bias; never 0, because the sample itself counts as one."""
    return float((1 + is_against.sum()) / (1 + len(is_against)))


# ---- sources: shares, and a permutation test over groups
# C: admitted, trained, kept; G: groups; R: resamples; S: sources.


def compare_sources(table: RolloutTable, names: list[str], rng: np.random.Generator) -> list[BiasTest]:
    """One test per choice, by permutation: without bias, the losses of two groups could be exchanged."""
    chosen, lost = choices(table), int(is_lost(table).sum())
    empty = [_untested("source", one, lost) for one in chosen]
    if all(test.note for test in empty):
        return empty
    counts_CG, is_of_GS = _counts(table, chosen, len(names))
    if np.count_nonzero(is_of_GS.sum(axis=0)) == 1:
        return [replace(test, verdict=UNBIASED, note=test.note or "there is one source") for test in empty]
    totals_CS = counts_CG @ is_of_GS
    drawn_CRS = np.split(resample(np.hstack([is_of_GS * counts_G[:, None] for counts_G in counts_CG]), rng), 3, axis=1)
    permuted_CRS = _permuted(counts_CG, is_of_GS, rng)
    return [
        test if test.note else _moved(test, names, totals_CS[[0, c]], _shift(drawn_CRS, c), _shift(permuted_CRS, c))
        for c, test in enumerate(empty, start=1)
    ]


def _moved(test: BiasTest, names: list[str], totals: Doubles, drawn: Doubles, permuted: Doubles) -> BiasTest:
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


def _counts(table: RolloutTable, choices: tuple[Mask, Mask], num_sources: int) -> tuple[Doubles, Doubles]:
    """The rollouts of each group that were admitted, trained, kept; and 1 where a group is of a source."""
    size = int(table.group.max()) + 1
    is_of_GS = np.zeros((size, num_sources))
    is_of_GS[table.group, table.source] = 1
    everything = np.ones(len(table.group))
    return np.stack([np.bincount(table.group, chosen, size) for chosen in (everything, *choices)]), is_of_GS


def _shift(counts_CRS: Sequence[Doubles] | Doubles, choice: int) -> Doubles:
    """The total variation between the admitted and a choice of them, in percent."""
    admitted, chosen = (c / np.maximum(c.sum(axis=-1, keepdims=True), 1) for c in (counts_CRS[0], counts_CRS[choice]))
    return np.asarray(50 * np.abs(admitted - chosen).sum(axis=-1))


def _permuted(counts_CG: Doubles, is_of_GS: Doubles, rng: np.random.Generator) -> Doubles:
    chunks = []
    for _ in range(RESAMPLES // CHUNK):
        order_RG = rng.permuted(np.tile(np.arange(len(is_of_GS)), (CHUNK, 1)), axis=1)
        chunks.append(counts_CG[:, order_RG] @ is_of_GS)
    return np.concatenate(chunks, axis=1)


# ---- the verdict


def judge(tests: list[BiasTest]) -> list[BiasTest]:
    """Holm 1979: the smallest p-value is multiplied by the number of tests, the next by one less, and so on."""
    judged, smallest = list(tests), 0.0
    for rank, number in enumerate(sorted(range(len(tests)), key=lambda number: tests[number].p_value)):
        test = tests[number]
        smallest = max(smallest, min(1.0, (len(tests) - rank) * test.p_value))
        verdict = BIASED if smallest <= LEVEL else test.verdict
        judged[number] = replace(test, p_value=smallest, verdict=verdict)
    return judged
