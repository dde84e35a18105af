// Ranks of a run on workers: one row per rank, and notes about all of them.
//
// The model's trait `ranks` is a list of
//   [rank, remark, 1 if it is still training, 1 if it is the slowest, loss, samples/s, step time in ms,
//    communication time in ms, bytes of parameters, gradients, optimizer state, rest of the step,
//    loss line, samples/s line]
// where null is unknown and a line is base64 with one byte per point: 1 to 255 are its height, 0 is a gap.
// The lines of all ranks have a common scale. `rank_notes` are lines of text.
import "./ranks.css";
import { KEYS } from "./form.js";
import { amount, milliseconds, number } from "./format.js";
import { make, setText } from "./elements.js";
import { HIGH, path } from "./spark.js";

const SVG = "http://www.w3.org/2000/svg";
const PARTS = ["parameters", "gradients", "optimizer state", "rest of the step"];
const HEADS = ["rank", "loss", "samples/s", "step", "communication", "step memory"];

const unknown = (value, show) => (value == null ? "–" : show(value));
const three = (value) => number(Number(value.toPrecision(3)));

/** A small line chart without axes. */
class Spark {
  constructor(name) {
    this.root = document.createElementNS(SVG, "svg");
    this.root.setAttribute("class", `ortlab-spark ortlab-spark-${name}`);
    this.root.setAttribute("preserveAspectRatio", "none");
    this.root.setAttribute("aria-hidden", "true"); // the number next to it is the last value
    this.line = document.createElementNS(SVG, "path");
    this.line.setAttribute("vector-effect", "non-scaling-stroke");
    this.root.append(this.line);
  }

  draw(line) {
    if (line === this.drawn) return;
    this.drawn = line;
    const { d, width } = path(line);
    this.root.setAttribute("viewBox", `0 -8 ${width} ${HIGH + 16}`);
    this.line.setAttribute("d", d);
  }
}

class Row {
  constructor() {
    const cell = (name, role, label, ...children) =>
      make("div", `ortlab-rank-cell ortlab-rank-${name}`, { role, ...(label ? { "data-label": label } : {}) }, ...children);
    const value = () => make("span", "ortlab-value");
    this.name = make("span", "ortlab-rank-number");
    this.slow = make("span", "ortlab-rank-slow", { title: "The other ranks wait for this one" }, "▲ slowest");
    this.remark = make("span", "ortlab-rank-remark");
    [this.loss, this.rate, this.step, this.communication, this.memory] = Array.from({ length: 5 }, value);
    this.lines = [new Spark("loss"), new Spark("rate")];
    this.waited = make("div", "ortlab-rank-waited");
    this.share = make("div", "ortlab-rank-bar", { role: "img" }, this.waited);
    this.pieces = PARTS.map((_, i) => make("div", `ortlab-rank-piece ortlab-s${i}`));
    this.stack = make("div", "ortlab-rank-stack", { role: "img" }, ...this.pieces);
    this.root = make("div", "ortlab-rank", { role: "row" },
      cell("name", "rowheader", "", this.name, this.slow, this.remark),
      cell("line", "cell", HEADS[1], this.lines[0].root, this.loss),
      cell("line", "cell", HEADS[2], this.lines[1].root, this.rate),
      cell("step", "cell", HEADS[3], this.step),
      cell("share", "cell", HEADS[4], this.share, this.communication),
      cell("memory", "cell", HEADS[5], this.stack, this.memory));
  }

  /** `most` is the size of the widest stack in bytes. */
  draw([rank, remark, current, slowest, loss, rate, stepMs, waitedMs, ...rest], most) {
    const sizes = rest.slice(0, PARTS.length);
    const [lossLine, rateLine] = rest.slice(PARTS.length);
    setText(this.name, `rank ${rank}`);
    setText(this.remark, remark);
    this.slow.hidden = !slowest;
    this.remark.hidden = !remark;
    this.root.classList.toggle("ortlab-gone", !current);
    this.root.classList.toggle("ortlab-slow", Boolean(slowest));
    this.lines[0].draw(lossLine);
    this.lines[1].draw(rateLine);
    setText(this.loss, unknown(loss, number));
    setText(this.rate, unknown(rate, three));
    setText(this.step, unknown(stepMs, milliseconds));
    const part = stepMs && waitedMs != null ? Math.min(waitedMs / stepMs, 1) : null;
    this.waited.style.width = `${100 * (part ?? 0)}%`;
    const percent = part == null ? "–" : `${Math.round(100 * part)}%`;
    setText(this.communication, percent);
    this.share.title = `${unknown(waitedMs, milliseconds)} of ${unknown(stepMs, milliseconds)} in collective operations, including the wait for other ranks`;
    this.share.setAttribute("aria-label", this.share.title);
    sizes.forEach((size, i) => (this.pieces[i].style.width = `${most ? (100 * (size ?? 0)) / most : 0}%`));
    setText(this.memory, unknown(sum(sizes), (size) => amount(size, "bytes")));
    const each = PARTS.map((name, i) => `${name} ${unknown(sizes[i], (size) => amount(size, "bytes"))}`);
    this.stack.title = each.join(", ");
    this.stack.setAttribute("aria-label", this.stack.title);
  }
}

/** Returns the sum of the known sizes; null if none is known. */
function sum(sizes) {
  const known = sizes.filter((size) => size != null);
  return known.length ? known.reduce((total, size) => total + size, 0) : null;
}

/** Section below the charts; hidden until there are ranks. */
export class Ranks {
  constructor() {
    const mark = (name, label) =>
      make("span", "ortlab-entry", {}, make("span", `ortlab-mark ${name}`), make("span", "ortlab-label", {}, label));
    const head = make("div", "ortlab-chart-head", {},
      make("span", "ortlab-chart-title", {}, "Workers"),
      ...PARTS.map((label, i) => mark(`ortlab-s${i}`, label)),
      mark("ortlab-rank-waited", "communication"));
    this.heads = make("div", "ortlab-rank ortlab-rank-heads", { role: "row" },
      ...HEADS.map((text) => make("div", "ortlab-rank-cell", { role: "columnheader" }, text)));
    // Many ranks are scrollable, with the keyboard too.
    this.table = make("div", "ortlab-rank-table", { role: "table", "aria-label": "ranks", tabindex: "0", ...KEYS }, this.heads);
    this.notes = make("div", "ortlab-lines");
    this.root = make("section", "ortlab-ranks", { "aria-label": "Workers" }, head, this.table, this.notes);
    this.rows = [];
  }

  draw(ranks, notes) {
    if (ranks === this.drawnRanks && notes === this.drawnNotes) return;
    [this.drawnRanks, this.drawnNotes] = [ranks, notes];
    this.root.hidden = ranks.length === 0;
    while (this.rows.length < ranks.length) {
      this.rows.push(new Row());
      this.table.append(this.rows.at(-1).root);
    }
    this.rows.splice(ranks.length).forEach((row) => row.root.remove());
    const most = Math.max(0, ...ranks.map((rank) => sum(rank.slice(8, 8 + PARTS.length)) ?? 0));
    ranks.forEach((rank, i) => this.rows[i].draw(rank, most));
    notes.forEach((text, i) => {
      if (!this.notes.children[i]) this.notes.append(make("div", "ortlab-line"));
      setText(this.notes.children[i], text);
    });
    [...this.notes.children].slice(notes.length).forEach((line) => line.remove());
  }
}
