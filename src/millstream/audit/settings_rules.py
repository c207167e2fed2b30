"""The settings of a run: what the config in the log says, how a resume may change it, and which groups that supersedes."""

from __future__ import annotations

import hashlib
import math
import tomllib

from millstream.audit.config_rules import changes_between, is_in_lockstep, most_groups, terms_of
from millstream.audit.history import Cursor, History, TrackedGroup
from millstream.audit.report import Fields

# What a resume that changes it does: groups are superseded, or those that are not settled are rolled out again.
OF_SCHEDULE = ("steps", "groups_per_step", "max_lag", "auto_lag", "lockstep", "extra_groups", "surplus")
OF_ROLLOUT = ("group_size", "extra_members", "min_group_size", "max_parts", "max_tokens", "temperature", "stop")
WHILE_TRAINING = ("pipeline.max_lag", "pipeline.auto_lag", "pipeline.extra_groups")
SCHEDULE = tuple(f"pipeline.{key}" for key in OF_SCHEDULE)
OF_FILTERS = ("filter_zero_signal", "filter", "filter_args")
ROLLOUTS = (*(f"rollout.{key}" for key in OF_ROLLOUT), "reward", *(f"pipeline.{key}" for key in OF_FILTERS))


class SettingsRules:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._holds = cursor.report.holds
        self._expect = cursor.expect
        self._finding = cursor.add_finding
        self.config_digests: set[str] = set()  # of every config that a process of the run wrote
        self.last_digest = ""

    @property
    def _now(self) -> History:
        return self._cursor.now

    def on_config_written(self, event: Fields) -> None:
        """From here on the settings are those of this text. Logs of earlier versions have none."""
        now, text = self._now, event.get("text", "")
        self.config_digests.add(event["digest"])
        self.last_digest = event["digest"]
        if not text:
            return
        is_own = hashlib.sha256(text.encode()).hexdigest() == event["digest"]
        self._expect(is_own, "config", "the text of the config has another SHA-256 than the event says")
        config = tomllib.loads(text)
        now.changes_due = None if now.config is None else dict(changes_between(now.config, config, ""))
        if now.is_training:
            frozen = sorted((now.changes_due or {}).keys() - set(WHILE_TRAINING))
            self._expect(not frozen, "settings", f"{', '.join(frozen[:4])} changed while the run trained")
        now.config = config
        now.changed = set()
        now.lag_moved_at = None
        if now.terms is not None:
            derived = {**terms_of(config), "lag_bound": math.ceil(config["pipeline"]["max_lag"])}
            derived["budget"] = most_groups(config["pipeline"])
            now.terms = now.terms._replace(**{name: value for name, value in derived.items() if value is not None})

    def on_setting_changed(self, event: Fields) -> None:
        now, key, found = self._now, event["key"], (event["old"], event["new"])
        now.changed.add(key)
        if not self._holds(event["version"] == now.version):
            self._finding(
                "settings", f"{key} is changed at version {event['version']}, and the run is at {now.version}"
            )
        if now.changes_due is not None:
            due = now.changes_due.pop(key, None)
            self._expect(
                due == found, "settings", f"{key} is changed from {found[0]} to {found[1]}, the configs say {due}"
            )

    def on_lag_moved(self, event: Fields) -> None:
        """`auto_lag` moves the bound and the budget: within max_lag, at most once a version."""
        now, pipeline = self._now, (self._now.config or {}).get("pipeline", {})
        version, lag, bound, budget = (event[name] for name in ("version", "max_lag", "lag_bound", "budget"))
        is_allowed = bool(pipeline.get("auto_lag")) and 0 <= lag <= pipeline["max_lag"]
        self._expect(is_allowed, "settings", f"the lag moves to {lag}, the config has {pipeline.get('max_lag')}")
        due = (math.ceil(lag), most_groups({**pipeline, "max_lag": lag}))
        self._expect((bound, budget) == due, "settings", f"with a lag of {lag} bound and budget are {(bound, budget)}")
        is_first = version == now.version and version != now.lag_moved_at
        self._expect(is_first, "settings", f"the lag moves twice at version {version}, or the run is at {now.version}")
        if now.is_training:
            now.lag_moved_at = version
        now.terms = self._cursor.terms._replace(lag_bound=bound, budget=budget)

    def check_announced(self) -> None:
        """Before the first group or step of a process. A key that the config of an earlier version did not have may appear."""
        due = self._now.changes_due or {}
        silent = [key for key, (old, _) in due.items() if old is not None or key.startswith(("pipeline.", "rollout."))]
        self._expect(not silent, "settings", f"{', '.join(silent[:4])} differ from the config before, without an event")
        self._now.changes_due = None
        self._now.is_training = True

    def check_rate(self, event: Fields) -> None:
        """A step was made with the learning rate of its config: exactly that, or at most, where it has a schedule."""
        rate, learner = event["metrics"].get("learning_rate"), (self._now.config or {}).get("learner")
        if rate is None or learner is None:
            return
        most, is_fixed = learner["learning_rate"], learner["schedule"] == "constant" and not learner["warmup_steps"]
        is_right = math.isclose(rate, most, rel_tol=1e-6) or (rate < most and not is_fixed)
        self._expect(
            is_right, "settings", f"step {event['version']} has the learning rate {rate}, the config then had {most}"
        )

    # ---- the groups in flight at a resume

    def check_resumed(self, group: TrackedGroup, what: str, kept: list[int], to_do: list[int], listed: Fields) -> None:
        """Its members are those of the checkpoint; or all are rolled out again, where that is what the changes ask for."""
        is_redone = not kept and to_do == list(range(self._cursor.terms.num_members))
        are_rollouts_changed = any(key.startswith(ROLLOUTS) for key in self._now.changed)
        is_as_listed = (listed["kept"], listed["to_do"]) == (kept, to_do)
        is_right = is_as_listed or (is_redone and are_rollouts_changed)
        self._expect(is_right, "resume", f"{what} with members that differ from the checkpoint's ledger")
        is_mixed = are_rollouts_changed and bool(kept) and bool(to_do)
        self._expect(not is_mixed, "settings", f"{what} with rollouts of two settings: {kept} kept, {to_do} not")
        if is_redone:
            group.terms = self._cursor.terms
            group.out = set()
            group.aborted = set()

    def limit_deadline(self, group: TrackedGroup) -> None:
        """Of a resumed group, where the resume changed the schedule; otherwise it keeps the one of its admission."""
        if not self._now.changed.isdisjoint(SCHEDULE):
            group.deadline = min(group.deadline, group.start + self._cursor.terms.lag_bound)

    def on_superseded(self, event: Fields) -> None:
        """A group leaves at a resume, instead of being resumed."""
        now, group_id = self._now, event["group_id"]
        group = now.groups.pop(group_id, None)
        is_new = group is not None and group_id in now.to_resume
        self._expect(
            is_new, "superseded", f"group {group_id} is superseded, and was not in flight at a resume just before"
        )
        has_cause = not now.changed.isdisjoint(SCHEDULE)
        self._expect(
            has_cause, "superseded", f"group {group_id} is superseded by a resume that did not change the schedule"
        )
        said = (event["num_members"], event["mean_reward"], event["is_replaced"])
        self._expect(
            said == (0, 0.0, False), "totals", f"group {group_id} is superseded, and says {said} of its members"
        )
        if group is None:
            return
        now.to_resume.discard(group_id)
        now.fates["superseded"] += 1
        now.to_feed.append((group.task_id, group.epoch))
        now.superseded[group_id] = self._due(group)
        self.check_superseded()

    def _due(self, group: TrackedGroup) -> int:
        terms = self._cursor.terms
        return min(group.deadline, group.start + terms.lag_bound, terms.steps - 1)

    def check_superseded(self) -> None:
        """When the last group is resumed: there was no room for those that are superseded."""
        now, terms = self._now, self._cursor.terms
        if not now.superseded or now.to_resume:
            return
        vacant = len(self._cursor.ledger.get("vacant", ()))
        kept = sorted(self._due(group) for group in now.groups.values())
        for group_id, due in now.superseded.items():
            room = (due - now.version + 1) * terms.groups_per_step
            is_full = not terms.is_first_to_finish and sum(one <= due for one in kept) + vacant >= room
            is_out = due < now.version or is_full or is_in_lockstep(now.config or {})
            self._expect(is_out, "superseded", f"group {group_id} is superseded, and could be trained by version {due}")
        now.superseded = {}
