// The lanes of a timeline: which rectangles a lane has, what is under the pointer, and how they are drawn on a canvas. Times are
// seconds of the run's clock; `origin` is the time at which its axis has 0.

import type { LaneRow, LanesAnswer, LaneSpan, VersionMark } from "./api.ts";
import { type Pattern, WORK, type Work } from "./color.ts";
import type { Range } from "./scale.ts";

export interface Box {
  readonly x: number;
  readonly width: number;
  readonly low: number; // share of the lane's height below the box
  readonly high: number;
  readonly span: LaneSpan;
}

/** A whole run, and in the window that is shown what is known in more detail. */
export interface LaneData {
  readonly whole: LanesAnswer;
  readonly part: LanesAnswer | null;
}

/** The spans of a lane for a view: of the detailed answer where there is one, and of the whole run outside of it. */
export function spansIn(data: LaneData, name: string, view: Range): LaneSpan[] {
  const { whole, part } = data;
  const inView = (span: LaneSpan): boolean => span[1] >= view.from && span[0] <= view.to;
  const coarse = whole.lanes.find((lane) => lane.name === name)?.spans ?? [];
  const fine = part?.lanes.find((lane) => lane.name === name)?.spans;
  if (part === null || fine === undefined) return coarse.filter(inView);
  const outside = coarse.flatMap((span): LaneSpan[] => {
    const [begin, end, what, share, tokens, label] = span;
    if (end <= part.begin || begin >= part.end) return [span];
    const cut: LaneSpan[] = [];
    if (begin < part.begin) cut.push([begin, part.begin, what, share, tokens, label]);
    if (end > part.end) cut.push([part.end, end, what, share, tokens, label]);
    return cut;
  });
  return [...outside, ...fine].filter(inView);
}

/** Rectangles of a lane. Pieces of work that share one stretch of time are stacked: the height is the share of it. */
export function boxes(spans: readonly LaneSpan[], view: Range, width: number): Box[] {
  const scale = width / (view.to - view.from || 1);
  const tops = new Map<number, number>();
  return spans.map((span) => {
    const [begin, end, , share] = span;
    const isWhole = share >= 0.999;
    const low = isWhole ? 0 : (tops.get(begin) ?? 0);
    const high = Math.min(1, low + share);
    if (!isWhole) tops.set(begin, high);
    const x = (begin - view.from) * scale;
    return { x, width: Math.max((end - begin) * scale, 0.6), low, high, span };
  });
}

/** The box under a point; `share` is of the lane's height, from below. Within two pixels, so that short work can be hit. */
export function boxAt(found: readonly Box[], x: number, share: number): Box | null {
  let best: Box | null = null;
  for (const box of found) {
    const near = Math.max(box.x - x, x - box.x - box.width, 0);
    if (near > 2 || share > Math.max(box.high, 0.25) || share < box.low) continue;
    if (best === null || near === 0 || box.width < best.width) best = box;
  }
  return best;
}

/** Marks that have room: at least `room` pixels apart, preferring round versions. */
export function spread(marks: readonly VersionMark[], view: Range, width: number, room: number): VersionMark[] {
  const scale = width / (view.to - view.from || 1);
  const inView = marks.filter(([at]) => at >= view.from && at <= view.to);
  for (const every of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000, 1_000_000]) {
    const chosen = inView.filter(([, version]) => version % every === 0);
    const isRoomy = chosen.every(([at], i) => i === 0 || (at - (chosen[i - 1] as VersionMark)[0]) * scale >= room);
    if (!isRoomy) continue;
    // Of many versions the answer has only some, perhaps none that are round: then those that have room.
    return chosen.length * 4 >= Math.min(inView.length, width / room) ? chosen : roomy(inView, room / scale);
  }
  return roomy(inView, room / scale);
}

function roomy(marks: readonly VersionMark[], seconds: number): VersionMark[] {
  let last = -Infinity;
  return marks.filter(([at]) => {
    if (at - last < seconds) return false;
    last = at;
    return true;
  });
}

/** The mean idle share of the lanes of a kind; null without any. */
export function idleOf(lanes: readonly LaneRow[], kind: LaneRow["kind"]): number | null {
  const some = lanes.filter((lane) => lane.kind === kind);
  return some.length ? some.reduce((sum, lane) => sum + lane.idle_share, 0) / some.length : null;
}

/** Steps a second between the first and the last version of a run; null of fewer than two. */
export function stepRate(marks: readonly VersionMark[]): number | null {
  const [first, last] = [marks[0], marks[marks.length - 1]];
  if (first === undefined || last === undefined || last[0] <= first[0] || last[1] <= first[1]) return null;
  return (last[1] - first[1]) / (last[0] - first[0]);
}

// ---- drawing -------------------------------------------------------------------------------------------------------------

export interface Theme {
  readonly isDark: boolean;
  readonly ink: string;
  readonly muted: string;
  readonly line: string;
  readonly lane: string;
  readonly accent: string;
  readonly font: string;
}

const GAP = 5; // pixels between two lanes

/** Pixels of a lane: few lanes are drawn higher. */
export function rowHeight(numLanes: number): number {
  return numLanes <= 5 ? 44 : numLanes <= 10 ? 34 : 26;
}

const patterns = new Map<string, CanvasPattern | null>();

