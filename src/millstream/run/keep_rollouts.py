"""The rollouts of an active run: the writer of its folder, and the tokenizer that turns their tokens into text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from millstream.errors import LogError
from millstream.events import Sample, SampleShown
from millstream.events.rollouts import NO_ROLLOUTS, Attempt, GroupFate, RolloutSink
from millstream.events.rollouts.records import Record
from millstream.events.rollouts.text import Decode, task_text, turn_texts
from millstream.events.rollouts.writer import ROLLOUTS_FOLDER, RolloutWriter, void_after
from millstream.types import Fate, Task

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
    return ShownSamples(_open_files(run), run)


def _open_files(run: ActiveRun) -> RolloutSink:
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


class ShownSamples:
    """Passes records on, and every `SAMPLE_S` shows a rollout that has ended, as an event. Only as much of it is decoded as a
    terminal shows."""

    SAMPLE_S = 5.0
    MAX_TOKENS = 256

    def __init__(self, files: RolloutSink, run: ActiveRun) -> None:
        self._files = files
        self._run = run
        self._shown_at = float("-inf")

    def add(self, record: Record) -> None:
        self._files.add(record)
        if isinstance(record, Attempt) and record.outcome == "ended" and record.parts and record.task is not None:
            now = self._run.clock.now()
            if now - self._shown_at >= self.SAMPLE_S:
                self._shown_at = now
                sample = self._sample(record, record.task)
                event = SampleShown(at=now, group_id=record.group_id, member=record.member, sample=sample)
                self._run.log.emit(event)

    def _sample(self, record: Attempt, task: Task) -> Sample:
        first = record.parts[0]
        begin = int(first.loss_mask.argmax())  # of what was sampled
        head = structs.replace(
            first,
            tokens=first.tokens[begin : begin + self.MAX_TOKENS],
            loss_mask=first.loss_mask[begin : begin + self.MAX_TOKENS],
        )
        decode = self._run.prepared.text.decode
        written = "\n".join(turn.text for turn in turn_texts(head, decode))
        return Sample(prompt=task_text(task), completion=written, reward=first.reward, answer=task.answer)


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
    """Decodes tokens with the tokenizer in RUN/rollouts/, special tokens included. Where there is none, tokens are numbers.
    Raises `LogError` for one that cannot be read."""
    files = folder / TOKENIZER_FOLDER
    try:
        return _decoder_of(files) if files.exists() else as_numbers
    except Exception as error:  # tokenizers raises nothing narrower
        raise LogError(f"the tokenizer in {files} cannot be read: {error}") from error


def as_numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _decoder_of(files: Path) -> Decode:
    if (files / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        found: Decode = partial(Tokenizer.from_file(str(files / "tokenizer.json")).decode, skip_special_tokens=False)
        return found
    from transformers import AutoTokenizer

    return partial(AutoTokenizer.from_pretrained(files, trust_remote_code=False).decode, skip_special_tokens=False)
