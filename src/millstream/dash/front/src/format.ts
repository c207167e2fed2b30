// Numbers, durations and texts as they are shown. Pure functions; figures are short, and of equal precision in a column.

/** A number with about four significant figures: 0.8123, 12.35, 1,204, 3.2M. A dash for no value. */
export function num(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0) return `−${num(-value)}`;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9, 2)}G`;
  if (size >= 1e6) return `${trim(value / 1e6, 2)}M`;
  if (size >= 1e5) return `${trim(value / 1e3, 1)}k`;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100) return value.toFixed(1);
  if (size >= 10) return value.toFixed(2);
  if (size >= 0.01) return value.toFixed(3);
  if (size === 0) return "0";
  return value.toExponential(1).replace("e-", "e−").replace("e+", "e");
}

/** With a real minus sign, and a plus for values above 0. */
export function signed(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value > 0 ? `+${num(value)}` : num(value);
}

function trim(value: number, digits: number): string {
  const text = value.toFixed(digits);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  return value > 0 && value < 1 ? "<1%" : `${Math.round(value)}%`;
}

/** A duration: 0.4 ms, 12.3 s, 4:05, 2:03:10, 3 d 04:00. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${trim(seconds * 1000, seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 60) return `${trim(seconds, seconds < 10 ? 2 : 1)} s`;
  const total = Math.round(seconds);
  const [days, hours, minutes, rest] = [
    Math.floor(total / 86400),
    Math.floor(total / 3600) % 24,
    Math.floor(total / 60) % 60,
    total % 60,
  ];
  if (days) return `${days} d ${pad(hours)}:${pad(minutes)}`;
  return hours ? `${hours}:${pad(minutes)}:${pad(rest)}` : `${minutes}:${pad(rest)}`;
}

/** A time on an axis whose ticks are `step` seconds apart: as many figures as tell two ticks apart. */
export function clock(seconds: number, step: number): string {
  if (seconds < 0) return `−${clock(-seconds, step)}`;
  const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step) - 1e-9));
  const shown = Number(seconds.toFixed(digits));
  if (shown < 60 && step < 60) return `${shown.toFixed(digits)} s`;
  const [hours, minutes, rest] = [Math.floor(shown / 3600), Math.floor(shown / 60) % 60, shown % 60];
  const tail = `${rest < 10 ? "0" : ""}${rest.toFixed(digits)}`;
  return hours ? `${hours}:${pad(minutes)}:${tail}` : `${minutes}:${tail}`;
}

function pad(value: number): string {
  return String(value).padStart(2, "0");
}

/** "1 rollout", "3 rollouts". */
export function count(value: number, noun: string): string {
  return `${value.toLocaleString("en-US")} ${noun}${value === 1 ? "" : "s"}`;
}

/** The local date and time of Unix seconds. */
export function when(unix: number | null): string {
  if (unix === null) return "–";
  const date = new Date(unix * 1000);
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

/** White space of a token made visible, where it would be invisible: a token of spaces alone, and ends of lines. */
export function visible(text: string): string {
  const shown = text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥");
  return /^ +$/.test(shown) ? "·".repeat(shown.length) : shown;
}
