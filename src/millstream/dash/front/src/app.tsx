// The page: its head, the view that the address names, the keys.

import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import type { RunRow } from "./api.ts";
import { percent, when } from "./format.ts";
import { type Page, PageContext, useKeys } from "./hooks.ts";
import { type Feed, Poller } from "./live.ts";
import { Empty, Select, State } from "./parts/bits.tsx";
import { Help } from "./parts/help.tsx";
import { formatRoute, parseRoute, type Route, type View, VIEWS, withOptions } from "./route.ts";
import type { Source } from "./source.ts";
import { nextTheme, storedTheme, storeTheme, type Theme } from "./theme.ts";
import { Flow } from "./views/flow.tsx";
import { Overview } from "./views/overview.tsx";
import { Rollouts } from "./views/rollouts.tsx";
import { Runs } from "./views/runs.tsx";
import { Timeline } from "./views/timeline.tsx";

const SHOW: Readonly<Record<View, (props: { run: RunRow }) => preact.JSX.Element>> = { overview: Overview, timeline: Timeline, flow: Flow, rollouts: Rollouts, runs: Runs };
const TITLES: Readonly<Record<View, string>> = { overview: "Overview", timeline: "Timeline", flow: "Flow", rollouts: "Rollouts", runs: "Runs" };
const KEPT = ["x"]; // options that a change of the view keeps
const THEMES: Readonly<Record<Theme, string>> = { auto: "◐", light: "☀", dark: "☾" };

export function App(props: { source: Source }) {
  const [feed, poller] = useFeed(props.source);
  const [route, go] = useRoute();
  const [theme, setTheme] = useState(storedTheme);
  const [isHelp, setIsHelp] = useState(false);
  const run = chooseRun(feed.runs, route.run);
  useEffect(() => storeTheme(theme), [theme]);
  useEffect(() => {
    document.title = run === null ? "millstream" : `${run.name}${run.steps > 0 ? ` · ${run.step}/${run.steps}` : ""} · millstream`;
  }, [run?.name, run?.step, run?.steps]);

  const set = useCallback((options: Readonly<Record<string, string>>, isStep = false) => go(withOptions(parseRoute(location.hash), options), isStep), [go]);
  const page = useMemo((): Page => ({ source: props.source, feed, route, run, go, set }), [props.source, feed, route, run, go, set]);
  const show = (view: View): void => go(viewRoute(route, run, view), true);
  useKeys((event) => {
    const number = Number(event.key) - 1;
    if (event.key !== "0" && VIEWS[number] !== undefined) show(VIEWS[number]);
    else if (event.key === "?") setIsHelp(true);
    else if (event.key === "t") setTheme(nextTheme(theme));
    else if (event.key === "p" && props.source.isLive) poller.setPaused(!feed.isPaused);
    else if (event.key === "/") document.getElementById("search")?.focus();
    else if ((event.key === "[" || event.key === "]") && run !== null) {
      const next = feed.runs[feed.runs.indexOf(run) + (event.key === "[" ? -1 : 1)];
      if (next !== undefined) go({ run: next.id, view: route.view, options: keep(route) }, true);
    } else return false;
    return true;
  });
  const View = SHOW[route.view];
  return (
    <PageContext.Provider value={page}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the view</a>
      <header>
        <div class="bar">
          <span class="brand">millstream</span>
          {feed.runs.length > 0 && (
            <Select label="Run" isLabelHidden value={run?.id ?? ""} options={runOptions(feed.runs, run, route.run)} onChange={(id) => go({ run: id, view: route.view, options: keep(route) }, true)} />
          )}
          {run !== null && <State run={run} />}
          <span class="space" />
          <Live feed={feed} source={props.source} onPause={() => poller.setPaused(!feed.isPaused)} />
          <button type="button" class="icon" aria-label={`Colors: ${theme}`} title={`Colors: ${theme} (t)`} onClick={() => setTheme(nextTheme(theme))}>{THEMES[theme]}</button>
          <button type="button" class="icon" aria-label="Keys and help" title="Keys and help (?)" onClick={() => setIsHelp(true)}>?</button>
        </div>
        <nav aria-label="Views">
          {VIEWS.map((view) => (
            <a key={view} href={formatRoute(viewRoute(route, run, view))} aria-current={view === route.view ? "page" : undefined}>
              {TITLES[view]}
            </a>
          ))}
        </nav>
      </header>
      <Banner feed={feed} run={run} wanted={route.run} />
      <main id="main" tabIndex={-1}>
        <h1 class="hidden">{TITLES[route.view]}{run && ` of ${run.name}`}</h1>
        {run === null ? <NoRun feed={feed} wanted={route.run} /> : run.state === "unreadable" && route.view !== "runs" ? <Unreadable run={run} /> : <View key={route.view === "runs" ? "" : run.id} run={run} />}
      </main>
      <Help isOpen={isHelp} onClose={() => setIsHelp(false)} version={feed.version} />
    </PageContext.Provider>
  );
}

