"""The command line: train, scale, set, status, export, eval, env, audit, dash, rollouts, diff, report, note, plot, trace,
init, recipes, parts, check, doctor, sim, calibrate, plan, advise, serve, serve-store, serve-training.

A command parses its arguments, calls one function of the package and prints the result. Exit code 0, or 1 with a message that
says what to type.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import structs

import millstream
from millstream import config as configs
from millstream.audit import AuditReport, audit, audit_service, is_service_folder, report_lines, service_lines
from millstream.cli.advise import advise_command, given_lines
from millstream.cli.calibrate import calibrate_command
from millstream.cli.common import AsJson, console, errors, errors_shown, keep_stdout
from millstream.cli.dash import dash_command, note_command, write_html
from millstream.cli.diff import diff_command
from millstream.cli.doctor import doctor_command
from millstream.cli.dry_run import DryRun, OtherMachine, ShowConfig, show_config, show_dry_run
from millstream.cli.environments import env_commands
from millstream.cli.evaluate import evaluate_command
from millstream.cli.export import export_command
from millstream.cli.parts import check_command, parts_command
from millstream.cli.plan import plan_command
from millstream.cli.plot import plot_command
from millstream.cli.recipes import init_command, recipes_command
from millstream.cli.rollouts import kept_lines, rollouts_command
from millstream.cli.serve import serve_command, serve_store_command, serve_training_command
from millstream.cli.show import (
    Alarms,
    JsonLines,
    Lines,
    bias_tables,
    bottleneck_lines,
    changed_lines,
    finding_lines,
    result_table,
    scaled_lines,
    status_lines,
)
from millstream.cli.sim import sim_command
from millstream.cli.view import View, can_redraw
from millstream.errors import ConfigError
from millstream.events import EventSink
from millstream.events.bias import bias_report
from millstream.events.bottleneck import bottleneck_of
from millstream.events.findings import PastFinding, findings_of
from millstream.events.sinks import read_history
from millstream.paths import kind_of, program
from millstream.pipeline.schedule import PipelineConfig
from millstream.run import control
from millstream.run.advise import read_advice
from millstream.run.best import best_step
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder, check_free, resume_command

if TYPE_CHECKING:
    from millstream.run.folder import RunResult

EVENTS = "events.jsonl"
NOT_LEARNING = 3  # the exit code of `train --strict`
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        console.out(f"millstream {millstream.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Millstream: asynchronous reinforcement learning for language models."""


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one key of the config: --set pipeline.max_lag=2. May be repeated."
    ),
]


FromRun = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@STEP]",
        help="Begin with the weights and the optimizer's state of this run's checkpoint.",
    ),
]


AsJsonLines = Annotated[
    bool,
    typer.Option(
        "--json-lines",
        help="Print steps, evaluations and warnings as lines of JSON; the last is the result.",
        callback=keep_stdout,
    ),
]


@app.command(name="train")
def train_command(
    path: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The config of the run.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Resume the run in this folder instead.")
    ] = None,
    from_run: FromRun = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    machine: OtherMachine = None,
    with_config: ShowConfig = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 3 if a finding holds at the end: the run did not learn.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and the result.")] = False,
    rollouts_only: Annotated[
        bool, typer.Option("--rollouts-only", help="Generate, score and keep rollouts; train nothing.")
    ] = False,
    as_json: AsJson = False,
    json_lines: AsJsonLines = False,
) -> None:
    """Train a model by reinforcement learning, or resume a run."""
    with errors_shown():
        if rollouts_only:
            overrides = [*(overrides or []), "pipeline.rollouts_only=true"]
        _check_train(path, resume, from_run)
        if machine is not None and not dry_run:
            raise ConfigError("--machine describes a machine that a config is checked for: type --dry-run with it")
        if path is not None:
            config = configs.load(path, RunConfig, overrides or [])
        else:
            config = RunFolder.of_run(resume or Path()).config_to_resume(overrides or [])
        if with_config:
            show_config(config)
        if dry_run:
            show_dry_run(config, path=path, resume=resume, from_run=from_run, machine=machine, is_commented=with_config)
        if dry_run or with_config:
            return
        check_combinations(config)  # an error here comes before the view is drawn
        if path is not None and config.run_dir is not None:
            check_free(config.run_dir)  # at once, not when torch is there
        with _shown(config.pipeline, is_quiet=quiet, as_json=as_json, json_lines=json_lines) as sinks:
            if resume is not None:
                result = millstream.resume(resume, sinks=sinks, changes=overrides or [], progress=False)
            else:
                name = path.stem if path else "run"
                result = millstream.train(config, name=name, sinks=sinks, from_run=from_run, progress=False)
        if json_lines:
            JsonLines(console).print("result", msgspec.to_builtins(result))
        elif as_json:
            console.out(msgspec.json.encode(result).decode(), highlight=False)
        elif config.pipeline.rollouts_only:
            for line in kept_lines(result.run_dir):
                console.out(line, highlight=False)
        else:
            _show_result(result, config.checkpoint.keep_best)
    if strict and result.findings:
        raise typer.Exit(NOT_LEARNING)


