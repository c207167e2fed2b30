// Rollouts: a long list, of which only the rows in view are asked for and drawn, and next to it the group that is read.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { RolloutRow, RolloutsAnswer, RunRow } from "../api.ts";
import { count, num, signed } from "../format.ts";
import { type Asked, useAnswers, useKeys, usePage, useSize } from "../hooks.ts";
import { Empty, Problem, Select } from "../parts/bits.tsx";
import { formatRoute, numberOption, withOptions } from "../route.ts";
import { rowsInView } from "../scale.ts";
import { Group, nameOf } from "./group.tsx";

const PAGE = 60; // rows of one request

const SORTS = [["step", "step"], ["reward", "reward"], ["advantage", "advantage"], ["length", "length"], ["lag", "lag"]] as const;
type Sort = (typeof SORTS)[number][0];

export function Rollouts(props: { run: RunRow }) {
  const { route } = usePage();
  const group = numberOption(route, "group");
  return (
    <div class={`view rollouts ${group === null ? "" : "reading"}`}>
      <List run={props.run} />
      {group === null ? (
        <div class="group none"><Empty>Choose a rollout to read it: what the model wrote, turn by turn, next to the others of its group.</Empty></div>
      ) : (
        <Group key={group} run={props.run} group={group} />
      )}
    </div>
  );
}

/** Where a rollout is shown, in the address. */
export function placeOf(row: RolloutRow): Record<string, string> {
  return { group: String(row.group_id), member: String(row.member), attempt: String(row.attempt) };
}

function List(props: { run: RunRow }) {
  const { run } = props;
  const { route, set, go } = usePage();
  const sort = (route.options["sort"] as Sort) || "step";
  const isDescending = route.options["order"] !== "up";
  const filters = { query: route.options["query"] ?? "", environment: route.options["environment"] ?? "", fate: route.options["fate"] ?? "", step: route.options["step"] ?? "" };
  const options = { sort, descending: isDescending ? 1 : 0, ...filters };
  const [scrolled, setScrolled] = useState(0);
  const [attach, size] = useSize<HTMLDivElement>();
  const box = useRef<HTMLDivElement | null>(null);
  const rowHeight = useRowHeight();
  const [total, setTotal] = useState(0);
  const [first, end] = rowsInView(scrolled, size.height || 600, rowHeight, Math.max(total, 1));
  const pages: number[] = [];
  for (let page = Math.floor(first / PAGE); page * PAGE < Math.max(end, 1); page++) pages.push(page);
  const answers = useAnswers<"rollouts">(
    pages.map((page): Asked<"rollouts"> => ({ request: { kind: "rollouts", run: run.id, part: String(page), options: { ...options, offset: page * PAGE, limit: PAGE } }, stamp: run.stamp })),
  );
  const answer = answers.find((one) => one.value !== null)?.value ?? null;
  useEffect(() => {
    if (answer !== null && answer.total !== total) setTotal(answer.total);
  }, [answer?.total]);
  const rows = useMemo(() => {
    const found = new Map<number, RolloutRow>();
    pages.forEach((page, i) => answers[i]?.value?.rows.forEach((row, k) => found.set(page * PAGE + k, row)));
    return found;
  }, [pages.join(), ...[0, 1, 2].map((i) => answers[i]?.value)]);

  const chosen = { group: numberOption(route, "group"), member: numberOption(route, "member") ?? 0, attempt: numberOption(route, "attempt") };
  const isChosen = (row: RolloutRow): boolean => row.group_id === chosen.group && row.member === chosen.member && row.attempt === (chosen.attempt ?? row.attempt);
  const open = (row: RolloutRow): void => set(placeOf(row), chosen.group === null);
  useKeys((event) => {
    if (event.key === "Escape" && chosen.group !== null) {
      set({ group: "", member: "", attempt: "" }, true);
      return true;
    }
    if (event.key !== "j" && event.key !== "k") return false;
    const now = [...rows].find(([, row]) => isChosen(row))?.[0];
    const index = now === undefined ? first : now + (event.key === "j" ? 1 : -1);
    const next = rows.get(index);
    if (next === undefined) return true;
    open(next);
    const element = box.current;
    if (element !== null) {
      const top = index * rowHeight;
      if (top < element.scrollTop) element.scrollTop = top;
      else if (top + rowHeight > element.scrollTop + element.clientHeight) element.scrollTop = top + rowHeight - element.clientHeight;
    }
    return true;
  });
  const change = (changed: Record<string, string>): void => {
    if (box.current !== null) box.current.scrollTop = 0;
    set(changed);
  };
  return (
    <section class="list" aria-label="Rollouts">
      <Filters answer={answer} sort={sort} isDescending={isDescending} filters={filters} onChange={change} />
      <Problem error={answers[0]?.error ?? null} />
      {answer !== null && <Kept answer={answer} run={run} isFiltered={Object.values(filters).some(Boolean)} />}
      {answer?.why_none == null && <div
        class="rows"
        role="table"
        aria-label="Rollouts"
        aria-rowcount={total + 1}
        tabIndex={0}
        ref={(element) => {
          box.current = element;
          attach(element);
        }}
        onScroll={(event) => setScrolled(event.currentTarget.scrollTop)}
      >
        <Heads sort={sort} isDescending={isDescending} onSort={change} />
        <div role="rowgroup" class="tall" style={{ height: `${total * rowHeight}px` }}>
          {Array.from({ length: Math.max(0, Math.min(end, total) - first) }, (_, i) => first + i).map((index) => {
            const row = rows.get(index);
            return row === undefined ? (
              <div key={index} class="row loading" role="row" aria-rowindex={index + 2} style={{ top: `${index * rowHeight}px` }}>
                <span role="cell">…</span>
              </div>
            ) : (
              <Row
                key={index}
                row={row}
                top={index * rowHeight}
                index={index}
                isChosen={isChosen(row)}
                href={formatRoute(withOptions(route, placeOf(row)))}
                onOpen={() => go(withOptions(route, placeOf(row)), chosen.group === null)}
              />
            );
          })}
        </div>
      </div>}
    </section>
  );
}

