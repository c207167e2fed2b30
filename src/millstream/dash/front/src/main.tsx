// The page of `millstream dash`, and of a report in one file: the same code, with another source of answers.

import { render } from "preact";
import type { ReportAnswers } from "./api.ts";
import { App } from "./app.tsx";
import { EmbeddedSource, LiveSource } from "./source.ts";
import "./style.css";
import { storedTheme, storeTheme } from "./theme.ts";

storeTheme(storedTheme());
const embedded = document.getElementById("answers")?.textContent;
const root = document.getElementById("app");
if (root !== null) {
  const source = embedded ? new EmbeddedSource(JSON.parse(embedded) as ReportAnswers) : new LiveSource();
  render(<App source={source} />, root);
}
