// What is shown, as the hash of the URL: `#/RUN/VIEW?key=value`. A link copied from the address bar shows the same again.

export const VIEWS = ["overview", "timeline", "flow", "rollouts", "runs"] as const;
export type View = (typeof VIEWS)[number];

export interface Route {
  readonly run: string | null; // null: the newest run
  readonly view: View;
  readonly options: Readonly<Record<string, string>>;
}

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").map(decode);
  const view = VIEWS.find((one) => one === parts[1]) ?? "overview";
  return { run: parts[0] || null, view, options: Object.fromEntries(new URLSearchParams(query)) };
}

export function formatRoute(route: Route): string {
  const given = Object.entries(route.options).filter(([, value]) => value !== "");
  given.sort(([a], [b]) => (a < b ? -1 : 1));
  const query = new URLSearchParams(given).toString().replace(/%2C/g, ",");
  return `#/${encodeURIComponent(route.run ?? "")}/${route.view}${query && `?${query}`}`;
}

/** The route with some options set; an empty text removes one. */
export function withOptions(route: Route, changed: Readonly<Record<string, string>>): Route {
  return { ...route, options: { ...route.options, ...changed } };
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function numberOption(route: Route, name: string): number | null {
  const text = route.options[name];
  const value = text === undefined || text === "" ? NaN : Number(text);
  return Number.isFinite(value) ? value : null;
}

export function listOption(route: Route, name: string): string[] {
  return (route.options[name] ?? "").split(",").filter(Boolean).map(decode);
}

/** Names in one option: each encoded, so that a comma in a name stays in it. */
export function joinOption(names: readonly string[]): string {
  return names.map((name) => name.replace(/[%,]/g, encodeURIComponent)).join(",");
}
