"""The commands: train, scale, status, export, eval, env check, audit, report, trace, init, serve, serve-store. No logic.

Exit code 0, or 1 with a message that says what to type.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import structs
from rich.console import Console

import millstream
from millstream import config as configs
from millstream.audit import audit, report_lines
from millstream.cli.show import Alarms, Lines, bias_tables, result_table, sample_text, scaled_lines, status_lines
from millstream.cli.template import TEMPLATE
from millstream.cli.view import View
from millstream.engine import EngineConfig
from millstream.errors import ConfigError, MillstreamError, Stopped
from millstream.events import EventSink
from millstream.events.bias import bias_report
from millstream.events.sinks import read_history
from millstream.pipeline.schedule import PipelineConfig
from millstream.run import control
from millstream.run import env_check_run as trial_run
from millstream.run.check import check_parts
from millstream.run.config import ModelConfig, RunConfig, check_run
from millstream.run.folder import RunFolder, check_changes, program, resume_command

if TYPE_CHECKING:
    from millstream.run.folder import RunResult

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
console, errors = Console(), Console(stderr=True)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        console.out(f"millstream {millstream.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Millstream: asynchronous reinforcement learning for language models."""


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key: --set pipeline.max_lag=2")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Host = Annotated[str, typer.Option("--host", help="Beyond this machine only with a token.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="MILLSTREAM_TOKEN", help="What clients must send; better not typed here."),
]


