"""Findings: a run says when it is not learning, by name, with the figures and what to do.

facts.py   what the rules read        rules.py   one pure function per finding        watch.py   from events to findings
"""

from millstream.events.findings.rules import RULES
from millstream.events.findings.watch import PastFinding, Watch, findings_of, is_empty_step

__all__ = ["RULES", "PastFinding", "Watch", "findings_of", "is_empty_step"]
