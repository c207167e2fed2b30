// Written from api.py by `python -m millstream.dash.typescript`: do not edit.

export interface ErrorAnswer {
  readonly error: string;
}

export interface RunRow {
  readonly id: string;
  readonly name: string;
  readonly path: string;
  readonly state: "running" | "ended" | "stopped" | "failed" | "dead" | "unreadable";
  readonly is_simulated: boolean;
  readonly model: string;
  readonly step: number;
  readonly steps: number;
  readonly seconds: number;
  readonly started: number | null;
  readonly stamp: string;
  readonly indexed: number;
  readonly problem: string | null;
}

export interface RunsAnswer {
  readonly version: string;
  readonly runs: readonly RunRow[];
}

export interface SeriesInfo {
  readonly name: string;
  readonly title: string;
  readonly unit: string;
  readonly group: string;
  readonly is_main: boolean;
}

export interface WaitRow {
  readonly owner: string;
  readonly what: string;
  readonly seconds: number;
  readonly num: number;
  readonly share: number;
}

export interface BottleneckRow {
  readonly name: string;
  readonly text: string;
  readonly shares: Readonly<Record<string, number>>;
}

export interface FindingRow {
  readonly name: string;
  readonly step: number;
  readonly until: number | null;
  readonly message: string;
  readonly advice: string;
}

export interface AdviceRow {
  readonly words: string;
  readonly gain: number;
  readonly low: number;
  readonly high: number;
  readonly command: string;
  readonly note: string;
}

export interface ScoreRow {
  readonly name: string;
  readonly value: number;
  readonly low: number;
  readonly high: number;
}

export interface EvaluationRow {
  readonly name: string;
  readonly at: number;
  readonly version: number | null;
  readonly accuracy: number;
  readonly num_tasks: number;
  readonly num_failed: number;
  readonly scores: readonly ScoreRow[];
}

export interface NoteRow {
  readonly at: number;
  readonly kind: string;
  readonly text: string;
}

export interface SkippedRow {
  readonly file: string;
  readonly line: number;
  readonly why: string;
}

export interface OverviewAnswer {
  readonly run: RunRow;
  readonly left_s: number | null;
  readonly latest: Readonly<Record<string, number | null>>;
  readonly series: readonly SeriesInfo[];
  readonly waits: readonly WaitRow[];
  readonly waits_at: number | null;
  readonly bottleneck: BottleneckRow | null;
  readonly findings: readonly FindingRow[];
  readonly advice: readonly AdviceRow[];
  readonly evaluations: readonly EvaluationRow[];
  readonly history: readonly NoteRow[];
  readonly config: string;
  readonly notes: string;
  readonly skipped: readonly SkippedRow[];
  readonly num_skipped: number;
}

export interface SeriesCurve {
  readonly x: readonly number[];
  readonly values: readonly (number | null)[];
  readonly low: readonly (number | null)[] | null;
  readonly high: readonly (number | null)[] | null;
}

export interface SeriesAnswer {
  readonly x: "step" | "seconds" | "samples";
  readonly curves: Readonly<Record<string, SeriesCurve>>;
}

export type LaneSpan = readonly [begin: number, end: number, what: "generate" | "train" | "sync" | "score" | "environment" | "evaluate" | "wait" | "other", share: number, num_tokens: number, label: string];

export interface LaneRow {
  readonly name: string;
  readonly kind: "learner" | "rank" | "engine" | "worker" | "stage" | "environment" | "evaluation" | "driver";
  readonly idle_share: number;
  readonly spans: readonly LaneSpan[];
}

export type VersionMark = readonly [at: number, version: number];

export interface EvaluationSpan {
  readonly begin: number;
  readonly end: number;
  readonly name: string;
  readonly engines: readonly string[];
}

export interface LanesAnswer {
  readonly begin: number;
  readonly end: number;
  readonly first: number;
  readonly last: number;
  readonly is_exact: boolean;
  readonly lanes: readonly LaneRow[];
  readonly num_left_out: number;
  readonly versions: readonly VersionMark[];
  readonly evaluations: readonly EvaluationSpan[];
}

