"""The command line: train, scale, status, export, eval, env check, audit, report, plot, trace, init, serve, serve-store.

A command parses its arguments, calls one function of the package and prints the result. Exit code 0, or 1 with a message that
says what to type.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import structs

import millstream
from millstream import config as configs
from millstream.audit import audit, report_lines
from millstream.cli.common import console, errors, errors_shown, model_in
from millstream.cli.plot import plot_command
from millstream.cli.serve import serve_command, serve_store_command
from millstream.cli.show import (
    Alarms,
    Lines,
    bias_tables,
    finding_lines,
    result_table,
    sample_text,
    scaled_lines,
    status_lines,
)
from millstream.cli.template import TEMPLATE
from millstream.cli.view import View
from millstream.errors import ConfigError
from millstream.events import EventSink
from millstream.events.bias import bias_report
from millstream.events.findings import PastFinding, findings_of
from millstream.events.sinks import read_history
from millstream.paths import kind_of
from millstream.pipeline.schedule import PipelineConfig
from millstream.run import control
from millstream.run.check import check_combinations, check_config
from millstream.run.config import RunConfig
from millstream.run.device import estimated_lines
from millstream.run.env_check import env_report_lines, run_env_check
from millstream.run.folder import RunFolder, check_changes, program, resume_command

if TYPE_CHECKING:
    from millstream.run.folder import RunResult

EVENTS = "events.jsonl"
NOT_LEARNING = 3  # the exit code of `train --strict`
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


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
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


@app.command(name="train")
def train_command(
    path: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The config of the run.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Resume the run in this folder instead.")
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the config, the data, the rewards and the model folders; print the config with all keys; run nothing.",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 3 if a finding holds at the end: the run did not learn.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and the result.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by reinforcement learning, or resume a run."""
    with errors_shown():
        if (path is None) == (resume is None):
            raise ConfigError("type either a config (millstream train RUN.toml) or a run to resume (--resume RUN)")
        if resume is not None:
            check_changes(overrides or [])
        if path is not None and kind_of(path) == "folder":
            raise ConfigError(_not_a_config(path))
        source = path or RunFolder.of_run(resume or Path()).config
        config = configs.load(source, RunConfig, overrides or [])
        if dry_run:
            for finding in (*check_config(config).findings, *estimated_lines(config)):
                console.out(f"# {finding}", highlight=False)
            console.out(configs.to_toml(config), end="", highlight=False)
            return
        check_combinations(config)  # an error here comes before the view is drawn
        with _shown(config.pipeline, is_quiet=quiet or as_json, with_findings=not as_json) as sinks:
            if resume is not None:
                result = millstream.resume(resume, sinks=sinks, changes=overrides or [], progress=False)
            else:
                result = millstream.train(config, name=path.stem if path else "run", sinks=sinks, progress=False)
        if as_json:
            console.out(msgspec.json.encode(result).decode(), highlight=False)
        else:
            _show_result(result)
    if strict and result.findings:
        raise typer.Exit(NOT_LEARNING)


def _not_a_config(folder: Path) -> str:
    if kind_of(RunFolder(folder).config) == "file":
        return f"{folder} is a run folder, not a config. To resume that run:\n  {resume_command(folder)}"
    return f"{folder} is a folder: expected a config, a TOML file. To write one:\n  {program()} init mine.toml"


@contextmanager
def _shown(pipeline: PipelineConfig, *, is_quiet: bool, with_findings: bool) -> Iterator[list[EventSink]]:
    """The sinks that show the run: a live view, lines where there is no terminal, or warnings only. Findings are left out
    where the result, as JSON, has them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if is_quiet:
        yield [Alarms(errors, with_findings=with_findings)]
    elif not console.is_terminal:
        yield [Lines(console, num_steps=pipeline.steps)]
    else:
        with View(console, num_steps=pipeline.steps, max_lag=pipeline.max_lag) as view:
            yield [view]


def _show_result(result: RunResult) -> None:
    console.print(result_table(result))
    if result.findings:
        console.print("This run did not learn as it should:", style="bold red")
        for line in finding_lines([PastFinding(finding, None) for finding in result.findings]):
            console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
        console.print()
    console.out(f"run folder    {result.run_dir}\nsaved model   {result.run_dir}/model", highlight=False)
    console.print("\nWhat to type next:", style="bold")
    name = program()
    for what, command in (
        ("to verify what happened to every prompt", f"{name} audit {result.run_dir}"),
        ("to see whether long or hard rollouts were lost", f"{name} report {result.run_dir}"),
        ("to evaluate the saved model again, and see what it writes", f"{name} eval {result.run_dir} --show 3"),
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


@app.command(name="export")
def export_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it must not exist.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="The step of the checkpoint. Default: the newest checkpoint."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint of a run. Writes what was trained so far as a Hugging Face model."""
    with errors_shown():
        found = millstream.export(run_dir, target, step=step)
        for trouble in found.troubles:
            errors.out(trouble, highlight=False)
        if as_json:
            console.out(msgspec.json.encode(found).decode(), highlight=False)
        else:
            console.out(f"the model of {found.what} is in {found.folder}", highlight=False)


