// Several runs: their curves over steps, samples and time, the differences of their configs, and their notes.

import { useMemo } from "preact/hooks";
import type { OverviewAnswer, RunRow, SeriesInfo } from "../api.ts";
import { duration, num, when } from "../format.ts";
import { useAnswer, useAnswers, usePage } from "../hooks.ts";
import { Check, Choice, Empty, Panel, Problem, Select, State } from "../parts/bits.tsx";
import { Chart, extentOf, type Shown, Swatch } from "../parts/chart.tsx";
import { formatRoute, joinOption, listOption } from "../route.ts";
import type { XAxis } from "../source.ts";
import { AXES, mainOf, POINTS, useCursor } from "./overview.tsx";

const MOST = 8; // runs whose curves can be told apart

export function Runs(props: { run: RunRow }) {
  const { feed, route, set } = usePage();
  const named = listOption(route, "runs");
  const ids = named.length ? named : [props.run.id];
  const chosen = feed.runs.filter((run) => ids.includes(run.id) && run.state !== "unreadable").slice(0, MOST);
  const overviews = useAnswers<"overview">(chosen.map((run) => ({ request: { kind: "overview", run: run.id }, stamp: run.stamp })));
  const series = useMemo(() => seriesOf(overviews.map((one) => one.value)), [overviews.map((one) => one.value?.series.length).join()]);
  const toggle = (id: string, isOn: boolean): void => {
    const kept = feed.runs.map((run) => run.id).filter((one) => (one === id ? isOn : ids.includes(one)));
    set({ runs: joinOption(kept) });
  };
  return (
    <div class="view runs">
      <Panel title="Runs" note={`choose up to ${MOST} to compare`}>
        <RunTable chosen={chosen} onToggle={toggle} />
      </Panel>
      {chosen.length === 0 ? (
        <Empty>Choose a run above.</Empty>
      ) : (
        <>
          <Compare chosen={chosen} series={series} />
          {chosen.length > 1 && <Differences chosen={chosen} />}
          <Notes chosen={chosen} overviews={overviews.map((one) => one.value)} />
        </>
      )}
    </div>
  );
}

