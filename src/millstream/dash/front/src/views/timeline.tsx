// The timeline: a lane for each engine, worker, environment pool, stage and learner rank. Two runs on one axis, aligned where
// they begin, show what asynchronous training gains.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { LaneRow, LanesAnswer, LaneSpan, RunRow } from "../api.ts";
import { WORK, type Work } from "../color.ts";
import { clock, duration, num, percent } from "../format.ts";
import { type Answer, useAnswers, useIsDark, useKeys, usePage, useSize } from "../hooks.ts";
import { type Box, boxAt, boxes, drawLanes, fillWork, idleOf, type LaneData, rowHeight, spansIn, spread, stepRate, type Theme } from "../lanes.ts";
import { Empty, Problem, Select, State } from "../parts/bits.tsx";
import { Tooltip } from "../parts/tooltip.tsx";
import { numberOption } from "../route.ts";
import { inside, pan, type Range, timeTicks, width, zoom } from "../scale.ts";

const NARROWEST = 1e-4; // seconds
const POINTS = 700;

interface Track {
  readonly run: RunRow;
  readonly data: LaneData | null;
  readonly answer: Answer<LanesAnswer>;
  readonly origin: number; // the time of the run's clock that is 0 on the axis
}

interface Chosen {
  readonly track: number;
  readonly lane: number;
  readonly span: LaneSpan;
}

export function Timeline(props: { run: RunRow }) {
  const { feed, route, set } = usePage();
  const other = feed.runs.find((run) => run.id === route.options["with"] && run.id !== props.run.id) ?? null;
  const isAtStep = route.options["align"] === "step";
  const runs = other === null ? [props.run] : [props.run, other];
  const wholes = useAnswers<"lanes">(runs.map((run) => ({ request: { kind: "lanes", run: run.id, part: "whole", options: { points: POINTS } }, stamp: run.stamp })));
  const origins = wholes.map(({ value }) => (value === null ? 0 : isAtStep ? (value.versions[0]?.[0] ?? value.first) : value.first));
  const whole = wholeOf(wholes, origins);
  const [view, setView, isFollowing] = useWindow(whole);
  const isZoomed = whole !== null && width(view) < width(whole) * 0.999;
  const parts = useAnswers<"lanes">(
    !isZoomed
      ? []
      : runs.map((run, i) => {
          const options = { begin: round(view.from + (origins[i] ?? 0)), end: round(view.to + (origins[i] ?? 0)), points: POINTS };
          return { request: { kind: "lanes", run: run.id, part: "window", options }, stamp: isFollowing || run.state === "running" ? run.stamp : "" };
        }),
  );
  const tracks = runs.map((run, i): Track => {
    const answer = wholes[i] as Answer<LanesAnswer>;
    const data = answer.value === null ? null : { whole: answer.value, part: parts[i]?.value ?? null };
    return { run, data, answer, origin: origins[i] ?? 0 };
  });
  const [chosen, setChosen] = useState<Chosen | null>(null);
  const full = whole ?? view;
  const move = (range: Range): void => setView(inside(range, full));
  const zoomBy = (factor: number, share = 0.5): void => setView(zoom(view, full, factor, share, NARROWEST));
  const panBy = (share: number): void => setView(pan(view, full, width(view) * share));
  const all = (): void => setView(full);
  useTimelineKeys(tracks, view, chosen, setChosen, { zoomBy, panBy, all, move });

  const others = feed.runs.filter((run) => run.id !== props.run.id && run.state !== "unreadable");
  return (
    <div class="view timeline">
      <div class="tools">
        <div class="choice" role="group" aria-label="Zoom and pan">
          <button type="button" aria-label="Zoom in" title="+" onClick={() => zoomBy(0.5)}>+</button>
          <button type="button" aria-label="Zoom out" title="−" onClick={() => zoomBy(2)}>−</button>
          <button type="button" aria-label="Earlier" title="←" onClick={() => panBy(-0.4)}>←</button>
          <button type="button" aria-label="Later" title="→" onClick={() => panBy(0.4)}>→</button>
          <button type="button" onClick={all} disabled={!isZoomed} title="0">
            all
          </button>
        </div>
        {others.length > 0 && (
          <Select
            label="with"
            value={other?.id ?? ""}
            options={[["", "no other run"], ...others.map((run) => [run.id, run.name] as const)]}
            onChange={(id) => set({ with: id, from: "", to: "", last: "" }, true)}
          />
        )}
        {other !== null && (
          <Select
            label="0 is"
            value={isAtStep ? "step" : "start"}
            options={[["start", "the start"], ["step", "the first step's end"]]}
            onChange={(align) => set({ align: align === "step" ? "step" : "", from: "", to: "", last: "" }, true)}
          />
        )}
        {isZoomed && whole !== null && <Position view={view} whole={whole} onMove={move} />}
        <Legend tracks={tracks} />
      </div>
      {whole !== null && other !== null && <Compared tracks={tracks} />}
      {tracks.map((track, i) => (
        <TrackBlock
          key={track.run.id}
          track={track}
          index={i}
          isNamed={tracks.length > 1}
          row={rowHeight(tracks.reduce((sum, one) => sum + (one.data?.whole.lanes.length ?? 0), 0))}
          view={view}
          chosen={chosen?.track === i ? chosen : null}
          onChoose={setChosen}
          onZoom={zoomBy}
          onMove={(by) => setView(pan(view, full, by))}
        />
      ))}
      <Details chosen={chosen} tracks={tracks} />
    </div>
  );
}

