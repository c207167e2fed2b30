// Where the page's data comes from: the server of `millstream dash`, or the answers embedded in a report. One interface; a
// request names what is wanted by its path and its options, as in api.py.

import type {
  DiffAnswer,
  ErrorAnswer,
  FlowAnswer,
  GroupAnswer,
  LanesAnswer,
  OverviewAnswer,
  ReportAnswers,
  RolloutRow,
  RolloutsAnswer,
  RunsAnswer,
  SeriesAnswer,
} from "./api.ts";

export type XAxis = SeriesAnswer["x"];
export type Options = Readonly<Record<string, string | number>>;

export interface Answers {
  runs: RunsAnswer;
  overview: OverviewAnswer;
  series: SeriesAnswer;
  lanes: LanesAnswer;
  flow: FlowAnswer;
  rollouts: RolloutsAnswer;
  group: GroupAnswer;
  diff: DiffAnswer;
}

export interface Request<K extends keyof Answers> {
  readonly kind: K;
  readonly run?: string;
  readonly group?: number;
  readonly part?: string; // requests of one kind and run that are shown at the same time differ in it
  readonly options?: Options;
}

/** `gone`: no server answered. `refused`: it wants a token. `wrong`: it answered that it cannot. */
export type Failure = "gone" | "refused" | "wrong";

export class AnswerError extends Error {
  readonly failure: Failure;

  constructor(failure: Failure, message: string) {
    super(message);
    this.failure = failure;
  }
}

export interface Source {
  /** Whether the answers can change. */
  readonly isLive: boolean;
  /** When the answers were written, in Unix seconds, if they cannot change. */
  readonly written: number | null;
  /** Raises an `AnswerError`. */
  get<K extends keyof Answers>(request: Request<K>): Promise<Answers[K]>;
}

export function address(request: Request<keyof Answers>): string {
  const run = request.run === undefined ? "" : `/${encodeURIComponent(request.run)}`;
  const query = Object.entries(request.options ?? {})
    .filter(([, value]) => value !== "")
    .map(([key, value]) => `${key}=${encodeURIComponent(value)}`)
    .join("&");
  const path = {
    runs: "api/runs",
    overview: `api/runs${run}/overview`,
    series: `api/runs${run}/series`,
    lanes: `api/runs${run}/lanes`,
    flow: `api/runs${run}/flow`,
    rollouts: `api/runs${run}/rollouts`,
    group: `api/runs${run}/rollouts/${request.group}`,
    diff: "api/diff",
  }[request.kind];
  return query ? `${path}?${query}` : path;
}

export class LiveSource implements Source {
  readonly isLive = true;
  readonly written = null;

  /** `token`: where the server wants one. */
  constructor(private readonly token: string | null = null) {}

  async get<K extends keyof Answers>(request: Request<K>): Promise<Answers[K]> {
    let response: Response;
    try {
      const headers: HeadersInit = this.token === null ? {} : { Authorization: `Bearer ${this.token}` };
      response = await fetch(address(request), { cache: "no-store", headers });
    } catch {
      throw new AnswerError("gone", "the server does not answer");
    }
    if (response.ok) return (await response.json()) as Answers[K];
    const found = (await response.json().catch(() => null)) as ErrorAnswer | null;
    const message = found?.error ?? `the server answered with status ${response.status}`;
    throw new AnswerError(response.status === 401 || response.status === 403 ? "refused" : "wrong", message);
  }
}

export class EmbeddedSource implements Source {
  readonly isLive = false;
  readonly written: number;

  constructor(private readonly answers: ReportAnswers) {
    this.written = answers.written;
  }

  async get<K extends keyof Answers>(request: Request<K>): Promise<Answers[K]> {
    const found = this.find(request);
    if (found === undefined) throw new AnswerError("wrong", "This is not part of the report. `millstream dash RUN` shows it.");
    return found as Answers[K];
  }

  private find(request: Request<keyof Answers>): Answers[keyof Answers] | undefined {
    const all = this.answers;
    switch (request.kind) {
      case "runs":
        return { version: all.version, runs: [all.overview.run] };
      case "overview":
        return all.overview;
      case "series":
        return { step: all.by_step, seconds: all.by_seconds, samples: all.by_samples }[request.options?.["x"] as XAxis];
      case "lanes":
        return all.lanes;
      case "flow":
        return all.flow;
      case "rollouts":
        return selectRollouts(all.rollouts, request.options ?? {}, all.groups);
      case "group":
        return all.groups.find((group) => group.group_id === request.group);
      case "diff":
        return { runs: [all.overview.run.id], changed: [] };
    }
  }
}

const SORTED_BY = { reward: "reward", advantage: "advantage", length: "num_tokens", lag: "lag", step: "step" } as const;

/** What is searched: names, and the text of all turns. */
function searched(row: RolloutRow, groups: readonly GroupAnswer[]): string {
  const members = groups.find((one) => one.group_id === row.group_id)?.members ?? [];
  const member = members.find((one) => one.row.member === row.member && one.row.attempt === row.attempt);
  return [row.task, row.environment, row.fate, ...(member?.turns ?? []).map((turn) => turn.text)].join("\n").toLowerCase();
}

/** The same choice and order of rollouts as the server's, of the few that a report has. */
export function selectRollouts(all: RolloutsAnswer, options: Options, groups: readonly GroupAnswer[] = []): RolloutsAnswer {
  const { query, environment, fate, step, sort, descending, offset = 0, limit = 50 } = options;
  const words = String(query ?? "").toLowerCase();
  const rows = all.rows.filter(
    (row) =>
      (!words || searched(row, groups).includes(words)) &&
      (!environment || row.environment === environment) &&
      (!fate || row.fate === fate) &&
      (step === undefined || step === "" || row.step === Number(step)),
  );
  const key = SORTED_BY[sort as keyof typeof SORTED_BY] ?? "step";
  const sign = descending ? -1 : 1;
  // Rows without the value are last, in both directions.
  rows.sort((a, b) => {
    const [x, y] = [a[key], b[key]];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * (x - y) || a.group_id - b.group_id || a.member - b.member || a.attempt - b.attempt;
  });
  return { ...all, total: rows.length, rows: rows.slice(Number(offset), Number(offset) + Number(limit)) };
}
