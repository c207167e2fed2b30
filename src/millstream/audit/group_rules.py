"""The rules of a group, from its admission to its fate, and of the steps that trained groups make.

Each handler checks its event against the history before it, and then adds it to the history.
"""

from __future__ import annotations

import math

from millstream.audit.history import BatchTotals, Cursor, EndedMember, History, StepTotals, TrackedGroup
from millstream.audit.report import Fields
from millstream.audit.settings_rules import SettingsRules

LOAD_STEPS = 8  # within which the load of a version that is in use is logged
SUMS = ("groups", "rollouts", "rows", "tokens")  # what a batch and its `stepped` event both have


class GroupRules:
    def __init__(self, cursor: Cursor, settings: SettingsRules) -> None:
        self._cursor = cursor
        self._settings = settings
        self._holds = cursor.report.holds
        self._expect = cursor.expect
        self._finding = cursor.add_finding

    @property
    def _now(self) -> History:
        return self._cursor.now

    def on_group_admitted(self, event: Fields) -> None:
        now, terms, group_id = self._now, self._cursor.terms, event["group_id"]
        self._check_all_resumed()
        if not self._holds(group_id == now.next_group):
            self._finding("admitted", f"group {group_id} was admitted, {now.next_group} was expected")
        self._check_deadline(event, "was admitted", now.version)
        if (event["task_id"], event["epoch"]) in now.to_feed:
            now.to_feed.remove((event["task_id"], event["epoch"]))
        else:
            self._count_prompt(group_id, event["task_id"], event["epoch"])
        self._expect(
            not now.is_fed, "batch", f"group {group_id} was admitted after a place had stayed empty without need"
        )
        now.use_version(event["start_version"])
        now.groups[group_id] = TrackedGroup(
            event["task_id"], event["epoch"], event["start_version"], event["deadline"], terms=terms
        )
        now.next_group = max(now.next_group, group_id + 1)
        now.num_admitted += 1
        now.bound_max = max(now.bound_max, event["deadline"] - event["start_version"])
        num_groups = len(now.groups)
        if not self._holds(num_groups <= terms.budget):
            self._finding("budget", f"with group {group_id}, {num_groups} are in flight; the budget is {terms.budget}")

    def _check_deadline(self, event: Fields, what: str, latest: int, before: int = 0) -> None:
        """`before`: its deadline before a restart, which it keeps where the bound was lowered since."""
        start, deadline, bound = event["start_version"], event["deadline"], self._cursor.terms.lag_bound
        if not self._holds(start <= latest <= deadline == max(before, start + bound)):
            self._finding(
                "deadline",
                f"group {event['group_id']} {what} with start {start}, deadline {deadline}, version {latest}, bound {bound}",
            )

    def _count_prompt(self, group_id: int, task_id: str, epoch: int) -> None:
        now, num_tasks = self._now, self._cursor.terms.num_tasks
        if not self._holds(not now.to_feed):
            self._finding("superseded", f"group {group_id} has a new prompt before {now.to_feed[0][0]} is fed again")
        if epoch != now.epoch:
            self._expect(epoch == now.epoch + 1, "prompt", f"group {group_id} has epoch {epoch}, after {now.epoch}")
            if not self._holds(num_tasks in (0, len(now.prompts))):
                self._finding("prompt", f"epoch {now.epoch} ends after {len(now.prompts)} of {num_tasks} prompts")
            if now.first_prompts is None and num_tasks:
                now.first_prompts = frozenset(now.prompts)
            now.epoch = epoch
            now.prompts = set()
        if not self._holds(now.first_prompts is None or task_id in now.first_prompts):
            self._finding("prompt", f"group {group_id} has prompt {task_id}, which the first epoch does not have")
        if not self._holds(task_id not in now.prompts):
            self._finding("prompt", f"group {group_id} repeats prompt {task_id} in epoch {epoch}")
        now.prompts.add(task_id)

    def _group(self, event: Fields) -> TrackedGroup | None:
        """The group of an event, if it is in flight."""
        now, group_id = self._now, event["group_id"]
        group = now.groups.get(group_id)
        why = "has left already" if group_id < now.next_group else "was never admitted"
        self._expect(group is not None, "in flight", f"{event['kind']} of group {group_id}, which {why}")
        if not self._holds(group_id not in now.to_resume):
            self._finding("resume", f"{event['kind']} of group {group_id}, which was not resumed")
        return group

    # ---- its members

    def on_rollout_started(self, event: Fields) -> None:
        group, member, attempt = self._group(event), event["member"], event["attempt"]
        if group is None:
            return
        due = group.next_attempt.get(member, group.first_attempt)
        is_free = member not in group.running and member not in group.ended and member not in group.out
        if not self._holds(is_free and attempt == due and 0 <= member < group.own_terms.num_members):
            self._finding(
                "rollout",
                f"group {event['group_id']} member {member} began attempt {attempt}: "
                f"{f'attempt {due} was expected' if is_free else 'it is running or done'}",
            )
        group.running.add(member)
        group.next_attempt[member] = attempt + 1

    def on_rollout_ended(self, event: Fields) -> None:
        group = self._end_attempt(event)
        if group is None:
            return
        start, end, newest = event["start_version"], event["end_version"], self._now.version
        if not self._holds(group.start <= start <= end <= newest):
            self._finding(
                "rollout",
                f"group {event['group_id']} member {event['member']} ran on versions {start} to {end}, "
                f"outside of {group.start} to {newest}",
            )
        self._now.use_version(end)
        reward, is_partial = float(event["reward"]), bool(event.get("is_partial"))
        if not is_partial:
            self._now.rewards.append(reward)
        group.ended[event["member"]] = EndedMember(
            reward,
            event.get("rewards") or [reward],
            event["num_tokens"],
            event.get("num_parts", 1),
            start,
            end,
            given=reward,
            is_partial=is_partial,
            is_kept=self._cursor.is_keeping,
        )

    def on_rollout_failed(self, event: Fields) -> None:
        group = self._end_attempt(event)
        if group is not None and event["is_final"]:
            group.out.add(event["member"])

    def on_rollout_aborted(self, event: Fields) -> None:
        group, terms, member = self._end_attempt(event), self._cursor.terms, event["member"]
        if group is None:
            return
        if not self._holds(terms.is_first_to_finish or terms.max_restarts > 0):
            self._finding("declared", f"group {event['group_id']} member {member} was aborted, undeclared")
        group.out.add(member)
        group.aborted.add(member)
        self._now.rollouts_aborted += 1

    def on_group_restarted(self, event: Fields) -> None:
        group, group_id, now, terms = self._group(event), event["group_id"], self._now, self._cursor.terms
        if group is None:
            return
        if not self._holds(group.restarts + 1 == event["restarts"] <= terms.max_restarts):
            self._finding(
                "declared",
                f"group {group_id}: restart {event['restarts']} after {group.restarts}, {terms.max_restarts} are allowed",
            )
        if not self._holds(group.start <= event["start_version"]):
            self._finding(
                "deadline",
                f"group {group_id} was restarted at version {event['start_version']}, before its start {group.start}",
            )
        self._check_deadline(event, "was restarted", now.version, group.deadline)
        is_at_rest = not group.running and not group.is_taken
        if not self._holds(is_at_rest and event["first_attempt"] >= max(group.next_attempt.values(), default=0)):
            self._finding("rollout", f"group {group_id} was restarted while it was running or done")
        group.restart(event)
        now.num_restarts += 1

    def on_group_scored(self, event: Fields) -> None:
        """The total reward of each member, which decides the fate."""
        group, rewards = self._group(event), event["rewards"]
        if group is None:
            return
        group.has_failed_score = bool(event["failure"])
        if not self._holds(group.has_failed_score or (len(rewards) == len(group.ended) and not group.running)):
            self._finding(
                "totals", f"group {event['group_id']} has {len(rewards)} rewards for {len(group.ended)} members"
            )
        # In logs of earlier versions none is; nor in a resumed group, if the reward of whole groups came with the resume.
        if group.is_resumed or any(member.is_partial for member in group.ended.values()):
            self._now.rewards += rewards
        for (number, member), reward in zip(sorted(group.ended.items()), rewards, strict=False):
            added = reward - member.reward
            group.ended[number] = member._replace(reward=reward, rewards=[one + added for one in member.rewards])

    def _end_attempt(self, event: Fields) -> TrackedGroup | None:
        group, member, attempt = self._group(event), event["member"], event["attempt"]
        if group is None:
            return None
        if not self._holds(member in group.running and attempt + 1 == group.next_attempt[member]):
            self._finding(
                "rollout",
                f"{event['kind']} of group {event['group_id']} member {member} attempt {attempt}, which was not running",
            )
        group.running.discard(member)
        return group

    # ---- its fate

    def _check_members(self, group: TrackedGroup, event: Fields, recorded: int) -> None:
        """Every member is done, and the event has the number of those that ended."""
        size, ended, out = group.own_terms.num_members, len(group.ended), len(group.out)
        if not self._holds(ended + out == size and recorded == ended):
            self._finding(
                "members",
                f"{event['kind']} of group {event['group_id']} with {recorded} members: "
                f"of {size}, {ended} have ended and {out} failed for good or were aborted",
            )

    def _check_complete(self, group: TrackedGroup, event: Fields) -> None:
        """A group with a fate other than aborted may lack an aborted member only if it was complete without it."""
        terms, ended = group.own_terms, len(group.ended)
        is_first_to_finish = terms.is_first_to_finish or self._cursor.terms.is_first_to_finish
        is_complete = is_first_to_finish and ended >= terms.group_size
        if not self._holds(not group.aborted or is_complete):
            self._finding(
                "declared",
                f"{event['kind']} of group {event['group_id']} without members {sorted(group.aborted)}, "
                f"which were aborted when {ended} of {terms.group_size} had ended",
            )

    def on_group_taken(self, event: Fields) -> None:
        group, group_id, now = self._group(event), event["group_id"], self._now
        if group is None:
            return
        self._check_members(group, event, event["num_rollouts"])
        self._check_complete(group, event)
        if not self._holds(not group.is_taken and event["version"] == now.version):
            self._finding(
                "batch",
                f"group {group_id} was taken {'twice' if group.is_taken else 'once'}, by {event['version']} at {now.version}",
            )
        oldest = min((member.start for member in group.ended.values()), default=now.version)
        lag, bound = now.version - oldest, group.deadline - group.start
        self._expect(lag <= bound, "lag", f"group {group_id} was taken with lag {lag}, the bound is {bound}")
        if not self._holds(now.version <= group.deadline):
            self._finding("lag", f"group {group_id} was taken at version {now.version}, due by {group.deadline}")
        if not self._holds(event["lag"] == lag):
            self._finding("lag", f"group {group_id} says lag {event['lag']}, its oldest member has {lag}")
        group.is_taken = True
        now.lag_max = max(now.lag_max, lag)

    def on_group_left(self, event: Fields) -> None:
        if event["fate"] == "superseded":
            self._settings.on_superseded(event)
            return
        group, group_id, fate = self._group(event), event["group_id"], event["fate"]
        if group is None:
            return
        self._check_members(group, event, event["num_members"])
        due, mean = group.due_fate(), group.mean_reward()
        if fate == "aborted":
            self._check_aborted(group_id)
        else:
            self._check_complete(group, event)
            rewards = [member.reward for member in group.ended.values()]
            is_refused = self._is_refused(event)
            due = "filtered" if is_refused and due == "trained" else due
            is_due = fate == due or (self._is_compared_within and {fate, due} == {"trained", "filtered"})
            self._expect(is_due, "fate", f"group {group_id} left as {fate}, rewards {rewards} ask for {due}")
        if not self._holds(math.isclose(event["mean_reward"], mean, rel_tol=1e-6, abs_tol=1e-9)):
            self._finding(
                "totals", f"group {group_id} says mean reward {event['mean_reward']}, its members have {mean}"
            )
        if not self._holds(group.is_taken == (fate == "trained")):
            self._finding(
                "batch", f"group {group_id} left as {fate}, and {'was taken' if group.is_taken else 'was not taken'}"
            )
        self._check_replaced(group_id, fate, event["is_replaced"])
        self._remove(group_id, group, fate, event["is_replaced"])

    def _is_refused(self, event: Fields) -> bool:
        """By the user's own filter, which must be that of the settings."""
        name, own = event.get("refused_by"), (self._now.config or {}).get("pipeline", {}).get("filter", "")
        if name is None:
            return False
        self._expect(
            bool(own) and name == own,
            "fate",
            f"group {event['group_id']} was refused by the filter {name}, the config has {own or 'none'}",
        )
        return True

    @property
    def _is_compared_within(self) -> bool:
        """Whether the rewards of turns or parts, which the log does not have, decide if a group has a signal."""
        return (self._now.config or {}).get("algorithm", {}).get("advantage") in ("turns", "parts")

    def _check_replaced(self, group_id: int, fate: str, is_replaced: bool) -> None:
        """A group that is not trained is replaced until its step has replaced `max_replaced`; then its place stays empty."""
        now, most = self._now, self._cursor.terms.max_replaced
        if fate in ("trained", "aborted"):
            if not self._holds(is_replaced == (fate == "aborted")):
                self._finding("batch", f"group {group_id} left as {fate}, and says is_replaced {is_replaced}")
            return
        if most is None or self._cursor.terms.rollouts_from:
            return
        if not self._holds(not is_replaced or (now.num_replaced < most and not now.is_fed)):
            why = "the data have ended" if now.is_fed else f"its step had replaced {now.num_replaced} of {most}"
            self._finding("batch", f"group {group_id} was replaced, and {why}")
        now.is_fed = now.is_fed or (not is_replaced and now.num_replaced < most)
        now.num_replaced += is_replaced

    def _check_aborted(self, group_id: int) -> None:
        """First to finish aborts the groups that a full batch does not need."""
        terms, now = self._cursor.terms, self._now
        num_taken = sum(group.is_taken for group in now.groups.values())
        filled = now.fates["trained"] + now.num_vacant + num_taken
        is_full = filled >= now.num_places + terms.groups_per_step
        if not self._holds(terms.is_first_to_finish and is_full):
            self._finding(
                "declared",
                f"group {group_id} was aborted: {num_taken} of {terms.groups_per_step} were taken, "
                f"and first to finish is {terms.is_first_to_finish}",
            )

    def _remove(self, group_id: int, group: TrackedGroup, fate: str, is_replaced: bool) -> None:
        now = self._now
        del now.groups[group_id]
        now.fates[fate] += 1
        if fate == "trained":
            self._cursor.add_trained(group_id, group)
            now.batch.groups += 1
            now.batch.rows += sum(member.num_rows for member in group.ended.values())
            now.batch.rollouts += len(group.ended)
            now.batch.tokens += sum(member.num_tokens for member in group.ended.values())
        elif not is_replaced:
            now.num_vacant += 1

    # ---- its step

    def on_stepped(self, event: Fields) -> None:
        now, version, batch = self._now, event["version"], self._now.batch
        self._check_all_resumed()
        self._expect(version == now.version + 1, "step", f"version {version} after {now.version}")
        recorded, due = [event[f"num_{name}"] for name in SUMS], [getattr(batch, name) for name in SUMS]
        if not self._holds(recorded == due):
            self._finding("totals", f"step {version} says {recorded} {', '.join(SUMS)}; its groups have {due}")
        now.version = version
        now.batch = BatchTotals()
        now.steps.append(StepTotals(batch.groups, math.fsum(now.rewards) / len(now.rewards) if now.rewards else None))
        now.rewards = []
        now.num_replaced = 0
        now.num_places += self._cursor.terms.groups_per_step
        now.rollouts_trained += batch.rollouts
        self._settings.check_rate(event)
        self._check_places(batch.groups)
        self._check_loaded()
        for group_id, group in now.groups.items():
            self._check_not_trained(group_id, group)

    def _check_places(self, num_groups: int) -> None:
        """A step has at most `groups_per_step` groups, and exactly that many before the data end."""
        now, size = self._now, self._cursor.terms.groups_per_step
        filled = now.fates["trained"] + now.num_vacant
        is_full = filled >= now.num_places or not now.groups
        if not self._holds(num_groups <= size and is_full):
            self._finding(
                "batch", f"step {now.version} has {num_groups} groups for {size} places, {len(now.groups)} wait"
            )

    def _check_loaded(self) -> None:
        """A version that is in use has been loaded. An engine may be used a moment before its load is logged."""
        now = self._now
        late = [version for version, since in now.unloaded.items() if now.version - since >= LOAD_STEPS]
        self._expect(not late, "weights", f"versions {late} were used, and no engine loaded them")
        for version in late:
            del now.unloaded[version]

    def _check_not_trained(self, group_id: int, group: TrackedGroup) -> None:
        version = self._now.version
        if not self._holds(not group.is_taken):
            self._finding("batch", f"group {group_id} was taken by the batch of step {version}, and did not leave")
        if not self._holds(group.deadline >= version):
            self._finding("lag", f"group {group_id} is in flight at version {version}, due by {group.deadline}")

    # ---- its resume

    def on_group_resumed(self, event: Fields) -> None:
        now, group_id, kept, to_do = self._now, event["group_id"], event["kept"], event["to_do"]
        what = f"group {group_id} was resumed"
        self._expect(group_id in now.to_resume, "resume", f"{what}: it was not in flight, or this is the second time")
        now.to_resume.discard(group_id)
        group = now.groups.get(group_id)
        if group is None:
            return
        listed = self._cursor.ledger.get("groups", {}).get(str(group_id), event)
        self._settings.check_resumed(group, what, kept, to_do, listed)
        for objection in group.objections(kept, to_do, group.own_terms.num_members):
            self._expect(not objection, "resume", f"{what}: {objection}")
        self._settings.limit_deadline(group)
        is_current = event["incarnation"] == self._cursor.incarnation
        self._expect(is_current, "resume", f"{what} by incarnation {event['incarnation']}")
        group.resume(kept, to_do)
        self._settings.check_superseded()

    def _check_all_resumed(self) -> None:
        """Before the first group or step of a process."""
        to_resume = self._now.to_resume
        self._settings.check_announced()
        if not self._expect(
            not to_resume, "resume", f"groups {sorted(to_resume)[:10]} were in flight and were not resumed"
        ):
            to_resume.clear()