def _check_train(path: Path | None, resume: Path | None, from_run: str | None) -> None:
    if (path is None) == (resume is None):
        raise ConfigError("type either a config (millstream train RUN.toml) or a run to resume (--resume RUN)")
    if from_run is not None and resume is not None:
        raise ConfigError("--from begins a new run and --resume continues one: type one of them")
    if path is not None and kind_of(path) == "folder":
        raise ConfigError(_not_a_config(path))


def _not_a_config(folder: Path) -> str:
    if kind_of(RunFolder(folder).config) == "file":
        return f"{folder} is a run folder, not a config. To resume that run:\n  {resume_command(folder)}"
    return f"{folder} is a folder: expected a config, a TOML file. To write one:\n  {program()} init mine.toml"


@contextmanager
def _shown(
    pipeline: PipelineConfig, *, is_quiet: bool = False, as_json: bool = False, json_lines: bool = False
) -> Iterator[list[EventSink]]:
    """The sinks that show the run: a live view, lines where there is no terminal, lines of JSON, or warnings only. Findings are
    left out where the result, as JSON, has them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if json_lines:
        yield [JsonLines(console)]
    elif is_quiet or as_json:
        yield [Alarms(errors, with_findings=not as_json)]
    elif not can_redraw(console):
        yield [Lines(console, num_steps=pipeline.steps)]
    else:
        with View(console, num_steps=pipeline.steps, max_lag=pipeline.max_lag) as view:
            yield [view]


def _show_result(result: RunResult, keep_best: str | None) -> None:
    console.print(result_table(result))
    if result.findings:
        console.print("This run did not learn as it should:", style="bold red")
        for line in finding_lines([PastFinding(finding, None) for finding in result.findings]):
            console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
        console.print()
    for line in bottleneck_lines(result.summary.bottleneck):
        console.out(line, highlight=False)
    console.out(f"run folder    {result.run_dir}\nsaved model   {result.run_dir}/model", highlight=False)
    name, folder, exported = program(), quote(result.run_dir), list[tuple[str, str]]()
    if keep_best is not None:
        with suppress(ConfigError):  # none was evaluated
            step, score = best_step(Path(result.run_dir))
            console.out(f"best step     {step}, {keep_best} {score:.3f}", highlight=False)
            target = quote(f"{result.run_dir}-best")
            exported = [("to export the checkpoint of the best step", f"{name} export {folder} {target} --best")]
    console.print("\nWhat to type next:", style="bold")
    for what, command in (
        *exported,
        ("to verify what happened to every prompt", f"{name} audit {folder}"),
        ("to see whether long or hard rollouts were lost", f"{name} report {folder}"),
        ("to see what would make it faster", f"{name} advise {folder}"),
        ("to evaluate the saved model again, and see what it writes", f"{name} eval {folder} --show 3"),
        ("to train with your own data, reward and model", f"{name} init mine.toml"),
    ):
        console.print(f"  {what}", style="dim", highlight=False)
        console.out(f"    {command}", highlight=False)


@app.command()
def trace(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
) -> None:
    """Write a timeline of a run. RUN/trace.json shows every worker at ui.perfetto.dev."""
    with errors_shown():
        target = RunFolder.of_run(run_dir, EVENTS).write_trace()
        console.print(f"wrote {target}: open it at https://ui.perfetto.dev", highlight=False)


@app.command()
def scale(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an active run.")],
    engines: Annotated[str, typer.Argument(metavar="engines=N", help="The number of engines that the run shall have.")],
    as_json: AsJson = False,
) -> None:
    """Add engines to an active run, or remove some. Returns when they have joined or left."""
    with errors_shown():
        found = control.ask_run(run_dir, control.ScaleRequest(engines=control.parse_scale(engines)))
        _print(found, scaled_lines(found), as_json=as_json)


@app.command(name="set")
def set_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an active run.")],
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...", help="pipeline.max_lag=3, pipeline.auto_lag=true or pipeline.extra_groups=8."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Change how stale rollouts may be, while the run trains. Groups in flight keep the bound that they began with. Other
    settings change when a run is resumed: train --resume RUN --set KEY=VALUE."""
    with errors_shown():
        found = control.ask_run(run_dir, control.SetRequest(settings=settings))
        _print(found, changed_lines(found), as_json=as_json)


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an active run.")],
    as_json: AsJson = False,
) -> None:
    """Show what an active run is doing. Engines, versions, groups in flight, and what waits for what."""
    with errors_shown():
        found = control.ask_run(run_dir, control.StatusRequest())
        _print(found, status_lines(found), as_json=as_json)


