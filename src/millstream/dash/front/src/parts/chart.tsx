// Curves over one axis, as SVG. The cursor belongs to the view: all charts of a view show the values at the same place.

import { useMemo } from "preact/hooks";
import type { SeriesCurve } from "../api.ts";
import { curveLook } from "../color.ts";
import { clock, num } from "../format.ts";
import { useIsDark, useSize } from "../hooks.ts";
import { band, extent, nearest, path, type Range, smooth, ticks, timeTicks } from "../scale.ts";

export interface Shown {
  readonly label: string;
  readonly curve: SeriesCurve;
  readonly look: number; // index of its color and dash
}

export interface ChartProps {
  readonly title: string;
  readonly href?: string;
  readonly unit?: string;
  readonly x: "step" | "seconds" | "samples";
  readonly xs: Range | null; // null: of the curves
  readonly curves: readonly Shown[];
  readonly cursor: number | null;
  readonly onCursor: (x: number | null) => void;
  readonly isSmooth?: boolean;
  readonly height?: number;
  readonly floor?: number; // a value that the axis always has
  readonly hasLegend?: boolean;
}

const LEFT = 44;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;
const SMOOTH = 0.9;

export function Chart(props: ChartProps) {
  const [attach, size] = useSize<SVGSVGElement>();
  const isDark = useIsDark();
  const height = props.height ?? 132;
  const wide = Math.max(80, size.width || 320);
  const xs = props.xs ?? extentOf(props.curves);
  const drawn = useMemo(
    () =>
      props.curves.map((shown) => ({
        ...shown,
        isSparse: shown.curve.x.length <= 40,
        mean: props.isSmooth && shown.curve.x.length > 40 ? smooth(shown.curve.values, SMOOTH) : shown.curve.values,
      })),
    [props.curves, props.isSmooth],
  );
  const ys = useMemo(
    () => extent(drawn.flatMap(({ curve, isSparse }) => (isSparse ? [curve.values, curve.low ?? [], curve.high ?? []] : [curve.values])), props.floor),
    [drawn, props.floor],
  );
  const x = (value: number): number => LEFT + ((value - xs.from) / (xs.to - xs.from || 1)) * (wide - LEFT - RIGHT);
  const y = (value: number): number => TOP + (1 - (value - ys.from) / (ys.to - ys.from)) * (height - TOP - BOTTOM);
  const xTicks = (props.x === "seconds" ? timeTicks : ticks)(xs, Math.max(3, wide / 75));
  const yTicks = ticks(ys, height > 200 ? 6 : 4);
  const paths = useMemo(
    () =>
      drawn.map(({ curve, mean, isSparse }) => ({
        line: path(curve.x, mean, x, y),
        raw: mean === curve.values ? "" : path(curve.x, curve.values, x, y),
        area: curve.low && curve.high ? band(curve.x, curve.low, curve.high, x, y) : "",
        isSparse,
      })),
    [drawn, xs.from, xs.to, ys, wide, height],
  );
  const point = (event: PointerEvent & { currentTarget: SVGSVGElement }): void => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (wide - LEFT - RIGHT);
    props.onCursor(share < -0.02 || share > 1.02 ? null : xs.from + share * (xs.to - xs.from));
  };
  const values = drawn.map((one) => valueAt(one, props.cursor));
  const isEmpty = drawn.every((one) => one.curve.values.every((value) => value === null));
  const words = isEmpty ? "no values yet" : drawn.map((one, i) => `${one.label} ${num(values[i]?.value)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        {props.href ? <a href={props.href}>{props.title}</a> : <span>{props.title}</span>}
        {props.unit && <span class="unit">{props.unit}</span>}
        {!props.hasLegend && drawn.length === 1 && <output>{num(values[0]?.value)}</output>}
      </figcaption>
      <svg
        ref={attach}
        role="img"
        aria-label={`${props.title} by ${props.x}: ${words}`}
        height={height}
        onPointerMove={point}
        onPointerDown={point}
        onPointerLeave={() => props.onCursor(null)}
      >
        {yTicks.at.map((at) => (
          <g key={at}>
            <line class="grid" x1={LEFT} x2={wide - RIGHT} y1={y(at)} y2={y(at)} />
            <text x={LEFT - 6} y={y(at) + 3.5} text-anchor="end">
              {axisNumber(at, yTicks.step)}
            </text>
          </g>
        ))}
        {xTicks.at.map((at) => {
          const text = props.x === "seconds" ? clock(at, xTicks.step) : num(at);
          return (
            <text key={at} x={Math.min(x(at), wide - 3.2 * text.length)} y={height - 5} text-anchor="middle">
              {text}
            </text>
          );
        })}
        {paths.map(({ line, raw, area, isSparse }, i) => {
          const { look } = drawn[i] as Shown;
          const { light, dark, dash } = curveLook(look);
          const color = isDark ? dark : light;
          return (
            <g key={i} stroke={color} fill="none">
              {area && <path d={area} fill={color} stroke="none" opacity={isSparse ? 0.16 : 0.13} />}
              {raw && <path d={raw} stroke-width="1" opacity="0.28" />}
              <path d={line} stroke-width="1.6" stroke-dasharray={dash} stroke-linejoin="round" />
              {isSparse &&
                (drawn[i] as Shown).curve.x.map((at, k) => {
                  const value = (drawn[i] as Shown).curve.values[k];
                  return value === null || value === undefined ? null : (
                    <circle key={k} cx={x(at)} cy={y(value)} r="2.2" fill={color} stroke="none" />
                  );
                })}
            </g>
          );
        })}
        {props.cursor !== null && props.cursor >= xs.from && props.cursor <= xs.to && (
          <g>
            <line class="cursor" x1={x(props.cursor)} x2={x(props.cursor)} y1={TOP} y2={height - BOTTOM} />
            {values.map((found, i) => {
              const { light, dark } = curveLook((drawn[i] as Shown).look);
              return found === null || found.value === null ? null : (
                <circle key={i} cx={x(found.x)} cy={y(found.value)} r="3" fill={isDark ? dark : light} class="dot" />
              );
            })}
          </g>
        )}
        {isEmpty && (
          <text x={wide / 2} y={height / 2} text-anchor="middle">
            no values yet
          </text>
        )}
      </svg>
      {props.hasLegend && (
        <ul class="legend">
          {drawn.map((one, i) => (
            <li key={one.label}>
              <Swatch look={one.look} />
              <span class="name">{one.label}</span>
              <output>{num(values[i]?.value)}</output>
            </li>
          ))}
        </ul>
      )}
    </figure>
  );
}

/** A short piece of a curve, with its color and dash. */
export function Swatch(props: { look: number }) {
  const isDark = useIsDark();
  const { light, dark, dash } = curveLook(props.look);
  return (
    <svg class="swatch" width="22" height="8" aria-hidden="true">
      <line x1="1" x2="21" y1="4" y2="4" stroke={isDark ? dark : light} stroke-width="2" stroke-dasharray={dash} />
    </svg>
  );
}

/** Without a cursor, the last value. */
function valueAt(one: { curve: SeriesCurve; mean: readonly (number | null)[] }, cursor: number | null): { x: number; value: number | null } | null {
  const { x } = one.curve;
  let i = cursor === null ? x.length - 1 : nearest(x, cursor);
  if (cursor === null) while (i > 0 && one.mean[i] === null) i--;
  return i < 0 ? null : { x: x[i] as number, value: one.mean[i] ?? null };
}

export function extentOf(curves: readonly Shown[]): Range {
  let from = Infinity;
  let to = -Infinity;
  for (const { curve } of curves) {
    if (!curve.x.length) continue;
    from = Math.min(from, curve.x[0] as number);
    to = Math.max(to, curve.x[curve.x.length - 1] as number);
  }
  return from < to ? { from, to } : from === to ? { from: from - 0.5, to: to + 0.5 } : { from: 0, to: 1 };
}

function axisNumber(value: number, step: number): string {
  if (Math.abs(value) >= 1e4) return num(value);
  if (step >= 1) return String(value);
  if (step < 1e-4) return value === 0 ? "0" : value.toExponential(0).replace("e-", "e−");
  return value.toFixed(Math.min(5, Math.ceil(-Math.log10(step) - 1e-9)));
}
