// The timeline: a lane for each engine, worker, environment pool, stage and learner rank. Two runs on one axis, aligned where
// they begin, show what asynchronous training gains.

import { useEffect, useRef, useState } from "preact/hooks";
import type { LanesAnswer, LaneSpan, RunRow } from "../api.ts";
import { WORK, type Work } from "../color.ts";
import { duration, num } from "../format.ts";
import { type Answer, useAnswers, useIsDark, useKeys, usePage } from "../hooks.ts";
import { fillWork, type LaneData, rowHeight, spansIn, stepRate } from "../lanes.ts";
import { Select } from "../parts/bits.tsx";
import { type Chosen, lanesOf, SpanFacts, type Track, TrackBlock } from "../parts/track.tsx";
import { numberOption } from "../route.ts";
import { inside, pan, type Range, width, zoom } from "../scale.ts";

const NARROWEST = 1e-4; // seconds
const POINTS = 700;

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

// ---- texts ---------------------------------------------------------------------------------------------------------------

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
