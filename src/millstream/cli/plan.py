"""`millstream plan`: how to divide GPUs, and how asynchronous to train, before anything is rented."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from html import escape
from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from millstream import config as configs
from millstream.cli.common import AsJson, console, errors, errors_shown
from millstream.cli.view import can_redraw
from millstream.config import to_toml
from millstream.errors import ConfigError, OutputError
from millstream.events.lanes import COLORS
from millstream.paths import kind_of, program
from millstream.run.config import RunConfig
from millstream.run.plan import Plan, Planner, Tried, plan_run
from millstream.run.plan_input import plan_notes, planned_costs, planned_shape
from millstream.run.roofline import Gpus, parse_gpus

MAX_SHOWN_TRIES = 8
PROGRESS_S = 5.0
WIDTH, HEIGHT, MARGIN_PX = 640, 320, 50


def plan_command(
    path: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The config of the run: model, batch, lengths, environment.")
    ],
    gpus: Annotated[str, typer.Option("--gpus", metavar="NUMBERxKIND", help="The GPUs: 8xH200. H200 is one of them.")],
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs", metavar="FILE", help="Costs of a real run of the model: RUN/costs.toml of `calibrate`."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="KEY=VALUE,...", help="The model's shape, as in its config.json, where that is not here."
        ),
    ] = None,
    max_lag: Annotated[
        float, typer.Option("--max-lag", metavar="LAG", min=0, max=64, help="The highest max_lag that you allow.")
    ] = 2.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.toml", help="Write the planned config, and a plot next to it (FILE.svg)."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the config: --set sim.lengths.mean=2000"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a run: GPUs of the learner and of engines, max_lag, slots, groups in flight. Closed forms give a first guess, and
    the simulator judges. Shows what to expect, and how much faster it is than synchronous training on the same GPUs."""
    with errors_shown():
        if kind_of(path) == "folder":
            raise ConfigError(f"{path} is a folder: expected a config. Of a run: {path}/config.toml")
        config, found = configs.load(path, RunConfig, overrides or []), parse_gpus(gpus)
        if out is not None:
            _check_out(out)
        model = planned_shape(config, shape)
        sim, notes = planned_costs(config, model, costs)
        planner = Planner(config, sim, model, found, max_lag=max_lag, is_calibrated=costs is not None)
        with nullcontext() if as_json else _progress(planner):
            plan = plan_run(planner, [*notes, *plan_notes(config, shape)])
        if out is not None:
            _write(out, plan, found)
        if as_json:
            console.out(msgspec.json.encode(plan).decode(), highlight=False)
            return
        for table in plan_tables(plan, found):
            console.print(table)
        for line in plan_lines(plan):
            console.out(line, highlight=False)
        if out is not None:
            console.out(f"\nwrote {out} and {out.with_suffix('.svg')}. To see it run:", highlight=False)
            console.out(f"  {program()} sim {quote(str(out))}", highlight=False)


@contextmanager
def _progress(planner: Planner) -> Iterator[None]:
    """How many settings were simulated: in place in a terminal, elsewhere a line every few seconds. On standard error."""
    if can_redraw(errors):
        with errors.status("searching") as status:
            planner.report = lambda num_simulated: status.update(f"settings simulated: {num_simulated}")
            yield
        return
    said_at = time.monotonic()

    def say(num_simulated: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= PROGRESS_S:
            said_at = time.monotonic()
            errors.out(f"settings simulated: {num_simulated}", highlight=False)

    planner.report = say
    errors.out("searching: simulates one setting after another", highlight=False)
    yield


def _check_out(out: Path) -> None:
    """Before the search. Raises `ConfigError` for a file that cannot be written, or is there."""
    if out.suffix == ".svg":
        raise ConfigError(f"--out {out}: expected the name of a config, FILE.toml. The plot is next to it, FILE.svg")
    if kind_of(out.parent, "--out") != "folder":
        raise ConfigError(f"--out {out}: {out.parent} is not a folder. Type:\n  mkdir -p {quote(str(out.parent))}")
    for path in (out, out.with_suffix(".svg")):
        if kind_of(path, "--out") is not None:
            raise ConfigError(f"--out {out}: {path} is there already. Type another name, or remove it")


def _write(out: Path, plan: Plan, gpus: Gpus) -> None:
    expected = plan.chosen.expected
    header = (
        f"# Planned for {gpus.number}x{gpus.name}: about {expected.step_s:.3g} s a step, {plan.gain:.2f} times the throughput "
        "of synchronous training.\n# [sim] has the costs that this comes from. `millstream train` does not read it.\n\n"
    )
    try:
        out.write_text(header + to_toml(plan.config))
        out.with_suffix(".svg").write_text(plan_svg(plan))
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror}. Type --out FILE.toml with another place") from error


# ---- tables ------------------------------------------------------------------------------------------------------------