function round(seconds: number): number {
  return Math.round(seconds * 1e4) / 1e4;
}

function wholeOf(wholes: readonly Answer<LanesAnswer>[], origins: readonly number[]): Range | null {
  const known = wholes.flatMap(({ value }, i) => (value === null ? [] : [{ from: value.first - (origins[i] ?? 0), to: value.last - (origins[i] ?? 0) }]));
  if (!known.length) return null;
  const from = Math.min(...known.map((one) => one.from));
  return { from, to: Math.max(from + 1e-3, ...known.map((one) => one.to)) };
}

/** The window that is shown, kept in the address: `from` and `to`, or `last`, the width of a window at the end, which follows a
 * run that grows. Without them, the whole run. */
function useWindow(whole: Range | null): [Range, (range: Range) => void, boolean] {
  const { route, set } = usePage();
  const [from, to, last] = [numberOption(route, "from"), numberOption(route, "to"), numberOption(route, "last")];
  const full = whole ?? { from: 0, to: 1 };
  const [draft, setDraft] = useState<Range | null>(null);
  const timer = useRef(0);
  let view = full;
  if (draft !== null) view = draft;
  else if (last !== null) view = inside({ from: full.to - last, to: full.to }, full);
  else if (from !== null && to !== null && to > from) view = inside({ from, to }, full);
  const setView = (range: Range): void => {
    setDraft(range);
    window.clearTimeout(timer.current);
    timer.current = window.setTimeout(() => {
      if (width(range) >= width(full) * 0.999) set({ from: "", to: "", last: "" });
      else if (range.to >= full.to - width(range) * 0.01) set({ from: "", to: "", last: width(range).toPrecision(5) });
      else set({ from: range.from.toFixed(4), to: range.to.toFixed(4), last: "" });
      setDraft(null);
    }, 180);
  };
  useEffect(() => () => window.clearTimeout(timer.current), []);
  return [view, setView, last !== null];
}

interface Moves {
  zoomBy(factor: number): void;
  panBy(share: number): void;
  all(): void;
  move(range: Range): void;
}

