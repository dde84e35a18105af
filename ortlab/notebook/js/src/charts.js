// Small uPlot charts with a common crosshair and zoom; colors are read from the page's theme at every draw.
import uPlot from "uplot";
import { button, make, setText } from "./elements.js";
import { csv, png, save, svg } from "./export.js";
import { KEYS } from "./form.js";
import { byteUnit, bytes, duration, number, withUnit } from "./format.js";
import { draw, near, placed, ROW, signed } from "./marks.js";

export const TITLES = {
  loss: "Loss", throughput: "Throughput", memory: "Memory", lr: "Learning rate", evaluation: "Evaluation",
};
export const PRINTED = 310; // width of a printed chart in CSS pixels: two fit on 800, beside JupyterLab's margins
const HEIGHT = 190;
const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const EVALUATION = { name: "evaluation", label: "evaluation", unit: "", chart: "loss" };
const AVERAGED = new Set(["loss", "throughput"]); // charts that the slider smooths: others have no noise
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const ZOOM_STEP = 2; // of the keys + and -
const NOTES = {
  throughput: ["without export, warm-up and pauses", "Left out of the rates: the first step of the run and after a change of "
    + "settings, which exports or compiles and warms up; pauses, evaluations and checkpoints. Mean of the last 2% of the run"],
  memory: ["of the whole process", "Resident size: memory of the process, with Python and libraries; its peak is the highest since "
    + "the previous step. CUDA: torch's allocator; its peak is the highest of the run. On workers these are sums over all of them. "
    + "Step memory, as in races and the settings, is what a step takes without Python and libraries"],
};

/** Returns the index of the last known value; -1 if there is none. */
const lastKnown = (values) => values.findLastIndex((value) => value != null);

/** Returns the space for the longest tick label, as in uPlot's "dynamic axis size" demo. */
const axisSize = (u, labels, axisIndex, cycle) => {
  if (cycle > 1) return u.axes[axisIndex]._size;
  const longest = (labels ?? []).reduce((a, b) => (b != null && b.length > a.length ? b : a), "");
  u.ctx.font = u.axes[axisIndex].font[0];
  return Math.ceil(u.ctx.measureText(longest).width / devicePixelRatio) + 14;
};

/** Returns the range of a logarithmic axis, from tick to tick: leading digits, or powers of 2. */
const logarithmic = (low, high, base) => {
  const unit = (value) => base ** Math.floor(Math.log(value) / Math.log(base));
  return [Math.floor(low / unit(low)) * unit(low), Math.ceil(high / unit(high)) * unit(high)];
};

export class Chart {
  /**
   * @param {string} kind a key of TITLES
   * @param {import("./series.js").Series} series
   * @param {import("./controls.js").Controls} controls the state that all charts of a view have in common
   * @param {string} cursor the key that synchronizes the cursors of one view
   */
  constructor(kind, series, controls, cursor) {
    this.kind = kind;
    this.series = series;
    this.controls = controls;
    this.cursor = cursor;
    this.drawn = ""; // what the current plot was made for
    this.hidden = new Set(); // names of columns
    this.marks = [];
    this.name = ""; // of the run, for the names of files
    this.#build();
  }

  #build() {
    this.root = make("figure", `ortlab-chart ortlab-chart-${this.kind}`);
    this.head = make("figcaption", "ortlab-chart-head");
    this.step = make("span", "ortlab-chart-step");
    this.note = make("span", "ortlab-chart-note");
    const title = TITLES[this.kind];
    const keys = "left and right move the crosshair, plus and minus zoom, Escape resets";
    this.plot = make("div", "ortlab-plot", { tabindex: "0", role: "group", "aria-label": `${title}: ${keys}`, ...KEYS });
    this.plot.addEventListener("keydown", (event) => this.#press(event));
    this.plot.addEventListener("blur", () => this.keyed && this.#point(null));
    this.tip = make("div", "ortlab-tip"); // the list below the charts has the changes' text, too
    this.tip.hidden = true;
    const formats = { PNG: () => png(this.picture()), SVG: () => svg(this.picture()), CSV: () => csv(this.table()) };
    const files = Object.entries(formats).map(([format, written]) => {
      const made = button("ortlab-export-format", format, `Save the chart ${title} as ${format}`, async () => {
        this.export.open = false;
        save(await written(), `${this.name}-${this.kind}.${format.toLowerCase()}`);
      });
      made.dataset.lmSuppressShortcuts = "true";
      return made;
    });
    const fold = make("summary", "ortlab-export-fold", { title: "Export", "aria-label": `Export the chart ${title}`, ...KEYS }, "⤓");
    this.export = make("details", "ortlab-export", {}, fold, make("div", "ortlab-export-formats", {}, ...files));
    this.export.addEventListener("focusout", (event) => {
      if (!this.export.contains(event.relatedTarget)) this.export.open = false;
    });
    this.root.append(this.head, this.plot, this.export, this.step, this.tip);
  }

  #columns() {
    if (this.kind === "evaluation") {
      return this.series.scores().map((name) => ({ name, label: name, unit: "", chart: "evaluation" }));
    }
    const columns = this.series.columns.filter((c) => c.chart === this.kind && this.series.has(c.name));
    if (this.kind === "loss" && this.series.evaluations.length) columns.push(EVALUATION);
    return columns;
  }

