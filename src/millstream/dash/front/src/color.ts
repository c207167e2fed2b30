// Colors, after Okabe and Ito: they can be told apart with the common kinds of color blindness, on light and on dark. Colors
// never stand alone: work has a pattern or a label, curves have dashes, tokens have their value in text.

import type { LaneSpan } from "./api.ts";

export type Work = LaneSpan[2];
export type Pattern = "plain" | "stripes" | "dots" | "back" | "cross" | "lines";

export interface Look {
  readonly light: string;
  readonly dark: string;
  readonly pattern: Pattern;
  readonly title: string;
}

export const WORK: Readonly<Record<Work, Look>> = {
  generate: { light: "#0072b2", dark: "#3f9bd6", pattern: "plain", title: "generation" },
  train: { light: "#e69f00", dark: "#e69f00", pattern: "stripes", title: "training" },
  sync: { light: "#cc79a7", dark: "#d98cb6", pattern: "dots", title: "weight sync" },
  score: { light: "#f0e442", dark: "#d8cc3a", pattern: "back", title: "scoring" },
  environment: { light: "#56b4e9", dark: "#7cc8f0", pattern: "lines", title: "environment" },
  evaluate: { light: "#009e73", dark: "#22b58a", pattern: "cross", title: "evaluation" },
  wait: { light: "#c9ced4", dark: "#3d454e", pattern: "back", title: "waiting" },
  other: { light: "#8a929b", dark: "#7a838d", pattern: "plain", title: "other work" },
};

/** Curves of several runs: a color, a dash and a mark each. */
export const CURVES: ReadonlyArray<{ light: string; dark: string; dash: string; mark: string }> = [
  { light: "#0072b2", dark: "#4ba6e0", dash: "", mark: "●" },
  { light: "#d55e00", dark: "#f08a3c", dash: "6 3", mark: "▲" },
  { light: "#007a59", dark: "#22b58a", dash: "2 3", mark: "■" },
  { light: "#a8487f", dark: "#dd8fba", dash: "8 3 2 3", mark: "◆" },
  { light: "#8a6100", dark: "#e6b035", dash: "1 2", mark: "▼" },
  { light: "#3b7fa8", dark: "#86cdf2", dash: "10 4", mark: "○" },
  { light: "#555d66", dark: "#b3bbc4", dash: "4 2 1 2", mark: "△" },
  { light: "#6b6400", dark: "#e4da4d", dash: "3 6", mark: "□" },
];

export function curveLook(index: number): (typeof CURVES)[number] {
  return CURVES[index % CURVES.length] as (typeof CURVES)[number];
}

export const VERSION_HUES = 6; // classes v0 to v5 of the stylesheet: a version has the class of its number

export type TokenColor = "none" | "version" | "log_prob" | "ratio" | "advantage";
export const TOKEN_COLORS: readonly TokenColor[] = ["none", "version", "log_prob", "ratio", "advantage"];

/** The step, 0 to 4, of a log-probability: 0 is likely (from 0.9), 4 is very unlikely (below 0.01). */
export function logProbStep(value: number): number {
  const limits = [Math.log(0.9), Math.log(0.5), Math.log(0.1), Math.log(0.01)];
  return limits.filter((limit) => value < limit).length;
}

/** The step, -3 to 3, of a train/behaviour ratio: 0 within 5% of 1, 3 beyond a factor of 1.5. */
export function ratioStep(value: number): number {
  const size = Math.abs(Math.log(Math.max(value, 1e-9)));
  const steps = [Math.log(1.05), Math.log(1.2), Math.log(1.5)].filter((limit) => size > limit).length;
  return value < 1 ? -steps : steps;
}

/** The step, -2 to 2, of an advantage. */
export function advantageStep(value: number): number {
  const size = Math.abs(value) < 1e-6 ? 0 : Math.abs(value) < 0.5 ? 1 : 2;
  return value < 0 ? -size : size;
}

/** The class of a token in the stylesheet; "" without a value. */
export function tokenClass(color: TokenColor, value: number | null | undefined): string {
  if (color === "none" || value === null || value === undefined || !Number.isFinite(value)) return "";
  switch (color) {
    case "version":
      return `v${((value % VERSION_HUES) + VERSION_HUES) % VERSION_HUES}`;
    case "log_prob":
      return `l${logProbStep(value)}`;
    case "ratio":
      return `r${ratioStep(value)}`.replace("-", "n");
    case "advantage":
      return `a${advantageStep(value)}`.replace("-", "n");
  }
}
