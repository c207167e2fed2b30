// Axes, zoom and pan, smoothing, and nearest points. Pure functions of numbers.

export interface Range {
  readonly from: number;
  readonly to: number;
}

export const width = (range: Range): number => range.to - range.from;

/** Ticks at 1, 2 or 5 times a power of ten, at most about `most` of them, inside the range. */
export function ticks(range: Range, most: number): { at: number[]; step: number } {
  const rough = width(range) / Math.max(1, most);
  if (!(rough > 0) || !Number.isFinite(rough)) return { at: [range.from], step: 1 };
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5].find((factor) => factor * power >= rough * 0.8) ?? 10) * power;
  return { at: multiples(range, step), step };
}

/** Ticks of a time axis: above a minute at 1, 2, 5, 10, 15, 30 minutes and hours. */
export function timeTicks(range: Range, most: number): { at: number[]; step: number } {
  const rough = width(range) / Math.max(1, most);
  if (rough <= 10) return ticks(range, most);
  const steps = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const step = steps.find((one) => one >= rough) ?? Math.ceil(rough / 86400) * 86400;
  return { at: multiples(range, step), step };
}

function multiples(range: Range, step: number): number[] {
  const first = Math.ceil(range.from / step - 1e-9);
  const found: number[] = [];
  for (let i = first; i * step <= range.to + step * 1e-9 && found.length < 100; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/** The range of all finite values, a little wider; never empty. `floor`: a value that is always inside. */
export function extent(lists: ReadonlyArray<ReadonlyArray<number | null>>, floor?: number): Range {
  let from = floor ?? Infinity;
  let to = floor ?? -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value === null || !Number.isFinite(value)) continue;
      if (value < from) from = value;
      if (value > to) to = value;
    }
  }
  if (from > to) return { from: 0, to: 1 };
  if (from === to) return from === 0 ? { from: 0, to: 1 } : { from: from - Math.abs(from) * 0.1, to: to + Math.abs(to) * 0.1 };
  const margin = (to - from) * 0.06;
  return { from: from === floor ? from : from - margin, to: to + margin };
}

/** The part of `whole` that is `factor` times as wide as `shown`, with the time at `share` of the view where it was. */
export function zoom(shown: Range, whole: Range, factor: number, share: number, narrowest: number): Range {
  const size = Math.min(width(whole), Math.max(narrowest, width(shown) * factor));
  const pivot = shown.from + width(shown) * share;
  return inside({ from: pivot - size * share, to: pivot + size * (1 - share) }, whole);
}

export function pan(shown: Range, whole: Range, by: number): Range {
  return inside({ from: shown.from + by, to: shown.to + by }, whole);
}

/** The range moved, and only then cut, so that it is inside `whole`. */
export function inside(range: Range, whole: Range): Range {
  const size = Math.min(width(range), width(whole));
  const from = Math.min(Math.max(range.from, whole.from), whole.to - size);
  return { from, to: from + size };
}

/** An exponential moving average that skips missing values, with the correction of its start. */
export function smooth(values: ReadonlyArray<number | null>, weight: number): (number | null)[] {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

/** The index of the value next to `target` in a sorted list; -1 of an empty one. */
export function nearest(sorted: ReadonlyArray<number>, target: number): number {
  if (!sorted.length) return -1;
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((sorted[middle] as number) < target) low = middle + 1;
    else high = middle;
  }
  const before = sorted[low - 1];
  return before !== undefined && target - before <= (sorted[low] as number) - target ? low - 1 : low;
}

/** Which rows of a long list are in view, with a few more on both sides: [first, end). */
export function rowsInView(top: number, height: number, rowHeight: number, total: number, more = 8): [number, number] {
  const first = Math.max(0, Math.floor(top / rowHeight) - more);
  const end = Math.min(total, Math.ceil((top + height) / rowHeight) + more);
  return [Math.min(first, total), Math.max(end, Math.min(first, total))];
}

/** Points of an SVG path; a missing value is a gap. Values without neighbours become short dashes. */
export function path(
  xs: ReadonlyArray<number>,
  ys: ReadonlyArray<number | null>,
  x: (value: number) => number,
  y: (value: number) => number,
): string {
  let found = "";
  let open = false;
  for (let i = 0; i < xs.length; i++) {
    const value = ys[i];
    if (value === null || value === undefined || !Number.isFinite(value)) {
      open = false;
      continue;
    }
    const at = `${round(x(xs[i] as number))} ${round(y(value))}`;
    found += open ? `L${at}` : `M${at}${isMissing(ys[i + 1]) ? "h1.5" : ""}`;
    open = true;
  }
  return found;
}

/** The area between two curves, as closed pieces of an SVG path. */
export function band(
  xs: ReadonlyArray<number>,
  low: ReadonlyArray<number | null>,
  high: ReadonlyArray<number | null>,
  x: (value: number) => number,
  y: (value: number) => number,
): string {
  let found = "";
  let piece: number[] = [];
  const close = (): void => {
    if (piece.length > 1) {
      const there = piece.map((i) => `${round(x(xs[i] as number))} ${round(y(high[i] as number))}`);
      const back = [...piece].reverse().map((i) => `${round(x(xs[i] as number))} ${round(y(low[i] as number))}`);
      found += `M${[...there, ...back].join("L")}Z`;
    }
    piece = [];
  };
  for (let i = 0; i < xs.length; i++) {
    if (isMissing(low[i]) || isMissing(high[i])) close();
    else piece.push(i);
  }
  close();
  return found;
}

function isMissing(value: number | null | undefined): boolean {
  return value === null || value === undefined || !Number.isFinite(value);
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
