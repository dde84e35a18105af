// A chart as a file: SVG and PNG of what is seen, CSV of the values. uPlot draws on canvases only.

const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const TEXT = "#333"; // on white, whatever the page's theme is: files are pasted elsewhere
const GRID = "#ddd";
const LINE = 18; // height of a line of text
const SCALE = 2; // pixels of a PNG per CSS pixel

/** Downloads a blob. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replaceAll(/[^\p{L}\p{N}._-]+/gu, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const escaped = (text) => String(text).replaceAll(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

/** Returns markup of an element; attributes and text are escaped, and so is what the user named. */
const tag = (name, attributes, text) => {
  const told = Object.entries(attributes).map(([key, value]) => ` ${key}="${escaped(value)}"`).join("");
  return text == null ? `<${name}${told}/>` : `<${name}${told}>${escaped(text)}</${name}>`;
};

const round = (value) => Math.round(value * 10) / 10;

/** Returns {d, dots} of a line of a plot, with gaps where values are missing. */
function path(u, index) {
  const [from, to] = u.series[0].idxs;
  const parts = [];
  const dots = [];
  let pen = false;
  // One point beyond each side, so that lines reach the edges of a zoomed plot, which clips them.
  for (let i = Math.max(from - 1, 0); i <= Math.min(to + 1, u.data[0].length - 1); i++) {
    const value = u.data[index][i];
    if (value === undefined) continue; // of another line of the same plot
    if (value === null) {
      pen = false;
      continue;
    }
    const place = [round(u.valToPos(u.data[0][i], "x")), round(u.valToPos(value, u.series[index].scale))];
    parts.push(`${pen ? "L" : "M"}${place.join(" ")}`);
    dots.push(place);
    pen = true;
  }
  return { d: parts.join(""), dots };
}

/** Returns the SVG of a chart as a blob; `picture` is that of Chart.picture. */
export function svg(picture) {
  return new Blob([markup(picture)], { type: "image/svg+xml" });
}

function markup({ u, title, run, marks, lines, mark }) {
  const ratio = devicePixelRatio;
  const box = Object.fromEntries(["left", "top", "width", "height"].map((side) => [side, u.bbox[side] / ratio]));
  const entries = legend(u, lines.filter(({ faint }) => !faint));
  const above = 2 * LINE + LINE * entries.lines + 6;
  const texts = [
    tag("text", { x: 8, y: 16, "font-weight": "bold", "font-size": 13 }, title),
    tag("text", { x: 8, y: 16 + LINE, fill: "#666" }, run),
  ];
  const axes = u.axes.flatMap((axis) => axisOf(u, axis, box));
  const curves = lines.flatMap(({ index, faint, color, dashed, dots }) => {
    const drawn = path(u, index);
    const width = u.series[index].width;
    const style = { fill: "none", stroke: color, "stroke-width": width, "stroke-linejoin": "round", ...(faint ? { opacity: 0.45 } : {}) };
    const points = dots || drawn.dots.length <= 2 ? drawn.dots : [];
    return [
      tag("path", { d: drawn.d, ...style, ...(dashed ? { "stroke-dasharray": "5 4" } : {}) }),
      ...points.map(([cx, cy]) => tag("circle", { cx, cy, r: 3, fill: color })),
    ];
  });
  const clip = tag("rect", { width: box.width, height: box.height });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${u.width}" height="${u.height + above}" font-family="${FONT}" font-size="11" fill="${TEXT}">`,
    tag("title", {}, title),
    tag("rect", { width: "100%", height: "100%", fill: "#fff" }),
    ...texts,
    `<g transform="translate(8 ${2 * LINE + 16})">${entries.text}</g>`,
    `<g transform="translate(${box.left} ${box.top + above})">`,
    `<clipPath id="plot">${clip}</clipPath>`,
    ...axes,
    `<g clip-path="url(#plot)">${curves.join("")}</g>`,
    ...marks.flatMap((one) => marked(one, box, one.kind === "change" ? mark : "#666")),
    "</g></svg>",
  ].join("");
}

