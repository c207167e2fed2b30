"""`millstream export`: a checkpoint of a run as a model's folder, here or on the hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer

import millstream
from millstream.cli.common import AsJson, console, errors, errors_shown
from millstream.errors import ConfigError, OutputError
from millstream.paths import program


def export_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    target: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder to write; it must not exist.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="The step of the checkpoint. Default: the newest checkpoint."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that checkpoint.keep_best keeps.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone, in peft's format, of a run with [learner.lora].")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push-to-hub", metavar="REPO", help="Upload the folder to this repository on the hub."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A repository that is created is public.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint of a run. Writes what was trained so far as a Hugging Face model."""
    with errors_shown(), tempfile.TemporaryDirectory(prefix="millstream-") as temporary:
        if target is None and push is None:
            command = f"{program()} export {quote(str(run_dir))}"
            raise ConfigError(f"type the folder to write: {command} DIR, or --push-to-hub REPO")
        folder = target or Path(temporary) / "model"
        found = millstream.export(run_dir, folder, step=step, is_best=best, adapter_only=adapter)
        for trouble in found.troubles:
            errors.out(trouble, highlight=False)
        url = None
        if push is not None:
            from millstream.run.push import push_to_hub  # imports torch

            try:
                url = push_to_hub(found, run_dir, push, is_private=not public)
            except OutputError as error:
                if target is not None:
                    error.add_note(
                        f"The folder is complete. To push it again:\n  hf upload {quote(push)} {quote(str(target))}"
                    )
                raise
        if as_json:
            fields = {**msgspec.to_builtins(found), "url": url}
            console.out(msgspec.json.encode(fields).decode(), highlight=False)
            return
        for place in (found.folder if target is not None else None, url):
            if place is not None:
                console.out(f"the model of {found.what} is in {place}", highlight=False)
