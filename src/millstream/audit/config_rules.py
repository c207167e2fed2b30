"""The config of a run: the file against its digest in the log, and `run_started` against the file."""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from millstream.audit.history import History, RunTerms
from millstream.audit.report import MALFORMED, AuditReport, Fields, reason_of

MAX_KEYS_SHOWN = 4


def compare_config(path: Path, now: History, digests: set[str], last: str, report: AuditReport) -> None:
    """`digests`: of the configs that the processes of the run had; `last`: of the last. Logs of earlier versions have none."""
    if not path.exists():
        report.expect(not digests, "config", "config.toml is missing")
        return
    try:
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        is_own = not digests or digest in digests
        if not report.holds(is_own):
            report.add_finding("config", f"config.toml is not as the run wrote it: {_edited(raw, now.config)}")
        if is_own and digest != last and digests:
            report.notes.append("config.toml is that of an earlier process: the last one ended before it trained")
        elif now.terms is not None:
            _compare(tomllib.loads(raw.decode()), now.terms, report)
    except MALFORMED as error:
        report.add_finding("config", f"config.toml cannot be read: {reason_of(error)}")


def _edited(raw: bytes, logged: Fields | None) -> str:
    """The keys that differ from those in the log."""
    if logged is None:
        return "its SHA-256 is not in the log"
    changes = sorted(changes_between(logged, tomllib.loads(raw.decode()), ""))
    words = [f"{key} is {new}, in the log {old}" for key, (old, new) in changes[:MAX_KEYS_SHOWN]]
    more = f", and {len(changes) - MAX_KEYS_SHOWN} more" if len(changes) > MAX_KEYS_SHOWN else ""
    return "; ".join(words) + more if words else "its text was edited, and no key differs"


def _compare(config: Fields, terms: RunTerms, report: AuditReport) -> None:
    """Keys that a config of an earlier version does not have are not compared."""
    for name, due in terms_of(config).items():
        found = getattr(terms, name)
        if due is not None and found is not None:
            report.expect(found == due, "config", f"run_started says {name} {found}, config.toml has {due}")
    most = most_groups(config["pipeline"])
    if most is not None:
        report.expect(
            terms.budget <= most, "config", f"run_started says budget {terms.budget}, config.toml allows {most}"
        )


def is_in_lockstep(config: Fields) -> bool:
    pipeline = config.get("pipeline", {})
    return bool(pipeline.get("max_lag") == 0 and pipeline.get("lockstep", True) and pipeline.get("surplus") != "abort")


def terms_of(config: Fields) -> dict[str, Any]:
    pipeline, rollout = config["pipeline"], config["rollout"]
    surplus, overdue, groups = pipeline.get("surplus"), pipeline.get("overdue"), pipeline.get("groups_per_step")
    same = ("steps", "groups_per_step", "max_lag", "filter_zero_signal")
    return {
        "seed": config.get("seed"),
        **{name: pipeline.get(name) for name in same},
        **{name: rollout.get(name) for name in ("group_size", "min_group_size", "extra_members")},
        "is_first_to_finish": None if surplus is None else surplus == "abort",
        "max_restarts": None if overdue is None else pipeline.get("max_restarts") if overdue == "restart" else 0,
        "max_replaced": pipeline.get("max_replaced_per_step", None if groups is None else 8 * groups),
        "rollouts_from": config.get("data", {}).get("rollouts", ""),
    }


def most_groups(pipeline: Fields) -> int | None:
    """In flight: those of one batch and `extra_groups`, or as many as the lag allows, counted in decimals."""
    groups, max_lag, extra = (pipeline.get(name) for name in ("groups_per_step", "max_lag", "extra_groups"))
    if groups is None or max_lag is None:
        return None
    return math.floor((1 + Decimal(str(max_lag))) * int(groups)) if extra is None else int(groups) + int(extra)


def changes_between(old: Any, new: Any, place: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The keys whose values differ, with both; None: it is not set. A table, or a list of tables, that only one of them has is
    one key: as the run itself names it (`run.changes`)."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from changes_between(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))
    elif _are_tables(old) and _are_tables(new):
        for index in range(max(len(old), len(new))):
            one, other = (side[index] if index < len(side) else None for side in (old, new))
            yield from changes_between(one, other, f"{place}.{index}")
    elif old != new and not (old != old and new != new):  # NaN is equal to itself here
        yield place, (old, new)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