@app.command()
def train(
    path: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The config of the run.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with the run in this folder, instead.")
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check config, data, reward and model folder, print the resolved config; run nothing."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by reinforcement learning."""
    with said():
        if (path is None) == (resume is None):
            raise ConfigError("type either a config (millstream train RUN.toml) or a run to go on with (--resume RUN)")
        if resume is not None:
            check_changes(overrides or [])
        if path is not None and path.is_dir():
            raise ConfigError(_not_a_config(path))
        config = configs.load(path or _config_in(resume), RunConfig, overrides or [])
        check_run(config)
        if dry_run:
            for line in check_parts(config):
                console.out(f"# {line}", highlight=False)
            console.out(configs.to_toml(config), end="", highlight=False)
            return
        with _shown(config.pipeline, is_quiet=quiet or as_json) as sinks:
            if resume is not None:
                result = millstream.resume(resume, sinks=sinks, changes=overrides or [])
            else:
                result = millstream.train(config, name=path.stem if path else "run", sinks=sinks)
        if as_json:
            console.out(msgspec.json.encode(result).decode(), highlight=False)
        else:
            _show_result(result)


def _not_a_config(folder: Path) -> str:
    if RunFolder(folder).config.is_file():
        return f"{folder} is a run folder, not a config. To go on with that run:\n  {resume_command(folder)}"
    return f"{folder} is a folder: expected a config, a TOML file. To write one:\n  {program()} init mine.toml"


def _config_in(run_dir: Path | None) -> Path:
    folder = RunFolder(run_dir or Path())
    if not folder.config.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it has no config.toml")
    return folder.config


@contextmanager
def _shown(pipeline: PipelineConfig, *, is_quiet: bool) -> Iterator[list[EventSink]]:
    """What the run is to be shown on: a live view, lines where there is no terminal, or nothing."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if is_quiet:
        yield [Alarms(errors)]
    elif not console.is_terminal:
        yield [Lines(console, num_steps=pipeline.steps)]
    else:
        with View(console, num_steps=pipeline.steps, max_lag=pipeline.max_lag) as view:
            yield [view]


def _show_result(result: RunResult) -> None:
    console.print(result_table(result))
    if result.summary.steps and not result.summary.rollouts_trained:
        console.print(
            "Nothing was trained: in every group all rewards were equal, so that none was better than another. Is the reward "
            "what it should be? Is the task far too hard, or too easy, for the model?",
            style="bold yellow",
        )
    console.out(f"run folder    {result.run_dir}\nsaved model   {result.run_dir}/model", highlight=False)
    console.print("\nWhat to type next:", style="bold")
    name = program()
    for what, command in (
        ("to prove what became of every prompt", f"{name} audit {result.run_dir}"),
        ("to see whether long or hard rollouts got lost", f"{name} report {result.run_dir}"),
        ("to measure the saved model again, and see what it writes", f"{name} eval {result.run_dir} --show 3"),
        ("to begin with data, a reward and a model of your own", f"{name} init mine.toml"),
    ):
        console.print(f"  {what}", style="dim", highlight=False)
        console.out(f"    {command}", highlight=False)


@app.command()
def trace(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, live or dead.")],
) -> None:
    """Write RUN/trace.json, a timeline of every worker, for ui.perfetto.dev."""
    with said():
        target = _run_folder(run_dir).write_trace()
        console.print(f"wrote {target}: open it at https://ui.perfetto.dev", highlight=False)


def _run_folder(run_dir: Path) -> RunFolder:
    folder = RunFolder(run_dir)
    if not folder.events.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it has no events.jsonl")
    return folder


@app.command()
def scale(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run at work.")],
    engines: Annotated[str, typer.Argument(metavar="engines=N", help="How many engines it is to have.")],
    as_json: AsJson = False,
) -> None:
    """Add engines to a run while it goes on, or take some away. Returns when they have joined, or left."""
    with said():
        found = control.ask(run_dir, control.Scale(engines=control.number_of(engines)))
        _tell(found, scaled_lines(found), as_json=as_json)


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run at work.")],
    as_json: AsJson = False,
) -> None:
    """Ask a run at work what it is doing: engines, versions, what is in flight, and who waits for what."""
    with said():
        found = control.ask(run_dir, control.Look())
        _tell(found, status_lines(found), as_json=as_json)


def _tell(found: msgspec.Struct, lines: list[str], *, as_json: bool) -> None:
    for line in [msgspec.json.encode(found).decode()] if as_json else lines:
        console.out(line, highlight=False)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, live, dead or done.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it must not be there.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Of the checkpoint. Default: the newest one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what a run has trained so far as a Hugging Face model, from one of its checkpoints."""
    with said():
        found = millstream.export(run_dir, target, step=step)
        for trouble in found.troubles:
            errors.out(trouble, highlight=False)
        if as_json:
            console.out(msgspec.json.encode(found).decode(), highlight=False)
        else:
            console.out(f"the model of {found.what} is in {found.folder}", highlight=False)


@app.command(name="audit")
def audit_run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, live, dead or done.")],
    as_json: AsJson = False,
) -> None:
    """Prove from a run's events and checkpoints what became of every prompt. Exit code 1 if something is wrong."""
    with said():
        found = audit(_run_folder(run_dir).path)
        if as_json:
            console.out(msgspec.json.encode(found, enc_hook=str).decode(), highlight=False)
        else:
            for line in report_lines(found):
                console.out(line, highlight=False)
    if not found.is_clean:
        raise typer.Exit(1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, live, dead or done.")],
    as_json: AsJson = False,
) -> None:
    """What was admitted, trained, filtered, failed and aborted: did the long, the slow or the hard ones get lost?"""
    with said():
        found = bias_report(read_history(_run_folder(run_dir).events))
        if as_json:
            console.out(msgspec.json.encode(found).decode(), highlight=False)
        else:
            for table in bias_tables(found):
                console.print(table)


