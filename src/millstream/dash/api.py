"""The answers of `millstream dash`, as JSON: the contract between the server and the page. `front/src/api.ts` is made from this
file: `python -m millstream.dash.typescript`.

All requests are GET. Where the page's address has a fragment `#token=TOKEN`, each has the header `Authorization: Bearer TOKEN`
(401 without it). An error is an `ErrorAnswer` with a status of 4xx or 5xx. ID is the `id` of a `RunRow`. A number that is
not finite is null. Times (`at`, `begin`, `end`) are seconds of the run's own clock; `seconds` is a duration.

    /api/runs                              RunsAnswer
    /api/runs/ID/overview                  OverviewAnswer
    /api/runs/ID/series                    SeriesAnswer    names=a,b  x=step|seconds|samples  points=800
    /api/runs/ID/lanes                     LanesAnswer     begin=  end=  points=800      (seconds; without them, the whole run)
    /api/runs/ID/flow                      FlowAnswer      begin=  end=  points=400
    /api/runs/ID/rollouts                  RolloutsAnswer  sort=reward|advantage|length|lag|step  descending=1  query=
                                                           environment=  fate=  step=  offset=0  limit=50
    /api/runs/ID/rollouts/GROUP            GroupAnswer
    /api/diff                              DiffAnswer      runs=ID,ID
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

RunStateName = Literal["running", "ended", "stopped", "failed", "dead", "unreadable"]
"""`dead`: the process is gone without an end in the log, and can be resumed. `unreadable`: see `problem`."""
LaneKind = Literal["learner", "rank", "engine", "worker", "stage", "environment", "evaluation", "driver"]
WorkKind = Literal["generate", "train", "sync", "score", "environment", "evaluate", "wait", "other"]


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    error: str  # what was found, what was expected, what to do


# ---- runs ----------------------------------------------------------------------------------------------------------------


class RunRow(Struct, frozen=True, kw_only=True):
    id: str  # in addresses; a name, never a path
    name: str
    path: str  # to show
    state: RunStateName
    is_simulated: bool
    model: str
    step: int
    steps: int  # that the run shall have; 0: not known
    seconds: float  # of the run's clock, up to the last event
    started: float | None  # Unix time; None: not known
    stamp: str  # changes whenever the run's files do
    indexed: float  # 0 to 1: the share of the events that the answers cover. Below 1 while an index is built
    problem: str | None  # why it cannot be read, or not all of it


class RunsAnswer(Struct, frozen=True, kw_only=True):
    version: str  # of millstream
    runs: list[RunRow]


# ---- overview ------------------------------------------------------------------------------------------------------------


class SeriesInfo(Struct, frozen=True, kw_only=True):
    """One that the run has."""

    name: str
    title: str
    unit: str  # "" if it has none
    group: str  # a heading: "learning", "lengths", "speed", "lag", "off-policy", "evaluation", "rewards", "other"
    is_main: bool  # to show without being asked


class WaitRow(Struct, frozen=True, kw_only=True):
    owner: str
    what: str
    seconds: float  # how long the longest has waited
    num: float  # that wait for the same: now, or in the mean of a window
    share: float  # of the readings in which it was there; 1 for those of now


class BottleneckRow(Struct, frozen=True, kw_only=True):
    name: str
    text: str
    shares: dict[str, float]  # of the learner's time, by what it did


class FindingRow(Struct, frozen=True, kw_only=True):
    name: str
    step: int
    until: int | None  # the step at which it ended; None: it holds
    message: str
    advice: str


class AdviceRow(Struct, frozen=True, kw_only=True):
    """Of the last `millstream advise`."""

    words: str
    gain: float  # times as fast
    low: float
    high: float
    command: str
    note: str


class ScoreRow(Struct, frozen=True, kw_only=True):
    name: str
    value: float
    low: float
    high: float


class EvaluationRow(Struct, frozen=True, kw_only=True):
    name: str
    at: float
    version: int | None  # None: logs of earlier releases do not say
    accuracy: float
    num_tasks: int
    num_failed: int
    scores: list[ScoreRow]


class NoteRow(Struct, frozen=True, kw_only=True):
    """Something of the run's history to read: a resume, a changed setting, a warning, an engine that left."""

    at: float
    kind: str
    text: str


