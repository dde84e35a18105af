// Bundles the views into ../static, which wheels include and browsers load.
import { build } from "esbuild";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const STATIC = new URL("../static/", import.meta.url);

const WEB = new URL("node_modules/onnxruntime-web/", import.meta.url);
const WASM = "ort-wasm-simd-threaded.wasm";

/**
 * Wraps a module so that a page runs it once. anywidget imports the code of every widget separately, and a
 * page never releases a module: compiled code would accumulate with every execution of a cell.
 */
const once = (code, key) => `const run = () => {
const module = { exports: {} };
${code}return module.exports;
};
export default (globalThis[${JSON.stringify(key)}] ??= run()).default;
`;

await mkdir(STATIC, { recursive: true });
const { outputFiles } = await build({
  absWorkingDir: fileURLToPath(new URL(".", import.meta.url)),
  entryPoints: {
    runview: "src/runview.js",
    graphview: "src/graphview.js",
    panel: "src/panel.js",
    inpage: "src/inpage.js",
    history: "src/history.js",
    controls_guard: "src/controls_guard.js",
  },
  outdir: fileURLToPath(STATIC),
  bundle: true,
  format: "cjs",
  target: "es2022",
  loader: { ".frame.js": "text" }, // a script that runs in its own frame
  minify: true,
  legalComments: "none",
  logLevel: "warning",
  write: false,
});
for (const { path, text, hash } of outputFiles) {
  await writeFile(path, path.endsWith(".js") ? once(text, `ortlab ${hash}`) : text);
}
const uplot = JSON.parse(await readFile(new URL("node_modules/uplot/package.json", import.meta.url)));
const license = await readFile(new URL("node_modules/uplot/LICENSE", import.meta.url), "utf8");
const web = JSON.parse(await readFile(new URL("package.json", WEB)));
await writeFile(new URL(`${WASM}.gz`, STATIC), gzipSync(await readFile(new URL(`dist/${WASM}`, WEB)), { level: 9 }));
const licenses = `runview.js and runview.css contain uPlot ${uplot.version} (https://github.com/leeoniya/uPlot):\n\n${license}

inpage.js and ${WASM}.gz contain onnxruntime-web ${web.version}
(https://github.com/microsoft/onnxruntime), Copyright (c) Microsoft Corporation, under the same MIT License.\n`;
await writeFile(new URL("THIRD_PARTY_LICENSES.txt", STATIC), licenses);