def _print(found: msgspec.Struct, lines: list[str], *, as_json: bool) -> None:
    for line in [msgspec.json.encode(found).decode()] if as_json else lines:
        console.out(line, highlight=False)


@app.command(name="audit")
def audit_command(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run folder, of an active run or not; or the folder of a training service."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Verify what happened to every prompt. Reads a run's events and checkpoints; of a training service, its sessions' events
    and journals. Exit code 1 if something is wrong."""
    found: AuditReport
    with errors_shown():
        if kind_of(run_dir) == "folder" and is_service_folder(run_dir):
            found = service = audit_service(run_dir)
            lines = service_lines(service)
        else:
            found = audit(RunFolder.of_run(run_dir, EVENTS).path)
            lines = report_lines(found)
        if as_json:
            lines = [msgspec.json.encode(found, enc_hook=str).decode()]
        for line in lines:
            console.out(line, highlight=False)
    if not found.is_clean:
        raise typer.Exit(1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write the dashboard of the run, with its data, as one file to send, instead.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report which rollouts were trained. Shows what was admitted, trained, filtered, failed and aborted, tests whether long,
    slow or hard rollouts were lost, and lists the findings: what says that the run did not learn. Names what holds the run up,
    and shows the last advice (`millstream advise`)."""
    with errors_shown():
        folder = RunFolder.of_run(run_dir, EVENTS)
        if html is not None:
            write_html(run_dir, html)
            return
        history = list(read_history(folder.events))
        found, findings = bias_report(history), findings_of(history, run_dir)
        held_up, given = bottleneck_of(history), read_advice(folder)
        if as_json:
            past = [{**structs.asdict(one), "until": until} for one, until in findings]
            more = {"findings": past, "bottleneck": held_up, "advice": given[-1] if given else None}
            console.out(msgspec.json.encode({**structs.asdict(found), **more}).decode(), highlight=False)
        else:
            for table in bias_tables(found):
                console.print(table)
            for line in [*finding_lines(findings), *bottleneck_lines(held_up), *given_lines(given, history)]:
                console.out(line, highlight=False)


app.add_typer(env_commands, name="env")
app.command(name="parts")(parts_command)
app.command(name="check")(check_command)
app.command(name="rollouts")(rollouts_command)
app.command(name="dash")(dash_command)
app.command(name="diff")(diff_command)
app.command(name="note")(note_command)
app.command(name="plot")(plot_command)
app.command(name="eval")(evaluate_command)
app.command(name="doctor")(doctor_command)
app.command(name="export")(export_command)
app.command(name="init")(init_command)
app.command(name="recipes")(recipes_command)
app.command(name="sim")(sim_command)
app.command(name="calibrate")(calibrate_command)
app.command(name="plan")(plan_command)
app.command(name="advise")(advise_command)
app.command(name="serve")(serve_command)
app.command(name="serve-store")(serve_store_command)
app.command(name="serve-training")(serve_training_command)

if __name__ == "__main__":
    app()
