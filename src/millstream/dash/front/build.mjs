// Bundles src/ into ../static: `make dash-page`. With --test: the tests into .test/, for `node --test`.
// The first line of app.js has a hash of the sources; tests/dash/test_bundle.py computes it again, without node.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "static");

function sources() {
  const found = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath ?? entry.path, entry.name)).split(sep).join("/"));
  return ["build.mjs", "package-lock.json", "tsconfig.json", ...found].sort();
}

function digest() {
  const hash = createHash("sha256");
  for (const name of sources()) hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
  return hash.digest("hex");
}

const common = {
  absWorkingDir: here,
  bundle: true,
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
};

if (process.argv.includes("--test")) {
  rmSync(join(here, ".test"), { recursive: true, force: true });
  const tests = readdirSync(join(here, "test")).filter((name) => name.endsWith(".test.ts"));
  await build({
    ...common,
    entryPoints: tests.map((name) => join("test", name)),
    outdir: ".test",
    outExtension: { ".js": ".mjs" },
    platform: "node",
    format: "esm",
  });
} else {
  mkdirSync(out, { recursive: true });
  await build({
    ...common,
    entryPoints: { app: "src/main.tsx" },
    outdir: out,
    minify: true,
    target: ["es2022", "safari16"],
    format: "iife",
    banner: { js: `/* sources ${digest()} */` },
  });
  copyFileSync(join(here, "src", "index.html"), join(out, "index.html"));
}
