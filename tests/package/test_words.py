"""Docstrings, comments and messages of the package are in plain technical English: words of a private style do not return."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/millstream"
PRIVATE = re.compile(
    r"\b(?:whoever|whomever|nobody|somebody|anybody|everybody|anew|mend(?:s|ed|ing)?|told|so\s+many|(?:go|goes|going|went)\s+on"
    r"|beside|be\s+it|lives|lived)\b",
    flags=re.I,
)
ALLOWED = (
    "as nobody",  # the user of Unix
    "the user `nobody`",
    '"goes on"',  # a part of a seed: another word would be other randomness
)
TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def private_words(path: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in TEXT:
            continue
        text = token.string
        for phrase in ALLOWED:
            text = text.replace(phrase, "")
        for found in PRIVATE.findall(text):
            yield f"{path.relative_to(SOURCE)}:{token.start[0]}: {found}"


def test_no_module_uses_words_of_a_private_style() -> None:
    found = [word for path in sorted(SOURCE.rglob("*.py")) for word in private_words(path)]
    assert not found, "\n".join(found)
