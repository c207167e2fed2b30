"""The rollouts of an active run: the writer of its folder, and the tokenizer that turns their tokens into text."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from millstream.events.rollouts import NO_ROLLOUTS, GroupFate, RolloutSink
from millstream.events.rollouts.records import Record
from millstream.events.rollouts.text import Decode
from millstream.events.rollouts.writer import ROLLOUTS_FOLDER, RolloutWriter
from millstream.types import Fate

if TYPE_CHECKING:
    from millstream.run.active import ActiveRun

TOKENIZER_FOLDER = "tokenizer"


def open_rollouts(run: ActiveRun) -> RolloutSink:
    """What the pipeline gives its rollouts to. A resumed run voids those that its checkpoint does not cover."""
    keep_gb = run.config.rollout.keep_gb
    if not keep_gb or run.config.data.rollouts is not None:  # recorded ones are kept where they come from
        return NO_ROLLOUTS
    folder = run.folder.path / ROLLOUTS_FOLDER
    upto = None
    if run.resumed is not None:
        upto = -1 if run.found is None else run.found.manifest.covers_seq

    def write(path: Path) -> None:
        run.rollouts = RolloutWriter(path, max_bytes=keep_gb * 1e9, last_seq=run.log.last_seq, upto=upto)
        _save_tokenizer(run, path / TOKENIZER_FOLDER)

    run.folder.write(folder, write)
    assert run.rollouts is not None
    return _NotTrained(run.rollouts) if run.config.pipeline.rollouts_only else run.rollouts


class _NotTrained(NamedTuple):
    """In a run that only keeps rollouts, a group that a batch took is kept, not trained."""

    writer: RolloutWriter

    def add(self, record: Record) -> None:
        is_kept = isinstance(record, GroupFate) and record.fate == Fate.TRAINED
        self.writer.add(record._replace(fate="kept") if isinstance(record, GroupFate) and is_kept else record)


def close_rollouts(run: ActiveRun) -> None:
    """Write the rest, and warn if some could not be written."""
    if run.rollouts is None:
        return
    run.rollouts.close()
    if num_lost := run.rollouts.sampled.num_lost:
        run.warn(f"{num_lost} rollouts are not in {run.folder.path / ROLLOUTS_FOLDER}: it could not be written")


def _save_tokenizer(run: ActiveRun, folder: Path) -> None:
    if folder.exists():
        return
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    run.prepared.tokenizer.save_pretrained(new)
    new.rename(folder)


def decoder_in(folder: Path) -> Decode:
    """Decodes tokens with the tokenizer in RUN/rollouts/, special tokens included. Where there is none, tokens are numbers."""
    files = folder / TOKENIZER_FOLDER
    if (files / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        found: Decode = partial(Tokenizer.from_file(str(files / "tokenizer.json")).decode, skip_special_tokens=False)
        return found
    if files.exists():
        from transformers import AutoTokenizer

        return partial(AutoTokenizer.from_pretrained(files, trust_remote_code=False).decode, skip_special_tokens=False)
    return lambda tokens: " ".join(map(str, tokens))
