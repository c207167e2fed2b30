"""The rules: each a pure function of the run so far (`facts.SoFar`). `docs/findings.md` has the reasons of every threshold.

A rule compares rates with their sampling error. It holds only where chance is excluded, and, where the reward could tell, only
if that neither rises nor has reached its maximum."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, median
from typing import NamedTuple

from millstream.events.findings.facts import (
    MOST,
    RECENT,
    WINDOW,
    Z_DIFFERS,
    Z_RISES,
    SoFar,
    are_equal,
    difference,
    pooled,
)

MIN_GROUPS = 50  # for a share of groups: 45 of 50 means 79% or more, with 95% confidence
MIN_ROLLOUTS = 256  # for "all of them": with 95% confidence a share of 1.2% or more would have been seen
MIN_AT_THE_END = 10  # groups, at the end of a run that had fewer
HALF = 0.5
FLAT_STEPS = 50
FLAT_RISE = 0.1  # of the rewards' standard deviation: the rise that must be excluded
Z_SURE = 2.326  # one-sided 99%
LOW_ENTROPY = 0.1  # of its value in the first steps
ANSWER_ENTROPY = 0.5  # nats of a whole answer: the likeliest answer has a probability of exp(-0.5) = 61% or more
TOKEN_ENTROPY = 0.02  # nats a token
LARGE_KL = 0.5  # nats a token: a typical ratio is then exp(0.5) = 1.6, outside every clip range
SMALL_SAMPLE = 0.1  # effective sample size: nine tokens of ten do not count
LARGE_REFERENCE_KL = 5.0  # nats a token: the reference would write one such token in exp(5) = 148
LOST_WEIGHT = 0.25  # of the weight of a token, on average
LONGER = 2.0  # times the length of the first steps
CUT = 0.95  # of the answers


class Evidence(NamedTuple):
    """Why a rule holds, in words and figures, and what to do."""

    message: str
    advice: str
    figures: dict[str, float]


LearningRule = Callable[[SoFar], Evidence | bool]
"""Evidence if it holds, False if it does not, True if that cannot be said: it stays as it was."""

UNKNOWN = True


def all_rewards_equal(so_far: SoFar) -> Evidence | bool:
    window = so_far.window
    count = pooled(facts.rollouts for facts in window).count
    if so_far.is_early or count < (1 if so_far.is_over else MIN_ROLLOUTS):
        return UNKNOWN
    low, high = min(facts.lowest for facts in window), max(facts.highest for facts in window)
    if not are_equal(low, high) or so_far.is_solved():
        return False
    return Evidence(
        f"all {count} rewards of the last {len(window)} steps are {low:g}: no rollout is better than another, and nothing is "
        "learned",
        "See what the model writes and whether the reward is right: millstream eval RUN --show 3. If it is: easier tasks, a "
        "[warmup] on gold answers, or a reward that gives part of the points",
        {"rewards": count, "reward": low},
    )


def no_signal(so_far: SoFar) -> Evidence | bool:
    window = so_far.window
    count, silent = sum(facts.groups.count for facts in window), sum(facts.num_silent for facts in window)
    if so_far.is_early or count < (MIN_AT_THE_END if so_far.is_over else MIN_GROUPS):
        return UNKNOWN
    if silent < MOST * count or so_far.is_solved():
        return False
    reward = pooled(facts.groups for facts in window).mean
    return Evidence(
        f"{silent} of {count} groups of the last {len(window)} steps had no signal: their rewards were all equal (mean "
        f"{reward:.3g})",
        "Is the mean reward low: easier tasks, a [warmup], a larger rollout.group_size. Is it high: harder tasks. See what the "
        "model writes: millstream eval RUN --show 3",
        {"groups": count, "groups_without_signal": silent, "reward": reward},
    )


def empty_steps(so_far: SoFar) -> Evidence | bool:
    if so_far.is_early:
        return UNKNOWN
    window = so_far.window
    empty = sum(facts.is_empty for facts in window)
    if empty < HALF * len(window) or so_far.is_solved():
        return False
    return Evidence(
        f"{empty} of the last {len(window)} steps trained nothing, {so_far.num_empty} of {so_far.num_steps} in all: no group "
        "was left to train, or the gradient was 0",
        "Filtered groups: as for no-signal. Rows that are not finite are named in the warnings. To let a step look for more "
        "groups: --set pipeline.max_replaced_per_step=N",
        {"empty_steps": empty, "steps": len(window), "empty_steps_in_all": so_far.num_empty},
    )


def reward_flat(so_far: SoFar) -> Evidence | bool:
    """A line through the mean reward of every step: its rise is not above 0, and a rise of `FLAT_RISE` standard deviations is
    excluded. Where there are too few rollouts to exclude it, the rule does not hold."""
    count = so_far.line.count
    if count < FLAT_STEPS:
        return UNKNOWN
    rise, error = so_far.line.rise()
    spread = math.sqrt(so_far.rewards.variance)
    is_flat = rise < Z_RISES * error and max(rise, 0.0) + Z_SURE * error < FLAT_RISE * spread
    if not is_flat or so_far.share_at_top() >= MOST or so_far.has_risen():
        return False
    reward = pooled(facts.groups for facts in so_far.window).mean
    return Evidence(
        f"the reward has not risen in {count} steps: {rise:+.3g} ± {Z_SURE * error:.2g}, now {reward:.3g}",
        "Raise learner.learning_rate (--set learner.learning_rate=X, by a factor of 3 to 10), or train more rollouts a step. "
        "Does the reward depend on what the model can change? millstream eval RUN --show 3",
        {"rise": rise, "error": error, "reward": reward, "reward_std": spread, "steps": count},
    )


def entropy_collapsed(so_far: SoFar) -> Evidence | bool:
    entropies = so_far.values("entropy")
    if so_far.num_steps < 2 * RECENT or min(len(entropies), len(so_far.first_trained)) < RECENT:
        return UNKNOWN
    first, now = fmean(facts.metrics["entropy"] for facts in so_far.first_trained), fmean(entropies)
    length = pooled(facts.lengths for facts in so_far.window).mean
    is_low = now < LOW_ENTROPY * first and (now < TOKEN_ENTROPY or now * length < ANSWER_ENTROPY)
    is_rising = difference(list(so_far.last)[:-WINDOW], so_far.window, "groups") > Z_RISES
    if not is_low or is_rising or so_far.share_at_top() >= HALF:
        return False
    return Evidence(
        f"the entropy has fallen from {first:.3g} to {now:.3g} nats a token, and most answers do not have the highest reward: "
        "the model has become certain of answers that are wrong",
        "Resume from an earlier checkpoint or start again with a lower learning rate (--set learner.learning_rate=X), with "
        "--set algorithm.entropy_bonus=0.001, --set algorithm.clip_high=0.28, or a higher rollout.temperature",
        {"entropy": now, "entropy_at_first": first, "length": length},
    )


def ratio_exploded(so_far: SoFar) -> Evidence | bool:
    distances, samples = so_far.values("behaviour_kl"), so_far.values("effective_sample_size")
    if min(len(distances), len(samples)) < RECENT:
        return UNKNOWN
    kl, sample = median(distances), median(samples)
    if kl <= LARGE_KL and sample >= SMALL_SAMPLE:
        return False
    largest = max(so_far.values("max_ratio"), default=0.0)
    return Evidence(
        f"the policy is far from the one that sampled: KL {kl:.3g} nats a token, largest ratio {largest:.3g}, effective sample "
        f"size {sample:.2g} of 1 (medians of {RECENT} steps)",
        "Lower learner.learning_rate (--set learner.learning_rate=X, by a factor of 3 to 10), or pipeline.max_lag. If it is so "
        "from the first step on, the engine and the learner disagree: millstream audit RUN, and the warnings of the start",
        {"behaviour_kl": kl, "effective_sample_size": sample, "max_ratio": largest},
    )


def kl_exploded(so_far: SoFar) -> Evidence | bool:
    distances = so_far.values("reference_kl")
    if len(distances) < RECENT:
        return UNKNOWN
    kl = median(distances)
    if kl <= LARGE_REFERENCE_KL:
        return False
    return Evidence(
        f"the policy is {kl:.3g} nats a token from the reference (median of {RECENT} steps): it writes what the reference "
        "never would",
        'Raise the penalty (--set algorithm.kl="loss" --set algorithm.kl_coefficient=X), or lower learner.learning_rate. See '
        "whether the reward is being exploited: millstream eval RUN --show 3",
        {"reference_kl": kl},
    )


def length_runaway(so_far: SoFar) -> Evidence | bool:
    if so_far.num_steps < 2 * RECENT:
        return UNKNOWN
    early, late = so_far.first[:RECENT], list(so_far.last)[-RECENT:]
    first, now = (pooled(facts.lengths for facts in some).mean for some in (early, late))
    is_longer = now >= LONGER * first > 0 and difference(early, late, "lengths") > Z_DIFFERS
    if not is_longer or so_far.may_be_rising() or so_far.share_at_top() >= HALF:
        return False
    return Evidence(
        f"answers have grown from {first:.0f} to {now:.0f} tokens, and the reward has not risen",
        'Use an aggregation without a length bias (--set algorithm.aggregation="token_mean"), subtract a length penalty in the '
        "reward, or lower rollout.max_tokens",
        {"length": now, "length_at_first": first},
    )


def answers_cut(so_far: SoFar) -> Evidence | bool:
    window = so_far.window
    count, cut = pooled(facts.lengths for facts in window).count, sum(facts.num_cut for facts in window)
    if len(window) < WINDOW or count < MIN_ROLLOUTS:
        return UNKNOWN
    if cut < CUT * count or so_far.may_be_rising() or so_far.share_at_top() >= HALF:
        return False
    return Evidence(
        f"{cut} of {count} answers of the last {len(window)} steps were cut at max_tokens, and the reward has not risen: the "
        "model never finishes an answer",
        "Raise rollout.max_tokens (--set rollout.max_tokens=N). If the answers are complete before that, the model does not "
        "end its turn: set rollout.stop, or check its chat template",
        {"answers": count, "answers_cut": cut},
    )


def weights_truncated(so_far: SoFar) -> Evidence | bool:
    """With a cap of 1 half of the weights are cut even on policy, by nearly nothing: how much they lose decides."""
    masked, shares, lost = (so_far.values(name) for name in ("masked_share", "truncated_share", "truncated_weight"))
    if len(masked) == RECENT:
        is_lost, share, what = median(masked) >= HALF, median(masked), "masked"
    elif len(lost) == RECENT:
        is_lost, share, what = median(shares) >= HALF and median(lost) >= LOST_WEIGHT, median(shares), "truncated"
    else:
        return UNKNOWN
    if not is_lost:
        return False
    return Evidence(
        f"importance weights are {what} on {share:.0%} of the tokens (median of {RECENT} steps): the correction for staleness "
        "does not hold",
        "Lower pipeline.max_lag (--set pipeline.max_lag=1) or learner.learning_rate, or raise algorithm.ratio_cap",
        {f"{what}_share": share},
    )


RULES: dict[str, LearningRule] = {
    "all-rewards-equal": all_rewards_equal,
    "no-signal": no_signal,
    "empty-steps": empty_steps,
    "reward-flat": reward_flat,
    "entropy-collapsed": entropy_collapsed,
    "ratio-exploded": ratio_exploded,
    "kl-exploded": kl_exploded,
    "length-runaway": length_runaway,
    "answers-cut": answers_cut,
    "weights-truncated": weights_truncated,
}
SAID_BY = {"no-signal": ("all-rewards-equal",), "reward-flat": ("all-rewards-equal", "no-signal")}
"""Findings that say the same more exactly: while one of them holds, the other is not made."""
OF_ABSOLUTE_REWARDS = frozenset(("reward-flat",))
"""Rules for rewards whose mean says how good the model is."""
OF_REWARDS = frozenset(RULES) - {"empty-steps", "ratio-exploded", "weights-truncated"}
"""Rules that say nothing where a teacher is followed."""