@app.command(name="audit")
def audit_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    as_json: AsJson = False,
) -> None:
    """Verify what happened to every prompt. Reads a run's events and checkpoints. Exit code 1 if something is wrong."""
    with errors_shown():
        found = audit(RunFolder.of_run(run_dir, EVENTS).path)
        if as_json:
            console.out(msgspec.json.encode(found, enc_hook=str).decode(), highlight=False)
        else:
            for line in report_lines(found):
                console.out(line, highlight=False)
    if not found.is_clean:
        raise typer.Exit(1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    as_json: AsJson = False,
) -> None:
    """Report which rollouts were trained. Shows what was admitted, trained, filtered, failed and aborted, tests whether long,
    slow or hard rollouts were lost, and lists the findings: what says that the run did not learn."""
    with errors_shown():
        history = list(read_history(RunFolder.of_run(run_dir, EVENTS).events))
        found, findings = bias_report(history), findings_of(history)
        if as_json:
            past = [{**structs.asdict(one), "until": until} for one, until in findings]
            console.out(msgspec.json.encode({**structs.asdict(found), "findings": past}).decode(), highlight=False)
        else:
            for table in bias_tables(found):
                console.print(table)
            for line in finding_lines(findings):
                console.out(line, highlight=False)


@app.command(name="eval")
def evaluate_command(
    path: Annotated[
        Path, typer.Argument(metavar="RUN", help="A config, whose data, reward and sampling are used; or a run folder.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="A checkpoint or a run folder, in place of the config's model.")
    ] = None,
    show: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="Print N prompts and what the model wrote.")
    ] = 0,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on the held-out tasks. Sampled as in training, and greedy."""
    with errors_shown():
        if kind_of(path) == "folder":
            path, model = RunFolder.of_run(path).config, model or str(path)
        config = configs.load(path, RunConfig, overrides or [])
        if model is not None:
            config = structs.replace(
                config, model=structs.replace(config.model, path=model_in(model, "evaluating"), tiny=None)
            )
        measured = millstream.evaluate(config)
        measured = structs.replace(measured, samples=measured.samples[:show])
        if as_json:
            console.out(msgspec.json.encode(measured).decode(), highlight=False)
        else:
            for sample in measured.samples:
                console.out(sample_text(sample), highlight=False)
            console.out(f"accuracy, sampled  {measured.accuracy:.3f}", highlight=False)
            console.out(f"accuracy, greedy   {measured.greedy:.3f}", highlight=False)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The file to write.")] = Path("run.toml"),
) -> None:
    """Write a commented config. Fill in your own data, reward and model, then train with it."""
    with errors_shown():
        if kind_of(path) is not None:
            raise ConfigError(f"{path} exists already: choose another name")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(TEMPLATE)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        console.print(
            f"wrote {path}. Fill in the model and the data, then: {program()} train {path}",
            highlight=False,
            soft_wrap=True,
        )


env_commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check environments.")
app.add_typer(env_commands, name="env")


@env_commands.callback()
def env_options() -> None:
    """Check environments."""


@env_commands.command(name="check")
def env_check_command(
    use: Annotated[
        str | None,
        typer.Argument(metavar="USE", help="As environment.use: a built-in name, file.py:Name, package.module:Name."),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option("--args", metavar="KEY=VALUE", help="An argument of the environment: --args size=5"),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option("--config", metavar="RUN.toml", help="Take environments, data and rewards from a config."),
    ] = None,
    process: Annotated[bool, typer.Option("--process", help="Run the environment in a separate process.")] = False,
    num_tasks: Annotated[int, typer.Option("--tasks", metavar="N", min=1, help="The number of tasks to play.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Play an environment with scripted policies, without a model, and report what is wrong with it. Exit code 1 if anything
    is."""
    with errors_shown():
        reports = run_env_check(use, args or [], path, process=process, num_tasks=num_tasks)
        if as_json:
            console.out(msgspec.json.encode(reports).decode(), highlight=False)
        else:
            for line in (line for report in reports for line in env_report_lines(report)):
                console.out(line, highlight=False)
    if not all(report.is_fit for report in reports):
        raise typer.Exit(1)


app.command(name="plot")(plot_command)
app.command(name="serve")(serve_command)
app.command(name="serve-store")(serve_store_command)

if __name__ == "__main__":
    app()
