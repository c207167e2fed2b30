// One group: its task, its members, and what one of them wrote, turn by turn and token by token; or all of them side by side.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { GroupAnswer, MemberRow, RolloutLife, RolloutRow, RunRow, TokenColumns, TurnRow } from "../api.ts";
import { TOKEN_COLORS, type TokenColor, tokenClass, VERSION_HUES } from "../color.ts";
import { duration, num, signed, visible } from "../format.ts";
import { useAnswer, useKeys, usePage } from "../hooks.ts";
import { Check, Empty, Facts, Problem, Select } from "../parts/bits.tsx";
import { numberOption } from "../route.ts";

const COLOR_TITLES: Readonly<Record<TokenColor, string>> = {
  none: "nothing",
  version: "version",
  log_prob: "log-probability",
  ratio: "train/behaviour ratio",
  advantage: "advantage",
};
type Values = readonly (number | null)[] | null;

/** What tokens are colored by; null: it is not recorded. */
export function valuesOf(tokens: TokenColumns, color: TokenColor): Values {
  switch (color) {
    case "none":
      return null;
    case "version":
      return tokens.versions;
    case "log_prob":
      return tokens.log_probs;
    case "ratio":
      return ratiosOf(tokens);
    case "advantage":
      return tokens.advantages;
  }
}

/** Of each token: its probability in the learner when it was trained, over that in the engine when it was sampled. */
function ratiosOf(tokens: TokenColumns): Values {
  const { log_probs, trained_log_probs } = tokens;
  if (log_probs === null || trained_log_probs === null) return null;
  return trained_log_probs.map((trained, i) => {
    const sampled = log_probs[i] ?? null;
    return trained === null || sampled === null ? null : Math.exp(trained - sampled);
  });
}

/** The member, and the attempt if it is not the first. */
export function nameOf(row: RolloutRow): string {
  return row.attempt ? `${row.member}, attempt ${row.attempt}` : String(row.member);
}

/** This attempt of the member, or its last one; the first member if there is none. */
export function memberOf(answer: GroupAnswer, member: number, attempt: number | null): MemberRow | undefined {
  const own = answer.members.filter((one) => one.row.member === member).reverse();
  return own.find((one) => one.row.attempt === attempt) ?? own[0] ?? answer.members[0];
}

export function Group(props: { run: RunRow; group: number }) {
  const { run, group } = props;
  const { route, set } = usePage();
  const { value, error } = useAnswer({ kind: "group", run: run.id, group }, run.stamp);
  const isBeside = route.options["beside"] === "1";
  const color = TOKEN_COLORS.find((one) => one === route.options["color"]) ?? "version";
  const chosen = value === null ? undefined : memberOf(value, numberOption(route, "member") ?? 0, numberOption(route, "attempt"));
  const choose = (row: RolloutRow): void => set({ member: String(row.member), attempt: String(row.attempt) });
  const show = (by: number): void => {
    const at = value?.members.findIndex((one) => one === chosen) ?? -1;
    const next = value?.members[at + by];
    if (next !== undefined) choose(next.row);
  };
  useKeys((event) => {
    if (event.key === "h" || event.key === "l") show(event.key === "h" ? -1 : 1);
    else if (event.key === "c") set({ color: TOKEN_COLORS[(TOKEN_COLORS.indexOf(color) + 1) % TOKEN_COLORS.length] as string });
    else if (event.key === "b") set({ beside: isBeside ? "" : "1" });
    else return false;
    return true;
  });
  return (
    <section class="group" aria-label={`Group ${group}`}>
      <div class="tools">
        <button type="button" class="close" onClick={() => set({ group: "", member: "", attempt: "" }, true)} aria-label="Back to the list" title="Esc">←</button>
        <h2>Group {group}{value && <span class={`fate ${value.fate}`}>{value.fate}</span>}</h2>
        <Select label="color by" value={color} options={TOKEN_COLORS.map((one) => [one, COLOR_TITLES[one]] as const)} onChange={(one) => set({ color: one })} />
        <Check label="side by side" isOn={isBeside} onChange={(isOn) => set({ beside: isOn ? "1" : "" })} title="b" />
      </div>
      <Problem error={error} />
      {value === null && error === null && <Empty>Reading group {group} …</Empty>}
      {value !== null && chosen !== undefined && (
        <>
          <Members answer={value} chosen={chosen} onChoose={choose} />
          <ColorLegend color={color} member={chosen} />
          {isBeside ? <Beside answer={value} color={color} /> : <Member key={nameOf(chosen.row)} member={chosen} color={color} />}
        </>
      )}
    </section>
  );
}

