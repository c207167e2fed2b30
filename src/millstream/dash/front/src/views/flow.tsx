// The flow: how many groups are in each place, what became of them, and who waits for what.

import { useMemo } from "preact/hooks";
import type { SeriesCurve, FlowAnswer, FlowDepths, RunRow, VersionRows } from "../api.ts";
import { count, duration, num, percent } from "../format.ts";
import { useAnswer, usePage } from "../hooks.ts";
import { Choice, Empty, Meter, Panel, Problem } from "../parts/bits.tsx";
import { Chart, type Shown } from "../parts/chart.tsx";
import { numberOption } from "../route.ts";
import { useCursor, Waits } from "./overview.tsx";

const FATES = [
  ["trained", "joined a batch and were trained"],
  ["filtered", "had no signal: all rewards equal"],
  ["restarted", "were overdue and began again"],
  ["aborted", "were ended on purpose"],
  ["superseded", "were replaced at a resume"],
  ["failed", "had too few members left"],
] as const;

const LASTS: ReadonlyArray<readonly [string, string]> = [["", "whole run"], ["3600", "last hour"], ["600", "10 min"], ["60", "1 min"]];

const DEPTHS: ReadonlyArray<readonly [string, string, ReadonlyArray<readonly [keyof FlowDepths, string]>]> = [
  ["Groups", "groups", [["groups_outstanding", "admitted, not yet in a batch"], ["groups_taken", "in the batch"], ["budget", "most in flight"]]],
  ["Requests to the engines", "requests", [["requests_running", "generating"], ["requests_waiting", "waiting for an engine"]]],
  ["Rollouts in flight", "rollouts", [["rollouts_in_flight", "in flight"]]],
  ["Rows in the store", "rows", [["rows_in_store", "not yet trained"]]],
];

export function Flow(props: { run: RunRow }) {
  const { run } = props;
  const { route, set } = usePage();
  const last = numberOption(route, "last");
  const options = last === null ? { points: 240 } : { begin: Math.max(0, run.seconds - last), points: 240 };
  const { value, error } = useAnswer({ kind: "flow", run: run.id, options }, run.stamp);
  const charts = useMemo(() => (value === null ? null : chartsOf(value)), [value]);
  const [cursor, setCursor] = useCursor(charts?.depths[0]?.curves[0]?.curve);
  if (value === null || charts === null) return error ? <Problem error={error} /> : <Empty>Reading {run.name} …</Empty>;
  const xs = { from: value.begin, to: Math.max(value.end, value.begin + 1e-3) };
  return (
    <div class="view flow">
      <Problem error={error} />
      <div class="tools">
        <Choice label="Window" value={route.options["last"] ?? ""} options={LASTS} onChange={(seconds) => set({ last: seconds })} />
        <span class="at note">{cursor === null ? `${duration(Math.round(value.begin))} to ${duration(value.end)}` : `at ${duration(cursor)}`}</span>
      </div>
      <Panel title="What became of the groups" note={`${count(value.totals["admitted"] ?? 0, "group")} admitted`}>
        <Fates answer={value} />
      </Panel>
      <div class="grid two">
        {charts.depths.map((one) => (
          <Panel key={one.title} title={one.title} note={one.unit}>
            <Chart title={one.title} x="seconds" xs={xs} curves={one.curves} cursor={cursor} onCursor={setCursor} floor={0} height={150} hasLegend />
          </Panel>
        ))}
        <Panel title="Groups a second" note="admitted, and how they left">
          <Chart title="Groups a second" x="seconds" xs={xs} curves={charts.rates} cursor={cursor} onCursor={setCursor} floor={0} height={150} hasLegend />
        </Panel>
        <Panel title="Rows in the store, by version" note="at the end of the window">
          <Versions rows={value.rows_by_version} />
        </Panel>
      </div>
      <Panel title="Who waits for what" note="in the window, the most frequent first">
        <Waits rows={value.waits} />
      </Panel>
    </div>
  );
}

function chartsOf(answer: FlowAnswer): { depths: { title: string; unit: string; curves: Shown[] }[]; rates: Shown[] } {
  const starts = answer.at.slice(0, -1);
  const middles = starts.map((at, i) => (at + (answer.at[i + 1] ?? at)) / 2);
  const curve = (values: readonly (number | null)[]): SeriesCurve => ({ x: middles, values, low: null, high: null });
  const depths = DEPTHS.map(([title, unit, parts]) => ({
    title,
    unit,
    curves: parts.map(([name, label], look): Shown => ({ label, look, curve: curve(answer.depths[name]) })),
  })).filter(({ curves }) => curves.some((one) => one.curve.values.some((value) => value !== null)));
  const seconds = (i: number): number => Math.max(1e-9, (answer.at[i + 1] ?? 0) - (answer.at[i] ?? 0));
  const names = ["admitted", "trained", "filtered", "restarted", "aborted", "superseded", "failed"] as const;
  const rates = names
    .map((name, look): Shown => ({ label: name, look, curve: curve(answer.counts[name].map((number, i) => number / seconds(i))) }))
    .filter((one, i) => i < 2 || one.curve.values.some((value) => value));
  return { depths, rates };
}

function Fates(props: { answer: FlowAnswer }) {
  const { totals } = props.answer;
  const admitted = totals["admitted"] ?? 0;
  const rollouts = (["rollouts_ended", "rollouts_failed", "rollouts_aborted"] as const).map((name) => [name.replace("rollouts_", ""), totals[name] ?? 0] as const);
  return (
    <>
      <ul class="bars fates">
        {FATES.map(([name, words]) => {
          const number = totals[name] ?? 0;
          return (
            <li key={name} class={number ? "" : "none"}>
              <span title={words}>{name}</span>
              <Meter share={admitted ? number / admitted : 0} />
              <span class="figure">{num(number)}</span>
              <span class="figure dim">{number && admitted ? percent(number / admitted) : ""}</span>
              <span class="words dim">{words}</span>
            </li>
          );
        })}
      </ul>
      <p class="note">Rollouts: {rollouts.map(([name, number]) => `${num(number)} ${name}`).join(", ")}.</p>
    </>
  );
}

function Versions(props: { rows: readonly VersionRows[] }) {
  if (!props.rows.length) return <Empty>No rows wait in the store.</Empty>;
  const most = Math.max(...props.rows.map((row) => row.num));
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Rows by version">
      <table>
        <thead>
          <tr><th scope="col" class="right">version</th><th scope="col" class="right">age</th><th scope="col" class="wide">rows</th><th scope="col" class="right"><span class="hidden">number of rows</span></th></tr>
        </thead>
        <tbody>
          {[...props.rows].sort((a, b) => b.version - a.version).map((row) => (
            <tr key={row.version}>
              <th scope="row" class="right">{num(row.version)}</th>
              <td class="right">{num(row.age)}</td>
              <td class="wide"><Meter share={row.num / most} /></td>
              <td class="right">{num(row.num)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