/** Lines or dots over a color, so that work can be told apart without color. */
function patternOf(context: CanvasRenderingContext2D, pattern: Pattern, ink: string, ratio: number): CanvasPattern | null {
  const key = `${pattern} ${ink} ${ratio}`;
  if (patterns.has(key)) return patterns.get(key) ?? null;
  const size = 6 * ratio;
  const tile = document.createElement("canvas");
  tile.width = size;
  tile.height = size;
  const draw = tile.getContext("2d");
  if (draw === null) return null;
  draw.strokeStyle = ink;
  draw.fillStyle = ink;
  draw.lineWidth = ratio;
  const stroke = (...lines: [number, number, number, number][]): void => {
    for (const [x1, y1, x2, y2] of lines) {
      draw.beginPath();
      draw.moveTo(x1 * size, y1 * size);
      draw.lineTo(x2 * size, y2 * size);
      draw.stroke();
    }
  };
  if (pattern === "stripes") stroke([-0.5, 0.5, 0.5, -0.5], [0, 1, 1, 0], [0.5, 1.5, 1.5, 0.5]);
  if (pattern === "back" || pattern === "cross") stroke([-0.5, 0.5, 0.5, 1.5], [0, 0, 1, 1], [0.5, -0.5, 1.5, 0.5]);
  if (pattern === "cross") stroke([0, 1, 1, 0], [-0.5, 0.5, 0.5, -0.5], [0.5, 1.5, 1.5, 0.5]);
  if (pattern === "lines") stroke([0, 0.5, 1, 0.5]);
  if (pattern === "dots") {
    draw.beginPath();
    draw.arc(size / 2, size / 2, ratio * 1.2, 0, 7);
    draw.fill();
  }
  const made = context.createPattern(tile, "repeat");
  made?.setTransform(new DOMMatrix().scale(1 / ratio));
  patterns.set(key, made);
  return made;
}

export function fillWork(
  context: CanvasRenderingContext2D,
  work: Work,
  isDark: boolean,
  [x, y, width, height]: readonly [number, number, number, number],
): void {
  const look = WORK[work];
  context.fillStyle = isDark ? look.dark : look.light;
  context.fillRect(x, y, width, height);
  if (look.pattern === "plain" || width < 5 || height < 4) return;
  const lines = patternOf(context, look.pattern, work === "wait" ? (isDark ? "#66707b" : "#98a1aa") : isDark ? "#00000066" : "#00000047", window.devicePixelRatio || 1);
  if (lines === null) return;
  context.fillStyle = lines;
  context.fillRect(x, y, width, height);
}

export interface Drawn {
  readonly lanes: readonly { readonly name: string; readonly boxes: readonly Box[] }[];
  readonly view: Range;
  readonly width: number;
  readonly row: number; // pixels of a lane
  readonly origin: number;
  readonly end: number; // of the run
  readonly isOver: boolean;
  readonly ticks: readonly number[]; // of the axis
  readonly marks: readonly VersionMark[];
  readonly cursor: number | null; // pixels
  readonly chosen: { lane: number; span: LaneSpan } | null;
}

export function drawLanes(context: CanvasRenderingContext2D, drawn: Drawn, theme: Theme): void {
  const { view, width, row, lanes } = drawn;
  const height = lanes.length * row;
  const scale = width / (view.to - view.from || 1);
  const xOf = (at: number): number => (at - view.from) * scale;
  context.clearRect(0, 0, width, height);
  context.fillStyle = theme.lane;
  lanes.forEach((_, i) => context.fillRect(0, i * row + GAP / 2, width, row - GAP));
  context.fillStyle = theme.line;
  for (const at of drawn.ticks) context.fillRect(Math.round(xOf(at + drawn.origin)), 0, 1, height);
  lanes.forEach((lane, i) => drawLane(context, lane.boxes, i * row + GAP / 2, row - GAP, theme));
  context.fillStyle = theme.isDark ? "#ffffff30" : "#00000026";
  const marks = drawn.marks.filter(([at]) => at >= view.from && at <= view.to);
  if (marks.length * 12 < width) for (const [at] of marks) context.fillRect(Math.round(xOf(at)), 0, 1, height);
  if (drawn.isOver && xOf(drawn.end) < width) {
    context.fillStyle = theme.muted;
    context.fillRect(Math.round(xOf(drawn.end)), 0, 1.5, height);
  }
  if (drawn.chosen !== null) {
    const { lane, span } = drawn.chosen;
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    context.strokeRect(xOf(span[0]), lane * row + GAP / 2, Math.max(2, (span[1] - span[0]) * scale), row - GAP);
  }
  if (drawn.cursor !== null) {
    context.fillStyle = theme.accent;
    context.fillRect(Math.round(drawn.cursor), 0, 1, height);
  }
}

function drawLane(context: CanvasRenderingContext2D, found: readonly Box[], top: number, tall: number, theme: Theme): void {
  context.font = theme.font;
  context.textBaseline = "middle";
  for (const { x, width, low, high, span } of found) {
    fillWork(context, span[2], theme.isDark, [x, top + (1 - high) * tall, width, (high - low) * tall]);
    const label = span[5];
    if (width < 54 || high - low < 0.8 || label === "" || label === span[2]) continue; // the legend says what the color says
    const room = Math.min(width, width + x) - 8; // a piece that begins left of the view has its text at the edge
    if (context.measureText(label).width > room) continue;
    const look = WORK[span[2]];
    const isOnBlue = span[2] === "generate" || span[2] === "evaluate";
    const ink = isOnBlue && !theme.isDark ? "#ffffff" : "#101418";
    if (look.pattern !== "plain") {
      context.fillStyle = theme.isDark ? look.dark : look.light;
      context.fillRect(Math.max(x, 0) + 2, top + tall / 2 - 8, context.measureText(label).width + 4, 16);
    }
    context.fillStyle = span[2] === "wait" ? theme.ink : ink;
    context.fillText(label, Math.max(x, 0) + 4, top + tall / 2 + 0.5);
  }
}