function useTimelineKeys(tracks: readonly Track[], view: Range, chosen: Chosen | null, choose: (chosen: Chosen | null) => void, moves: Moves): void {
  const step = (by: number): void => {
    const track = tracks[chosen?.track ?? 0];
    if (track === undefined || track.data === null) return;
    const laneIndex = chosen?.lane ?? 0;
    const lane = lanesOf(track.data)[laneIndex];
    if (lane === undefined) return;
    const shown = { from: view.from + track.origin, to: view.to + track.origin };
    const spans = spansIn(track.data, lane.name, { from: -Infinity, to: Infinity }).sort((a, b) => a[0] - b[0]);
    const now = chosen === null ? -1 : spans.findIndex((span) => span[0] === chosen.span[0] && span[2] === chosen.span[2]);
    const next = now < 0 ? spans.find((span) => span[1] >= shown.from) : spans[now + by];
    if (next === undefined) return;
    choose({ track: chosen?.track ?? 0, lane: laneIndex, span: next });
    const at = next[0] - track.origin;
    if (at < view.from || at > view.to) moves.move({ from: at - width(view) / 2, to: at + width(view) / 2 });
  };
  const lane = (by: number): void => {
    const places = tracks.flatMap((track, t) => (track.data === null ? [] : lanesOf(track.data).map((row, l) => ({ track: t, lane: l, name: row.name, data: track.data as LaneData, origin: track.origin }))));
    const now = chosen === null ? -1 : places.findIndex((place) => place.track === chosen.track && place.lane === chosen.lane);
    for (let i = now + by; i >= 0 && i < places.length; i += by) {
      const place = places[i] as (typeof places)[number];
      const at = (chosen === null ? view.from : chosen.span[0] - (tracks[chosen.track]?.origin ?? 0)) + place.origin;
      const spans = spansIn(place.data, place.name, { from: view.from + place.origin, to: view.to + place.origin });
      const near = spans.reduce<LaneSpan | null>((best, span) => (best === null || Math.abs(span[0] - at) < Math.abs(best[0] - at) ? span : best), null);
      if (near !== null) return choose({ track: place.track, lane: place.lane, span: near });
    }
  };
  useKeys((event) => {
    switch (event.key) {
      case "+":
      case "=":
        moves.zoomBy(0.5);
        return true;
      case "-":
        moves.zoomBy(2);
        return true;
      case "0":
        moves.all();
        return true;
      case "ArrowLeft":
        moves.panBy(-0.2);
        return true;
      case "ArrowRight":
        moves.panBy(0.2);
        return true;
      case "ArrowUp":
        lane(-1);
        return true;
      case "ArrowDown":
        lane(1);
        return true;
      case ",":
        step(-1);
        return true;
      case ".":
        step(1);
        return true;
      case "Escape":
        choose(null);
        return chosen !== null;
    }
    return false;
  });
}

/** The lanes that are shown, with the idle shares of the window where they are known. */
function lanesOf(data: LaneData): readonly LaneRow[] {
  const { whole, part } = data;
  if (part === null) return whole.lanes;
  return whole.lanes.map((lane) => part.lanes.find((one) => one.name === lane.name) ?? { ...lane, idle_share: 1, spans: [] });
}

// ---- one run -------------------------------------------------------------------------------------------------------------

function useTheme(): Theme {
  const isDark = useIsDark();
  return useMemo(() => {
    const style = getComputedStyle(document.documentElement);
    const read = (name: string): string => style.getPropertyValue(name).trim();
    return { isDark, ink: read("--ink"), muted: read("--muted"), line: read("--line"), lane: read("--lane"), accent: read("--accent"), font: `11px ${read("--sans")}` };
  }, [isDark]);
}

interface TrackProps {
  readonly track: Track;
  readonly index: number;
  readonly isNamed: boolean;
  readonly row: number; // pixels of a lane
  readonly view: Range;
  readonly chosen: Chosen | null;
  onChoose(chosen: Chosen | null): void;
  onZoom(factor: number, share: number): void;
  onMove(by: number): void;
}

