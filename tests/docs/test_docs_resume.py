"""docs/resume.md: its table of keys is that of the program."""

from __future__ import annotations

import re
from pathlib import Path

from millstream.run.changes import RULES

PAGE = (Path(__file__).parents[2] / "docs/resume.md").read_text()


def test_the_page_has_every_key_with_its_effect_or_the_reason_why_it_may_not_change() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    shown = {key: effect for keys, effect in rows for key in re.findall(r"`([^`]+)`", keys)}
    assert shown == {key: rule.effect or f"no: {rule.why}" for key, rule in RULES.items()}
