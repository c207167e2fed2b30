// Small pieces that all views use.

import type { ComponentChildren } from "preact";
import type { RunRow } from "../api.ts";
import type { AnswerError } from "../source.ts";

export function Panel(props: { title: string; note?: ComponentChildren; children: ComponentChildren; class?: string }) {
  return (
    <section class={`panel ${props.class ?? ""}`} aria-label={props.title}>
      <h2>
        {props.title}
        {props.note !== undefined && <span class="note">{props.note}</span>}
      </h2>
      {props.children}
    </section>
  );
}

export function Empty(props: { children: ComponentChildren }) {
  return <p class="empty">{props.children}</p>;
}

/** What cannot be shown, and what to do. */
export function Problem(props: { error: AnswerError | null; children?: ComponentChildren }) {
  if (props.error === null || props.error.failure === "gone") return null; // the page's head says so already
  return (
    <p class="problem" role="alert">
      <b aria-hidden="true">!</b> {props.error.message}
    </p>
  );
}

const STATES: Readonly<Record<RunRow["state"], { mark: string; words: string }>> = {
  running: { mark: "●", words: "writes events now" },
  ended: { mark: "✓", words: "has made all its steps" },
  stopped: { mark: "■", words: "was stopped; millstream train --resume continues it" },
  failed: { mark: "✕", words: "ended with an error" },
  dead: { mark: "✕", words: "its process is gone; millstream train --resume continues it" },
  unreadable: { mark: "?", words: "cannot be read" },
};

export function State(props: { run: RunRow }) {
  const { mark, words } = STATES[props.run.state];
  return (
    <span class={`state ${props.run.state}`} title={words}>
      <i aria-hidden="true">{mark}</i> {props.run.state}
    </span>
  );
}

export function Choice<T extends string>(props: {
  label: string;
  value: T;
  options: ReadonlyArray<readonly [T, string]>;
  onChange: (value: T) => void;
}) {
  return (
    <div class="choice" role="group" aria-label={props.label}>
      {props.options.map(([value, title]) => (
        <button type="button" key={value} aria-pressed={value === props.value} onClick={() => props.onChange(value)}>
          {title}
        </button>
      ))}
    </div>
  );
}

export function Select<T extends string>(props: {
  label: string;
  value: T;
  options: ReadonlyArray<readonly [T, string]>;
  onChange: (value: T) => void;
  isLabelHidden?: boolean;
}) {
  return (
    <label class="field">
      <span class={props.isLabelHidden ? "hidden" : ""}>{props.label}</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value as T)}>
        {props.options.map(([value, title]) => (
          <option key={value} value={value}>
            {title}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Check(props: { label: string; isOn: boolean; onChange: (isOn: boolean) => void; title?: string }) {
  return (
    <label class="check" title={props.title}>
      <input type="checkbox" checked={props.isOn} onChange={(event) => props.onChange(event.currentTarget.checked)} />
      {props.label}
    </label>
  );
}

/** A share of 1 as a bar; the text beside it says the same. */
export function Meter(props: { share: number; class?: string }) {
  const share = Math.min(1, Math.max(0, props.share));
  return (
    <span class={`meter ${props.class ?? ""}`} aria-hidden="true">
      <span style={{ width: `${share * 100}%` }} />
    </span>
  );
}

export function Facts(props: { rows: ReadonlyArray<readonly [string, ComponentChildren]> }) {
  return (
    <dl class="facts">
      {props.rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
