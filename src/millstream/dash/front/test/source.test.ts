import assert from "node:assert/strict";
import { test } from "node:test";
import type { GroupAnswer, MemberRow, ReportAnswers, RolloutRow, RolloutsAnswer } from "../src/api.ts";
import { advantageStep, logProbStep, ratioStep, tokenClass } from "../src/color.ts";
import { memberOf, nameOf, phasesOf, valuesOf } from "../src/views/group.tsx";
import { placeOf, searchWords } from "../src/views/rollouts.tsx";
import { AnswerError, address, EmbeddedSource, selectRollouts } from "../src/source.ts";

const row = (group_id: number, reward: number | null, more: Partial<RolloutRow> = {}): RolloutRow => ({
  group_id, member: 0, attempt: 0, task: `task ${group_id}`, environment: "", step: group_id, start_version: 0, lag: 0, reward,
  advantage: 0, num_tokens: 10, fate: "trained", head: "", ...more,
});
const ALL: RolloutsAnswer = {
  total: 4, num_kept: 4, num_read: 4, num_away: 0, environments: [], fates: [], why_none: null, num_searched: null, is_searching: false,
  rows: [row(1, 0.5), row(2, null, { fate: "failed" }), row(3, 1), row(4, 0)],
};
const groups = (answer: RolloutsAnswer): number[] => answer.rows.map((one) => one.group_id);

test("requests are the paths of the server, with names escaped", () => {
  assert.equal(address({ kind: "runs" }), "api/runs");
  assert.equal(address({ kind: "lanes", run: "a/b", options: { begin: 0, end: 2.5, points: "" } }), "api/runs/a%2Fb/lanes?begin=0&end=2.5");
  assert.equal(address({ kind: "group", run: "r", group: 7 }), "api/runs/r/rollouts/7");
  assert.equal(address({ kind: "rollouts", run: "r", options: { query: "a&b" } }), "api/runs/r/rollouts?query=a%26b");
});

test("a report sorts and filters its rollouts, and rows without the value are last", () => {
  assert.deepEqual(groups(selectRollouts(ALL, { sort: "reward", descending: 1 })), [3, 1, 4, 2]);
  assert.deepEqual(groups(selectRollouts(ALL, { sort: "reward" })), [4, 1, 3, 2]);
  const spoken = { group_id: 3, members: [{ row: row(3, 1), turns: [{ text: "a prompt" }, { text: "The Answer" }] }] } as unknown as GroupAnswer;
  assert.deepEqual(groups(selectRollouts(ALL, { query: "the answer" }, [spoken])), [3]);
  assert.deepEqual(groups(selectRollouts(ALL, { query: "FAILED" })), [2]);
  assert.deepEqual(groups(selectRollouts(ALL, { fate: "failed" })), [2]);
  assert.deepEqual(groups(selectRollouts(ALL, { step: "4" })), [4]);
  assert.deepEqual(groups(selectRollouts(ALL, { offset: 1, limit: 2 })), [2, 3]);
});

test("a search that has not read everything says how far it came", () => {
  assert.equal(searchWords(ALL), "");
  assert.equal(searchWords({ ...ALL, num_searched: 4 }), "");
  assert.equal(searchWords({ ...ALL, num_searched: 3 }), "searched the newest 3 of 4");
  assert.equal(searchWords({ ...ALL, num_searched: 3, is_searching: true }), "searched 3 of 4 so far");
});

test("a report says what it does not have", async () => {
  const report = { version: "1", written: 5, groups: [], rollouts: ALL } as unknown as ReportAnswers;
  const source = new EmbeddedSource(report);
  await assert.rejects(source.get({ kind: "group", run: "r", group: 9 }), AnswerError);
  assert.equal((await source.get({ kind: "rollouts", run: "r" })).total, 4);
});

test("the life of a rollout has no holes", () => {
  const life = { admitted: 1, started: 2, generated: 4, settled: null, taken: 7, trained: 8 };
  assert.deepEqual(phasesOf(life).map(({ title, seconds }) => [title, seconds]), [["queued", 1], ["generating", 2], ["in the store", 3], ["training", 1]]);
  assert.deepEqual(phasesOf({ ...life, settled: 5, taken: null, trained: null }).map((one) => one.title), ["queued", "generating", "reward"]);
});

test("every attempt of a member can be read, and the last one is shown first", () => {
  const rows = [row(5, null, { fate: "failed" }), row(5, 1, { attempt: 1 }), row(5, 0, { member: 1 })];
  const members = rows.map((one) => ({ row: one }) as MemberRow);
  const group = { group_id: 5, task: "", fate: "trained", members } as GroupAnswer;
  assert.deepEqual(rows.map((one) => memberOf(group, one.member, Number(placeOf(one)["attempt"]))), members);
  assert.deepEqual([memberOf(group, 0, null), memberOf(group, 1, 7), memberOf(group, 9, null)], [members[1], members[2], members[0]]);
  assert.equal(new Set(rows.map(nameOf)).size, 3);
});

test("steps of token colors have their limits", () => {
  assert.deepEqual([0.95, 0.6, 0.2, 0.05, 0.001].map((p) => logProbStep(Math.log(p))), [0, 1, 2, 3, 4]);
  assert.deepEqual([0.5, 0.8, 0.9, 1, 1.1, 1.3, 2].map(ratioStep), [-3, -2, -1, 0, 1, 2, 3]);
  assert.deepEqual([-1, -0.1, 0, 0.1, 1].map(advantageStep), [-2, -1, 0, 1, 2]);
});

test("a token without a value has no color", () => {
  assert.equal(tokenClass("ratio", null), "");
  assert.equal(tokenClass("none", 1), "");
  assert.deepEqual([tokenClass("version", 7), tokenClass("ratio", 0.5), tokenClass("advantage", -1)], ["v1", "rn3", "an2"]);
});

test("the ratio of a token that was not trained is not known", () => {
  const tokens = { texts: ["a", "b"], versions: [0, 0], log_probs: [-1, -2], trained_log_probs: [-1, null], advantages: null, reference_log_probs: null };
  assert.deepEqual(valuesOf(tokens, "ratio"), [1, null]);
  assert.equal(valuesOf({ ...tokens, trained_log_probs: null }, "ratio"), null);
});
