// Bundles the views into ../static: what a wheel carries and what the browser gets.
import { build } from "esbuild";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const STATIC = new URL("../static/", import.meta.url);

await mkdir(STATIC, { recursive: true });
await build({
  absWorkingDir: fileURLToPath(new URL(".", import.meta.url)),
  entryPoints: { runview: "src/runview.js", graphview: "src/graphview.js", panel: "src/panel.js" },
  outdir: fileURLToPath(STATIC),
  bundle: true,
  format: "esm",
  target: "es2022",
  loader: { ".frame.js": "text" }, // a script for a frame of its own
  minify: true,
  legalComments: "none",
  logLevel: "warning",
});
const uplot = JSON.parse(await readFile(new URL("node_modules/uplot/package.json", import.meta.url)));
const license = await readFile(new URL("node_modules/uplot/LICENSE", import.meta.url), "utf8");
await writeFile(
  new URL("THIRD_PARTY_LICENSES.txt", STATIC),
  `runview.js and runview.css contain uPlot ${uplot.version} (https://github.com/leeoniya/uPlot):\n\n${license}`,
);