class SkippedRow(Struct, frozen=True, kw_only=True):
    """A line that could not be read."""

    file: str
    line: int  # 0: the file as a whole
    why: str


class OverviewAnswer(Struct, frozen=True, kw_only=True):
    run: RunRow
    left_s: float | None  # None: not known, or the run is over
    latest: dict[str, float | None]  # the newest value of each series
    series: list[SeriesInfo]
    waits: list[WaitRow]  # now, or in the last reading of a run that is over
    waits_at: float | None  # of that reading
    bottleneck: BottleneckRow | None
    findings: list[FindingRow]
    advice: list[AdviceRow]
    evaluations: list[EvaluationRow]
    history: list[NoteRow]
    config: str  # of config.toml
    notes: str  # of notes.md; "" without one
    skipped: list[SkippedRow]
    num_skipped: int  # all of them; `skipped` has the first


# ---- series --------------------------------------------------------------------------------------------------------------


class SeriesCurve(Struct, frozen=True, kw_only=True):
    """`low` and `high`: of an evaluation, its 95% interval; of more steps than points, the extremes of each point."""

    x: list[float]
    values: list[float | None]
    low: list[float | None] | None
    high: list[float | None] | None


class SeriesAnswer(Struct, frozen=True, kw_only=True):
    """A name that the run does not have is left out."""

    x: Literal["step", "seconds", "samples"]
    curves: dict[str, SeriesCurve]


# ---- lanes ---------------------------------------------------------------------------------------------------------------


class LaneSpan(Struct, frozen=True, array_like=True):
    """Work of a lane, or a wait between two pieces of work: its label says for what, where a reading of the state has it. If
    `share` is below 1, several pieces of work that are too short to show, in that share of the time."""

    begin: float
    end: float
    what: WorkKind
    share: float
    num_tokens: int
    label: str


class LaneRow(Struct, frozen=True, kw_only=True):
    name: str
    kind: LaneKind
    idle_share: float  # of the window
    spans: list[LaneSpan]


class VersionMark(Struct, frozen=True, array_like=True):
    """The step that made this version has ended."""

    at: float
    version: int


class EvaluationSpan(Struct, frozen=True, kw_only=True):
    begin: float
    end: float
    name: str
    engines: list[str]  # empty: all


class LanesAnswer(Struct, frozen=True, kw_only=True):
    begin: float
    end: float
    first: float  # of the whole run
    last: float
    is_exact: bool  # every span is one piece of work
    lanes: list[LaneRow]
    num_left_out: int  # lanes beyond the limit
    versions: list[VersionMark]  # of many, some
    evaluations: list[EvaluationSpan]


# ---- flow ----------------------------------------------------------------------------------------------------------------


class FlowCounts(Struct, frozen=True, kw_only=True):
    """Per point. Groups, but for those with `rollouts_`."""

    admitted: list[int]
    trained: list[int]
    filtered: list[int]
    failed: list[int]
    aborted: list[int]
    superseded: list[int]
    restarted: list[int]
    rollouts_ended: list[int]
    rollouts_failed: list[int]  # attempts
    rollouts_aborted: list[int]


class FlowDepths(Struct, frozen=True, kw_only=True):
    """Means per point; null: nothing was read."""

    requests_waiting: list[float | None]  # for an engine
    requests_running: list[float | None]
    rollouts_in_flight: list[float | None]
    rows_in_store: list[float | None]
    groups_outstanding: list[float | None]  # admitted and not yet taken by a batch
    groups_taken: list[float | None]  # in the batch that is trained
    budget: list[float | None]  # the most groups in flight


class VersionRows(Struct, frozen=True, kw_only=True):
    """Rows of the store at the end of the window that no batch has taken."""

    version: int  # that they began with
    age: int  # the learner's version, minus theirs
    num: int


