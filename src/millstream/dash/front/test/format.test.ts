import assert from "node:assert/strict";
import { test } from "node:test";
import { clock, count, duration, num, percent, signed, visible } from "../src/format.ts";

test("numbers have about four figures", () => {
  const shown = [0, 5, 1204, 0.81234, 12.3456, 123.456, 4567.8, 123_456, 3_200_000, 0.00012, -0.5];
  assert.deepEqual(shown.map(num), ["0", "5", "1,204", "0.812", "12.35", "123.5", "4,568", "123.5k", "3.2M", "1.2e−4", "−0.500"]);
});

test("a missing number is a dash", () => {
  assert.deepEqual([num(null), num(undefined), num(NaN), percent(null), duration(Infinity), signed(null)], Array(6).fill("–"));
});

test("durations are as short as they can be read", () => {
  assert.deepEqual([0, 0.0004, 0.25, 2.5, 59, 61, 3723, 90_000].map(duration), ["0 s", "400 µs", "250 ms", "2.5 s", "59 s", "1:01", "1:02:03", "1 d 01:00"]);
});

test("the times of an axis differ from tick to tick", () => {
  assert.notEqual(clock(1.01, 0.01), clock(1.02, 0.01));
  assert.deepEqual([clock(0, 10), clock(90, 30), clock(3600, 600), clock(59.999, 0.1), clock(75.25, 0.05)], ["0 s", "1:30", "1:00:00", "1:00.0", "1:15.25"]);
});

test("a share above nothing is not shown as nothing", () => {
  assert.deepEqual([0, 0.001, 0.5, 1].map(percent), ["0%", "<1%", "50%", "100%"]);
});

test("a number of things has its noun", () => assert.deepEqual([count(1, "rollout"), count(2000, "rollout")], ["1 rollout", "2,000 rollouts"]));

test("white space that would be invisible is shown", () => {
  assert.deepEqual(["  ", "a b", "a\n", "\t"].map(visible), ["··", "a b", "a↵\n", "⇥"]);
});
