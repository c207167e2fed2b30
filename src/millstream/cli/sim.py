"""`millstream sim`: what a run would do, on the virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from millstream import config as configs
from millstream.cli.common import AsJson, console, errors_shown
from millstream.cli.show import bottleneck_lines, result_table
from millstream.errors import ConfigError, OutputError
from millstream.events.lanes import lanes_of, lanes_svg, lanes_text
from millstream.paths import kind_of, program
from millstream.run.config import RunConfig
from millstream.run.places import place
from millstream.run.simulate import costs_of, simulate


def sim_command(
    path: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The config of the run, with a [sim] table.")],
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="A TOML file whose [sim] table is used instead.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write a run folder, with events, trace and lanes.svg.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the config: --set sim.load_s=2"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run. The production scheduler, router and store run on a virtual clock. Engines, environments and the learner
    take the time that the [sim] table says. No model is loaded."""
    with errors_shown():
        if kind_of(path) == "folder":
            raise ConfigError(f"{path} is a folder: expected a config. To simulate a run again: {path}/config.toml")
        config = configs.load(path, RunConfig, overrides or [])
        found = simulate(config, costs_of(config, costs), out=out)
        lanes = lanes_of(found.events)
        if out is not None:
            try:
                (out / "lanes.svg").write_text(lanes_svg(lanes))
            except OSError as error:
                raise OutputError(f"cannot write {out / 'lanes.svg'}: {error.strerror}") from error
        if as_json:
            console.out(msgspec.json.encode(found.result).decode(), highlight=False)
            return
        console.print(result_table(found.result))
        engines, ranks = place(config, None)[0].engine.num_engines, config.learner.ranks
        of_engines, of_ranks = "engine" + "s" * (engines != 1), "learner rank" + "s" * (ranks != 1)
        console.out(f"simulated with {engines} {of_engines} and {ranks} {of_ranks}", highlight=False)
        for line in [*bottleneck_lines(found.result.summary.bottleneck), ""]:
            console.out(line, highlight=False)
        for line in lanes_text(lanes):
            console.out(line, highlight=False)
        if out is not None:
            console.out(f"\nrun folder    {out}\nlanes         {out}/lanes.svg\n", highlight=False)
            console.out(f"To see every worker at ui.perfetto.dev: {program()} trace {out}", highlight=False)