/** Returns the names of the lines with their colors, wrapped to the width of the picture. */
function legend(u, lines) {
  const parts = [];
  let [x, y] = [0, 0];
  u.ctx.save(); // uPlot relies on its own font
  u.ctx.font = `11px ${FONT}`;
  for (const { label, color, dashed } of lines) {
    const width = 22 + u.ctx.measureText(label).width + 16;
    if (x && x + width > u.width - 16) [x, y] = [0, y + LINE];
    parts.push(
      tag("line", { x1: x, x2: x + 16, y1: y - 4, y2: y - 4, stroke: color, "stroke-width": 2.5, ...(dashed ? { "stroke-dasharray": "5 4" } : {}) }),
      tag("text", { x: x + 22, y }, label),
    );
    x += width;
  }
  u.ctx.restore();
  return { text: parts.join(""), lines: lines.length ? y / LINE + 1 : 0 };
}

/** Returns the ticks, labels and grid of an axis, as uPlot has placed them. */
function axisOf(u, axis, { width, height }) {
  if (!axis._show || axis._splits == null || u.scales[axis.scale].min == null) return [];
  const across = axis.side === 2;
  const right = axis.side === 1;
  const x = right ? width : 0;
  const parts = axis._splits.flatMap((split, i) => {
    const text = axis._values[i];
    const at = round(u.valToPos(split, axis.scale));
    if (text == null || text === "" || at < -1 || at > (across ? width : height) + 1) return [];
    const line = across ? { x1: at, x2: at, y1: 0, y2: height + 4 } : { x1: right ? width : -4, x2: right ? width + 4 : width, y1: at, y2: at };
    const place = across
      ? { x: at, y: height + 16, "text-anchor": "middle" }
      : { x: right ? x + 8 : -8, y: at + 4, "text-anchor": right ? "start" : "end" };
    return [tag("line", { ...line, stroke: GRID }), tag("text", place, text)];
  });
  const label = typeof axis.label === "function" ? axis.label() : axis.label;
  if (!label) return parts;
  const sizes = axis._size;
  if (across) return [...parts, tag("text", { x: width / 2, y: height + sizes + 8, "text-anchor": "middle" }, label)];
  const away = right ? width + sizes + 8 : -sizes - 2;
  const turned = { transform: `translate(${away} ${height / 2}) rotate(${right ? 90 : -90})`, "text-anchor": "middle" };
  return [...parts, tag("text", turned, label)];
}

function marked({ x, dashed, sign, box }, { height }, color) {
  return [
    ...(dashed ? [tag("line", { x1: x, x2: x, y1: 0, y2: height, stroke: color, "stroke-dasharray": dashed.join(" ") })] : []),
    ...(sign ? [tag("text", { x, y: sign.y + 3, "font-size": 9, "text-anchor": "middle", fill: color }, sign.text)] : []),
    ...(box
      ? [
        tag("rect", { x: box.left, y: box.top, width: box.width, height: box.height, rx: 3, fill: color }),
        tag("text", { x: box.left + box.width / 2, y: box.top + 11, "font-weight": "bold", "text-anchor": "middle", fill: "#fff" }, box.text),
      ]
      : []),
  ];
}

/** Returns the PNG of a chart as a blob: its SVG, drawn by the browser. */
export async function png(picture) {
  const address = URL.createObjectURL(svg(picture));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth * SCALE, image.naturalHeight * SCALE];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

/** Returns a table as CSV; a text that a spreadsheet would execute as a formula begins with an apostrophe. */
export function csv(table) {
  const cell = (value) => {
    if (typeof value !== "string") return value == null ? "" : String(value);
    const plain = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  };
  return new Blob([table.map((row) => `${row.map(cell).join(",")}\r\n`).join("")], { type: "text/csv" });
}
