"""Builds the documentation site: `make docs`.

1. Pages are collected in build/pages, in the layout of the repository, so that relative links hold in both.
2. The reference is made from the code (`reference_pages.py`). A file that a page links to, such as a recipe, becomes a page.
3. Zensical makes HTML in build/html from mkdocs.yml.
4. The HTML is checked: links, anchors, pictures, the navigation; and nothing in it is loaded from elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import reference_pages

ROOT = Path(__file__).parents[2]
PAGES, HTML = ROOT / "build/pages", ROOT / "build/html"
ABOUT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
GENERATED = {
    "reference/configuration.md": reference_pages.configuration_page,
    "reference/commands.md": reference_pages.commands_page,
    "reference/api.md": reference_pages.api_page,
}
PICTURES = {".svg", ".png"}
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash"}
LINK = re.compile(r"\[([^][]*)\]\((?!https?:)([^)#\s]+)((?:#[^)\s]*)?)\)")
NAV_ENTRY = re.compile(r"^\s*- (?:[^#:]+: )?([\w./-]+\.md)\s*$", flags=re.M)

# ---- pages -----------------------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    """The pages of the repository that are in the site."""
    return [*(ROOT / name for name in ABOUT), *sorted(ROOT.glob("docs/**/*.md"))]


def nav_entries() -> list[str]:
    return NAV_ENTRY.findall((ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2])


def for_the_site(text: str, page: Path, linked: set[Path]) -> str:
    """The page with two kinds of links changed: one whose text is the name of a page gets that page's title, and one to a file
    that is no page leads to a page of it, which is added to `linked`."""

    def change(match: re.Match[str]) -> str:
        words, path, anchor = match.groups()
        target = (page.parent / path).resolve()
        if target.suffix in PICTURES or not target.is_file():
            return match[0]
        if target.suffix != ".md":
            linked.add(target)
            path += ".md"
        elif Path(words).name == target.name:
            words = title_of(target)
        return f"[{words}]({path}{anchor})"

    return LINK.sub(change, text)


def title_of(page: Path) -> str:
    return page.read_text().partition("# ")[2].partition("\n")[0]


def code_page(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {path.relative_to(ROOT)}\n\n`````{language}\n{path.read_text()}`````\n"


def write(relative: str, text: str) -> None:
    path = PAGES / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def collect() -> None:
    """Writes all pages and pictures into build/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    linked: set[Path] = set()
    for page in sources():
        write(str(page.relative_to(ROOT)), for_the_site(page.read_text(), page, linked))
    for path in sorted(linked):
        write(f"{path.relative_to(ROOT)}.md", code_page(path))
    for relative, make in GENERATED.items():
        write(relative, make())
    for path in sorted(ROOT.glob("docs/**/*")):
        if path.suffix in {*PICTURES, ".css"}:
            target = PAGES / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


# ---- checks ----------------------------------------------------------------------------------------------------------


class Document(HTMLParser):
    """The ids of a page, what it links to, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values.get("href", ""))
        self.loaded += [values[name] for name in ("src", "data", "poster") if name in values and tag != "meta"]
        self.loaded += re.findall(r"url\(['\"]?([^'\")]+)", values.get("style", ""))


def is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc) or urlsplit(url).scheme not in ("", "data")


def target_of(url: str, page: Path, folder: Path) -> Path:
    """The file that a link of a page leads to."""
    path = unquote(urlsplit(url).path)
    target = (folder / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve() if path else page
    return target / "index.html" if target.is_dir() else target


def problems(folder: Path) -> Iterator[str]:
    """What is wrong with a built site."""
    documents = {path: Document(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    for path, document in documents.items():
        name = path.relative_to(folder)
        for url in document.loaded:
            if is_elsewhere(url):
                yield f"{name} loads {url} from elsewhere"
            elif not url.startswith("data:") and not target_of(url, path, folder).is_file():
                yield f"{name} loads {url}, which is not there"
        for url in document.links:
            if (parts := urlsplit(url)).scheme or parts.netloc:
                continue
            target = target_of(url, path, folder)
            if not target.is_file():
                yield f"{name} links to {url}, which is not there"
            elif parts.fragment and target in documents and unquote(parts.fragment) not in documents[target].ids:
                yield f"{name} links to {url}: no such place on that page"
    for path in sorted(folder.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import )['\"]?(https?:[^'\")]+)", path.read_text()):
            yield f"{path.relative_to(folder)} loads {url} from elsewhere"


def missing_pages() -> Iterator[str]:
    entries = nav_entries()
    pages = [*(str(page.relative_to(ROOT)) for page in sources() if page.parent.name != "decisions"), *GENERATED]
    for name in sorted({*entries, *pages, "docs/decisions/README.md"}):
        if entries.count(name) != 1:
            yield f"{name} is in the navigation of mkdocs.yml {entries.count(name)} times: expected once"
        if not (PAGES / name).is_file():
            yield f"{name} is in the navigation of mkdocs.yml, and there is no such page"


def main() -> int:
    collect()
    shutil.rmtree(HTML, ignore_errors=True)
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=False)
    if built.returncode:
        return built.returncode
    found = [*missing_pages(), *problems(HTML)]
    for problem in found:
        print(problem)
    print(f"{len(list(HTML.rglob('*.html')))} pages in {HTML.relative_to(ROOT)}, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
