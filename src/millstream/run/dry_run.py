"""The dry run: the walk of a start (`run.check`), and what else a start would find, without starting anything.

torch and transformers are imported only where the model's own tokenizer is needed: for chats, for prompts that may be too long,
and for a reference or a critic with a tokenizer of its own.
"""

from __future__ import annotations

from pathlib import Path

from millstream.run.check import check_config
from millstream.run.check_machine import needs_tokenizer
from millstream.run.config import RunConfig
from millstream.run.device import estimated_lines


def find_all(config: RunConfig, *, is_new: bool = True) -> list[str]:
    """What was checked, what was not, and what to be warned of: a line each, warnings last. Raises what a start would.
    `is_new`: the run has no folder yet."""
    checked = check_config(config, is_new=is_new)
    findings = [*checked.findings, *_checked_tokenizers(config)]
    if checked.data is not None and needs_tokenizer(config, checked.kinds, checked.data):
        from millstream.run.check_prompts import check_with_tokenizer

        number = check_with_tokenizer(config, checked.kinds, checked.data)
        findings.append(f"checked: {number} prompts fit into the model's context, by its tokenizer")
    findings += estimated_lines(config)
    return sorted(findings, key=lambda line: line.startswith("not checked") + 2 * line.startswith("warning"))


def _checked_tokenizers(config: RunConfig) -> list[str]:
    paths = [table.path for table in (config.reference, config.critic) if table is not None and table.path is not None]
    if not paths or not all(Path(path).is_dir() for path in (*paths, config.model.path or ".")):
        return []
    from millstream.run.build_scorers import check_scorer_models
    from millstream.run.check_prompts import tokenizer_of

    check_scorer_models(config, tokenizer_of(config.model))
    return [f"checked: {' and '.join(paths)} has the model's vocabulary"]
