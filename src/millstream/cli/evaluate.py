"""`millstream eval`: any model, run or checkpoint of a run, on the evaluations of a config; or two of them compared."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import Struct, structs

import millstream
from millstream import config as configs
from millstream.cli.common import AsJson, console, errors, errors_shown, model_in
from millstream.cli.show import estimate_words, sample_text
from millstream.errors import ConfigError
from millstream.events import Estimate
from millstream.paths import kind_of
from millstream.run.config import EvaluationConfig, RunConfig
from millstream.run.estimates import paired_difference
from millstream.run.folder import RunFolder

if TYPE_CHECKING:
    from millstream.run.evaluate import Evaluation, Measured

CHECKPOINT = re.compile(r"(?P<run>.+)@(?P<step>\d+|best)")


class Compared(Struct, frozen=True, kw_only=True):
    """Two models on the same tasks. `differences`: of the first minus the second, by evaluation and score."""

    measured: Measured
    against: Measured
    differences: dict[str, dict[str, Estimate]]


def evaluate_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run folder; RUN@STEP or RUN@best: one of its checkpoints; or a config, whose model is evaluated.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="A checkpoint or a run folder, in place of the config's model.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="RUN@STEP", help="Evaluate this one, too, and print the difference."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Only this evaluation of the config. With --data: what to call it.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="All tasks of this JSONL or Parquet file instead.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", metavar="K", min=1, help="Samples of each task.")] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", metavar="N", min=1, help="Only the first N tasks.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy alone: the most likely tokens.")] = False,
    show: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="Print N prompts and what the model wrote.")
    ] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the config. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model, a run or a checkpoint of a run, by the evaluations of its config. Prints pass@1, pass@k and the mean
    reward with 95% intervals."""
    with errors_shown():
        path, of_target = _split(target)
        config = configs.load(path, RunConfig, overrides or [])
        tables = _tables(config, name=name, data=data, samples=samples, tasks=tasks, is_greedy=greedy)
        config = structs.replace(config, evaluation=tables)
        measured = _measure(config, model or of_target)
        if against is not None:
            _compare((target, measured), (against, _measure(config, against)), config, show=show, as_json=as_json)
        elif as_json:
            console.out(msgspec.json.encode(_cut(measured, show)).decode(), highlight=False)
        else:
            _print_measured(_cut(measured, show))


def _compare(
    ours: tuple[str, Measured], theirs: tuple[str, Measured], config: RunConfig, *, show: int, as_json: bool
) -> None:
    """Print both, each with its name, and their differences."""
    differences = _differences(ours[1], theirs[1], config)
    measured, against = _cut(ours[1], show), _cut(theirs[1], show)
    if as_json:
        compared = Compared(measured=measured, against=against, differences=differences)
        console.out(msgspec.json.encode(compared).decode(), highlight=False)
        return
    for name, one in ((ours[0], measured), (theirs[0], against)):
        console.out(name, highlight=False)
        _print_measured(one)
    console.out(f"{ours[0]} minus {theirs[0]}, on the same tasks", highlight=False)
    for label, scores in differences.items():
        _print_scores(label, scores)


def _split(target: str) -> tuple[Path, str | None]:
    """The config, and the model to put into it: a run folder or a checkpoint of one; None: the config's own."""
    found = None if kind_of(target) is not None else CHECKPOINT.fullmatch(target)
    folder = Path(target if found is None else found["run"])
    if found is not None or kind_of(folder) == "folder":
        return RunFolder.of_run(folder).config, target
    return folder, None


def _tables(
    config: RunConfig,
    *,
    name: str | None,
    data: Path | None,
    samples: int | None,
    tasks: int | None,
    is_greedy: bool,
) -> tuple[EvaluationConfig, ...]:
    tables = config.evaluations
    if data is not None:
        source = structs.replace(config.data, path=str(data), name=None, subset=None, toy=None, holdout=0)
        tables = (EvaluationConfig(name=name or data.stem, data=source),)
    elif name is not None:
        tables = tuple(one for one in tables if one.name == name)
        if not tables:
            names = ", ".join(one.name for one in config.evaluations)
            raise ConfigError(f"no evaluation is named {name!r}: expected one of {names}")
    return tuple(
        structs.replace(
            one,
            samples=samples or one.samples,
            tasks=tasks or one.tasks,
            decoding="greedy" if is_greedy else one.decoding,
        )
        for one in tables
    )


def _measure(config: RunConfig, model: str | None) -> Measured:
    with _model_of(model) as path:
        if path is not None:
            config = structs.replace(config, model=structs.replace(config.model, path=path, tiny=None))
        return millstream.evaluate(config)


def _cut(measured: Measured, show: int) -> Measured:
    """With the texts that are to be shown, and no others."""
    evaluations = tuple(structs.replace(one, samples=()) for one in measured.evaluations)
    return structs.replace(measured, samples=measured.samples[:show], evaluations=evaluations)


@contextmanager
def _model_of(target: str | None) -> Iterator[str | None]:
    """The folder of the model: a checkpoint of a run is exported for the time of the evaluation."""
    found = None if target is None or kind_of(target) is not None else CHECKPOINT.fullmatch(target)
    if found is None or target is None:
        yield None if target is None else model_in(target, "evaluating")
        return
    with tempfile.TemporaryDirectory(prefix="millstream-eval-") as folder:
        step = None if found["step"] == "best" else int(found["step"])
        exported = millstream.export(found["run"], Path(folder) / "model", step=step, is_best=step is None)
        for trouble in exported.troubles:
            errors.out(trouble, highlight=False)
        if step is None:
            errors.out(f"the best checkpoint is that of {exported.what}", highlight=False)
        yield exported.folder


def _differences(ours: Measured, theirs: Measured, config: RunConfig) -> dict[str, dict[str, Estimate]]:
    rewards = {table.name: table.pass_reward for table in config.evaluations}
    return {
        _label(one): paired_difference(one.rewards(), other.rewards(), pass_reward=rewards[one.result.table])
        for one, other in zip(ours.evaluations, theirs.evaluations, strict=True)
    }


def _label(one: Evaluation) -> str:
    return f"{one.result.table}, {'greedy' if one.result.is_greedy else 'sampled'}"


def _print_measured(measured: Measured) -> None:
    for sample in measured.samples:
        console.out(sample_text(sample), highlight=False)
    for one in measured.evaluations:
        result = one.result
        failed = f", {result.num_failed} rollouts failed ({result.failure})" if result.num_failed else ""
        _print_scores(f"{_label(one)}: {result.num_tasks} tasks x {result.num_samples}{failed}", result.scores)


def _print_scores(label: str, scores: dict[str, Estimate]) -> None:
    console.out(label, highlight=False)
    for name, estimate in scores.items():
        console.out(f"  {name:8}  {estimate_words(estimate)}", highlight=False)