/** Rows have two lines on a narrow page. */
function useRowHeight(): number {
  const query = window.matchMedia("(max-width: 700px)");
  const [isNarrow, setIsNarrow] = useState(query.matches);
  useEffect(() => {
    const update = (): void => setIsNarrow(query.matches);
    query.addEventListener("change", update);
    return () => query.removeEventListener("change", update);
  }, []);
  return isNarrow ? 52 : 28;
}

function Kept(props: { answer: RolloutsAnswer; run: RunRow; isFiltered: boolean }) {
  const { total, num_kept, num_read, num_away, why_none } = props.answer;
  const search = searchWords(props.answer);
  if (why_none !== null) return <Empty>{why_none}</Empty>;
  if (total === 0 && props.isFiltered) return <Empty>No rollout matches. {num_read < num_kept && `${num(num_read)} of ${num(num_kept)} were read so far. `}{search}</Empty>;
  if (total === 0) return <Empty>No rollout has ended yet.</Empty>;
  const words = [props.isFiltered ? `${num(total)} of ${count(num_kept, "rollout")}` : count(total, "rollout")];
  if (num_read < num_kept) words.push(`${num(num_read)} of ${num(num_kept)} read so far`);
  if (search) words.push(search);
  if (num_away > 0) words.push(`${num(num_away)} not kept (rollout.keep_gb)`);
  return <p class="note kept">{words.join(" · ")}</p>;
}

/** How far the search has come; "": through everything, or nothing is searched for. */
export function searchWords(answer: RolloutsAnswer): string {
  const { num_kept, num_searched, is_searching } = answer;
  if (num_searched === null) return "";
  if (is_searching) return `searched ${num(num_searched)} of ${num(num_kept)} so far`;
  return num_searched < num_kept ? `searched the newest ${num(num_searched)} of ${num(num_kept)}` : "";
}

interface FilterProps {
  readonly answer: RolloutsAnswer | null;
  readonly sort: Sort;
  readonly isDescending: boolean;
  readonly filters: { query: string; environment: string; fate: string; step: string };
  onChange(changed: Record<string, string>): void;
}

