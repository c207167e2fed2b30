"""The dry run: the walk of a start (`run.check`), and what else a start would find, without starting anything.

torch and transformers are imported only where they are needed: the model's own tokenizer for chats, for prompts that may be too
long, and for a reference or a critic with a tokenizer of its own; a checkpoint for `--resume` and `--from`.
"""

from __future__ import annotations

from pathlib import Path

from millstream.env.data import DataSet, digest
from millstream.run.check import check_config
from millstream.run.check_evaluation import of_evaluation
from millstream.run.check_machine import needs_tokenizer
from millstream.run.config import RunConfig
from millstream.run.device import estimated_lines, find_machine
from millstream.run.folder import RunFolder
from millstream.run.places import Machine, place


def find_all(
    config: RunConfig,
    *,
    resume: Path | None = None,
    from_run: str | None = None,
    machine: Machine | None = None,
) -> list[str]:
    """What was checked, what was not, and what to be warned of: a line each, warnings last. Raises what a start would.
    `resume`: the run that is continued. `from_run`: RUN or RUN@STEP, whose checkpoint a new run begins with. `machine`: where
    it would run; None: here."""
    machine = find_machine(config) if machine is None else machine
    if resume is not None:
        RunFolder.of_run(resume).check_resumable(config)
    findings = [] if from_run is None else _checked_branch(config, from_run)
    checked = check_config(config, is_new=resume is None, machine=machine)
    findings += [*checked.findings, *_checked_tokenizers(config)]
    for played in checked.played:
        if needs_tokenizer(config, played):
            from millstream.run.check_prompts import checked_with_tokenizer

            with of_evaluation(played.evaluation):
                findings += checked_with_tokenizer(config, played)
    if resume is not None:
        findings += _checked_resume_point(config, RunFolder(resume), checked.data)
    findings += estimated_lines(*place(config, machine), machine)
    return sorted(findings, key=lambda line: line.startswith("not checked") + 2 * line.startswith("warning"))


def _checked_branch(config: RunConfig, from_run: str) -> list[str]:
    from millstream.run.branch import checked_start, find_branch
    from millstream.run.build import skeleton_of

    branch = find_branch(from_run, config)
    step = f"the checkpoint of step {branch.lineage.step} in {branch.lineage.run_dir}"
    if config.model.path is not None and not Path(config.model.path).is_dir():
        return [f"not checked: whether {step} is of the model {config.model.path}, which is no folder here"]
    checked_start(skeleton_of(config), branch.found.folder)
    return [f"checked: {step} is whole, and of this model"]


def _checked_resume_point(config: RunConfig, folder: RunFolder, data: DataSet | None) -> list[str]:
    from millstream.run.resume import find_resume_point

    if folder.is_finished() and config.pipeline.steps <= folder.steps_done():
        return ["checked: the run is finished, and only its result is to be written"]
    point = find_resume_point(folder, config, None if data is None else digest(data))
    return [f"checked: the run continues from step {point.version}, with {len(point.changes)} changed settings"]


def _checked_tokenizers(config: RunConfig) -> list[str]:
    paths = [table.path for table in (config.reference, config.critic) if table is not None and table.path is not None]
    if not paths or not all(Path(path).is_dir() for path in (*paths, config.model.path or ".")):
        return []
    from millstream.run.build_scorers import check_scorer_models
    from millstream.run.check_prompts import tokenizer_of

    check_scorer_models(config, tokenizer_of(config.model))
    return [f"checked: {' and '.join(paths)} has the model's vocabulary"]