function TrackBlock(props: TrackProps) {
  const { run, data, answer, origin } = props.track;
  const [attach, size] = useSize<HTMLDivElement>();
  if (data === null) {
    return answer.error ? <Problem error={answer.error} /> : <Empty>Reading the events of {run.name} …</Empty>;
  }
  const lanes = lanesOf(data);
  const view = { from: props.view.from + origin, to: props.view.to + origin };
  const wide = Math.max(60, size.width);
  const axis = timeTicks(props.view, Math.max(2, wide / 90));
  const versions = data.part?.versions.length ? data.part.versions : data.whole.versions;
  const idle = (["engine", "learner"] as const).flatMap((kind) => {
    const share = idleOf(lanes, kind);
    return share === null ? [] : [`${kind === "engine" ? "engines" : "learner"} idle ${percent(share)}`];
  });
  return (
    <section class="track" aria-label={`Lanes of ${run.name}`}>
      <h2>
        <span class="letter" aria-hidden="true">{props.isNamed ? "AB"[props.index] : ""}</span>
        {run.name} <State run={run} />
        <span class="note">
          {[`${num(run.step)} steps`, duration(run.seconds), ...idle].join(" · ")}
          {!data.whole.is_exact && !(data.part?.is_exact ?? false) && " · columns are means: zoom in for single pieces of work"}
        </span>
      </h2>
      {!lanes.length ? (
        <Empty>No work yet. Lanes appear with the first piece of work that an engine or the learner reports.</Empty>
      ) : (
        <div class="lanes">
          <div class="corner">idle</div>
          <div class="axis" ref={attach} aria-hidden="true">
            {axis.at.map((at) => (
              <span key={at} style={{ left: `${((at - props.view.from) / width(props.view)) * 100}%` }}>
                {clock(at, axis.step)}
              </span>
            ))}
          </div>
          <div class="corner versions">version</div>
          <div class="axis versions" aria-hidden="true">
            {data.whole.evaluations.map((one) => (
              <i
                key={`${one.name} ${one.begin}`}
                class="evaluation"
                title={`evaluation ${one.name}`}
                style={{ left: `${((one.begin - view.from) / width(view)) * 100}%`, width: `${((one.end - one.begin) / width(view)) * 100}%` }}
              />
            ))}
            {spread(versions, view, wide, 30).map(([at, version]) => (
              <span key={version} style={{ left: `${((at - view.from) / width(view)) * 100}%` }}>
                {version}
              </span>
            ))}
          </div>
          <ol class="names">
            {lanes.map((lane) => (
              <li key={lane.name} style={{ height: `${props.row}px` }} title={`${lane.name}: idle for ${percent(lane.idle_share)} of the window`}>
                <span class="name">{lane.name}</span>
                <span class="idle">{percent(lane.idle_share)}</span>
              </li>
            ))}
          </ol>
          <LaneCanvas {...props} data={data} lanes={lanes} range={view} wide={wide} ticks={axis.at} versions={versions} />
        </div>
      )}
      {data.whole.num_left_out > 0 && <p class="note">{num(data.whole.num_left_out)} more lanes are not shown.</p>}
    </section>
  );
}

interface CanvasProps extends TrackProps {
  readonly data: LaneData;
  readonly lanes: readonly LaneRow[];
  readonly range: Range; // of the run's clock
  readonly wide: number;
  readonly ticks: readonly number[];
  readonly versions: LanesAnswer["versions"];
}