@app.command(name="eval")
def evaluate(
    path: Annotated[
        Path, typer.Argument(metavar="RUN", help="A config, whose data, reward and sampling are used; or a run folder.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Another checkpoint than the config's, or a run folder.")
    ] = None,
    show: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="Print N prompts and what the model wrote.")
    ] = 0,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on the held-out tasks: sampled as in training, and greedy."""
    with said():
        if path.is_dir():
            path, model = _config_in(path), model or str(path)
        config = configs.load(path, RunConfig, overrides or [])
        if model is not None:
            config = structs.replace(
                config, model=structs.replace(config.model, path=_model_in(model, "measuring"), tiny=None)
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


def _model_in(path: str, what: str) -> str:
    """The model of a run, where a run folder is given."""
    folder = RunFolder(Path(path))
    if not folder.config.is_file():
        return path
    if not folder.model.is_dir():
        raise ConfigError(f"the run in {path} has no model yet. To go on with it:\n  {resume_command(folder.path)}")
    errors.out(f"{path} is a run folder: {what} its model, {folder.model}", highlight=False)
    return str(folder.model)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The file to write.")] = Path("run.toml"),
) -> None:
    """Write a commented config for data, a reward and a model of your own."""
    with said():
        if path.exists():
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


environments = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at environments.")
app.add_typer(environments, name="env")


@environments.callback()
def environment() -> None:
    """Look at environments."""


@environments.command(name="check")
def check_environment(
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
    process: Annotated[bool, typer.Option("--process", help="Play it in a process of its own.")] = False,
    num_tasks: Annotated[int, typer.Option("--tasks", metavar="N", min=1, help="How many tasks to play.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Play an environment with scripted policies, without a model, and say what is wrong with it (exit code 1)."""
    with said():
        verdicts = trial_run.check(use, args or [], path, process=process, num_tasks=num_tasks)
        if as_json:
            console.out(msgspec.json.encode(verdicts).decode(), highlight=False)
        else:
            for line in (line for verdict in verdicts for line in trial_run.lines(verdict)):
                console.out(line, highlight=False)
    if not all(verdict.is_fit for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def serve(
    path: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a name on the hub, or a run folder.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="What clients call it. Default: MODEL.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Annotated[Device, typer.Option("--device", help="auto: a GPU if there is one.")] = Device.AUTO,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the weights.")] = Dtype.FLOAT32,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Answers decoded at the same time.")] = 32,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=2, help="Tokens of a prompt and its answer. Default: the model's context."),
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="At once; more are told to come again.")
    ] = 256,
    weights_from: Annotated[
        Path | None,
        typer.Option(
            "--weights-from", metavar="DIR", help="Take new weights from folders in it, on request: for training."
        ),
    ] = None,
    token: Token = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it: completions, chats, streams, and sessions that become rollouts."""
    with said():
        from millstream.serve.openai import model
        from millstream.serve.openai import service as openai

        chosen = model.ServedConfig(
            name=name or path,
            max_length=max_length,
            model=ModelConfig(path=_model_in(path, "serving"), device=device.value, dtype=dtype.value),
            engine=EngineConfig(slots=slots),
        )
        model.run_model_service(
            chosen,
            openai.ModelServiceConfig(
                host=host,
                port=port,
                max_requests=max_requests,
                weights_from=None if weights_from is None else str(weights_from),
            ),
            token=token,
            on_ready=lambda url, known_as: console.out(f"{known_as} is at {url}/v1", highlight=False),
        )


@app.command(name="serve-store")
def serve_store(
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="NAME:COLUMNS",
            help="A task and what it reads: train:tokens,reward. Behind it :rows (not whole groups), :after=NAME.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 7077,
    capacity_rows: Annotated[
        int | None, typer.Option("--capacity-rows", min=1, help="Puts wait beyond it. Default: no bound.")
    ] = None,
    token: Token = None,
) -> None:
    """Serve a store over HTTP: prompts, experience and notice of new weights, for programs in any language."""
    with said():
        from millstream.serve.store import service as store

        store.run_store_service(
            tasks or [],
            store.StoreServiceConfig(host=host, port=port),
            capacity_rows=capacity_rows,
            token=token,
            on_ready=lambda url: console.out(f"the store is at {url}", highlight=False),
        )


@contextmanager
def said() -> Iterator[None]:
    """An error of ours ends with one message and exit code 1; a stop with what to type to go on, and the signal's code."""
    try:
        yield
    except MillstreamError as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.out("\n".join([str(error), *getattr(error, "__notes__", ())]), highlight=False)
        raise typer.Exit(1) from error
    except Stopped as stopped:
        errors.out(str(stopped), highlight=False)
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        errors.print("stopped by Ctrl-C")
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app()
