"""The page that is committed is that of its sources, and is complete: nothing of it is fetched from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRONT = ROOT / "src/millstream/dash/front"
STATIC = ROOT / "src/millstream/dash/static"
MAX_BYTES = 60_000  # compressed, all files


def digest_of_sources() -> str:
    """As `build.mjs` computes it."""
    files = [
        *(FRONT / name for name in ("build.mjs", "package-lock.json", "tsconfig.json")),
        *(FRONT / "src").rglob("*"),
    ]
    names = sorted(path.relative_to(FRONT).as_posix() for path in files if path.is_file())
    found = hashlib.sha256()
    for name in names:
        found.update(name.encode() + b"\0" + (FRONT / name).read_bytes() + b"\0")
    return found.hexdigest()


def test_the_committed_page_is_that_of_its_sources() -> None:
    first_line = (STATIC / "app.js").read_text().split("\n", 1)[0]
    written = re.search(r"sources ([0-9a-f]{64})", first_line)
    assert written is not None and written[1] == digest_of_sources(), "the sources have changed: make dash-page"
    assert (STATIC / "index.html").read_text() == (FRONT / "src/index.html").read_text(), "make dash-page"


def test_the_page_is_small_and_fetches_nothing_from_elsewhere() -> None:
    files = sorted(STATIC.iterdir())
    assert [path.name for path in files] == ["app.css", "app.js", "index.html"]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < MAX_BYTES
    addresses = {
        found for path in files for found in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\"'`)\s]*", path.read_text())
    }
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml", "http://www.w3.org/1998/Math/MathML"}
    assert addresses <= names, addresses - names


def test_text_becomes_a_part_of_the_page_as_text_only() -> None:
    for path in (FRONT / "src").rglob("*.ts*"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text()), path


def test_the_wheel_has_the_page_and_not_its_sources() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "/src/millstream/dash/front" in wheel["exclude"]
