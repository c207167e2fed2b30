import assert from "node:assert/strict";
import { test } from "node:test";
import type { RunRow } from "../src/api.ts";
import { POLL_MS, Poller } from "../src/live.ts";
import { AnswerError, type Answers, type Request, type Source } from "../src/source.ts";

const RUN: RunRow = { id: "a", name: "a", path: "a", state: "running", is_simulated: false, model: "", step: 1, steps: 2, seconds: 1, started: null, stamp: "1", indexed: 1, problem: null };

class FakeSource implements Source {
  readonly isLive = true;
  readonly written = null;
  asked = 0;
  failure: AnswerError | null = null;
  stamp = "1";

  async get<K extends keyof Answers>(_: Request<K>): Promise<Answers[K]> {
    this.asked += 1;
    if (this.failure !== null) throw this.failure;
    return { version: "1", runs: [{ ...RUN, stamp: this.stamp }] } as unknown as Answers[K];
  }
}

class FakeTimers {
  at = 0;
  planned: { run: () => void; ms: number } | null = null;
  now = (): number => this.at;
  set = (run: () => void, ms: number): number => {
    this.planned = { run, ms };
    return 1;
  };
  clear = (): void => {
    this.planned = null;
  };

  async fire(): Promise<void> {
    this.planned?.run();
    await new Promise((done) => setImmediate(done));
  }
}

function started(): [FakeSource, FakeTimers, Poller] {
  const [source, timers] = [new FakeSource(), new FakeTimers()];
  return [source, timers, new Poller(source, timers)];
}

test("an unchanged answer draws nothing again, a changed stamp does", async () => {
  const [source, timers, poller] = started();
  let drawn = 0;
  poller.subscribe(() => drawn++);
  await poller.ask();
  await timers.fire();
  assert.deepEqual([source.asked, drawn], [2, 1]);
  source.stamp = "2";
  await timers.fire();
  assert.equal(drawn, 2);
  assert.equal(poller.current.runs[0]?.stamp, "2");
});

test("a hidden page does not ask, and asks at once when it is shown", async () => {
  const [source, timers, poller] = started();
  await poller.ask();
  poller.setVisible(false);
  assert.equal(timers.planned, null);
  poller.setVisible(true);
  assert.equal(source.asked, 2);
});

test("while the server is gone, the runs stay, and tries get rarer", async () => {
  const [source, timers, poller] = started();
  await poller.ask();
  source.failure = new AnswerError("gone", "");
  const waits: number[] = [];
  for (let i = 0; i < 6; i++) {
    await timers.fire();
    waits.push(timers.planned?.ms ?? 0);
  }
  assert.equal(poller.current.failure, "gone");
  assert.equal(poller.current.runs.length, 1);
  assert.deepEqual(waits.slice(0, 3), [POLL_MS, 2 * POLL_MS, 4 * POLL_MS]);
  assert.ok(Math.max(...waits) <= 10_000);
  source.failure = null;
  await timers.fire();
  assert.equal(poller.current.failure, null);
  assert.equal(timers.planned?.ms, POLL_MS);
  assert.equal(poller.current.numReturns, 1);
});

test("a paused page does not ask", async () => {
  const [, timers, poller] = started();
  await poller.ask();
  poller.setPaused(true);
  assert.equal(timers.planned, null);
  poller.setPaused(false);
  assert.equal(poller.current.isPaused, false);
});