class FlowAnswer(Struct, frozen=True, kw_only=True):
    """Point i is from `at[i]` to `at[i + 1]`: `at` has one number more than the others."""

    begin: float
    end: float
    first: float
    last: float
    at: list[float]
    counts: FlowCounts
    totals: dict[str, int]  # of the window, by the names of `counts`
    depths: FlowDepths
    rows_by_version: list[VersionRows]
    waits: list[WaitRow]  # of the window, the most frequent first


# ---- rollouts ------------------------------------------------------------------------------------------------------------


class RolloutRow(Struct, frozen=True, kw_only=True):
    group_id: int
    member: int
    attempt: int
    task: str
    environment: str  # where its task comes from; "" if the task does not say
    step: int | None  # that trained it; None: none, or not yet
    start_version: int | None
    lag: int | None
    reward: float | None
    advantage: float | None
    num_tokens: int  # sampled
    fate: str
    head: str  # the beginning of what the model wrote


class RolloutsAnswer(Struct, frozen=True, kw_only=True):
    total: int  # that match
    num_kept: int  # in the files
    num_read: int  # of these, how many were looked at: less while the files are read for the first time
    num_away: int  # sampled away by rollout.keep_gb
    rows: list[RolloutRow]
    environments: list[str]
    fates: list[str]
    why_none: str | None  # why the run has none; None: it has
    num_searched: int | None  # whose whole text was searched, the newest; None: nothing was searched for
    is_searching: bool  # the search continues with the next request


class TokenColumns(Struct, frozen=True, kw_only=True):
    """Of the tokens of one turn, in their order. Null columns: not known, or the turn was not sampled."""

    texts: list[str]
    versions: list[int] | None
    log_probs: list[float | None] | None
    trained_log_probs: list[float | None] | None  # the learner's, when it trained them
    advantages: list[float | None] | None
    reference_log_probs: list[float | None] | None


class TurnRow(Struct, frozen=True, kw_only=True):
    role: Literal["prompt", "model", "environment"]
    agent: int
    part: int  # of a rollout with several token sequences
    text: str
    tokens: TokenColumns | None  # None: the turn is too long to be sent so
    reward: float | None  # that the turn earned, where the environment says so


class RolloutLife(Struct, frozen=True, kw_only=True):
    """When it happened, of the run's clock. Null: not, or not yet."""

    admitted: float | None  # its group; it queues from here
    started: float | None
    generated: float | None  # ended, with its own reward
    settled: float | None  # its group was scored: rewards and advantages are known
    taken: float | None  # by a batch, from the store
    trained: float | None


class MemberRow(Struct, frozen=True, kw_only=True):
    row: RolloutRow
    why: str  # it failed or was aborted
    finish: str
    reward_parts: dict[str, float]
    life: RolloutLife
    turns: list[TurnRow]


class GroupAnswer(Struct, frozen=True, kw_only=True):
    group_id: int
    task: str
    fate: str
    members: list[MemberRow]


# ---- several runs --------------------------------------------------------------------------------------------------------


class ChangedKey(Struct, frozen=True, kw_only=True):
    key: str
    values: list[str]  # of each run, as in its config; "" where it does not have the key


class DiffAnswer(Struct, frozen=True, kw_only=True):
    runs: list[str]  # ids
    changed: list[ChangedKey]


# ---- the report in one file ----------------------------------------------------------------------------------------------


class ReportAnswers(Struct, frozen=True, kw_only=True):
    """The answers of one run, which `millstream report RUN --html FILE` embeds, as JSON, in
    `<script type="application/json" id="answers">`. The page reads them in place of requests."""

    version: str
    written: float  # Unix time
    overview: OverviewAnswer
    by_step: SeriesAnswer
    by_seconds: SeriesAnswer
    by_samples: SeriesAnswer
    lanes: LanesAnswer
    flow: FlowAnswer
    rollouts: RolloutsAnswer  # the best and the worst
    groups: list[GroupAnswer]  # of these