function LaneCanvas(props: CanvasProps) {
  const { data, lanes, range, wide, track, row } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const theme = useTheme();
  const [hover, setHover] = useState<{ x: number; y: number; at: number; down: number } | null>(null); // of the window, and of the canvas
  const drawn = useMemo(
    () => lanes.map((lane) => ({ name: lane.name, boxes: boxes(spansIn(data, lane.name, range), range, wide) })),
    [data.whole, data.part, range.from, range.to, wide],
  );
  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context) return;
    const ratio = window.devicePixelRatio || 1;
    element.width = Math.round(wide * ratio);
    element.height = Math.round(lanes.length * row * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const isOver = track.run.state !== "running";
    const chosen = props.chosen === null ? null : { lane: props.chosen.lane, span: props.chosen.span };
    const more = { origin: track.origin, end: data.whole.last, isOver, ticks: props.ticks, marks: props.versions, chosen };
    drawLanes(context, { lanes: drawn, view: range, width: wide, row, cursor: hover?.at ?? null, ...more }, theme);
  }, [drawn, theme, hover?.at, props.chosen, lanes.length, props.ticks, row]);

  const find = (x: number, y: number): { lane: number; box: Box | null } => {
    const lane = Math.min(lanes.length - 1, Math.max(0, Math.floor(y / row)));
    return { lane, box: boxAt(drawn[lane]?.boxes ?? [], x, 1 - (y / row - lane)) };
  };
  const gestures = useGestures(canvas, props, wide, (event) => setHover({ x: event.clientX, y: event.clientY, at: event.offsetX, down: event.offsetY }));
  const under = hover === null ? null : find(hover.at, hover.down); // found again when the view has moved under the pointer
  const busy = lanes.map((lane) => `${lane.name} idle ${percent(lane.idle_share)}`).join(", ");
  return (
    <>
      <canvas
        ref={canvas}
        role="img"
        tabIndex={0}
        aria-label={`Work by time. ${busy}. Arrow up and down choose a lane, comma and full stop a piece of work.`}
        style={{ height: `${lanes.length * row}px` }}
        {...gestures}
        onPointerLeave={() => setHover(null)}
        onClick={(event) => {
          const { offsetX, offsetY } = event as unknown as PointerEvent;
          const { lane, box } = find(offsetX, offsetY);
          props.onChoose(box === null ? null : { track: props.index, lane, span: box.span });
        }}
        onDblClick={(event) => props.onZoom(0.4, (event as unknown as PointerEvent).offsetX / wide)}
      />
      {hover !== null && under !== null && (
        <Tooltip x={hover.x} y={hover.y}>
          <b>{lanes[under.lane]?.name}</b>
          {under.box === null ? (
            <span>idle at {duration(range.from + (hover.at / wide) * width(range) - track.origin)}</span>
          ) : (
            <SpanFacts span={under.box.span} origin={track.origin} />
          )}
        </Tooltip>
      )}
    </>
  );
}

/** Wheel and pinch zoom, drag pans, a plain move hovers. */
function useGestures(canvas: { current: HTMLCanvasElement | null }, props: TrackProps, wide: number, onHover: (event: PointerEvent) => void) {
  const pointers = useRef(new Map<number, { x: number; y: number }>());
  const newest = useRef(props);
  newest.current = props;
  useEffect(() => {
    const element = canvas.current;
    if (element === null) return;
    const wheel = (event: WheelEvent): void => {
      event.preventDefault();
      const { onMove, onZoom, view } = newest.current;
      const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const by = (event.deltaX || event.deltaY) * (event.deltaMode === 1 ? 16 : 1);
      if (isSideways) onMove((by / wide) * width(view));
      else onZoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * (event.deltaMode === 1 ? 16 : 1))) * 0.0022), event.offsetX / wide);
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, [wide]);
  const move = (event: PointerEvent): void => {
    const held = pointers.current;
    const before = held.get(event.pointerId);
    if (before === undefined) return onHover(event);
    const now = { x: event.clientX, y: event.clientY };
    if (held.size === 1) {
      props.onMove((-(now.x - before.x) / wide) * width(props.view));
    } else {
      const fixed = [...held].find(([id]) => id !== event.pointerId)?.[1] ?? before;
      const [old, fresh] = [Math.abs(before.x - fixed.x), Math.abs(now.x - fixed.x)];
      const left = canvas.current?.getBoundingClientRect().left ?? 0;
      if (old > 4 && fresh > 4) props.onZoom(old / fresh, (fixed.x - left) / wide);
    }
    held.set(event.pointerId, now);
  };
  const release = (event: PointerEvent): void => {
    pointers.current.delete(event.pointerId);
  };
  return {
    onPointerDown: (event: PointerEvent) => {
      pointers.current.set(event.pointerId, { x: event.clientX, y: event.clientY });
      (event.currentTarget as Element).setPointerCapture(event.pointerId);
    },
    onPointerMove: move,
    onPointerUp: release,
    onPointerCancel: release,
  };
}

// ---- texts ---------------------------------------------------------------------------------------------------------------