export interface FlowCounts {
  readonly admitted: readonly number[];
  readonly trained: readonly number[];
  readonly filtered: readonly number[];
  readonly failed: readonly number[];
  readonly aborted: readonly number[];
  readonly superseded: readonly number[];
  readonly restarted: readonly number[];
  readonly rollouts_ended: readonly number[];
  readonly rollouts_failed: readonly number[];
  readonly rollouts_aborted: readonly number[];
}

export interface FlowDepths {
  readonly requests_waiting: readonly (number | null)[];
  readonly requests_running: readonly (number | null)[];
  readonly rollouts_in_flight: readonly (number | null)[];
  readonly rows_in_store: readonly (number | null)[];
  readonly groups_outstanding: readonly (number | null)[];
  readonly groups_taken: readonly (number | null)[];
  readonly budget: readonly (number | null)[];
}

export interface VersionRows {
  readonly version: number;
  readonly age: number;
  readonly num: number;
}

export interface FlowAnswer {
  readonly begin: number;
  readonly end: number;
  readonly first: number;
  readonly last: number;
  readonly at: readonly number[];
  readonly counts: FlowCounts;
  readonly totals: Readonly<Record<string, number>>;
  readonly depths: FlowDepths;
  readonly rows_by_version: readonly VersionRows[];
  readonly waits: readonly WaitRow[];
}

export interface RolloutRow {
  readonly group_id: number;
  readonly member: number;
  readonly attempt: number;
  readonly task: string;
  readonly environment: string;
  readonly step: number | null;
  readonly start_version: number | null;
  readonly lag: number | null;
  readonly reward: number | null;
  readonly advantage: number | null;
  readonly num_tokens: number;
  readonly fate: string;
  readonly head: string;
}

export interface RolloutsAnswer {
  readonly total: number;
  readonly num_kept: number;
  readonly num_read: number;
  readonly num_away: number;
  readonly rows: readonly RolloutRow[];
  readonly environments: readonly string[];
  readonly fates: readonly string[];
  readonly why_none: string | null;
  readonly num_searched: number | null;
  readonly is_searching: boolean;
}

export interface TokenColumns {
  readonly texts: readonly string[];
  readonly versions: readonly number[] | null;
  readonly log_probs: readonly (number | null)[] | null;
  readonly trained_log_probs: readonly (number | null)[] | null;
  readonly advantages: readonly (number | null)[] | null;
  readonly reference_log_probs: readonly (number | null)[] | null;
}

export interface TurnRow {
  readonly role: "prompt" | "model" | "environment";
  readonly agent: number;
  readonly part: number;
  readonly text: string;
  readonly tokens: TokenColumns | null;
  readonly reward: number | null;
}

export interface RolloutLife {
  readonly admitted: number | null;
  readonly started: number | null;
  readonly generated: number | null;
  readonly settled: number | null;
  readonly taken: number | null;
  readonly trained: number | null;
}

export interface MemberRow {
  readonly row: RolloutRow;
  readonly why: string;
  readonly finish: string;
  readonly reward_parts: Readonly<Record<string, number>>;
  readonly life: RolloutLife;
  readonly turns: readonly TurnRow[];
}

export interface GroupAnswer {
  readonly group_id: number;
  readonly task: string;
  readonly fate: string;
  readonly members: readonly MemberRow[];
}

export interface ChangedKey {
  readonly key: string;
  readonly values: readonly string[];
}

export interface DiffAnswer {
  readonly runs: readonly string[];
  readonly changed: readonly ChangedKey[];
}

export interface ReportAnswers {
  readonly version: string;
  readonly written: number;
  readonly overview: OverviewAnswer;
  readonly by_step: SeriesAnswer;
  readonly by_seconds: SeriesAnswer;
  readonly by_samples: SeriesAnswer;
  readonly lanes: LanesAnswer;
  readonly flow: FlowAnswer;
  readonly rollouts: RolloutsAnswer;
  readonly groups: readonly GroupAnswer[];
}
