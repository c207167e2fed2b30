"""`millstream recipes`, and `millstream init`: the recipes of the package, and copies of them to change."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

import millstream
from millstream.cli.common import console, errors_shown
from millstream.cli.template import TEMPLATE
from millstream.errors import ConfigError
from millstream.imports import meant
from millstream.paths import kind_of, program

DATA = re.compile(r'"recipes/data/([\w.-]+)(?::\w+)?"')  # a file of the package that a recipe reads


def recipe_folder() -> Path:
    """In the installed package, or, of an editable install, in the repository."""
    package = Path(millstream.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def find_recipes() -> dict[str, Path]:
    """By name; those for clusters after the others."""
    folder = recipe_folder()
    paths = [*sorted(folder.glob("*.toml")), *sorted(folder.glob("*/*.toml"))]
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


def recipes_command() -> None:
    """List the recipes: complete, commented configs. `init --recipe NAME` copies one."""
    with errors_shown():
        found = find_recipes()
        for name, path in found.items():
            console.out(f"{name:20}  {_first_comment(path)}", highlight=False)
        example = next(iter(found))
        console.out(f"\nThe files are in {recipe_folder()}", highlight=False)
        console.out(f"To copy one:\n  {program()} init --recipe {example} {example}.toml", highlight=False)


def init_command(
    path: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The file to write.")] = Path("run.toml"),
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help="Copy this recipe: see `millstream recipes`.")
    ] = None,
) -> None:
    """Write a commented config. Fill in your own data, reward and model, then train with it."""
    with errors_shown():
        if recipe is None:
            write_files({path: TEMPLATE.encode()})
            to_do = "Fill in the model and the data, then"
        else:
            write_files(_copies(recipe, path))
            to_do = "To run it"
        command = "sim" if recipe is not None and recipe.startswith("sim/") else "train"
        typed = f"{program()} {command} {quote(str(path))}"
        console.print(f"wrote {path}. {to_do}: {typed}", highlight=False, soft_wrap=True)


def _copies(name: str, path: Path) -> dict[Path, bytes]:
    """The recipe at this path, and the data that it reads next to it."""
    found = find_recipes()
    if name not in found:
        raise ConfigError(f"no recipe {name!r}: expected one of {', '.join(found)}{meant(name, found)}")
    text, data = found[name].read_text(), recipe_folder() / "data"
    text = text.replace(f" recipes/{name}.toml", f" {quote(str(path))}")  # in comments that say what to type
    files = {path.parent / file: (data / file).read_bytes() for file in DATA.findall(text)}
    for file in DATA.findall(text):
        text = text.replace(f'"recipes/data/{file}', f'"{(path.parent / file).as_posix()}')
    return {path: text.encode(), **files}


def write_files(files: dict[Path, bytes]) -> None:
    """None of them may be there."""
    for path in files:
        if kind_of(path) is not None:
            raise ConfigError(f"{path} exists already: choose another name")
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _first_comment(path: Path) -> str:
    """Its first sentence."""
    line = path.read_text().partition("\n")[0].removeprefix("#").strip()
    return line.partition(". ")[0].rstrip(".")
