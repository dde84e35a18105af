// Small uPlot charts with a common cursor; colors are read from the page's theme at every draw.
import uPlot from "uplot";
import { byteUnit, changed, number, withUnit } from "./format.js";

export const TITLES = {
  loss: "Loss", throughput: "Throughput", memory: "Memory", lr: "Learning rate", evaluation: "Evaluation",
};
const HEIGHT = 190;
const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const MARK_FONT = `bold ${FONT}`;
const MARK = { height: 14, padding: 4, gap: 2, rows: 5, near: 8 }; // in CSS pixels
const EVALUATION = { name: "evaluation", label: "evaluation", unit: "", chart: "loss" };

const node = (tag, className, text) => {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text; // never HTML: names come from the user
  return made;
};

/** Returns the last known value at or before `index`. */
const known = (values, index) => {
  for (let i = Math.min(index, values.length - 1); i >= 0; i--) if (values[i] != null) return values[i];
  return null;
};

/** Returns the space for the longest tick label, as in uPlot's "dynamic axis size" demo. */
const axisSize = (u, labels, axisIndex, cycle) => {
  if (cycle > 1) return u.axes[axisIndex]._size;
  const longest = (labels ?? []).reduce((a, b) => (b != null && b.length > a.length ? b : a), "");
  u.ctx.font = u.axes[axisIndex].font[0];
  return Math.ceil(u.ctx.measureText(longest).width / devicePixelRatio) + 14;
};

export class Chart {
  /**
   * @param {string} kind a key of TITLES
   * @param {import("./series.js").Series} series
   * @param {string} cursor the key that synchronizes the cursors of one view
   */
  constructor(kind, series, cursor) {
    this.kind = kind;
    this.series = series;
    this.cursor = cursor;
    this.drawn = ""; // columns of the current plot
    this.root = node("figure", `ortlab-chart ortlab-chart-${kind}`);
    this.head = node("figcaption", "ortlab-chart-head");
    this.plot = node("div", "ortlab-plot");
    this.tip = node("div", "ortlab-tip"); // the list below the charts has the same text
    this.tip.hidden = true;
    this.root.append(this.head, this.plot, this.tip);
  }

