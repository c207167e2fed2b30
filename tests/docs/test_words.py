"""The pages are in plain technical English: words of a private style do not return."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PRIVATE = re.compile(
    r"\b(?:whoever|whomever|nobody|somebody|anybody|everybody|anew|mend(?:s|ed)?|(?:go|goes|going|went) on"
    r"|those beside|what is over|so many)\b",
    flags=re.I,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_uses_words_of_a_private_style(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.S | re.M)
    assert PRIVATE.findall(prose) == []
