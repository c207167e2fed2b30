"""The bias report of a run: what each class of rollouts is made of, and the tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from millstream.events.bias.bootstrap import bootstrap
from millstream.events.bias.compare import (
    BIASED,
    KEPT,
    UNNAMED,
    BiasTest,
    compare,
    compare_sources,
    difficulty,
    is_hung,
    judge,
    logarithm,
    measured_quantity,
)
from millstream.events.bias.table import CLASSES, TRAINED, Doubles, GroupLog, Ints, RolloutTable, select, settled_only
from millstream.events.types import Event

DECLARED = "declared"


class ClassRow(Struct, frozen=True, kw_only=True):
    """Rollouts of one class. `failed`: its retries were spent; `group failed`: it ended, in a group that failed; `aborted`: on
    purpose, or discarded with its group; `in flight`: when the log ends; `open`: done, or between two attempts, in a group
    without a fate yet. None: not known of any."""

    name: str
    rollouts: int
    tokens_mean: float | None  # sampled tokens
    tokens_p50: float | None
    tokens_p95: float | None
    seconds_mean: float | None
    reward_mean: float | None
    sources: dict[str, float]  # the share of each
    is_lower_bound: bool  # some were cut off: tokens and seconds are at least these


class BiasReport(Struct, frozen=True, kw_only=True):
    rows: list[ClassRow]
    tests: list[BiasTest]  # kept against admitted
    declared: list[
        BiasTest
    ]  # trained against admitted: includes the filter of groups without signal, intended; no verdict
    is_biased: bool


def bias_report(events: Iterable[Event], *, seed: int = 0) -> BiasReport:
    """`events` are the history of a run. The same events and seed give the same report."""
    log = GroupLog(events)
    table, sources = log.table(), log.sources
    settled, rng = settled_only(table), np.random.default_rng(seed)
    quantities = [
        measured_quantity("sampled tokens", settled, settled.first_tokens, settled.tokens),
        measured_quantity("seconds", settled, np.where(is_hung(settled), 0.0, settled.first_seconds), settled.seconds),
        difficulty(settled),
    ]
    drawn = bootstrap([*quantities, *map(logarithm, quantities[:2])], rng)
    scales = [(drawn[0], drawn[3]), (drawn[1], drawn[4]), (drawn[2],)]
    moved = compare_sources(settled, sources, rng)
    declared, tests = (
        [*(compare(quantity, means, which) for quantity, means in zip(quantities, scales, strict=True)), moved[which]]
        for which in (TRAINED, KEPT)
    )
    tests = judge(tests)
    return BiasReport(
        rows=[_row(name, table, sources) for name in ("admitted", *CLASSES)],
        tests=tests,
        declared=[replace(test, verdict=DECLARED) for test in declared],
        is_biased=any(test.verdict == BIASED for test in tests),
    )


def _row(name: str, table: RolloutTable, sources: list[str]) -> ClassRow:
    some = table if name == "admitted" else select(table, table.kind == CLASSES.index(name))
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


def _mean(values: Doubles) -> float | None:
    return float(values.mean()) if len(values) else None


def _shares(source: Ints, num_sources: int) -> Doubles:
    return np.bincount(source, minlength=num_sources) / max(1, len(source))