  #columns() {
    if (this.kind === "evaluation") {
      return this.series.scores().map((name) => ({ name, label: name, unit: "", chart: "evaluation" }));
    }
    const columns = this.series.columns.filter((c) => c.chart === this.kind && this.series.has(c.name));
    if (this.kind === "loss" && this.series.evaluations.length) columns.push(EVALUATION);
    return columns;
  }

  #data(columns) {
    if (this.kind === "evaluation") {
      const points = this.series.evaluations;
      return [points.map((p) => p[0]), ...columns.map(({ name }) => points.map((p) => p[2][name] ?? null))];
    }
    const steps = this.series.data[0];
    const plain = columns
      .filter((c) => c !== EVALUATION)
      .map(({ name }) => (this.kind === "throughput" ? this.series.smoothed(name) : this.series.values(name)));
    if (!columns.includes(EVALUATION)) return [steps, ...plain];
    const points = this.series.evaluations;
    return uPlot.join([[steps, ...plain], [points.map((p) => p[0]), points.map((p) => p[1])]]);
  }

  /** Width available for the plot in pixels; reading it after a change forces a layout. */
  get width() {
    return this.plot.clientWidth;
  }

  /** Draws the current series, `width` pixels wide. */
  draw(width) {
    const columns = this.#columns();
    const data = this.#data(columns);
    this.root.classList.toggle("ortlab-empty", columns.length === 0);
    this.root.hidden = this.kind === "evaluation" && columns.length === 0; // most runs have none
    this.root.dataset.points = String(this.series.length);
    if (width < 50) return;
    const wanted = columns.map((c) => c.name).join();
    if (this.drawn !== wanted || !this.u) {
      this.u?.destroy();
      this.#head(columns);
      this.u = columns.length ? new uPlot(this.#options(columns, width), data, this.plot) : null;
      this.drawn = wanted;
    } else {
      if (this.u.width !== width) this.u.setSize({ width, height: HEIGHT });
      this.u.setData(data);
    }
    this.#legend(columns);
  }

  redraw() {
    this.u?.redraw(false, true);
  }

  destroy() {
    this.u?.destroy();
    this.u = null;
  }

  #head(columns) {
    this.values = columns.map(() => node("span", "ortlab-value"));
    this.head.replaceChildren(
      node("span", "ortlab-chart-title", TITLES[this.kind]),
      ...columns.map((column, i) => {
        const entry = node("span", "ortlab-entry");
        const mark = node("span", `ortlab-mark ortlab-s${i}`);
        const label = column.label === TITLES[this.kind].toLowerCase() ? "" : column.label;
        entry.append(mark, node("span", "ortlab-label", label), this.values[i]);
        return entry;
      }),
    );
  }

  /** Shows the values under the cursor, or else the latest. */
  #legend(columns) {
    if (!this.u) return;
    const at = this.u.cursor.idx ?? this.u.data[0].length - 1;
    columns.forEach((column, i) => {
      this.values[i].textContent = withUnit(known(this.u.data[i + 1], at), column);
    });
    const now = columns.map((c, i) => `${c.label} ${this.values[i].textContent}`).join(", ");
    this.root.setAttribute("aria-label", `${TITLES[this.kind]}: ${now}`);
  }

  #color(name) {
    return getComputedStyle(this.root).getPropertyValue(name).trim() || "#888";
  }

  #options(columns, width) {
    const scaleOf = (c) => c.unit || "y";
    const scales = [...new Set(columns.map(scaleOf))];
    const zeroBased = this.kind !== "loss" && this.kind !== "evaluation";
    const text = () => this.#color("--ortlab-text2");
    const line = () => this.#color("--ortlab-grid");
    const axis = (extra) => ({
      stroke: text,
      font: FONT,
      labelFont: FONT,
      labelSize: 16,
      labelGap: 2,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line, width: 1, size: 4 },
      gap: 4,
      ...extra,
    });
    const range = (u, low, high, scale) => {
      if (low == null) return [0, 1];
      const base = zeroBased ? Math.min(0, low) : low;
      // More room above the second, as the curves of samples and tokens would coincide.
      const room = scale === scales[1] ? 0.4 : 0.08;
      const pad = (high - base) * room || Math.abs(high) * 0.1 || 1;
      return [zeroBased ? base : base - pad, high + pad];
    };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, scales.length > 1 ? 0 : 12, 0, 0],
      cursor: { sync: { key: this.cursor, setSeries: false }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        ...Object.fromEntries(scales.map((name) => [name, { range }])),
      },
      series: [{}, ...columns.map((column, i) => this.#line(column, i, scaleOf(column)))],
      axes: [
        axis({ label: "step", size: 24, space: 60, values: (u, ticks) => ticks.map((t) => (t % 1 ? "" : number(t))) }),
        ...scales.map((scale, i) => axis({ scale, ...this.#ticks(scale), side: i ? 1 : 3, size: axisSize,
          ...(i ? { grid: { show: false } } : {}) })),
      ],
      hooks: {
        setCursor: [(u) => {
          if (!this.u) return;
          this.#legend(columns);
          this.#point(u);
        }],
        draw: [(u) => this.#marks(u)],
      },
    };
  }

  /** Returns the x position of a settings change in CSS pixels, clamped to the plot. */
  #left(u, change) {
    const { min, max } = u.scales.x;
    return u.valToPos(Math.min(Math.max(change.step, min), max), "x");
  }

  /** Draws a numbered dashed line at each change; numbers that would overlap are placed lower. */
  #marks(u) {
    const { changes } = this.series;
    if (!changes.length || u.scales.x.min == null) return;
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.font = MARK_FONT.replace("11px", `${11 * ratio}px`);
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.lineWidth = ratio;
    const color = this.#color("--ortlab-change");
    const ends = Array(MARK.rows).fill(-Infinity);
    for (const change of changes) {
      const x = Math.round(bbox.left + this.#left(u, change) * ratio);
      ctx.strokeStyle = ctx.fillStyle = color;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const text = String(change.number);
      const width = Math.max(ctx.measureText(text).width + 2 * MARK.padding * ratio, MARK.height * ratio);
      const left = Math.min(Math.max(x - width / 2, bbox.left), bbox.left + bbox.width - width);
      const row = ends.findIndex((end) => left >= end);
      if (row < 0) continue; // no room; the list below has it
      ends[row] = left + width + MARK.gap * ratio;
      const top = bbox.top + row * (MARK.height + MARK.gap) * ratio;
      ctx.beginPath();
      ctx.roundRect(left, top, width, MARK.height * ratio, 3 * ratio);
      ctx.fill();
      ctx.fillStyle = "#fff";
      ctx.fillText(text, left + width / 2, top + (MARK.height / 2 + 0.5) * ratio);
    }
    ctx.restore();
  }

  /** Describes the changes near the pointer. */
  #point(u) {
    const x = u.cursor.left;
    const here = u.over.matches(":hover") && x >= 0
      ? this.series.changes.filter((change) => Math.abs(this.#left(u, change) - x) <= MARK.near)
      : [];
    this.tip.hidden = here.length === 0;
    if (here.length) this.tip.replaceChildren(...here.slice(-4).map((change) => node("div", "", `${change.number}  ${changed(change)}`)));
  }

  #line(column, i, scale) {
    const stroke = () => this.#color(`--ortlab-s${i}`);
    if (column === EVALUATION) {
      return { scale, stroke, width: 1.5, dash: [5, 4], points: { show: true, size: 7, fill: stroke, stroke } };
    }
    // Few points are also drawn as dots, so that the first step is visible.
    const few = (u, s) => u.data[s].length <= (this.kind === "evaluation" ? 50 : 2);
    // The first line is the widest, so that it stays visible below an equal one.
    return { scale, stroke, width: i ? 1.2 : 2.2, points: { show: few, size: 5, fill: stroke } };
  }

  /** Returns the tick labels and the unit of an axis. */
  #ticks(scale) {
    if (scale === "B") {
      let unit = byteUnit(0);
      return {
        splits: (u, axis, low, high, increment, space) => {
          unit = byteUnit(high);
          const step = [0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
            .map((n) => n * unit.bytes)
            .find((n) => high / n <= 5) ?? high / 4;
          const ticks = [];
          for (let at = 0; at <= high; at += step) ticks.push(at);
          return ticks;
        },
        values: (u, ticks) => ticks.map((t) => number(t / unit.bytes)),
        label: () => unit.name,
      };
    }
    return { values: (u, ticks) => ticks.map(number), ...(scale === "y" ? {} : { label: scale }) };
  }
}