function RunTable(props: { chosen: readonly RunRow[]; onToggle: (id: string, isOn: boolean) => void }) {
  const { feed } = usePage();
  const isFull = props.chosen.length >= MOST;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Table of runs">
      <table class="list">
        <thead>
          <tr>
            <th scope="col"><span class="hidden">compared</span></th>
            <th scope="col">run</th>
            <th scope="col">state</th>
            <th scope="col" class="right">step</th>
            <th scope="col" class="right">time</th>
            <th scope="col">model</th>
            <th scope="col">started</th>
            <th scope="col">folder</th>
          </tr>
        </thead>
        <tbody>
          {feed.runs.map((run) => {
            const look = props.chosen.findIndex((one) => one.id === run.id);
            return (
              <tr key={run.id}>
                <td>
                  <input
                    type="checkbox"
                    aria-label={`Compare ${run.name}`}
                    checked={look >= 0}
                    disabled={run.state === "unreadable" || (isFull && look < 0)}
                    onChange={(event) => props.onToggle(run.id, event.currentTarget.checked)}
                  />
                </td>
                <th scope="row">
                  <a href={formatRoute({ run: run.id, view: "overview", options: {} })}>{run.name}</a>{" "}
                  {look >= 0 && <Swatch look={look} />}
                  {run.is_simulated && <span class="tag">simulated</span>}
                </th>
                <td><State run={run} /></td>
                <td class="right">{num(run.step)}{run.steps > 0 && <span class="dim"> / {num(run.steps)}</span>}</td>
                <td class="right">{duration(run.seconds)}</td>
                <td>{run.model}</td>
                <td>{when(run.started)}</td>
                <td class="dim">{run.problem ?? run.path}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

/** The figures that any of the runs has, in the order of the first run that has them. */
function seriesOf(overviews: readonly (OverviewAnswer | null)[]): SeriesInfo[] {
  const found = new Map<string, SeriesInfo>();
  for (const one of overviews) for (const info of one?.series ?? []) if (!found.has(info.name)) found.set(info.name, info);
  return [...found.values()];
}

function Compare(props: { chosen: readonly RunRow[]; series: readonly SeriesInfo[] }) {
  const { route, set } = usePage();
  const x = (route.options["x"] as XAxis) || "step";
  const figure = props.series.find((one) => one.name === route.options["figure"]);
  const isSmooth = route.options["smooth"] !== "0";
  const shown = figure ? [figure] : mainOf(props.series);
  const names = shown.map((one) => one.name).join(",");
  const answers = useAnswers<"series">(
    !names ? [] : props.chosen.map((run) => ({ request: { kind: "series", run: run.id, options: { names, x, points: POINTS } }, stamp: run.stamp })),
  );
  const charts = useMemo(
    () =>
      shown.map((info) => ({
        info,
        curves: props.chosen.flatMap((run, look): Shown[] => {
          const curve = answers[look]?.value?.curves[info.name];
          return curve === undefined ? [] : [{ label: run.name, curve, look }];
        }),
      })),
    [names, props.chosen.map((run) => run.id).join(), answers.map((one) => identity(one.value)).join()],
  );
  const all = charts.flatMap((one) => one.curves);
  const xs = extentOf(all);
  const [cursor, setCursor] = useCursor(all[0]?.curve);
  return (
    <Panel title="Curves" note={cursor === null ? undefined : x === "seconds" ? `at ${duration(cursor)}` : `at ${num(Math.round(cursor))}`}>
      <div class="tools">
        <Choice label="Axis" value={x} options={AXES} onChange={(axis) => set({ x: axis === "step" ? "" : axis })} />
        <Select
          label="figure"
          value={figure?.name ?? ""}
          options={[["", "the main ones"], ...props.series.map((one) => [one.name, `${one.group}: ${one.title}`] as const)]}
          onChange={(name) => set({ figure: name })}
        />
        <Check label="smooth" isOn={isSmooth} onChange={(isOn) => set({ smooth: isOn ? "" : "0" })} />
      </div>
      {answers.map((one, i) => one.error && <Problem key={i} error={one.error} />)}
      {!props.series.length && <Empty>No step has ended yet.</Empty>}
      <div class={figure ? "grid one" : "grid"}>
        {charts.map(({ info, curves }) => (
          <Chart
            key={info.name}
            title={info.title}
            unit={info.unit}
            x={x}
            xs={xs}
            curves={curves}
            cursor={cursor}
            onCursor={setCursor}
            isSmooth={isSmooth}
            height={figure ? 320 : 132}
            hasLegend={props.chosen.length > 1}
          />
        ))}
      </div>
    </Panel>
  );
}

const identities = new WeakMap<object, number>();
let newest = 0;

/** A number for an object: equal numbers are the same object. */
function identity(value: object | null | undefined): number {
  if (!value) return 0;
  const known = identities.get(value);
  if (known !== undefined) return known;
  identities.set(value, ++newest);
  return newest;
}

function Differences(props: { chosen: readonly RunRow[] }) {
  const ids = joinOption(props.chosen.map((run) => run.id));
  const { value, error } = useAnswer({ kind: "diff", options: { runs: ids } }, props.chosen.map((run) => run.stamp).join());
  return (
    <Panel title="Config differences">
      <Problem error={error} />
      {value !== null && !value.changed.length && <Empty>The configs are equal.</Empty>}
      {value !== null && value.changed.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Keys that differ">
          <table class="differences">
            <thead>
              <tr>
                <th scope="col">key</th>
                {value.runs.map((id, i) => <th scope="col" key={id}><Swatch look={i} /> {props.chosen.find((run) => run.id === id)?.name ?? id}</th>)}
              </tr>
            </thead>
            <tbody>
              {value.changed.map((row) => (
                <tr key={row.key}>
                  <th scope="row">{row.key}</th>
                  {row.values.map((one, i) => <td key={i}>{one === "" ? <span class="dim">not set</span> : one}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}

function Notes(props: { chosen: readonly RunRow[]; overviews: readonly (OverviewAnswer | null)[] }) {
  const noted = props.overviews.filter((one) => one?.notes);
  return (
    <Panel title="Notes">
      {!noted.length && <Empty>None. What you write into <code>notes.md</code> of a run folder is shown here.</Empty>}
      {noted.map((one) => one && (
        <article key={one.run.id}>
          <h3>{one.run.name}</h3>
          <pre class="notes" tabIndex={0}>{one.notes}</pre>
        </article>
      ))}
    </Panel>
  );
}