function useFeed(source: Source): [Feed, Poller] {
  const poller = useMemo(() => new Poller(source, { now: () => Date.now(), set: (run, ms) => window.setTimeout(run, ms), clear: (id) => window.clearTimeout(id) }), [source]);
  const [feed, setFeed] = useState(poller.current);
  useEffect(() => {
    const stop = poller.subscribe(setFeed);
    const look = (): void => poller.setVisible(!document.hidden);
    document.addEventListener("visibilitychange", look);
    look();
    void poller.ask();
    return () => {
      stop();
      document.removeEventListener("visibilitychange", look);
    };
  }, [poller]);
  return [feed, poller];
}

function useRoute(): [Route, Page["go"]] {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const listen = (): void => setHash(location.hash);
    window.addEventListener("hashchange", listen);
    return () => window.removeEventListener("hashchange", listen);
  }, []);
  const go = useCallback((route: Route, isStep = false) => {
    const next = formatRoute(route);
    if (next === location.hash) return;
    if (isStep) history.pushState(null, "", next);
    else history.replaceState(null, "", next);
    setHash(next);
  }, []);
  return [useMemo(() => parseRoute(hash), [hash]), go];
}

/** The run of the address; without one, a run that is active, else the newest. */
export function chooseRun(runs: readonly RunRow[], id: string | null): RunRow | null {
  if (id !== null) return runs.find((run) => run.id === id) ?? null;
  const readable = runs.filter((run) => run.state !== "unreadable");
  const newest = [...readable].sort((a, b) => Number(b.state === "running") - Number(a.state === "running") || (b.started ?? 0) - (a.started ?? 0));
  return newest[0] ?? runs[0] ?? null;
}

function keep(route: Route): Record<string, string> {
  return Object.fromEntries(Object.entries(route.options).filter(([name]) => KEPT.includes(name)));
}

function viewRoute(route: Route, run: RunRow | null, view: View): Route {
  if (view === route.view) return route;
  // The two runs of the timeline and those that are compared are the same choice.
  const other = route.options["with"];
  const runs = view === "runs" && run !== null && other ? { runs: `${run.id},${other}` } : {};
  const chosen = (route.options["runs"] ?? "").split(",").find((id) => id && id !== run?.id);
  const pair = view === "timeline" && chosen ? { with: chosen } : {};
  return { run: run?.id ?? route.run, view, options: { ...keep(route), ...runs, ...pair } };
}

function runOptions(runs: readonly RunRow[], run: RunRow | null, wanted: string | null): (readonly [string, string])[] {
  const known = runs.map((one) => [one.id, one.name] as const);
  return run === null ? [["", wanted ?? "choose a run"], ...known] : known;
}

function Live(props: { feed: Feed; source: Source; onPause: () => void }) {
  const { feed, source } = props;
  if (!source.isLive) return <span class="note">report of {when(source.written)}</span>;
  const [mark, words] = feed.failure !== null ? ["○", "no answer"] : feed.isPaused ? ["❚❚", "paused"] : ["●", "live"];
  return (
    <button type="button" class={`live ${feed.failure !== null ? "gone" : ""}`} aria-pressed={feed.isPaused} title="Pause the live update (p)" onClick={props.onPause}>
      <i aria-hidden="true">{mark}</i> {words}
    </button>
  );
}

function Banner(props: { feed: Feed; run: RunRow | null; wanted: string | null }) {
  const { feed, run } = props;
  const rows: string[] = []; // what is wrong
  if (feed.failure === "gone") {
    const since = feed.since === null ? "" : ` since ${new Date(feed.since).toLocaleTimeString()}. The page shows what it knew then`;
    rows.push(`The server does not answer${since}. If it was stopped, start it again: millstream dash. The page continues by itself.`);
  } else if (feed.failure === "refused") rows.push(`The server refused: ${feed.message} Open the address that millstream dash printed, with its token.`);
  else if (feed.failure === "wrong") rows.push(`The server could not list the runs: ${feed.message}`);
  if (run !== null && run.problem !== null && run.state !== "unreadable") rows.push(run.problem);
  return (
    <div class="banners" role="status">
      {rows.map((text) => <p class="banner bad" key={text}>{text}</p>)}
      {run !== null && run.indexed < 0.98 && run.state !== "unreadable" && <p class="banner">The events are being read: {percent(run.indexed)} so far, and what is shown covers these.</p>}
    </div>
  );
}

function NoRun(props: { feed: Feed; wanted: string | null }) {
  const { feed, wanted } = props;
  if (feed.isFirst) return <Empty>{feed.failure === null ? "Reading the runs …" : "No run is known yet."}</Empty>;
  if (wanted !== null) return <Empty>There is no run “{wanted}” here. Choose another one above.</Empty>;
  return <Empty>No run yet. Train one: <code>millstream train recipes/demo.toml</code>. It appears here by itself.</Empty>;
}

function Unreadable(props: { run: RunRow }) {
  return (
    <div class="view">
      <p class="problem" role="alert"><b aria-hidden="true">!</b> <b>{props.run.name}</b> cannot be read: {props.run.problem ?? "no reason is known"}</p>
      <Empty>{props.run.path}</Empty>
    </div>
  );
}
