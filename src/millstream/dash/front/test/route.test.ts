import assert from "node:assert/strict";
import { test } from "node:test";
import { formatRoute, joinOption, listOption, numberOption, parseRoute, withOptions } from "../src/route.ts";

test("an address is read as it was written", () => {
  const route = { run: "a b/ü%?#", view: "rollouts", options: { query: "x & y = ü, z", group: "12" } } as const;
  assert.deepEqual(parseRoute(formatRoute(route)), route);
});

test("an empty or unknown address is the overview of the newest run", () => {
  for (const hash of ["", "#", "#/", "#//nothing?"]) assert.deepEqual(parseRoute(hash), { run: null, view: "overview", options: {} });
});

test("an address with broken escapes is no error", () => assert.equal(parseRoute("#/%E0%A4%A/flow").view, "flow"));

test("an option that is set to nothing is removed", () => {
  const route = withOptions(parseRoute("#/r/flow?last=60&x=step"), { last: "" });
  assert.equal(formatRoute(route), "#/r/flow?x=step");
});

test("names with commas stay whole in a list", () => {
  const route = { run: "r", view: "runs", options: { runs: joinOption(["a,b", "c%2C", "d"]) } } as const;
  assert.deepEqual(listOption(parseRoute(formatRoute(route)), "runs"), ["a,b", "c%2C", "d"]);
});

test("a number that is none is null", () => {
  const route = parseRoute("#/r/timeline?from=1.5&to=x");
  assert.deepEqual([numberOption(route, "from"), numberOption(route, "to"), numberOption(route, "at")], [1.5, null, null]);
});
