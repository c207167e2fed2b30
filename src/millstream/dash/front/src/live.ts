// Live update. The list of runs is asked for every second or two; each run has a stamp that changes when its files do, and
// what is shown is asked for again only then. A hidden tab does not ask. What was shown stays until the new answer is there.

import type { RunRow, RunsAnswer } from "./api.ts";
import { AnswerError, type Failure, type Source } from "./source.ts";

export const POLL_MS = 1500;
const SLOWEST_MS = 10_000; // between two tries while the server is gone

export interface Feed {
  readonly version: string;
  readonly runs: readonly RunRow[];
  readonly isFirst: boolean; // nothing was answered yet
  readonly failure: Failure | null; // of the last try
  readonly message: string;
  readonly numReturns: number; // how often the server was gone and came back: what failed meanwhile is asked for again
  readonly since: number | null; // when the last answer came, in milliseconds
  readonly isPaused: boolean; // by the user
}

export interface Timers {
  now(): number;
  set(run: () => void, ms: number): number;
  clear(id: number): void;
}

const START: Feed = { version: "", runs: [], isFirst: true, failure: null, message: "", numReturns: 0, since: null, isPaused: false };

export class Poller {
  private feed: Feed = START;
  private readonly listeners = new Set<(feed: Feed) => void>();
  private timer: number | null = null;
  private isVisible = true;
  private isAsking = false;
  private numFailed = 0;

  constructor(
    private readonly source: Source,
    private readonly timers: Timers,
  ) {}

  get current(): Feed {
    return this.feed;
  }

  subscribe(listener: (feed: Feed) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Asks now, then again and again while the page is visible. */
  async ask(): Promise<void> {
    if (this.isAsking) return;
    this.isAsking = true;
    this.stop();
    try {
      this.take(await this.source.get({ kind: "runs" }));
    } catch (error) {
      this.numFailed += 1;
      const failure = error instanceof AnswerError ? error.failure : "wrong";
      this.change({ failure, message: error instanceof Error ? error.message : String(error) });
    }
    this.isAsking = false;
    this.plan();
  }

  setVisible(isVisible: boolean): void {
    if (isVisible === this.isVisible) return;
    this.isVisible = isVisible;
    if (isVisible) void this.ask();
    else this.stop();
  }

  setPaused(isPaused: boolean): void {
    this.change({ isPaused });
    if (isPaused) this.stop();
    else void this.ask();
  }

  private take(answer: RunsAnswer): void {
    const isSame =
      !this.feed.isFirst &&
      this.feed.failure === null &&
      answer.runs.length === this.feed.runs.length &&
      answer.runs.every((run, i) => sameRun(run, this.feed.runs[i] as RunRow));
    const numReturns = this.feed.numReturns + (this.numFailed > 0 ? 1 : 0);
    this.numFailed = 0;
    // An unchanged list keeps its identity: nothing is drawn again.
    if (isSame) this.feed = { ...this.feed, since: this.timers.now() };
    else this.change({ ...answer, isFirst: false, failure: null, message: "", numReturns, since: this.timers.now() });
  }

  private plan(): void {
    if (!this.source.isLive || !this.isVisible || this.feed.isPaused) return;
    const ms = this.numFailed ? Math.min(SLOWEST_MS, POLL_MS * 2 ** (this.numFailed - 1)) : POLL_MS;
    this.timer = this.timers.set(() => void this.ask(), ms);
  }

  private stop(): void {
    if (this.timer !== null) this.timers.clear(this.timer);
    this.timer = null;
  }

  private change(changed: Partial<Feed>): void {
    this.feed = { ...this.feed, ...changed };
    for (const listener of this.listeners) listener(this.feed);
  }
}

function sameRun(a: RunRow, b: RunRow): boolean {
  return a.id === b.id && a.stamp === b.stamp && a.state === b.state && a.indexed === b.indexed && a.problem === b.problem;
}
