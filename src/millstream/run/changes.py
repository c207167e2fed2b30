"""Changes at a resume: the one table of which keys of a config may change, what a change does, and why others may not.

Every change is in force from the resumed step on, and is an event (`setting_changed`). Keys of `WHILE_TRAINING` may change in
an active run, too, for the groups that start from then on. What a change at a resume does to the groups in flight:

    now        nothing
    rollouts   settled groups keep their rollouts and scores, the others are rolled out again (`pipeline.reschedule`)
    schedule   groups that no batch can train in time any more are superseded, and their prompts are fed again

Light: imports no torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from millstream.config import convert, to_toml
from millstream.pipeline.reschedule import Changed
from millstream.run.config import RunConfig, with_absolute_paths

Effect = Literal["now", "rollouts", "schedule"]
Tables = Mapping[str, Any]  # a config as TOML has it


class ChangeRule(NamedTuple):
    """`why` a key may not change, where `effect` is None."""

    effect: Effect | None
    why: str = ""


def _may(effect: Effect, table: str, keys: str) -> dict[str, ChangeRule]:
    return {f"{table}{key}": ChangeRule(effect) for key in keys.split()}


def _must_not(why: str, table: str, keys: str) -> dict[str, ChangeRule]:
    return {f"{table}{key}": ChangeRule(None, why) for key in keys.split()}


OTHER_WEIGHTS = "the checkpoint has the weights and the optimizer's state of the parameters that the run began with"
OTHER_TASKS = "the run's place in the data is a number of its tasks, in their order"
OTHER_STAGES = "the rows in the checkpoint have the columns of the models that the run began with"
OTHER_LOSS = "the rows in the checkpoint were scored for it"
OTHER_SFT = "supervised training draws its examples by it, and may have drawn some"

RULES: Mapping[str, ChangeRule] = {
    **_must_not(OTHER_WEIGHTS, "", "model.path model.tiny learner.lora learner.kind learner.args"),
    **_may("now", "model.", "device dtype trust_remote_code"),
    **_must_not(
        OTHER_TASKS,
        "data.",
        "name subset split toy size prompt_key answer_key system holdout shuffle sampler sampler_args rollouts sessions",
    ),
    **_may("now", "data.", "path passed"),  # of a file that was moved: other tasks are found by their digest
    **_must_not("every random number of the run follows from it", "", "seed"),
    **_must_not("it names the folder itself, which may be moved as a whole: mv RUN OTHER", "", "run_dir"),
    **_may("rollouts", "", "reward"),
    **_must_not(OTHER_TASKS, "environment", ".* .*.use .*.name .*.args .*.share"),
    **_must_not("it decides what the rows of a rollout are", "environment.*.", "thinking"),
    **_may("now", "environment.*.", "max_concurrent step_timeout_s process"),
    **_may("rollouts", "rollout.", "group_size extra_members min_group_size max_parts max_tokens temperature stop"),
    **_may("now", "rollout.", "retries timeout_s keep_gb workers"),
    **_may("schedule", "pipeline.", "steps groups_per_step max_lag auto_lag lockstep extra_groups surplus"),
    **_may("now", "pipeline.", "longest_first overdue max_restarts max_replaced_per_step stall_s deadline_s"),
    **_may("rollouts", "pipeline.", "filter_zero_signal filter filter_args"),
    **_must_not("a run that trains and one that does not are two runs", "pipeline.", "rollouts_only"),
    **_must_not(OTHER_LOSS, "algorithm.", "name advantage loss correction correction_level kl kl_estimator"),
    **_may(
        "now", "algorithm.", "aggregation fixed_length clip_low clip_high dual_clip ratio_cap ratio_floor entropy_bonus"
    ),
    **_may(
        "now",
        "algorithm.",
        "positive_weight negative_weight regularisation kl_coefficient overlong_buffer discount trace",
    ),
    **_may("now", "algorithm.", "turn_baseline normalization"),
    **_may(
        "now",
        "learner.",
        "learning_rate schedule schedule_args warmup_steps weight_decay max_grad_norm micro_batch_tokens ranks",
    ),
    **_may("now", "learner.", "recompute offload compile gpu_share max_skipped_steps"),
    **_must_not("the schedule of the learning rate counts that many steps a batch", "learner.", "mini_batches"),
    **_must_not(OTHER_STAGES, "", "reference reference.path critic critic.path proximal"),
    **_may("now", "reference.", "device dtype micro_batch_tokens ranks replicas"),
    **_may(
        "now",
        "critic.",
        "device learning_rate warmup_steps max_grad_norm value_clip micro_batch_tokens ranks max_skipped_steps",
    ),
    **_may("now", "proximal.", "device micro_batch_tokens ranks replicas"),
    **_may(
        "now",
        "",
        "engine store weights evaluation checkpoint runtime resources outside sim trackers metrics traces alerts",
    ),
    **_must_not(OTHER_SFT, "", "warmup warmup.max_steps warmup.epochs warmup.batch_size"),
    **_may("now", "warmup.", "learning_rate schedule warmup_steps stop_at check_every"),
}
"""By key; `*` stands for a number. A key that is not here has the rule of the table that it is in, if that is here."""


WHILE_TRAINING = ("pipeline.max_lag", "pipeline.auto_lag", "pipeline.extra_groups")


class ChangedSetting(NamedTuple):
    """A key whose value differs. None: it is not set."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}={'' if self.new is None else self.new}"


def rule_of(key: str) -> ChangeRule | None:
    """None: neither the key nor a table that it is in is in `RULES`."""
    place = re.sub(r"\.\d+(?=\.|$)", ".*", key)
    while place not in RULES and "." in place:
        place = place.rpartition(".")[0]
    return RULES.get(place)


def tables_of(config: RunConfig) -> Tables:
    """The config as a run folder keeps it."""
    return tomllib.loads(to_toml(with_absolute_paths(config)))


def tables_in(text: str, where: str) -> Tables:
    """The config in a file that a run wrote, with the keys that this version has."""
    return tables_of(convert(tomllib.loads(text), RunConfig, where=where))


def changed_settings(old: Tables, new: Tables) -> list[ChangedSetting]:
    return list(_settings_between(old, new, ""))


def _settings_between(old: Any, new: Any, place: str) -> Iterator[ChangedSetting]:
    """A table that only one of them has is one change."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from _settings_between(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))
    elif _are_tables(old) and _are_tables(new):
        for index in range(max(len(old), len(new))):
            ours, theirs = (side[index] if index < len(side) else None for side in (old, new))
            yield from _settings_between(ours, theirs, f"{place}.{index}")
    elif old != new and not (old != old and new != new):  # NaN is equal to itself here
        yield ChangedSetting(place, old, new)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def refused_change(changes: Iterable[ChangedSetting]) -> tuple[ChangedSetting, str] | None:
    """The first one that may not be, and why."""
    for change in changes:
        rule = rule_of(change.key)
        if rule is None or rule.effect is None:
            return change, "nothing is known of it" if rule is None else rule.why
    return None


def effects_of(changes: Sequence[ChangedSetting]) -> Changed:
    """What they do to the groups in flight."""
    effects = {rule.effect for change in changes if (rule := rule_of(change.key)) is not None}
    return Changed(rollouts="rollouts" in effects, schedule="schedule" in effects)
