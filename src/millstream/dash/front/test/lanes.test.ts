import assert from "node:assert/strict";
import { test } from "node:test";
import type { LanesAnswer, LaneSpan } from "../src/api.ts";
import { boxAt, boxes, idleOf, spansIn, spread, stepRate } from "../src/lanes.ts";

const span = (begin: number, end: number, share = 1, what: LaneSpan[2] = "generate"): LaneSpan => [begin, end, what, share, 0, ""];
const answer = (begin: number, end: number, spans: LaneSpan[], idle = 0.5): LanesAnswer => ({
  begin, end, first: 0, last: 100, is_exact: false, num_left_out: 0, versions: [], evaluations: [],
  lanes: [{ name: "engine", kind: "engine", idle_share: idle, spans }],
});

test("work that shares a stretch of time is stacked by its share", () => {
  const found = boxes([span(0, 10, 0.5), span(0, 10, 0.25, "train"), span(10, 20)], { from: 0, to: 100 }, 1000);
  assert.deepEqual(found.map(({ x, width, low, high }) => [x, width, low, high]), [[0, 100, 0, 0.5], [0, 100, 0.5, 0.75], [100, 100, 0, 1]]);
});

test("the window has its own detail, and the rest is that of the whole run", () => {
  const data = { whole: answer(0, 100, [span(0, 50, 0.4), span(50, 100, 0.6)]), part: answer(40, 60, [span(41, 42)]) };
  const found = spansIn(data, "engine", { from: 0, to: 100 }).map(([begin, end]) => [begin, end]);
  assert.deepEqual(found, [[0, 40], [60, 100], [41, 42]]);
});

test("short work is hit from two pixels away, and work in view only is kept", () => {
  const view = { from: 0, to: 100 };
  const found = boxes([span(50, 50.01)], view, 100);
  assert.ok(boxAt(found, 51.5, 0.5));
  assert.equal(boxAt(found, 60, 0.5), null);
  assert.equal(spansIn({ whole: answer(0, 100, [span(200, 300)]), part: null }, "engine", view).length, 0);
});

test("of stacked work the one under the pointer is found", () => {
  const found = boxes([span(0, 10, 0.5), span(0, 10, 0.5, "train")], { from: 0, to: 10 }, 100);
  assert.equal(boxAt(found, 50, 0.2)?.span[2], "generate");
  assert.equal(boxAt(found, 50, 0.8)?.span[2], "train");
});

test("marks have room for their text", () => {
  const marks = Array.from({ length: 100 }, (_, i) => [i, i] as const);
  const shown = spread(marks, { from: 0, to: 100 }, 1000, 30);
  assert.deepEqual(shown.slice(0, 3).map(([, version]) => version), [0, 5, 10]);
});

test("marks without round numbers are still shown", () => {
  const marks = Array.from({ length: 200 }, (_, i) => [i, 3 * i + 1] as const);
  const shown = spread(marks, { from: 0, to: 200 }, 1000, 40);
  assert.ok(shown.length >= 8);
  assert.ok(shown.every(([at], i) => i === 0 || at - (shown[i - 1] as readonly [number, number])[0] >= 8));
});

test("the idle share of a kind is the mean of its lanes", () => {
  assert.equal(idleOf(answer(0, 1, [], 0.25).lanes, "engine"), 0.25);
  assert.equal(idleOf([], "learner"), null);
});

test("the rate of steps needs two versions", () => {
  assert.equal(stepRate([[10, 1], [20, 6]]), 0.5);
  assert.equal(stepRate([[10, 1]]), null);
});