  get #smoothing() {
    return AVERAGED.has(this.kind) ? this.controls.smoothing : 0;
  }

  /** Returns the lines of the plot, in the order in which they are drawn: faint raw ones, then the others. */
  #lines(columns) {
    const lines = columns.map((column, color) => ({ column, color }));
    const averaged = this.#smoothing ? lines.filter(({ column }) => column !== EVALUATION) : [];
    return [...averaged.map((line) => ({ ...line, faint: true })), ...lines];
  }

  #data(lines) {
    const { axis, log } = this.controls;
    const rated = this.kind === "throughput";
    const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    const evaluated = (value) => {
      const points = this.series.evaluations;
      return [points.map((p) => this.series.place(p[0], axis)), ...value.map((one) => positive(points.map(one)))];
    };
    if (this.kind === "evaluation") return evaluated(lines.map(({ column }) => (p) => p[2][column.name] ?? null));
    const plain = lines.filter(({ column }) => column !== EVALUATION).map(({ column, faint }) => {
      const values = rated ? this.series.smoothed(column.name) : this.series.values(column.name);
      return positive(this.#smoothing && !faint ? this.series.averaged(values, this.#smoothing) : values);
    });
    const rows = [this.series.places(axis), ...plain];
    return lines.at(-1)?.column === EVALUATION ? uPlot.join([rows, evaluated([(p) => p[1]])]) : rows;
  }

  /** Width available for the plot in pixels; reading it after a change forces a layout. */
  get width() {
    return this.plot.clientWidth;
  }

  /** Draws the current series with its marks, `width` pixels wide. */
  draw(width, marks) {
    const columns = this.#columns();
    const lines = this.#lines(columns);
    this.marks = marks;
    this.root.classList.toggle("ortlab-empty", columns.length === 0);
    this.root.hidden = this.kind === "evaluation" && columns.length === 0; // most runs have none
    this.root.dataset.points = String(this.series.length);
    if (width < 50) return;
    const { axis, log } = this.controls;
    const signs = ROW * signed(marks).length;
    const height = HEIGHT + signs;
    const wanted = JSON.stringify([columns.map((c) => c.name), lines.length, axis, log, signs]);
    const data = this.#data(lines);
    if (this.drawn !== wanted || !this.u) {
      this.u?.destroy();
      if (JSON.stringify(columns) !== JSON.stringify(this.columns)) this.#head(columns);
      this.lines = lines;
      this.u = columns.length ? new uPlot(this.#options(lines, width, height, signs), data, this.plot) : null;
      this.u?.over.addEventListener("mousedown", () => (this.controls.dragged = this));
      this.drawn = wanted;
    } else {
      if (this.u.width !== width) this.u.setSize({ width, height });
      this.u.setData(data);
    }
    this.#tellNote();
    this.#legend();
  }

  redraw() {
    this.u?.redraw(false, true);
  }

  destroy() {
    this.u?.destroy();
    this.u = null;
  }

  #head(columns) {
    this.columns = columns;
    this.values = columns.map(() => make("span", "ortlab-value"));
    this.entries = columns.map((column, i) => {
      const label = column.label === TITLES[this.kind].toLowerCase() ? "" : column.label;
      const entry = button("ortlab-entry", "", `Show or hide ${column.label}`, () => this.#toggle(column));
      entry.dataset.lmSuppressShortcuts = "true";
      entry.append(make("span", `ortlab-mark ortlab-s${i}`), make("span", "ortlab-label", {}, label), this.values[i]);
      return entry;
    });
    const title = make("span", "ortlab-chart-title", {}, TITLES[this.kind]);
    this.head.replaceChildren(title, ...this.entries, this.note);
    this.export.hidden = columns.length === 0;
    this.#pressed();
  }

  #pressed() {
    this.entries.forEach((entry, i) => entry.setAttribute("aria-pressed", String(!this.hidden.has(this.columns[i].name))));
  }

  #toggle({ name }) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.#pressed();
    this.lines.forEach((line, i) => {
      if (line.column.name === name) this.u?.setSeries(i + 1, { show: !this.hidden.has(name) });
    });
  }

  #tellNote() {
    const [text, title] = NOTES[this.kind] ?? ["", ""];
    const parts = [text, this.#smoothing ? `smoothed ${this.#smoothing.toFixed(2)}` : "", this.controls.log ? "log" : ""];
    setText(this.note, parts.filter(Boolean).join(" · "));
    this.note.title = title;
  }

  /**
   * Shows the values nearest to the crosshair, or else the latest; of a smoothed line also the raw one. A value
   * of another step than the crosshair's names its step, and so does every evaluation loss.
   */
  #legend() {
    if (!this.u) return;
    const { cursor, data } = this.u;
    const pointed = cursor.idx;
    this.columns.forEach((column, i) => {
      const shown = (faint) => this.lines.findIndex((line) => line.color === i && Boolean(line.faint) === faint) + 1;
      const at = (line) => (pointed == null ? lastKnown(data[line]) : cursor.idxs[line]);
      const text = (line) => withUnit(data[line][at(line)], column);
      const [line, raw] = [shown(false), shown(true)];
      const place = data[0][at(line)];
      const other = column === EVALUATION || (pointed != null && at(line) !== pointed);
      const step = other && place != null ? `(step ${number(this.series.step(place, this.controls.axis))})` : "";
      setText(this.values[i], [text(line), raw ? `(${text(raw)})` : "", step].filter(Boolean).join(" "));
    });
    setText(this.step, pointed == null ? "" : this.#place(this.u.data[0][pointed]));
    const now = this.columns.map((c, i) => `${c.label} ${this.values[i].textContent}`).join(", ");
    this.root.setAttribute("aria-label", `${TITLES[this.kind]}: ${now}`);
  }

  /** Returns a place of the x axis in words, with its step. */
  #place(x) {
    const { axis } = this.controls;
    const step = `step ${number(this.series.step(x, axis))}`;
    if (axis === "step") return step;
    return `${step} · ${axis === "time" ? duration(x) : `${number(Math.round(x))} samples`}`;
  }

  #color(name) {
    return getComputedStyle(this.root).getPropertyValue(name).trim() || "#888";
  }

  #options(lines, width, height, signs) {
    const { axis: across } = this.controls;
    const scaleOf = (c) => c.unit || "y";
    const scales = [...new Set(lines.map(({ column }) => scaleOf(column)))];
    const zeroBased = this.kind !== "loss" && this.kind !== "evaluation";
    const text = () => this.#color("--ortlab-text2");
    const grid = () => this.#color("--ortlab-grid");
    const axis = (extra) => ({
      stroke: text,
      font: FONT,
      labelFont: FONT,
      labelSize: 16,
      labelGap: 2,
      grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid, width: 1, size: 4 },
      gap: 4,
      ...extra,
    });
    const range = (u, low, high, scale) => {
      if (low == null) return [null, null]; // hidden, or without values here: no axis
      if (this.#base(scale)) return logarithmic(low / 1.05, high * 1.05, this.#base(scale));
      const base = zeroBased ? Math.min(0, low) : low;
      // More room above the second, as the curves of samples and tokens would coincide.
      const room = scale === scales[1] ? 0.4 : 0.08;
      // Values that differ by rounding alone would need ticks closer than numbers are.
      const spread = high - base > 1e-9 * Math.abs(high) ? high - base : 0;
      const pad = spread * room || Math.abs(high) * 0.1 || 1;
      return [zeroBased ? base : base - pad, high + pad];
    };
    const distribution = (scale) => (this.#base(scale) ? { distr: 3, log: this.#base(scale) } : {});
    return {
      width,
      height,
      legend: { show: false },
      padding: [8 + signs, scales.length > 1 ? 0 : 12, 0, 0],
      cursor: {
        sync: { key: this.cursor, setSeries: false },
        drag: { x: true, y: false, setScale: false, dist: 5 },
        points: { size: 6 },
        hover: { skip: [null] }, // a series without a value at the crosshair shows its nearest one
        bind: { dblclick: () => () => this.controls.show(null) },
      },
      scales: {
        x: { time: false, range: () => this.controls.zoom ?? this.controls.extent() },
        ...Object.fromEntries(scales.map((name) => [name, { range, ...distribution(name) }])),
      },
      series: [{}, ...lines.map((line) => this.#line(line, scaleOf(line.column)))],
      axes: [
        axis({ ...this.#across(across), size: 24, space: 50 }),
        ...scales.map((scale, i) => axis({ scale, ...this.#ticks(scale), side: i ? 1 : 3, size: axisSize,
          ...(i ? { grid: { show: false } } : {}) })),
      ],
      hooks: {
        setCursor: [(u) => {
          if (!this.u) return;
          this.#legend();
          this.#point(u);
        }],
        setSelect: [(u) => this.#selected(u)],
        draw: [(u) => draw(u, this.placed(u), { change: this.#color("--ortlab-change"), plain: text() })],
      },
    };
  }

  /** Zooms all charts to what was dragged over on this one; the others only show the selection. */
  #selected(u) {
    const { left, width } = u.select;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (this.controls.dragged !== this || width <= 0) return;
    this.controls.dragged = null;
    this.controls.show([left, left + width].map((x) => u.posToVal(x, "x")));
  }

  /** Moves the crosshair or zooms by a key. */
  #press(event) {
    const { u } = this;
    const zooms = { "+": 1 / ZOOM_STEP, "=": 1 / ZOOM_STEP, "-": ZOOM_STEP };
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (!u || event.target !== this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const [low, high] = u.series[0].idxs;
      const from = u.cursor.idx ?? (event.key === "ArrowLeft" ? high + 1 : low - 1);
      const to = Math.min(Math.max(from + moves[event.key], low), high);
      this.keyed = true;
      u.setCursor({ left: u.valToPos(u.data[0][to], "x"), top: u.over.clientHeight / 2 }, true, true);
    } else if (event.key in zooms) {
      const { min, max } = u.scales.x;
      const middle = u.cursor.idx == null ? (min + max) / 2 : u.data[0][u.cursor.idx];
      const half = ((max - min) / 2) * zooms[event.key];
      const [first, last] = this.controls.extent();
      const zoom = [Math.max(middle - half, first), Math.min(middle + half, last)];
      this.controls.show(zoom[0] === first && zoom[1] === last ? null : zoom);
    } else if (event.key === "Escape") {
      u.setCursor({ left: -10, top: -10 }, true, true);
      this.controls.show(null);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #left(u) {
    return (mark) => u.valToPos(this.series.place(mark.step, this.controls.axis), "x");
  }

  /** Returns the marks with their places in the plot, in CSS pixels. */
  placed(u) {
    if (u.scales.x.min == null) return [];
    u.ctx.save(); // uPlot relies on its own font
    u.ctx.font = `bold ${FONT}`;
    const measure = (label) => u.ctx.measureText(label).width;
    const found = placed(this.marks, this.#left(u), u.bbox.width / devicePixelRatio, measure, this.controls.zoom != null);
    u.ctx.restore();
    return found;
  }

  /** Describes the marks near the crosshair of this chart. */
  #point(u) {
    if (u?.over.matches(":hover")) this.keyed = false;
    const x = u?.cursor.left ?? -1;
    const here = x >= 0 && (this.keyed || u.over.matches(":hover")) ? near(this.marks, x, this.#left(u)) : [];
    this.tip.hidden = here.length === 0;
    if (here.length) this.tip.replaceChildren(...here.map((line) => make("div", "", {}, line)));
  }

  #line({ column, color, faint }, scale) {
    const stroke = () => this.#color(`--ortlab-s${color}`);
    const common = { scale, stroke, show: !this.hidden.has(column.name) };
    if (column === EVALUATION) {
      return { ...common, width: 1.5, dash: [5, 4], points: { show: true, size: 7, fill: stroke, stroke } };
    }
    if (faint) return { ...common, width: 1, alpha: 0.45, points: { show: false } };
    // Few points are also drawn as dots, so that the first step is visible.
    const few = (u, s) => u.data[s].length <= (this.kind === "evaluation" ? 50 : 2);
    // The first line is the widest, so that it stays visible below an equal one.
    return { ...common, width: color ? 1.2 : 2.2, points: { show: few, size: 5, fill: stroke } };
  }

  /** Returns the tick labels and the title of the x axis. */
  #across(axis) {
    if (axis === "time") return { label: "time since the start", incrs: SECONDS, values: (u, ticks) => ticks.map(duration) };
    return { label: axis, values: (u, ticks) => ticks.map((t) => (t % 1 ? "" : number(t))) };
  }

  /** Returns the base of a logarithmic y axis, or 0. A loss scale halves and doubles. */
  #base(scale) {
    if (scale === "loss scale") return 2;
    if (!this.controls.log) return 0;
    return scale === "B" ? 2 : 10;
  }

  /** Returns the tick labels and the unit of a y axis. */
  #ticks(scale) {
    const labels = (format) => (u, ticks) => ticks.map((tick) => (tick == null ? "" : format(tick)));
    if (scale === "B" && this.controls.log) return { values: labels(bytes) };
    if (scale === "B") {
      let unit = byteUnit(0);
      return {
        splits: (u, axis, low, high) => {
          unit = byteUnit(high);
          const step = [0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
            .map((n) => n * unit.bytes)
            .find((n) => high / n <= 5) ?? high / 4;
          const ticks = [];
          for (let at = 0; at <= high; at += step) ticks.push(at);
          return ticks;
        },
        values: labels((tick) => number(tick / unit.bytes)),
        label: () => unit.name,
      };
    }
    return { values: labels(number), ...(scale === "y" ? {} : { label: scale }) };
  }

  /** Returns the chart as it is seen, for a picture. */
  picture() {
    const { u } = this;
    const title = [TITLES[this.kind], this.note.textContent].filter(Boolean).join(", ");
    const shown = this.lines.map((line, i) => ({ ...line, index: i + 1 })).filter(({ index }) => u.series[index].show);
    return {
      u,
      title,
      run: this.name,
      marks: this.placed(u),
      lines: shown.map(({ column, color, faint, index }) => ({
        index,
        faint,
        label: column.label,
        color: this.#color(`--ortlab-s${color}`),
        dashed: column === EVALUATION,
        dots: column === EVALUATION || this.kind === "evaluation",
      })),
      mark: this.#color("--ortlab-change"),
    };
  }

  /** Returns [heads, ...rows] of the series that are seen, with the values that the page holds. */
  table() {
    const { series, columns, hidden } = this;
    const shown = columns.filter(({ name }) => !hidden.has(name));
    const measured = ["time", "samples"].filter((axis) => series.measures(axis));
    const plain = shown.filter((column) => column !== EVALUATION && column.chart !== "evaluation");
    const scored = shown.filter((column) => !plain.includes(column));
    const rowOf = plain.length ? new Map(series.data[0].map((step, row) => [step, row])) : new Map();
    const evaluated = scored.length ? new Map(series.evaluations.map((each) => [each[0], each])) : new Map();
    const smooth = this.#smoothing
      ? plain.map(({ name }) => series.averaged(this.kind === "throughput" ? series.smoothed(name) : series.values(name), this.#smoothing))
      : [];
    const [from, to] = this.controls.zoom ?? [-Infinity, Infinity];
    const steps = [...new Set([...rowOf.keys(), ...evaluated.keys()])].sort((a, b) => a - b).filter((step) => {
      const place = series.place(step, this.controls.axis);
      return place >= from && place <= to;
    });
    const unit = ({ label, unit: of }) => (of && of !== label ? `${label} (${of})` : label);
    const heads = [
      "step", ...measured.map((axis) => (axis === "time" ? "time (s)" : axis)), ...plain.map(unit),
      ...smooth.map((_, i) => `${unit(plain[i])}, smoothed ${this.#smoothing}`), ...scored.map(unit),
    ];
    const rows = steps.map((step) => {
      const row = rowOf.get(step);
      const values = evaluated.get(step);
      return [
        step,
        ...measured.map((axis) => series.place(step, axis)),
        ...plain.map(({ name }) => (row === undefined ? null : series.values(name)[row])),
        ...smooth.map((of) => (row === undefined ? null : of[row])),
        ...scored.map((column) => (column === EVALUATION ? values?.[1] : values?.[2][column.name])),
      ];
    });
    return [heads, ...rows];
  }
}
