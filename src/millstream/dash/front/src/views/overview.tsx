// The overview: how the run learns, what it waits for, what was found.

import { useMemo, useState } from "preact/hooks";
import type { BottleneckRow, EvaluationRow, OverviewAnswer, RunRow, SeriesCurve, SeriesInfo, WaitRow } from "../api.ts";
import { duration, num, percent, when } from "../format.ts";
import { useAnswer, useKeys, usePage } from "../hooks.ts";
import { Check, Choice, Empty, Facts, Meter, Panel, Problem, State } from "../parts/bits.tsx";
import { Chart, extentOf, type Shown } from "../parts/chart.tsx";
import { formatRoute } from "../route.ts";
import type { XAxis } from "../source.ts";

export const AXES: ReadonlyArray<readonly [XAxis, string]> = [["step", "steps"], ["samples", "samples"], ["seconds", "time"]];
export const POINTS = 400;

export function Overview(props: { run: RunRow }) {
  const { run } = props;
  const { value, error } = useAnswer({ kind: "overview", run: run.id }, run.stamp);
  return (
    <div class="view overview">
      <Problem error={error} />
      <Head answer={value} run={run} />
      {value === null && error === null && <Empty>Reading {run.name} …</Empty>}
      {value !== null && <div class="sides">
        <Curves run={run} series={value.series} />
        <aside aria-label="State of the run">
          <Findings answer={value} />
          <Bottleneck bottleneck={value.bottleneck} />
          <Panel title={run.state === "running" ? "Waiting now" : "Last waits"} note={value.waits_at === null ? undefined : `at ${duration(value.waits_at)}`}>
            <Waits rows={value.waits} isNow />
          </Panel>
          <Evaluations rows={value.evaluations} />
          <Advice answer={value} />
          <History answer={value} />
        </aside>
      </div>}
    </div>
  );
}

function Head(props: { answer: OverviewAnswer | null; run: RunRow }) {
  const { run } = props;
  const left_s = props.answer?.left_s ?? null;
  const num_skipped = props.answer?.num_skipped ?? 0;
  const share = run.steps > 0 ? run.step / run.steps : 0;
  return (
    <div class="head">
      <Facts
        rows={[
          ["state", <State run={run} />],
          ["step", <>{num(run.step)}{run.steps > 0 && <span class="dim"> of {num(run.steps)}</span>}</>],
          ["time", duration(run.seconds)],
          ...(left_s === null ? [] : [["left", `about ${duration(left_s)}`] as const]),
          ["model", <>{run.model || "–"}{run.is_simulated && <span class="tag">simulated</span>}</>],
          ["started", when(run.started)],
          ...(num_skipped > 0 ? [["unreadable", `${num(num_skipped)} lines`] as const] : []),
        ]}
      />
      {run.steps > 0 && <Meter share={share} class="progress" />}
    </div>
  );
}

