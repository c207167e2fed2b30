import assert from "node:assert/strict";
import { test } from "node:test";
import { band, extent, inside, nearest, pan, path, rowsInView, smooth, ticks, timeTicks, width, zoom } from "../src/scale.ts";

const WHOLE = { from: 0, to: 100 };

test("ticks are round and inside the range", () => {
  assert.deepEqual(ticks({ from: 0.13, to: 0.97 }, 4).at, [0.2, 0.4, 0.6, 0.8]);
  assert.deepEqual(ticks({ from: 0, to: 840 }, 5).at, [0, 200, 400, 600, 800]);
  assert.deepEqual(timeTicks({ from: 0, to: 600 }, 6).at, [0, 120, 240, 360, 480, 600]);
});

test("ticks of an empty range do not loop", () => assert.equal(ticks({ from: 3, to: 3 }, 5).at.length, 1));

test("an axis is never empty and ignores missing values", () => {
  assert.deepEqual(extent([[null, NaN]]), { from: 0, to: 1 });
  assert.ok(width(extent([[2, 2]])) > 0);
  assert.equal(extent([[1, null, 3]], 0).from, 0);
});

test("zoom keeps the time under the pointer where it is", () => {
  const shown = zoom({ from: 20, to: 60 }, WHOLE, 0.5, 0.25, 1e-3);
  assert.deepEqual(shown, { from: 25, to: 45 });
  assert.equal(shown.from + 0.25 * width(shown), 30);
});

test("zoom and pan stay inside the whole", () => {
  assert.deepEqual(zoom({ from: 0, to: 50 }, WHOLE, 9, 0.5, 1e-3), WHOLE);
  assert.deepEqual(pan({ from: 80, to: 95 }, WHOLE, 50), { from: 85, to: 100 });
  assert.deepEqual(inside({ from: -20, to: 30 }, WHOLE), { from: 0, to: 50 });
  assert.ok(Math.abs(width(zoom({ from: 0, to: 1 }, WHOLE, 1e-9, 0.5, 0.01)) - 0.01) < 1e-9);
});

test("smoothing begins with the first value and skips gaps", () => {
  assert.deepEqual(smooth([4, null, 4], 0.9), [4, null, 4]);
  assert.deepEqual(smooth([0, 1], 0.5), [0, 2 / 3]);
});

test("the nearest point is found", () => {
  assert.deepEqual([-5, 4, 5, 6, 99].map((at) => nearest([0, 10, 20], at)), [0, 0, 0, 1, 2]);
  assert.equal(nearest([], 1), -1);
});

test("only the rows in view are drawn", () => {
  assert.deepEqual(rowsInView(0, 280, 28, 1_000_000), [0, 18]);
  assert.deepEqual(rowsInView(28_000, 280, 28, 1_000_000), [992, 1018]);
  assert.deepEqual(rowsInView(28_000, 280, 28, 5), [5, 5]);
  assert.deepEqual(rowsInView(0, 280, 28, 0), [0, 0]);
});

test("a missing value is a gap in a curve and in its band", () => {
  const same = (value: number): number => value;
  assert.equal(path([0, 1, 2, 3], [5, 6, null, 7], same, same), "M0 5L1 6M3 7h1.5");
  assert.equal(band([0, 1, 2], [1, 1, null], [2, 2, 2], same, same), "M0 2L1 2L1 1L0 1Z");
});
