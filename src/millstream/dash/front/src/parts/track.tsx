// The lanes of one run in the timeline: names and idle shares, axis, versions, and the canvas with its gestures.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { LaneRow, LanesAnswer, LaneSpan, RunRow } from "../api.ts";
import { WORK } from "../color.ts";
import { clock, duration, num, percent } from "../format.ts";
import { type Answer, useIsDark, useSize } from "../hooks.ts";
import { type Box, boxAt, boxes, drawLanes, idleOf, type LaneData, spansIn, spread, type Theme } from "../lanes.ts";
import { type Range, timeTicks, width } from "../scale.ts";
import { Empty, Problem, State } from "./bits.tsx";
import { Tooltip } from "./tooltip.tsx";

export interface Track {
  readonly run: RunRow;
  readonly data: LaneData | null;
  readonly answer: Answer<LanesAnswer>;
  readonly origin: number; // the time of the run's clock that is 0 on the axis
}

export interface Chosen {
  readonly track: number;
  readonly lane: number;
  readonly span: LaneSpan;
}

/** The lanes that are shown, with the idle shares of the window where they are known. */
export function lanesOf(data: LaneData): readonly LaneRow[] {
  const { whole, part } = data;
  if (part === null) return whole.lanes;
  return whole.lanes.map((lane) => part.lanes.find((one) => one.name === lane.name) ?? { ...lane, idle_share: 1, spans: [] });
}

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

export function TrackBlock(props: TrackProps) {
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

export function SpanFacts(props: { span: LaneSpan; origin: number }) {
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