function Members(props: { answer: GroupAnswer; chosen: MemberRow; onChoose: (row: RolloutRow) => void }) {
  const rewards = props.answer.members.flatMap((one) => (one.row.reward === null ? [] : [one.row.reward]));
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  return (
    <div class="members">
      <ol aria-label="Members of the group">
        {props.answer.members.map((one) => (
          <li key={nameOf(one.row)}>
            <button type="button" aria-pressed={one === props.chosen} onClick={() => props.onChoose(one.row)} title={`member ${nameOf(one.row)}: reward ${num(one.row.reward)}, ${one.row.fate}`}>
              <span class="dim">{nameOf(one.row)}</span> {one.row.reward === null ? one.row.fate : num(one.row.reward)}
            </button>
          </li>
        ))}
      </ol>
      <span class="note">mean reward {num(mean)}</span>
    </div>
  );
}

function Member(props: { member: MemberRow; color: TokenColor }) {
  const { member, color } = props;
  const { row } = member;
  const parts = Object.entries(member.reward_parts);
  return (
    <div class="member">
      <Facts
        rows={[
          ["reward", num(row.reward)],
          ["advantage", signed(row.advantage)],
          ["tokens", num(row.num_tokens)],
          ["lag", num(row.lag)],
          ["start version", num(row.start_version)],
          ["step", row.step === null ? "not trained" : num(row.step)],
          ["finish", member.finish || "–"],
          ...(row.attempt ? [["attempt", String(row.attempt)] as const] : []),
          ...(row.environment ? [["environment", row.environment] as const] : []),
          ["task", row.task || "–"],
          ...parts.map(([name, value]) => [name, num(value)] as const),
        ]}
      />
      {member.why && <p class="problem"><b aria-hidden="true">!</b> {member.why}</p>}
      <Life life={member.life} />
      <Turns turns={member.turns} color={color} />
    </div>
  );
}

function Beside(props: { answer: GroupAnswer; color: TokenColor }) {
  const first = props.answer.members[0];
  const prompt = first?.turns.filter((turn) => turn.role === "prompt") ?? [];
  return (
    <>
      <Turns turns={prompt} color="none" />
      <div class="beside" tabIndex={0} role="region" aria-label="Members side by side">
        {props.answer.members.map((one) => (
          <section key={nameOf(one.row)} aria-label={`Member ${nameOf(one.row)}`}>
            <h3>
              {nameOf(one.row)} <b>{num(one.row.reward)}</b>
              <span class="note">adv. {signed(one.row.advantage)} · {num(one.row.num_tokens)} tokens · lag {num(one.row.lag)}</span>
            </h3>
            <Turns turns={one.turns.filter((turn) => turn.role !== "prompt")} color={props.color} />
          </section>
        ))}
      </div>
    </>
  );
}

// ---- life ----------------------------------------------------------------------------------------------------------------

const POINTS: ReadonlyArray<readonly [keyof RolloutLife, string, string]> = [
  ["admitted", "queued", "wait"],
  ["started", "generating", "generate"],
  ["generated", "reward", "reward"],
  ["settled", "in the store", "store"],
  ["taken", "training", "train"],
  ["trained", "", ""],
];

/** The phases between the moments that are known. A rollout without a moment at which its group was scored has its reward when it
 * was generated: from then on it is in the store. */
export function phasesOf(life: RolloutLife): { title: string; look: string; seconds: number }[] {
  const known = POINTS.flatMap(([name, title, look]) => {
    const at = life[name];
    if (at === null) return [];
    const isStored = name === "generated" && life.settled === null;
    return [{ at, title: isStored ? "in the store" : title, look: isStored ? "store" : look }];
  });
  return known.slice(0, -1).map(({ at, title, look }, i) => ({ title, look, seconds: Math.max(0, (known[i + 1]?.at ?? at) - at) }));
}

function Life(props: { life: RolloutLife }) {
  const { life } = props;
  const phases = phasesOf(life);
  if (!phases.length) return null;
  const total = phases.reduce((sum, one) => sum + one.seconds, 0);
  return (
    <div class="life">
      <div class="bar" role="img" aria-label={`Its life: ${phases.map((one) => `${one.title} ${duration(one.seconds)}`).join(", ")}`}>
        {phases.map((one) => (
          <span key={one.title} class={one.look} style={{ flexGrow: total > 0 ? one.seconds / total : 1 }} title={`${one.title} ${duration(one.seconds)}`} />
        ))}
      </div>
      <ul class="legend">
        {phases.map((one) => (
          <li key={one.title}><i class={`block ${one.look}`} aria-hidden="true" />{one.title} <output>{duration(one.seconds)}</output></li>
        ))}
        <li class="dim">from {duration(life.admitted ?? life.started)}, in all <output>{duration(total)}</output></li>
      </ul>
    </div>
  );
}

// ---- turns and tokens ----------------------------------------------------------------------------------------------------

