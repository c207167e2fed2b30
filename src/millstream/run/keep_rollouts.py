"""The rollouts of an active run: the writer of its folder, and the tokenizer that turns their tokens into text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from millstream.events.rollouts import NO_ROLLOUTS, GroupFate, RolloutSink
from millstream.events.rollouts.records import Record
from millstream.events.rollouts.text import Decode
from millstream.events.rollouts.writer import ROLLOUTS_FOLDER, RolloutWriter, void_after
from millstream.types import Fate

if TYPE_CHECKING:
    from millstream.run.active import ActiveRun

TOKENIZER_FOLDER = "tokenizer"


def void_undone(run: ActiveRun) -> None:
    """Of a resumed run, before its log says so: rollouts that the checkpoint does not cover, with new ones kept or not."""
    if run.resumed is not None:
        upto = -1 if run.found is None else run.found.manifest.covers_seq
        run.folder.write(run.folder.path / ROLLOUTS_FOLDER, lambda path: void_after(path, upto))


def open_rollouts(run: ActiveRun) -> RolloutSink:
    """What the pipeline gives its rollouts to."""
    keep_gb, folder = run.config.rollout.keep_gb, run.folder.path / ROLLOUTS_FOLDER
    if not keep_gb or run.config.data.rollouts is not None:  # recorded ones are kept where they come from
        return NO_ROLLOUTS

    def write(path: Path) -> None:
        run.rollouts = RolloutWriter(path, max_bytes=keep_gb * 1e9, last_seq=run.log.last_seq)

    run.folder.write(folder, write)
    if not (folder / TOKENIZER_FOLDER).exists():
        run.folder.write_folder(folder / TOKENIZER_FOLDER, run.prepared.tokenizer.save_pretrained)
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
        run.warn(
            f"{num_lost} records of rollouts are not in {run.folder.path / ROLLOUTS_FOLDER}: it could not be written"
        )


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
