// Marks over the charts of a run: numbered changes of settings, evaluations, checkpoints and pauses.
import { changed, number } from "./format.js";

/** Kinds that have a row of signs above the plot, with their signs. */
export const SIGNS = { evaluation: "▲", checkpoint: "■", pause: "❚❚" };
export const ROW = 11; // height of a row of signs in CSS pixels
const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const BOX = { height: 14, padding: 4, gap: 2, rows: 5 }; // around a change's number, in CSS pixels
const NEAR = 8; // CSS pixels between the crosshair and a mark that it describes
const TOLD = 4;

/** Returns the marks of a series as [{kind, step, number, text()}], in order of kinds. */
export function marksOf(series) {
  const evaluations = series.evaluations.map(([step, loss, scores]) => ({
    kind: "evaluation", step, text: () => `step ${number(step)}: ${evaluated(loss, scores)}`,
  }));
  const others = series.marks.map(([kind, step, text]) => ({ kind, step, text: () => `step ${number(step)}: ${text}` }));
  const changes = series.changes.map((change) => ({
    kind: "change", step: change.step, number: change.number, text: () => `${change.number}  ${changed(change)}`,
  }));
  return [...evaluations, ...others, ...changes];
}

function evaluated(loss, scores) {
  const values = Object.entries({ ...(loss == null ? {} : { loss }), ...scores });
  return ["evaluation", ...values.map(([name, value]) => `${name} ${number(value)}`)].join(" · ");
}

/** Returns the kinds of marks that have signs, in the order of their rows. */
export function signed(marks) {
  return Object.keys(SIGNS).filter((kind) => marks.some((mark) => mark.kind === kind));
}

/** Returns the texts of the marks nearest to `x`, both in CSS pixels. */
export function near(marks, x, left) {
  return marks
    .map((mark) => ({ mark, away: Math.abs(left(mark) - x) }))
    .filter(({ away }) => away <= NEAR)
    .sort((a, b) => a.away - b.away)
    .slice(0, TOLD)
    .map(({ mark }) => mark.text());
}

/**
 * Places the marks: [{x, kind, dashed, sign: {text, y}, box: {left, top, width, height, text}}] in CSS pixels
 * of the plot, so that the page and the exported SVG agree. Signs and numbers that would overlap others of
 * their row are left out, or placed lower; the crosshair and the list below the charts have them all.
 * `measure` returns the width of a number, `zoomed` is true if the plot shows a part of the run.
 */
export function placed(marks, left, width, measure, zoomed) {
  const rows = signed(marks);
  const ends = Array(BOX.rows).fill(-Infinity);
  const last = {};
  const found = [];
  for (const mark of marks) {
    const x = left(mark);
    if (mark.kind === "change") {
      if (zoomed && !(x >= 0 && x <= width)) continue;
      const at = Math.min(Math.max(x, 0), width); // a change before the first point is at the edge
      const text = String(mark.number);
      const wide = Math.max(measure(text) + 2 * BOX.padding, BOX.height);
      const start = Math.min(Math.max(at - wide / 2, 0), width - wide);
      const row = ends.findIndex((end) => start >= end);
      const box = { left: start, top: row * (BOX.height + BOX.gap), width: wide, height: BOX.height, text };
      if (row >= 0) ends[row] = start + wide + BOX.gap;
      found.push({ x: at, kind: mark.kind, dashed: [4, 3], ...(row < 0 ? {} : { box }) });
    } else if (x >= 0 && x <= width && !(x - last[mark.kind] < ROW - 2)) {
      last[mark.kind] = x;
      const sign = { text: SIGNS[mark.kind], y: (rows.indexOf(mark.kind) - rows.length + 0.5) * ROW };
      found.push({ x, kind: mark.kind, ...(mark.kind === "pause" ? { dashed: [1, 3] } : {}), sign });
    }
  }
  return found;
}

/** Draws placed marks on the canvas of a chart. */
export function draw(u, places, { change, plain }) {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.lineWidth = ratio;
  for (const { x, kind, dashed, sign, box } of places) {
    const at = Math.round(bbox.left + x * ratio);
    ctx.strokeStyle = ctx.fillStyle = kind === "change" ? change : plain;
    if (dashed) {
      ctx.setLineDash(dashed.map((length) => length * ratio));
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    if (sign) {
      ctx.font = `${(kind === "pause" ? 7 : 9) * ratio}px ${FONT}`;
      ctx.fillText(sign.text, at, bbox.top + sign.y * ratio);
    }
    if (box) {
      const [left, top] = [bbox.left + box.left * ratio, bbox.top + box.top * ratio];
      ctx.beginPath();
      ctx.roundRect(left, top, box.width * ratio, box.height * ratio, 3 * ratio);
      ctx.fill();
      ctx.fillStyle = "#fff";
      ctx.font = `bold ${11 * ratio}px ${FONT}`;
      ctx.fillText(box.text, left + (box.width / 2) * ratio, top + (box.height / 2 + 0.5) * ratio);
    }
  }
  ctx.restore();
}
