"""`millstream calibrate`: the costs of a real run, for `millstream sim`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from millstream.cli.common import AsJson, console, errors_shown
from millstream.config import to_toml
from millstream.errors import OutputError
from millstream.paths import program
from millstream.run.calibrate import Calibration, calibrate
from millstream.sim.config import CostsFile


def calibrate_command(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run that has trained for some steps.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write the costs. Default: RUN/costs.toml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the costs of a run for `millstream sim`. Shows how uncertain each is, and how far a simulation with them is from the
    run."""
    with errors_shown():
        found, target = calibrate(run_dir), out or run_dir / "costs.toml"
        try:
            target.write_text(to_toml(CostsFile(sim=found.sim)))
        except OSError as error:
            raise OutputError(f"cannot write {target}: {error.strerror}. Type --out FILE with another place") from error
        if as_json:
            console.out(msgspec.json.encode(found).decode(), highlight=False)
            return
        for table in calibration_tables(found):
            console.print(table)
        console.out(f"wrote {target}. To simulate with these costs:", highlight=False)
        config, costs = quote(str(run_dir / "config.toml")), quote(str(target))
        changes = "".join(f" --set {change}" for change in (*found.changes, "pipeline.max_lag=2"))
        console.out(f"  {program()} sim {config} --costs {costs}{changes}", highlight=False)


def calibration_tables(found: Calibration) -> list[Table]:
    costs = Table(title="Costs")
    for heading in ("", "value", "standard error", "uncertain"):
        costs.add_column(heading, justify="left" if heading in ("", "uncertain") else "right")
    for one in found.parameters:
        costs.add_row(one.name, f"{one.value:.4g}", "-" if one.error is None else f"{one.error:.2g}", one.why)
    compared = Table(title="The run, and a simulation of it with these costs")
    for heading in ("", "real", "simulated", "ratio"):
        compared.add_column(heading, justify="left" if not heading else "right")
    for row in found.compared:
        compared.add_row(row.name, f"{row.real:.4g}", f"{row.simulated:.4g}", f"{row.ratio:.2f}")
    return [costs, compared]