function SpanFacts(props: { span: LaneSpan; origin: number }) {
  const [begin, end, what, share, tokens, label] = props.span;
  const seconds = end - begin;
  return (
    <>
      <span>
        {WORK[what].title}
        {label && label !== what ? `: ${label}` : ""}
      </span>
      <span>
        {clock(begin - props.origin, seconds / 20)} to {clock(end - props.origin, seconds / 20)}
        {share < 0.999 ? `, ${percent(share)} of ${duration(seconds)}` : `, ${duration(seconds)}`}
      </span>
      {tokens > 0 && (
        <span>
          {num(tokens)} tokens{seconds > 0 && `, ${num(Math.round(tokens / (seconds * share)))} a second`}
        </span>
      )}
    </>
  );
}

function Details(props: { chosen: Chosen | null; tracks: readonly Track[] }) {
  const { chosen } = props;
  const track = chosen === null ? undefined : props.tracks[chosen.track];
  const lane = track?.data && chosen ? lanesOf(track.data)[chosen.lane] : undefined;
  return (
    <div class="details" aria-live="polite">
      {chosen === null || track === undefined || lane === undefined ? (
        <span class="note">Click a piece of work, or press ↓ and . to walk through them. The wheel zooms, dragging pans, ? lists all keys.</span>
      ) : (
        <>
          <b>{lane.name}</b>
          <SpanFacts span={chosen.span} origin={track.origin} />
        </>
      )}
    </div>
  );
}

/** Where the window is in the whole. */
function Position(props: { view: Range; whole: Range; onMove: (range: Range) => void }) {
  const size = width(props.view) / width(props.whole);
  const at = (props.view.from - props.whole.from) / width(props.whole);
  return (
    <label class="position" title="Where the window is in the whole run">
      <span class="hidden">Position</span>
      <input
        type="range"
        min="0"
        max="1"
        step="any"
        value={at / Math.max(1e-9, 1 - size)}
        onInput={(event) => {
          const from = props.whole.from + Number(event.currentTarget.value) * (width(props.whole) - width(props.view));
          props.onMove({ from, to: from + width(props.view) });
        }}
      />
      <span class="note">{duration(width(props.view))} of {duration(width(props.whole))}</span>
    </label>
  );
}

/** Only the kinds of work that occur. */
function Legend(props: { tracks: readonly Track[] }) {
  const kinds = new Set<Work>();
  for (const track of props.tracks) for (const lane of track.data?.whole.lanes ?? []) for (const span of lane.spans) kinds.add(span[2]);
  return (
    <ul class="legend work">
      {(Object.keys(WORK) as Work[]).filter((kind) => kinds.has(kind)).map((kind) => (
        <li key={kind}>
          <WorkSwatch work={kind} />
          {WORK[kind].title}
        </li>
      ))}
    </ul>
  );
}

function WorkSwatch(props: { work: Work }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const isDark = useIsDark();
  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context) return;
    const ratio = window.devicePixelRatio || 1;
    element.width = 16 * ratio;
    element.height = 11 * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    fillWork(context, props.work, isDark, [0, 0, 16, 11]);
  }, [props.work, isDark]);
  return <canvas ref={canvas} class="swatch" aria-hidden="true" />;
}

/** What the picture shows, in a sentence. */
function Compared(props: { tracks: readonly Track[] }) {
  const rates = props.tracks.map(({ data }) => (data === null ? null : stepRate(data.whole.versions)));
  const [a, b] = rates;
  if (a === null || b === null || a === undefined || b === undefined) return null;
  const [quick, slow] = a >= b ? [0, 1] : [1, 0];
  const name = (i: number): string => props.tracks[i]?.run.name ?? "";
  const factor = Math.max(a, b) / Math.min(a, b);
  return (
    <p class="said">
      <b>{name(quick)}</b> makes {num(rates[quick])} steps a second, <b>{name(slow)}</b> {num(rates[slow])}:{" "}
      {factor < 1.02 ? "about the same." : `${factor.toFixed(2)} times as many.`}
    </p>
  );
}
