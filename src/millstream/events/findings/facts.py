"""What the rules read: facts of every step, and of the run so far in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from millstream.types import Metrics

WINDOW = 10  # steps that a rule looks back
RECENT = 5  # steps whose metrics are compared with the first ones
MIN_STEPS = 5  # before which no rule holds, except at the end of the run
MOST = 0.9  # of the groups without signal: ten times the rollouts for the same step
EQUAL = 1e-9  # rewards that differ by less, relative to their size, are equal
SOLVED_STEPS = 3
Z_RISES = 1.645  # one-sided 95%: the reward may be rising
Z_DIFFERS = 3.0  # 99.9%: two windows differ


class Moments(Struct):
    """Count, sum and sum of squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Of the population; never below 0."""
        return max(self.squares / self.count - self.mean**2, 0.0) if self.count else 0.0


def pooled(several: Iterable[Moments]) -> Moments:
    found = Moments()
    for one in several:
        found.count += one.count
        found.total += one.total
        found.squares += one.squares
    return found


class StepFacts(Struct, kw_only=True):
    """What happened since the step before. Groups that failed or were aborted are left out."""

    step: int = 0
    groups: Moments = msgspec.field(default_factory=Moments)  # mean rewards of groups
    rollouts: Moments = msgspec.field(default_factory=Moments)  # rewards of rollouts
    lengths: Moments = msgspec.field(default_factory=Moments)
    num_silent: int = 0  # groups whose rewards are all equal
    lowest: float = math.inf
    highest: float = -math.inf
    num_highest: int = 0
    num_cut: int = 0  # rollouts that ended at max_tokens
    is_empty: bool = False  # nothing was trained
    metrics: Metrics = {}


class Line(Struct):
    """The least-squares line through points that arrive one after another."""

    count: int = 0
    first_x: float = 0.0
    last_x: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    squares_x: float = 0.0
    squares_y: float = 0.0
    products: float = 0.0

    def add(self, x: float, y: float) -> None:
        if not self.count:
            self.first_x = x
        self.last_x = x
        self.count += 1
        from_x, from_y = x - self.mean_x, y - self.mean_y
        self.mean_x += from_x / self.count
        self.mean_y += from_y / self.count
        self.squares_x += from_x * (x - self.mean_x)
        self.squares_y += from_y * (y - self.mean_y)
        self.products += from_x * (y - self.mean_y)

    def rise(self) -> tuple[float, float]:
        """From the first point to the last, and its standard error. Expects three points or more."""
        slope, length = self.products / self.squares_x, self.last_x - self.first_x
        residuals = max(self.squares_y - slope * self.products, 0.0)
        return slope * length, length * math.sqrt(residuals / (self.count - 2) / self.squares_x)


class SoFar(Struct, kw_only=True):
    """What a rule gets: the run so far, in bounded memory."""

    first: list[StepFacts] = []  # the first `WINDOW` steps
    first_trained: list[StepFacts] = []  # the first `RECENT` steps that have an entropy
    last: deque[StepFacts] = msgspec.field(default_factory=lambda: deque(maxlen=2 * WINDOW))
    num_steps: int = 0
    num_empty: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    rewards: Moments = msgspec.field(default_factory=Moments)  # of all rollouts
    line: Line = msgspec.field(default_factory=Line)  # of the mean rewards of the steps
    is_over: bool = False

    def add(self, facts: StepFacts) -> None:
        self.num_steps += 1
        self.num_empty += facts.is_empty
        self.last.append(facts)
        if len(self.first) < WINDOW:
            self.first.append(facts)
        if len(self.first_trained) < RECENT and "entropy" in facts.metrics:
            self.first_trained.append(facts)
        if facts.groups.count:
            self.line.add(facts.step, facts.groups.mean)
            self.rewards = pooled((self.rewards, facts.rollouts))
            self.lowest = min(self.lowest, facts.lowest)
            self.highest = max(self.highest, facts.highest)

    @property
    def window(self) -> list[StepFacts]:
        return list(self.last)[-WINDOW:]

    @property
    def is_early(self) -> bool:
        return self.num_steps < MIN_STEPS and not self.is_over

    def values(self, name: str) -> list[float]:
        """Of a metric, in the newest `RECENT` steps that have it."""
        return [facts.metrics[name] for facts in self.last if name in facts.metrics][-RECENT:]

    def share_at_top(self, num_steps: int = WINDOW) -> float:
        """Of the newest rollouts, the share that has the highest reward of the run; 0 if all rewards are equal."""
        if are_equal(self.lowest, self.highest):
            return 0.0
        newest = list(self.last)[-num_steps:]
        reached = sum(facts.num_highest for facts in newest if are_equal(facts.highest, self.highest))
        return reached / max(pooled(facts.rollouts for facts in newest).count, 1)

    def has_risen(self) -> bool:
        """Whether the reward is above that of the run's first steps, beyond chance: of the first window, or of the first two
        steps alone, where it rose fast. Groups are compared, because rollouts of one group have the same task."""
        size = min(WINDOW, self.num_steps // 2)
        late = list(self.last)[-size:]
        return any(difference(self.first[:early], late, "groups") > Z_DIFFERS for early in {min(2, size), size} - {0})

    def may_be_rising(self) -> bool:
        """Whether it is at all likely that the reward rises: the weaker claim, to be excluded before another is made."""
        rise, error = self.line.rise() if self.line.count > 2 else (0.0, 0.0)
        return rise > Z_RISES * error or self.has_risen()

    def is_solved(self) -> bool:
        """Whether the run has brought the reward to its maximum: there is nothing left to learn, and nothing is wrong."""
        return self.share_at_top(SOLVED_STEPS) >= MOST and self.has_risen()


def are_equal(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=EQUAL, abs_tol=EQUAL)


def difference(before: Sequence[StepFacts], after: Sequence[StepFacts], what: str) -> float:
    """Of two means, in standard errors; 0 where nothing was counted."""
    old: Moments = pooled(getattr(facts, what) for facts in before)
    new: Moments = pooled(getattr(facts, what) for facts in after)
    if not old.count or not new.count or are_equal(old.mean, new.mean):
        return 0.0
    error = math.sqrt(old.variance / old.count + new.variance / new.count)
    return (new.mean - old.mean) / max(error, 1e-12)
