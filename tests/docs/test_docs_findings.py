"""The page about findings names every rule, its thresholds as they are, and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from millstream.events.findings import RULES, facts, rules

PAGE = (Path(__file__).parents[2] / "docs/findings.md").read_text()


def test_every_rule_is_in_both_tables_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)
    assert rows == [*RULES, *RULES]


def test_the_thresholds_of_the_page_are_those_of_the_rules() -> None:
    assert facts.WINDOW == 10 and facts.RECENT == facts.MIN_STEPS == 5 and facts.MOST == 0.9
    table = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \| step", PAGE, re.MULTILINE))
    for name, number in (
        ("all-rewards-equal", rules.MIN_ROLLOUTS),
        ("no-signal", rules.MIN_GROUPS),
        ("reward-flat", rules.FLAT_RISE),
        ("entropy-collapsed", rules.ANSWER_ENTROPY),
        ("entropy-collapsed", rules.TOKEN_ENTROPY),
        ("ratio-exploded", rules.LARGE_KL),
        ("ratio-exploded", rules.SMALL_SAMPLE),
        ("kl-exploded", rules.LARGE_REFERENCE_KL),
        ("answers-cut", rules.MIN_ROLLOUTS),
    ):
        assert f"{number:g}" in table[name], (name, number)
    assert f"{rules.CUT:.0%}" in table["answers-cut"] and rules.LONGER == 2 and rules.LOST_WEIGHT == 0.25
