"""The documentation site: its reference has every key, command and public name; its checks find what is planted. No site is built."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec import structs

import build_site
import millstream
import reference_pages
from millstream.config import _paths
from millstream.run.config import RunConfig

ROOT = build_site.ROOT
PICTURES = sorted(ROOT.glob("docs/images/*.svg"))
ROW = re.compile(r"^\| (?:\[`\w+`\]\(#([\w.]+)\)|<span id=\"([\w.]+)\">`\w+`</span>) \| (.*) \| (.*) \|$", flags=re.M)


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    """The meaning of each key on the configuration's page. Keys that are tables need none: they have a section."""
    page = reference_pages.configuration_page()
    return {table or key: meaning or table for table, key, _, meaning in ROW.findall(page)}


def test_every_key_of_a_config_is_on_its_page_with_a_meaning(keys: dict[str, str]) -> None:
    sections = {one.path: one for one in reference_pages.sections()}
    for path in _paths(RunConfig):
        parts = [part for part in path.split(".") if part != "0"]
        for num in range(len(parts) - 1, 0, -1):
            table = sections.get(".".join(parts[:num]))
            if table is not None and table.same_as is not None:
                parts = [*table.same_as.split("."), *parts[num:]]
        assert keys.get(".".join(parts)), f"{path}: give the field a docstring or a comment in its config struct"


def test_the_pages_row_of_a_key_has_its_type_its_default_and_its_allowed_values() -> None:
    page = reference_pages.configuration_page()
    assert "`max_lag`</span> | number; `1.0` | The asynchronous ratio" in page
    assert '`surplus`</span> | `"carry_over"`, `"abort"`; `"carry_over"` |' in page
    assert "[`lora`](#learner.lora) | table; unset |" in page and "## `[learner.lora]` {#learner.lora}" in page


def test_every_command_and_option_is_on_the_page_of_commands() -> None:
    page = reference_pages.commands_page()
    found = dict(reference_pages.commands())
    assert {"millstream train", "millstream env check"} <= found.keys()
    for name, command in found.items():
        (section,) = re.findall(rf"^## `{name}`\n(.*?)(?=^## |\Z)", page, flags=re.S | re.M)
        for option in command.params:
            assert option.help, f"{name} {option.name}: give it a help text"
            assert all(f"`{text}" in section for text in option.opts if text.startswith("--")), f"{name} {option.opts}"


def test_every_public_name_and_every_seam_is_on_the_page_of_the_api() -> None:
    page = reference_pages.api_page()
    names = [name for name in millstream.__all__ if name != "__version__"]
    assert [name for name in names if f"### {name}\n" not in page and f"- `{name}`: " not in page] == []
    seams = (ROOT / "ARCHITECTURE.md").read_text().partition("## Seams")[2].partition("\n## ")[0]
    listed = re.findall(
        r"`([A-Z]\w+)`", " ".join(line.split("|")[1] for line in seams.splitlines() if line.startswith("| `"))
    )
    functions = {"TransportStage"}  # a type of functions, not a protocol
    assert [name for name in listed if name not in functions and f"### {name}\n" not in page] == []


def test_the_meaning_of_a_key_is_the_string_below_it_or_the_comment_at_it() -> None:
    texts = reference_pages.field_texts(type(RunConfig(model=millstream.ModelConfig(path="m")).data))
    assert texts["holdout"].startswith("tasks set aside for evaluation")
    assert texts["system"].startswith("Makes a chat") and texts["system"].endswith("strings stay strings.")
    assert set(texts) >= {field.name for field in structs.fields(millstream.DataConfig)}


def test_every_page_is_in_the_navigation_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_site, "PAGES", tmp_path)
    build_site.collect()
    assert list(build_site.missing_pages()) == []
    monkeypatch.setattr(build_site, "nav_entries", lambda: ["README.md", "README.md", "docs/gone.md"])
    found = list(build_site.missing_pages())
    assert "README.md is in the navigation of mkdocs.yml 2 times: expected once" in found
    assert "docs/gone.md is in the navigation of mkdocs.yml, and there is no such page" in found


def test_a_file_that_a_page_links_to_becomes_a_page() -> None:
    linked: set[Path] = set()
    text = "[a](recipes/demo.toml), ![b](docs/terminal.svg), [c](docs/rewards.md#data), [d](https://e.org/x.py)"
    assert build_site.for_the_site(text, ROOT / "README.md", linked) == text.replace("demo.toml", "demo.toml.md")
    assert linked == {ROOT / "recipes/demo.toml"}


def test_a_link_with_the_name_of_a_page_gets_its_title() -> None:
    text = "[docs/rewards.md](docs/rewards.md#data) and [rewards](docs/rewards.md)"
    changed = "[Rewards](docs/rewards.md#data) and [rewards](docs/rewards.md)"
    assert build_site.for_the_site(text, ROOT / "README.md", set()) == changed


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="b.html">', "a.html links to b.html, which is not there"),
        ('<a href="#x">', "a.html links to #x: no such place on that page"),
        ('<a href="#é%20x"><p id="é x">', None),
        ('<a href="https://example.org/x">', None),
        ('<script src="https://example.org/x.js">', "a.html loads https://example.org/x.js from elsewhere"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "a.html loads //example.org/x.css from elsewhere"),
        ('<link rel="canonical" href="https://example.org/">', None),
        ('<img src="x.png">', "a.html loads x.png, which is not there"),
        ('<p style="background: url(http://e.org/x)">', "a.html loads http://e.org/x from elsewhere"),
        ('<img src="data:image/png;base64,AA==">', None),
    ],
)
def test_the_checks_of_a_built_site_find_what_is_planted(html: str, problem: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(html)
    assert list(build_site.problems(tmp_path)) == ([] if problem is None else [problem])


def test_a_stylesheet_that_loads_a_font_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face { src: url('https://example.org/f.woff2') }")
    assert list(build_site.problems(tmp_path)) == ["a.css loads https://example.org/f.woff2 from elsewhere"]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_has_a_title_and_loads_nothing(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    urls = [value for node in root.iter() for name, value in node.attrib.items() if name.endswith(("href", "src"))]
    assert [url for url in urls if not url.startswith("#")] == [] and root.find(f"{space}script") is None
    assert root.find(f"{space}title") is not None or "matplotlib" in picture.read_text(), "pictures say what they show"