/** The main figures as small charts, with one cursor for all. */
function Curves(props: { run: RunRow; series: readonly SeriesInfo[] }) {
  const { run } = props;
  const { route, set } = usePage();
  const x = (route.options["x"] as XAxis) || "step";
  const isAll = route.options["all"] === "1";
  const isSmooth = route.options["smooth"] !== "0";
  const shown = mainOf(props.series, isAll);
  const names = shown.map((one) => one.name).join(",");
  const { value, error } = useAnswer(shown.length ? { kind: "series", run: run.id, options: { names, x, points: POINTS } } : null, run.stamp);
  const curves = useMemo(
    () => new Map(Object.entries(value?.curves ?? {}).map(([name, curve]) => [name, [{ label: name, curve, look: 0 } satisfies Shown]])),
    [value],
  );
  const xs = useMemo(() => extentOf([...curves.values()].flat()), [curves]);
  const [cursor, setCursor] = useCursor([...curves.values()].flat()[0]?.curve);
  const groups = isAll ? [...new Set(shown.map((one) => one.group))] : ["main figures"];
  return (
    <div class="curves">
      <div class="tools">
        <Choice label="Axis" value={x} options={AXES} onChange={(axis) => set({ x: axis === "step" ? "" : axis })} />
        <Check label="smooth" isOn={isSmooth} onChange={(isOn) => set({ smooth: isOn ? "" : "0" })} />
        <Check label={`all ${props.series.length} figures`} isOn={isAll} onChange={(isOn) => set({ all: isOn ? "1" : "" })} />
        <span class="at note" aria-live="off">{cursor === null ? "" : x === "seconds" ? `at ${duration(cursor)}` : `at ${x === "step" ? "step" : "sample"} ${num(Math.round(cursor))}`}</span>
      </div>
      <Problem error={error} />
      {!props.series.length && <Empty>No step has ended yet. Curves begin with the first one.</Empty>}
      {groups.map((group) => (
        <section key={group} aria-label={group} class="group">
          {isAll && <h2>{group}</h2>}
          <div class="grid">
            {shown.filter((one) => !isAll || one.group === group).map((one) => (
              <Chart
                key={one.name}
                title={one.title}
                unit={one.unit}
                href={formatRoute({ run: run.id, view: "runs", options: { figure: one.name, x: route.options["x"] ?? "" } })}
                x={value?.x ?? x}
                xs={xs}
                curves={curves.get(one.name) ?? []}
                cursor={cursor}
                onCursor={setCursor}
                isSmooth={isSmooth}
              />
            ))}
          </div>
        </section>
      ))}
    </div>
  );
}

/** The figures to show: reward, then what evaluations found, then the rest in the server's order. */
export function mainOf(series: readonly SeriesInfo[], isAll = false): SeriesInfo[] {
  const shown = series.filter((one) => isAll || one.is_main);
  const rank = (one: SeriesInfo): number => (one.name === "reward" ? 0 : one.group === "evaluation" ? 1 : 2);
  return isAll ? shown : shown.sort((a, b) => rank(a) - rank(b));
}

/** A cursor that the pointer sets, and that the arrow keys move by a fiftieth of the axis. */
export function useCursor(curve: SeriesCurve | undefined): [number | null, (x: number | null) => void] {
  const [cursor, setCursor] = useState<number | null>(null);
  useKeys((event) => {
    if (curve === undefined || !curve.x.length || (event.key !== "ArrowLeft" && event.key !== "ArrowRight")) return false;
    const [first, last] = [curve.x[0] as number, curve.x[curve.x.length - 1] as number];
    const by = ((last - first) / 50) * (event.key === "ArrowLeft" ? -1 : 1);
    setCursor(Math.min(last, Math.max(first, (cursor ?? last) + by)));
    return true;
  });
  return [cursor, setCursor];
}

function Findings(props: { answer: OverviewAnswer }) {
  const [now, past] = [props.answer.findings.filter((one) => one.until === null), props.answer.findings.filter((one) => one.until !== null)];
  return (
    <Panel title="Findings" note={now.length ? `${now.length} now` : undefined} class={now.length ? "alarm" : ""}>
      {!now.length && <Empty>{props.answer.run.step === 0 ? "Nothing to judge before the first step." : "None: the run learns as it should, as far as the rules can see."}</Empty>}
      {now.map((one) => (
        <article key={one.name}>
          <h3><i aria-hidden="true">!</i> {one.name} <span class="note">since step {num(one.step)}</span></h3>
          <p>{one.message}</p>
          {one.advice && <p class="advice">{one.advice}</p>}
        </article>
      ))}
      {past.length > 0 && (
        <details>
          <summary>{past.length} ended</summary>
          {past.map((one) => (
            <p key={`${one.name} ${one.step}`}><b>{one.name}</b> <span class="note">steps {num(one.step)} to {num(one.until)}</span><br />{one.message}</p>
          ))}
        </details>
      )}
    </Panel>
  );
}

