"""Every file, module and relative link that a page names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.imports import ENTRY_POINTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/millstream"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BASES = (ROOT, PACKAGE, ROOT / "docs")
FILE = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|txt|yaml|sbatch|svg|jsonl))(?![\w/])")
MODULE = re.compile(r"(?<![\w/.])(millstream(?:\.[a-z_]+)+(?:\.[A-Z]\w+)?)(?![\w/])")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def named_files(text: str) -> Iterator[str]:
    """Paths whose first folder is one of the repository or of the package; a user's own files, `NAME.toml` and what runs have
    written are not."""
    for path in FILE.findall(text):
        first = path.split("/")[0]
        if first != "runs" and not Path(path).stem.isupper() and any((base / first).is_dir() for base in BASES):
            yield path


def defines(module: str) -> bool:
    """Whether a dotted name is a module of the package, or a name that occurs in one."""
    parts = module.split(".")[1:]
    for end in range(len(parts), -1, -1):
        stem = PACKAGE.joinpath(*parts[:end])
        candidates = [stem / "__init__.py", *([stem.with_suffix(".py")] if end else [])]
        found = [path for path in candidates if path.is_file()]
        if found:
            rest = parts[end:]
            return not rest or re.search(rf"\b{rest[0]}\b", found[0].read_text()) is not None
    return False


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in named_files(text) if not any((base / path).is_file() for base in BASES)]
    missing += [name for name in MODULE.findall(text) if not defines(name) and name not in ENTRY_POINTS.values()]
    assert missing == [], f"{page.name} names what is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_of_a_page_resolves(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == [], f"{page.name} has links that lead nowhere"
