"""`millstream advise`: what holds a run up, and what changes would give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from millstream.cli.common import AsJson, console, errors, errors_shown
from millstream.cli.show import bottleneck_lines
from millstream.events import Event
from millstream.run.advise import ADVICE, Advice, AdviceOutcome, PromisedGain, advise, keep_advice, outcome_of


def advise_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    as_json: AsJson = False,
) -> None:
    """Say what holds a run up and what would make it faster. Names the bottleneck from the run's events, simulates changes with
    the run's own costs, and compares the last advice with what came of it. The advice is kept in RUN/advice.jsonl."""
    with errors_shown():
        found = advise(run_dir)
        try:
            keep_advice(run_dir, found)
        except OSError as error:
            errors.out(f"the advice is not kept: cannot write {run_dir / ADVICE}: {error.strerror}", highlight=False)
        for line in [msgspec.json.encode(found).decode()] if as_json else advice_lines(found):
            console.out(line, highlight=False)


def advice_lines(found: Advice) -> list[str]:
    seen = found.bottleneck
    lines = [*bottleneck_lines(seen), *outcome_lines(found.last)]
    lines += [line for one in found.promises for line in _promise_lines(one)]
    if found.why_none:
        lines.append(f"What changes would give is not known: {found.why_none}")
    elif not found.promises:
        lines.append("No change that was tried makes the run 3% faster.")
    rests = f"This rests on {seen.steps} steps, of {seen.step_s:.3g} s each"
    if found.simulated_step_s is not None:
        rests += f"; the simulation has {found.simulated_step_s:.3g} s"
    return [*lines, f"{rests}.", *(f"uncertain: {one}" for one in found.uncertain)]


def given_lines(given: Sequence[Advice], events: Sequence[Event]) -> list[str]:
    """The last advice that was given, and what came of it."""
    promises = [line for one in given[-1].promises for line in _promise_lines(one)] if given else []
    advised = [f"Advice at step {given[-1].version}:"] if promises else []
    return [*advised, *promises, *outcome_lines(outcome_of(given, events))]


def outcome_lines(last: AdviceOutcome | None) -> list[str]:
    """What came of the last advice, if settings were changed after it."""
    if last is None:
        return []
    what = ", ".join(last.settings)
    said = f"said nothing of {what}" if last.promised is None else f"promised {last.promised:.2f}x for {what}"
    if last.gain is None:
        return [f"The last advice {said}; {last.steps} steps since then are too few to say what came of it."]
    return [f"The last advice {said}; {last.gain:.2f}x came of it, over {last.steps} steps."]


def _promise_lines(one: PromisedGain) -> list[str]:
    note = f" ({one.note})" if one.note else ""
    lines = [f"{one.gain:.2f}x  with {one.words}{note}; between {one.low:.2f}x and {one.high:.2f}x"]
    return [*lines, *([f"  {one.command}"] if one.command else [])]