function Turns(props: { turns: readonly TurnRow[]; color: TokenColor }) {
  const [token, setToken] = useState<string | null>(null); // the one under the pointer, in words
  const parts = new Set(props.turns.map((turn) => turn.part));
  const agents = new Set(props.turns.map((turn) => turn.agent));
  return (
    <div class="turns">
      {props.turns.map((turn, i) => (
        <article key={i} class={`turn ${turn.role}`}>
          <h4>
            {turn.role}
            {agents.size > 1 && ` · agent ${turn.agent}`}
            {parts.size > 1 && ` · part ${turn.part}`}
            {turn.reward !== null && turn.reward !== 0 && <span class="note">reward {signed(turn.reward)}</span>}
          </h4>
          {turn.tokens !== null && turn.role === "model" ? <Tokens tokens={turn.tokens} color={props.color} onToken={setToken} /> : <pre class="text">{turn.text}</pre>}
        </article>
      ))}
      {!props.turns.length && <Empty>It has no turns.</Empty>}
      <p class={`token ${token === null ? "" : "shown"}`} aria-live="polite">{token}</p>
    </div>
  );
}

/** Tokens with the class of their value. `onToken` gets the one under the pointer, or moved to with the arrow keys, in words. */
function Tokens(props: { tokens: TokenColumns; color: TokenColor; onToken: (words: string | null) => void }) {
  const { tokens, color } = props;
  const [at, setAt] = useState<number | null>(null);
  const box = useRef<HTMLPreElement>(null);
  const values = useMemo(() => valuesOf(tokens, color), [tokens, color]);
  useEffect(() => {
    if (at !== null) box.current?.querySelector(".at")?.scrollIntoView({ block: "nearest" });
    props.onToken(at === null ? null : described(tokens, at));
  }, [at]);
  const over = (event: PointerEvent): void => {
    const found = (event.target as Element).closest("[data-i]");
    if (found !== null) setAt(Number(found.getAttribute("data-i")));
  };
  const key = (event: KeyboardEvent): void => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    setAt(Math.min(tokens.texts.length - 1, Math.max(0, (at ?? -1) + by)));
  };
  return (
    <pre class={`text tokens ${color}`} ref={box} tabIndex={0} role="region" aria-label="Tokens: the arrow keys move" onPointerOver={over} onPointerLeave={() => setAt(null)} onBlur={() => setAt(null)} onKeyDown={key}>
      {tokens.texts.map((text, i) => (
        <span key={i} data-i={i} class={`${tokenClass(color, values?.[i])} ${i === at ? "at" : ""}`}>
          {visible(text)}
        </span>
      ))}
    </pre>
  );
}

function described(tokens: TokenColumns, i: number): string {
  const words = [`token ${i + 1} of ${tokens.texts.length}: ${JSON.stringify(tokens.texts[i] ?? "")}`];
  const add = (values: Values, word: (value: number) => string): void => {
    const value = values?.[i];
    if (value !== null && value !== undefined) words.push(word(value));
  };
  add(tokens.versions, (value) => `version ${value}`);
  add(tokens.log_probs, (value) => `probability ${num(Math.exp(value))} (log ${num(value)})`);
  add(tokens.trained_log_probs, (value) => `when trained ${num(Math.exp(value))} (log ${num(value)})`);
  add(ratiosOf(tokens), (value) => `ratio ${num(value)}`);
  add(tokens.advantages, (value) => `advantage ${signed(value)}`);
  add(tokens.reference_log_probs, (value) => `reference log ${num(value)}`);
  return words.join(" · ");
}

const SCALES: Readonly<Record<Exclude<TokenColor, "none" | "version">, ReadonlyArray<readonly [string, string]>>> = {
  log_prob: [["l0", "above 0.9"], ["l1", "above 0.5"], ["l2", "above 0.1"], ["l3", "above 0.01"], ["l4", "below"]],
  ratio: [["rn3", "below 1/1.5"], ["rn2", "below 1/1.2"], ["rn1", "below 1/1.05"], ["r0", "about 1"], ["r1", "above 1.05"], ["r2", "above 1.2"], ["r3", "above 1.5"]],
  advantage: [["an2", "below −0.5"], ["an1", "below 0"], ["a0", "0"], ["a1", "above 0"], ["a2", "above 0.5"]],
};

function ColorLegend(props: { color: TokenColor; member: MemberRow }) {
  const { color } = props;
  if (color === "none") return null;
  const isKnown = props.member.turns.some((turn) => turn.role === "model" && turn.tokens !== null && valuesOf(turn.tokens, color) !== null);
  if (!isKnown) return <p class="note">No {COLOR_TITLES[color]} is recorded for the tokens of this rollout.</p>;
  const versions = [...new Set(props.member.turns.flatMap((turn) => turn.tokens?.versions ?? []))].sort((a, b) => a - b).slice(0, 2 * VERSION_HUES);
  const rows = color === "version" ? versions.map((version) => [tokenClass("version", version), `version ${version}`] as const) : SCALES[color];
  return (
    <ul class={`legend tokens ${color}`} aria-label={`Colors by ${COLOR_TITLES[color]}`}>
      {color === "log_prob" && <li class="dim">probability</li>}
      {rows.map(([look, words]) => <li key={words}><span class={look}>abc</span> {words}</li>)}
    </ul>
  );
}