function Bottleneck(props: { bottleneck: BottleneckRow | null }) {
  const { bottleneck } = props;
  const shares = Object.entries(bottleneck?.shares ?? {}).filter(([, share]) => share >= 0.005).sort(([, a], [, b]) => b - a);
  return (
    <Panel title="What holds it up" note={bottleneck?.name}>
      {bottleneck === null ? (
        <Empty>Not known before the third step.</Empty>
      ) : (
        <>
          <p>{bottleneck.text}</p>
          <ul class="bars" aria-label="Where the learner's time goes">
            {shares.map(([name, share]) => (
              <li key={name}><span>{name}</span><Meter share={share} /><span class="figure">{percent(share)}</span></li>
            ))}
          </ul>
        </>
      )}
    </Panel>
  );
}

export function Waits(props: { rows: readonly WaitRow[]; isNow?: boolean }) {
  if (!props.rows.length) return <Empty>Nothing waits.</Empty>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Waits">
      <table>
        <thead>
          <tr>
            <th scope="col">who</th>
            <th scope="col">for what</th>
            <th scope="col" class="right">how many</th>
            {!props.isNow && <th scope="col" class="right">of the time</th>}
            <th scope="col" class="right">longest</th>
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row) => (
            <tr key={`${row.owner} ${row.what}`}>
              <th scope="row">{row.owner}</th>
              <td>{row.what}</td>
              <td class="right">{row.num < 10 && !Number.isInteger(row.num) ? row.num.toFixed(1) : num(Math.round(row.num))}</td>
              {!props.isNow && <td class="right">{percent(row.share)}</td>}
              <td class="right">{duration(row.seconds)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Evaluations(props: { rows: readonly EvaluationRow[] }) {
  if (!props.rows.length) return null;
  return (
    <Panel title="Evaluations">
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of evaluations">
        <table>
          <thead>
            <tr><th scope="col">name</th><th scope="col" class="right">accuracy</th><th scope="col" class="right">95%</th><th scope="col" class="right">tasks</th></tr>
          </thead>
          <tbody>
            {[...props.rows].reverse().slice(0, 12).map((row) => {
              const score = row.scores.find((one) => one.value === row.accuracy) ?? row.scores[0];
              return (
                <tr key={`${row.name} ${row.at}`}>
                  <th scope="row">{row.name}</th>
                  <td class="right">{percent(row.accuracy)}</td>
                  <td class="right dim">{score ? `${percent(score.low)} – ${percent(score.high)}` : ""}</td>
                  <td class="right">{num(row.num_tasks)}{row.num_failed > 0 && ` (${num(row.num_failed)} failed)`}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Advice(props: { answer: OverviewAnswer }) {
  const { advice, run } = props.answer;
  return (
    <Panel title="Advice">
      {!advice.length ? (
        <Empty>None yet. <code>millstream advise {run.name}</code> simulates what changes would give.</Empty>
      ) : (
        advice.map((one) => (
          <article key={one.words}>
            <h3>{one.words} <span class="note">{one.gain.toFixed(2)}× ({one.low.toFixed(2)} – {one.high.toFixed(2)})</span></h3>
            {one.note && <p>{one.note}</p>}
            {one.command && <pre tabIndex={0} class="command">{one.command}</pre>}
          </article>
        ))
      )}
    </Panel>
  );
}

function History(props: { answer: OverviewAnswer }) {
  const { history, notes, config, skipped, num_skipped } = props.answer;
  return (
    <>
      {skipped.length > 0 && (
        <Panel title="Lines that could not be read" note={num(num_skipped)}>
          <ul class="plain">
            {skipped.map((one) => (
              <li key={`${one.file} ${one.line}`}><b>{one.file}{one.line > 0 && `:${one.line}`}</b> {one.why}</li>
            ))}
          </ul>
        </Panel>
      )}
      {history.length > 0 && (
        <Panel title="History">
          <ul class="plain">
            {[...history].reverse().slice(0, 20).map((one, i) => (
              <li key={i}><span class="dim">{duration(one.at)}</span> <b>{one.kind}</b> {one.text}</li>
            ))}
          </ul>
        </Panel>
      )}
      {notes && <Panel title="Notes"><pre class="notes" tabIndex={0}>{notes}</pre></Panel>}
      {config && <Panel title="Config"><details><summary>config.toml</summary><pre class="config" tabIndex={0}>{config}</pre></details></Panel>}
    </>
  );
}
