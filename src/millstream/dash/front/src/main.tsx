// The page of `millstream dash`, and of a report in one file: the same code, with another source of answers.

import { render } from "preact";
import type { ReportAnswers } from "./api.ts";
import { App } from "./app.tsx";
import { EmbeddedSource, LiveSource } from "./source.ts";
import "./style.css";
import { storedTheme, storeTheme } from "./theme.ts";

const TOKEN = /^#token=(.+)$/;
const KEY = "millstream.token";

/** From the address that `millstream dash` printed, which is then shown without it; kept for reloads of this tab. */
function takeToken(): string | null {
  const found = TOKEN.exec(location.hash)?.[1] ?? null;
  if (found !== null) history.replaceState(null, "", location.pathname);
  try {
    if (found !== null) sessionStorage.setItem(KEY, found);
    return sessionStorage.getItem(KEY);
  } catch {
    return found; // a browser without storage: until the page is loaded again
  }
}

storeTheme(storedTheme());
const embedded = document.getElementById("answers")?.textContent;
const root = document.getElementById("app");
if (root !== null) {
  const source = embedded ? new EmbeddedSource(JSON.parse(embedded) as ReportAnswers) : new LiveSource(takeToken());
  render(<App source={source} />, root);
}