function Filters(props: FilterProps) {
  const { answer, filters } = props;
  const timer = useRef(0);
  const later = (changed: Record<string, string>): void => {
    window.clearTimeout(timer.current);
    timer.current = window.setTimeout(() => props.onChange(changed), 250);
  };
  const all = (names: readonly string[], chosen: string): (readonly [string, string])[] => {
    const known = chosen && !names.includes(chosen) ? [...names, chosen] : names;
    return [["", "all"], ...known.filter(Boolean).map((name) => [name, name] as const)];
  };
  return (
    <form class="tools" role="search" onSubmit={(event) => event.preventDefault()}>
      <label class="field grow">
        <span class="hidden">Search in prompts, answers, tools and fates</span>
        <input
          type="search"
          id="search"
          placeholder="search in prompts, answers, tools, fates  ( / )"
          defaultValue={filters.query}
          onInput={(event) => later({ query: event.currentTarget.value })}
          onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()}
        />
      </label>
      <label class="field">
        <span>step</span>
        <input type="text" inputMode="numeric" pattern="[0-9]*" class="short" placeholder="all" defaultValue={filters.step} onInput={(event) => later({ step: event.currentTarget.value.replace(/\D/g, "") })} />
      </label>
      {answer !== null && (answer.fates.length > 1 || filters.fate) && <Select label="fate" value={filters.fate} options={all(answer.fates, filters.fate)} onChange={(fate) => props.onChange({ fate })} />}
      {answer !== null && (answer.environments.filter(Boolean).length > 1 || filters.environment) && (
        <Select label="environment" value={filters.environment} options={all(answer.environments, filters.environment)} onChange={(environment) => props.onChange({ environment })} />
      )}
      <span class="phone">
        <Select label="sort by" value={props.sort} options={SORTS} onChange={(sort) => props.onChange({ sort: sort === "step" ? "" : sort })} />
        <button type="button" aria-label={props.isDescending ? "Descending" : "Ascending"} onClick={() => props.onChange({ order: props.isDescending ? "up" : "" })}>
          {props.isDescending ? "↓" : "↑"}
        </button>
      </span>
    </form>
  );
}

const COLUMNS: ReadonlyArray<readonly [Sort | "", string, string]> = [
  ["", "rollout", "its group and its number in it"],
  ["step", "step", "that trained it"],
  ["reward", "reward", ""],
  ["advantage", "adv.", "advantage"],
  ["length", "tokens", "that the model sampled"],
  ["lag", "lag", "versions between its start and its training"],
  ["", "fate", ""],
  ["", "what the model wrote", ""],
];

function Heads(props: { sort: Sort; isDescending: boolean; onSort: (changed: Record<string, string>) => void }) {
  return (
    <div role="rowgroup" class="heads">
      <div class="row" role="row" aria-rowindex={1}>
        {COLUMNS.map(([sort, title, words]) => {
          const isSorted = sort !== "" && sort === props.sort;
          const order = isSorted ? (props.isDescending ? "descending" : "ascending") : "none";
          const click = (): void => props.onSort({ sort: sort === "step" ? "" : sort, order: isSorted && props.isDescending ? "up" : "" });
          return (
            <span key={title} role="columnheader" title={words} {...(sort ? { "aria-sort": order } : {})}>
              {sort ? <button type="button" onClick={click}>{title}{isSorted && <i aria-hidden="true">{props.isDescending ? " ↓" : " ↑"}</i>}</button> : title}
            </span>
          );
        })}
      </div>
    </div>
  );
}

function Row(props: { row: RolloutRow; top: number; index: number; isChosen: boolean; href: string; onOpen: () => void }) {
  const { row } = props;
  const click = (event: MouseEvent): void => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    props.onOpen();
  };
  return (
    <div class={`row ${props.isChosen ? "chosen" : ""}`} role="row" aria-rowindex={props.index + 2} aria-current={props.isChosen ? "true" : undefined} style={{ top: `${props.top}px` }} onClick={click}>
      <span role="cell"><a href={props.href} title={`group ${row.group_id}, member ${nameOf(row)}`}>{row.group_id}.{row.member}{row.attempt ? `/${row.attempt}` : ""}</a></span>
      <span role="cell" data-name="step">{row.step === null ? "–" : num(row.step)}</span>
      <span role="cell" data-name="reward" class="strong">{num(row.reward)}</span>
      <span role="cell" data-name="adv.">{signed(row.advantage)}</span>
      <span role="cell" data-name="tokens">{num(row.num_tokens)}</span>
      <span role="cell" data-name="lag">{num(row.lag)}</span>
      <span role="cell" class={`fate ${row.fate}`}>{row.fate}</span>
      <span role="cell" class="text">{row.head.replace(/\s+/g, " ") || <i class="dim">nothing</i>}</span>
    </div>
  );
}
