"""The audit: what became of every prompt, proved from a run folder alone.

None skipped, none trained twice, none too old, and the totals add up. What is read, in this order:

    checkpoints/     every byte against the manifest, and the ledger against the events that it covers     checkpoints.py
    events.jsonl     every event against the history before it        replay.py, with the rules in group_rules.py, run_rules.py
    metrics.jsonl    one line for every step of that history                                                run_folder.py
    summary.json     the same counts                                                                        run_folder.py
    rollouts/        every trained rollout once, as the events have it                   rollout_rules.py, rollout_files.py
    config.toml      as the run wrote it, with the terms that the events have                             config_rules.py

The folder of a training service (`millstream serve-training`) is audited by service_folder.py, with rules of its own.

The audit is an independent reader. It imports nothing of the rest of the package and counts in its own way, so that it does not
repeat a mistake in the pipeline's counting. `RULES` lists what is proved; a finding names the broken rule, the line or file,
and the group.

Crashes: a `resumed` event takes the history back to its state at `from_seq`; the events in between are void. They are checked
all the same: they had to be right when they were written, and a checkpoint may cover them.

Memory: the groups in flight, the prompts of two epochs and a few numbers per step; one copy of these for every later resume. Of
a run that has kept rollouts, also a few numbers per trained rollout.
"""

from millstream.audit.report import COUNTS, RULES, AuditReport, Finding, report_lines
from millstream.audit.run_folder import audit
from millstream.audit.service_folder import (
    SERVICE_RULES,
    ServiceReport,
    audit_service,
    is_service_folder,
    service_lines,
)

__all__ = [
    "COUNTS",
    "RULES",
    "SERVICE_RULES",
    "AuditReport",
    "Finding",
    "ServiceReport",
    "audit",
    "audit_service",
    "is_service_folder",
    "report_lines",
    "service_lines",
]