def plan_tables(plan: Plan, gpus: Gpus) -> list[Table]:
    title = f"Plan for {gpus.number}x{gpus.name}, and the fastest synchronous one"
    table = Table(title=title)
    for heading in ("", "plan", "synchronous"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, *values in zip(*(_column(plan, one) for one in (plan.chosen, plan.synchronous)), strict=True):
        (label, chosen), (_, synchronous) = name, *values
        table.add_row(label, chosen, synchronous)
    tries = Table(title=f"The fastest of {len(plan.tried)} that were simulated")
    for heading in ("ranks + engines", "max_lag", "slots", "in flight", "guess, s", "s a step", "rollouts/s"):
        tries.add_column(heading, justify="right")
    for one in plan.tried[:MAX_SHOWN_TRIES]:
        settings, expected = one.settings, one.expected
        groups = plan.config.pipeline.groups_per_step + settings.extra_groups
        numbers = (one.guess_s, expected.step_s, expected.rollouts_per_s)
        tries.add_row(
            settings.placed.words,
            f"{settings.max_lag:g}",
            str(settings.slots),
            str(groups),
            *(f"{number:.3g}" for number in numbers),
        )
    return [table, tries]


def _column(plan: Plan, one: Tried) -> list[tuple[str, str]]:
    settings, expected, placed = one.settings, one.expected, one.settings.placed
    on = ", on the same GPUs" if placed.is_shared else ""
    return [
        ("learner ranks", f"{placed.ranks}"),
        ("engines", f"{placed.engines}{on}"),
        ("max_lag", f"{settings.max_lag:g}"),
        ("slots of an engine", f"{settings.slots}"),
        ("groups in flight", f"{plan.config.pipeline.groups_per_step + settings.extra_groups}"),
        ("extra members of a group", f"{settings.extra_members}"),
        ("seconds a step", f"{expected.step_s:.3g}"),
        ("rollouts/s trained", f"{expected.rollouts_per_s:.3g}"),
        ("tokens/s generated", f"{expected.tokens_per_s:,.0f}"),
        ("learner idle", f"{expected.learner_idle:.0%}"),
        ("engines idle", f"{expected.engines_idle:.0%}"),
        ("mean lag", f"{expected.mean_lag:.2f}"),
    ]


def plan_lines(plan: Plan) -> list[str]:
    fit, config = plan.fit, plan.config
    memory = (
        f"{fit.learner_gb:.0f} GB on each GPU"
        if plan.chosen.settings.placed.is_shared
        else f"{fit.learner_gb:.0f} GB on a GPU of the learner, {fit.engine_gb:.0f} GB on one of an engine"
    )
    recomputed = ", layers are recomputed" if fit.is_recomputed else ""
    lines = [
        f"{plan.gain:.2f} times the throughput of synchronous training on the same GPUs",
        f"memory: {memory}; passes of {fit.micro_batch_tokens:,} tokens{recomputed}; {fit.cache_gb:g} GB of cache an engine",
    ]
    if not config.pipeline.is_first_to_finish:
        lines.append(
            "redundancy: none. With --set pipeline.surplus=abort more groups and members than needed may be planned, and the "
            "slowest of them are aborted: biased against slow rollouts"
        )
    lines.append(f"changed in the config: {' '.join(plan.changed) or 'nothing'}")
    return [*lines, *(f"note: {note}" for note in plan.notes)]


# ---- plot --------------------------------------------------------------------------------------------------------------


def plan_svg(plan: Plan) -> str:
    """Seconds a step over the ways to divide the GPUs: a line for each max_lag is the guess, a point a simulation, the ring the
    plan."""
    top = 1.1 * max(min(max(curve.step_s) for curve in plan.curves), *(one.expected.step_s for one in plan.tried))

    def x(place: int) -> float:
        return MARGIN_PX + WIDTH * (place + 0.5) / len(plan.places)

    def y(seconds: float) -> float:
        return MARGIN_PX + HEIGHT * (1 - min(1.0, seconds / top))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 3 * MARGIN_PX}" height="{HEIGHT + 2 * MARGIN_PX}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{MARGIN_PX}" y="20">seconds a step (lines: closed forms, points: simulated) by ranks + engines</text>',
        *_axes(plan, [x(place) for place in range(len(plan.places))], top),
    ]
    colors = {curve.max_lag: COLORS[number % len(COLORS)] for number, curve in enumerate(plan.curves)}
    for number, curve in enumerate(plan.curves):
        line = " ".join(f"{x(place):.1f},{y(seconds):.1f}" for place, seconds in enumerate(curve.step_s))
        color, at = colors[curve.max_lag], MARGIN_PX + 16 * number
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"/>')
        parts.append(f'<text x="{WIDTH + MARGIN_PX + 8}" y="{at}" fill="{color}">max_lag {curve.max_lag:g}</text>')
    for one in plan.tried:
        place, is_plan = plan.places.index(one.settings.placed), one.settings == plan.chosen.settings
        center = f'cx="{x(place):.1f}" cy="{y(one.expected.step_s):.1f}"'
        parts.append(f'<circle {center} r="3" fill="{colors[one.settings.max_lag]}"/>')
        if is_plan:
            parts.append(f'<circle {center} r="8" fill="none" stroke="#000000"/>')
    return "\n".join([*parts, "</svg>\n"])


def _axes(plan: Plan, columns: Sequence[float], top: float) -> list[str]:
    bottom = HEIGHT + MARGIN_PX
    lines = [f'<line x1="{MARGIN_PX}" x2="{MARGIN_PX + WIDTH}" y1="{bottom}" y2="{bottom}" stroke="#000000"/>']
    for at, placed in zip(columns, plan.places, strict=True):
        lines.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(placed.words)}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        height = MARGIN_PX + HEIGHT * (1 - share)
        lines.append(f'<text x="{MARGIN_PX - 6}" y="{height:.1f}" text-anchor="end">{share * top:.3g}</text>')
    return lines
