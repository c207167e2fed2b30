// What views use: the route, the list of runs, and answers that follow the run.

import { createContext } from "preact";
import { useCallback, useContext, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RunRow } from "./api.ts";
import type { Feed } from "./live.ts";
import type { Route } from "./route.ts";
import { AnswerError, address, type Answers, type Request, type Source } from "./source.ts";

export interface Page {
  readonly source: Source;
  readonly feed: Feed;
  readonly route: Route;
  readonly run: RunRow | null; // the one that the route names
  /** Shows another route. `isStep`: as a step that the browser's back button undoes. */
  go(route: Route, isStep?: boolean): void;
  set(options: Readonly<Record<string, string>>, isStep?: boolean): void;
}

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  const page = useContext(PageContext);
  if (page === null) throw new Error("outside of the page");
  return page;
}

export interface Answer<T> {
  readonly value: T | null; // the newest one that is known, also while a newer one is asked for
  readonly error: AnswerError | null;
  readonly isLoading: boolean;
}

const kept = new Map<string, unknown>(); // by address: shown at once when a view is opened again
const MOST_KEPT = 60;

function keep(key: string, value: unknown): void {
  kept.delete(key);
  kept.set(key, value);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value as string);
}

interface Cell {
  answer: Answer<unknown>;
  asked: string; // the address and the stamp of the last request
  wanted: (() => Promise<unknown>) | null; // what to ask for next
  url: string;
  isBusy: boolean;
  restUntil: number; // milliseconds: before this, the same address is not asked for again
  timer: number;
}

const REST = 3; // times as long as an answer took: a slow answer does not become a load on the machine that trains

/** The answers to some requests, each asked for again when its stamp changes. One request of a subject at a time, the newest
 * wins; the last value stays until the next one is there, also when options of the same subject change: nothing flickers. */
export function useAnswers<K extends keyof Answers>(requests: ReadonlyArray<Asked<K>>): Answer<Answers[K]>[] {
  const { source, feed } = usePage();
  const [, redraw] = useState(0);
  const cells = useRef(new Map<string, Cell>());
  const isGone = useRef(false);
  useEffect(() => {
    isGone.current = false;
    return () => {
      isGone.current = true;
    };
  }, []);

  const work = async (cell: Cell): Promise<void> => {
    cell.isBusy = true;
    while (cell.wanted !== null && !isGone.current) {
      const { wanted, url } = cell;
      const began = performance.now();
      cell.wanted = null;
      try {
        const value = await wanted();
        keep(url, value);
        cell.answer = { value, error: null, isLoading: false };
      } catch (error) {
        const found = error instanceof AnswerError ? error : new AnswerError("wrong", String(error));
        cell.answer = { ...cell.answer, error: found, isLoading: false };
      }
      cell.restUntil = performance.now() + REST * (performance.now() - began);
      if (!isGone.current) redraw((times) => times + 1);
      if (cell.url === url) break; // at most a newer stamp: after a rest
    }
    cell.isBusy = false;
    start(cell, cell.url);
  };
  const start = (cell: Cell, before: string): void => {
    window.clearTimeout(cell.timer);
    if (cell.wanted === null || cell.isBusy || isGone.current) return;
    const rest = cell.url === before ? cell.restUntil - performance.now() : 0;
    if (rest > 0) cell.timer = window.setTimeout(() => void work(cell), rest);
    else void work(cell);
  };

  const found = requests.map(({ request }) => {
    const key = subject(request);
    let cell = cells.current.get(key);
    if (cell === undefined) {
      const value = kept.get(address(request)) ?? null;
      cell = { answer: { value, error: null, isLoading: true }, asked: "", wanted: null, url: "", isBusy: false, restUntil: 0, timer: 0 };
      cells.current.set(key, cell);
    }
    return cell;
  });
  useEffect(() => {
    const current = new Set(found);
    for (const [key, cell] of cells.current) if (!current.has(cell)) cells.current.delete(key);
    requests.forEach(({ request, stamp }, i) => {
      const cell = found[i] as Cell;
      const url = address(request);
      const asked = `${url} ${stamp} ${feed.numReturns}`;
      if (cell.asked === asked) return;
      const before = cell.url;
      cell.asked = asked;
      cell.url = url;
      cell.wanted = () => source.get(request);
      start(cell, before);
    });
  });
  return found.map((cell) => cell.answer as Answer<Answers[K]>);
}

export interface Asked<K extends keyof Answers> {
  readonly request: Request<K>;
  readonly stamp: string;
}

function subject(request: Request<keyof Answers>): string {
  return `${request.kind}/${request.run ?? ""}/${request.group ?? ""}/${request.part ?? ""}`;
}

const NOTHING: Answer<never> = { value: null, error: null, isLoading: false };

/** The answer to one request; null asks nothing. */
export function useAnswer<K extends keyof Answers>(request: Request<K> | null, stamp: string): Answer<Answers[K]> {
  const found = useAnswers(request === null ? [] : [{ request, stamp }]);
  return found[0] ?? NOTHING;
}

/** The width and height of an element, as it changes. */
export function useSize<T extends Element>(): [(element: T | null) => void, { width: number; height: number }] {
  const [size, setSize] = useState({ width: 0, height: 0 });
  const observer = useRef<ResizeObserver | null>(null);
  const attach = useCallback((element: T | null) => {
    observer.current?.disconnect();
    if (element === null) return;
    const read = (): void => {
      const { width, height } = element.getBoundingClientRect();
      setSize((old) => (old.width === width && old.height === height ? old : { width, height }));
    };
    read();
    observer.current = new ResizeObserver(read);
    observer.current.observe(element);
  }, []);
  return [attach, size];
}

/** Keys that no field and no button takes. The handler says by `true` that it took the key. */
export function useKeys(handle: (event: KeyboardEvent) => boolean): void {
  const newest = useRef(handle);
  useLayoutEffect(() => {
    newest.current = handle;
  });
  useEffect(() => {
    const listen = (event: KeyboardEvent): void => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      const target = event.target as Element | null;
      if (target?.closest("input:not([type=checkbox]):not([type=radio]), textarea, select, dialog[open]")) return;
      if (newest.current(event)) event.preventDefault();
    };
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, []);
}

/** Whether the page is dark, as it changes: for what is drawn on a canvas. */
export function useIsDark(): boolean {
  const query = window.matchMedia("(prefers-color-scheme: dark)");
  const read = (): boolean => {
    const chosen = document.documentElement.dataset["theme"];
    return chosen === "dark" || (chosen !== "light" && query.matches);
  };
  const [isDark, setIsDark] = useState(read);
  useEffect(() => {
    const update = (): void => setIsDark(read());
    const observer = new MutationObserver(update);
    observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    query.addEventListener("change", update);
    return () => {
      observer.disconnect();
      query.removeEventListener("change", update);
    };
  }, []);
  return isDark;
}
