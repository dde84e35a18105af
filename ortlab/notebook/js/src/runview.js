// Live view of a run: progress, pause and stop, charts, and the breakdown of the step time.
//
// The kernel sends one custom message per update. Its JSON part:
//   p  [message number, state, step, total steps or null, elapsed seconds, remaining seconds or null]
//   m  bit mask of the columns in the buffer's rows; absent if there are no new rows
//   e  [[step, loss, {name: score}], ...] new evaluation results
//   c  [[number, step, text, cost in s, samples/s before, after, bytes before, after], ...] settings
//      changes that are new or have new figures (null if unknown); the last one of a number is valid
//   k  [[kind, step, text], ...] new marks: kind is "checkpoint" or "pause"
//   i  the changed ones of {title, badges, lines, error, advice}; advice: settings to resume with
//   a  1: the rows, evaluations, changes and marks are the whole series, not an addition
// Its buffer is float32, row by row. "hello" requests the whole series. The messages of the settings panel
// are described in form.js, those of the ranks in ranks.js.
import "uplot/dist/uPlot.min.css";
import "./runview.css";
import { Chart, PRINTED, TITLES } from "./charts.js";
import { Controls } from "./controls.js";
import { hidesStill, setText, whenKernelEnds } from "./elements.js";
import { Form, KEYS, onClick } from "./form.js";
import { changed, duration, milliseconds, number } from "./format.js";
import { marksOf, signed } from "./marks.js";
import { Ranks } from "./ranks.js";
import { Series } from "./series.js";

const OVER = new Set(["finished", "stopped", "failed"]);
const SILENT_S = 20; // an active run sends more than one message per second
const SILENT = "No message from the kernel: it is busy, was restarted or has died. After a restart, %ort runs lists the saved runs.";
const SPLIT = [
  ["data_ms", "data"],
  ["forward_ms", "forward"],
  ["backward_ms", "backward"],
  ["optimizer_ms", "optimizer"],
];

/** State of the run on this page, shared by all views of one model. */
class Store extends EventTarget {
  constructor(model) {
    super();
    this.model = model;
    this.series = new Series(model.get("columns"));
    this.info = { title: "", badges: [], lines: [], error: null, advice: "" };
    this.progress = null;
    this.asked = null; // a clicked action, until the kernel's state confirms it
    this.whole = false;
    this.silent = false; // a message is overdue by SILENT_S
    this.gone = false; // the kernel has ended
    this.receive = (message, buffers) => this.#receive(message, buffers);
    model.on("msg:custom", this.receive);
    this.forget = whenKernelEnds(model, () => this.#lose());
    model.send({ do: "hello" });
  }

  #receive(message, buffers) {
    const [number, state, step, total, elapsed, left] = message.p;
    if (message.a) {
      this.series.clear();
      this.whole = true;
    } else if (!this.whole) {
      return; // the whole series was requested
    } else if (number !== this.number + 1) {
      this.whole = false; // a message was lost
      this.model.send({ do: "hello" });
    }
    this.number = number;
    this.progress = { state, step, total, elapsed, left };
    const again = state === "paused" && message.k?.some(([kind]) => kind === "pause"); // resumed, and paused once more
    if (this.asked && (state !== this.asked.from || again)) this.asked = null;
    if (message.i) this.info = { ...this.info, ...message.i };
    if (message.m) this.series.append(buffers[0], message.m);
    if (message.e) this.series.evaluations.push(...message.e);
    if (message.c) this.series.change(message.c);
    if (message.k) this.series.mark(message.k);
    this.#expect(state !== "paused" && !OVER.has(state));
    this.dispatchEvent(new Event("change"));
  }

  /** Sends a clicked action to the kernel and shows it immediately. */
  ask(verb, shown) {
    this.asked = { shown, from: this.progress?.state };
    this.model.send({ do: verb });
    if (!this.silent) this.#expect(true);
    this.dispatchEvent(new Event("change"));
  }

  /** Waits for the kernel's next message, if there will be one. */
  #expect(more) {
    this.silent = false;
    clearTimeout(this.silence);
    if (!more) return;
    this.silence = setTimeout(() => {
      this.silent = true;
      this.dispatchEvent(new Event("change"));
    }, 1000 * SILENT_S);
  }

  /** Notes that the kernel has ended, and with it the run, unless that was over. */
  #lose() {
    if (this.gone || !this.progress || OVER.has(this.progress.state)) return;
    this.gone = true;
    clearTimeout(this.silence);
    this.dispatchEvent(new Event("change"));
  }

  close() {
    clearTimeout(this.silence);
    this.model.off("msg:custom", this.receive);
    this.forget();
  }
}

const make = (tag, className, attributes = {}) => {
  const made = document.createElement(tag);
  made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

// Drawing takes at most this share of the page's time, but happens at least every SLOWEST_MS: the model
// may be training on the same cores. State changes and badges are drawn immediately.
const SHARE = 1 / 50;
const SLOWEST_MS = 1000;

class View {
  constructor(store, model, el) {
    this.store = store;
    this.interactive = model.get("interactive");
    this.#build();
    el.append(this.root);
    this.due = 0; // time of the next possible drawing
    this.request = () => {
      clearTimeout(this.timer);
      const wait = this.due - performance.now();
      if (wait > 0 && !this.#urgent()) this.timer = setTimeout(this.request, wait);
      else this.frame ??= requestAnimationFrame(() => this.#draw());
    };
    store.addEventListener("change", this.request);
    model.on("change:ranks", this.request);
    model.on("change:rank_notes", this.request);
    this.resized = new ResizeObserver(() => {
      this.due = 0;
      this.request();
    });
    this.resized.observe(this.root);
    // A theme is an attribute or a class of the page's body: redraw with its colors.
    this.themed = new MutationObserver(() => this.charts.forEach((chart) => chart.redraw()));
    for (const target of [document.documentElement, document.body]) {
      this.themed.observe(target, { attributes: true });
    }
    this.printing = (event) => this.#print(event.type === "beforeprint");
    for (const type of ["beforeprint", "afterprint"]) window.addEventListener(type, this.printing);
    this.request();
  }

  /** Draws the charts for a page of paper, or for the screen again: a canvas is not laid out anew for paper. */
  #print(paper) {
    this.root.classList.toggle("ortlab-printing", paper);
    const marks = marksOf(this.store.series);
    this.charts.forEach((chart) => chart.draw(paper ? PRINTED : chart.width, marks));
    this.charts.forEach((chart) => chart.redraw());
  }

  #build() {
    // JupyterLab's shortcuts must not intercept Enter and Space on the buttons.
    this.root = make("section", "ortlab-run", {
      "data-lm-suppress-shortcuts": "true",
    });
    const head = make("div", "ortlab-head");
    this.title = make("span", "ortlab-title");
    this.state = make("span", "ortlab-state", { role: "status" });
    this.badges = make("span", "ortlab-badges");
    this.buttons = make("span", "ortlab-buttons");
    head.append(this.title, this.state, this.badges, this.buttons);
    this.pause = make("button", "ortlab-button ortlab-pause", { type: "button" });
    this.stop = make("button", "ortlab-button ortlab-stop", { type: "button" });
    this.stop.textContent = "Stop";
    this.stop.title = "Stop the run after the current step and keep its weights";
    onClick(this.pause, () => {
      const paused = this.store.progress?.state === "paused";
      this.store.ask(paused ? "resume" : "pause", paused ? "resuming…" : "pausing…");
    });
    onClick(this.stop, () => this.store.ask("stop", "stopping…"));
    this.advice = make("button", "ortlab-button ortlab-advice", { type: "button" });
    this.advice.title = "Resume the run with these settings";
    onClick(this.advice, () => this.store.ask("advice", "resuming…"));
    if (this.interactive) this.buttons.append(this.advice, this.pause, this.stop);
    else {
      this.buttons.className += " ortlab-hint";
      this.buttons.textContent = "stop: the notebook’s ■ button";
    }
    this.bar = make("div", "ortlab-progress", {
      role: "progressbar", "aria-label": "progress", "aria-valuemin": "0", "aria-valuemax": "100",
    });
    this.done = make("div", "ortlab-done");
    this.bar.append(this.done);
    this.numbers = make("div", "ortlab-numbers");
    this.lines = make("div", "ortlab-lines");
    this.error = make("pre", "ortlab-error", { role: "alert" });
    this.grid = make("div", "ortlab-grid");
    const cursor = `ortlab-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.controls = new Controls(this.store.series, () => {
      this.due = 0;
      this.request();
    });
    this.charts = Object.keys(TITLES).map((kind) => new Chart(kind, this.store.series, this.controls, cursor));
    this.grid.append(...this.charts.map((chart) => chart.root));
    this.split = make("div", "ortlab-split");
    this.changes = make("ol", "ortlab-changes", { "aria-label": "changes of settings", tabindex: "0", ...KEYS });
    this.ranks = new Ranks();
    this.#buildPanel();
    this.silence = make("div", "ortlab-silence", { role: "status" });
    this.silence.hidden = true;
    this.root.append(head, this.bar, this.numbers, this.silence, this.lines, this.error, this.settings, this.controls.root, this.grid, this.changes, this.split,
      this.ranks.root, hidesStill(this.store.model));
  }

  /** The settings, collapsed at first. */
  #buildPanel() {
    const { model } = this.store;
    this.settings = make("details", "ortlab-settings");
    this.settings.hidden = true;
    const summary = make("summary", "ortlab-settings-fold", KEYS);
    summary.textContent = "Settings…";
    this.form = new Form((message) => model.send(message));
    this.settings.append(summary, this.form.root);
    this.drawPanel = () => {
      const standing = model.get("standing");
      this.settings.hidden = standing.serial === undefined; // a custom training loop has none
      if (!this.settings.hidden) this.form.draw(model.get("controls"), standing);
    };
    model.on("change:controls", this.drawPanel);
    model.on("change:standing", this.drawPanel);
    this.drawPanel();
    this.settings.addEventListener("toggle", () => this.settings.open && model.send({ do: "open" }));
  }

  /** Returns whether anything but numbers has changed. */
  #urgent() {
    const { progress, asked, info, silent, gone } = this.store;
    return (silent || gone) === this.silence.hidden || progress?.state !== this.drawnState || asked !== this.drawnAsked || info !== this.drawnInfo;
  }

  #draw() {
    this.frame = undefined;
    const began = performance.now();
    const widths = this.charts.map((chart) => chart.width); // read first, to avoid a forced layout
    if (this.store.progress) this.#drawProgress(this.store.progress);
    this.#drawInfo(this.store.info);
    const marks = marksOf(this.store.series);
    this.controls.draw(signed(marks));
    this.charts.forEach((chart, i) => chart.draw(widths[i], marks));
    const { series, progress } = this.store;
    const nothing = OVER.has(progress?.state) && series.length === 0 && series.evaluations.length === 0;
    this.grid.hidden = this.controls.root.hidden = nothing; // it failed at its start
    this.#drawChanges();
    this.#drawSplit();
    this.ranks.draw(this.store.model.get("ranks"), this.store.model.get("rank_notes"));
    this.due = began + SLOWEST_MS;
    // A timer that is set in an animation frame fires after that frame is painted.
    setTimeout(() => {
      this.due = began + Math.min(SLOWEST_MS, (performance.now() - began) / SHARE);
    });
  }

  #drawProgress({ state, step, total, elapsed, left }) {
    const asked = this.store.asked;
    const { gone, silent } = this.store;
    const over = gone || OVER.has(state);
    this.drawnState = state;
    this.drawnAsked = asked;
    const shown = gone ? "its kernel has ended" : silent ? `${state} when last heard of` : state;
    setText(this.state, asked && !gone ? asked.shown : shown);
    this.root.dataset.state = gone ? "failed" : state;
    this.pause.textContent = state === "paused" ? "Resume" : "Pause";
    this.pause.title = state === "paused" ? "Resume the training" : "Pause after the current step";
    this.buttons.hidden = over;
    const stopping = state === "stopping" || asked?.shown === "stopping…";
    this.stop.ariaDisabled = String(stopping);
    this.pause.ariaDisabled = String(stopping || state === "starting" || asked != null);
    const percent = total ? Math.min(100, Math.round((100 * step) / total)) : null;
    this.bar.classList.toggle("ortlab-unknown", percent == null && !over);
    this.done.style.transform = `scaleX(${percent == null ? 1 : step / total})`;
    if (percent == null) this.bar.removeAttribute("aria-valuenow");
    else this.bar.setAttribute("aria-valuenow", String(percent));
    const parts = [total ? `step ${number(step)} of ${number(total)} (${percent}%)` : `step ${number(step)}`];
    parts.push(over && !gone ? `took ${duration(elapsed)}` : `${duration(elapsed)} elapsed`);
    if (left != null && !over) parts.push(`${duration(left)} left`);
    setText(this.numbers, parts.join(" · "));
    this.silence.hidden = !silent && !gone;
    setText(this.silence, gone ? this.#gone() : SILENT);
    if (gone) this.settings.hidden = true; // nobody would hear its controls
  }

  /** Returns what became of the run, and how to go on, after its kernel has ended. */
  #gone() {
    const name = this.store.model.get("name");
    if (!name) return "The kernel has ended, and the loop with it.";
    const next = this.store.model.get("continues") || `ortlab.open_run("${name}") shows its charts`;
    return `The kernel has ended, and the run with it. %ort runs says what became of it; ${next}.`;
  }

  #drawInfo(info) {
    if (info === this.drawnInfo) return;
    this.drawnInfo = info;
    this.charts.forEach((chart) => (chart.name = info.title));
    this.title.textContent = info.title; // textContent always: these strings come from the user
    this.root.setAttribute("aria-label", `Run ${info.title}`);
    this.badges.replaceChildren(...info.badges.map((text) => {
      const badge = make("span", "ortlab-badge");
      if (/^(fallback|held)/.test(text)) badge.classList.add("ortlab-warn");
      badge.textContent = text;
      return badge;
    }));
    this.lines.replaceChildren(...info.lines.map((text) => {
      const line = make("div", "ortlab-line");
      line.textContent = text;
      return line;
    }));
    this.advice.hidden = !info.advice;
    this.advice.textContent = `Resume with ${info.advice}`;
    this.error.textContent = info.error ?? "";
    this.error.hidden = !info.error;
  }

  /** Lists the numbered changes of the charts, scrolled to the newest. */
  #drawChanges() {
    const changes = this.store.series.changes;
    if (changes === this.drawnChanges) return;
    this.drawnChanges = changes;
    this.changes.hidden = changes.length === 0;
    this.changes.replaceChildren(...changes.map((change) => {
      const line = make("li", "ortlab-change");
      const mark = make("span", "ortlab-change-number");
      mark.textContent = String(change.number);
      line.append(mark, changed(change));
      return line;
    }));
    this.changes.scrollTop = this.changes.scrollHeight;
  }

  /** Draws the mean step time by part as one bar: of the last steps, or of a run that is over. */
  #drawSplit() {
    const series = this.store.series;
    const over = OVER.has(this.store.progress?.state);
    const mean = (name) => (over ? series.overall(name) : series.recent(name));
    const whole = mean("step_ms");
    this.split.hidden = whole == null;
    if (whole == null) return;
    const parts = SPLIT.map(([name, label]) => ({ label, ms: mean(name) })).filter((p) => p.ms != null);
    const rest = whole - parts.reduce((sum, part) => sum + part.ms, 0);
    if (parts.length && rest > 0.02 * whole) parts.push({ label: "other", ms: rest });
    const bar = make("div", "ortlab-split-bar");
    const legend = make("div", "ortlab-split-legend");
    const title = make("span", "ortlab-chart-title");
    title.textContent = `Step time ${milliseconds(whole)}${over ? "" : " (last steps)"}`;
    legend.append(title);
    parts.forEach((part, i) => {
      const piece = make("div", `ortlab-piece ortlab-t${i}`);
      piece.style.flexGrow = String(Math.max(part.ms, 0));
      bar.append(piece);
      const entry = make("span", "ortlab-entry");
      const label = make("span", "ortlab-label");
      label.textContent = part.label;
      const value = make("span", "ortlab-value");
      value.textContent = milliseconds(part.ms);
      entry.append(make("span", `ortlab-mark ortlab-t${i}`), label, value);
      legend.append(entry);
    });
    this.split.replaceChildren(legend, ...(parts.length ? [bar] : []));
  }

  close() {
    this.store.removeEventListener("change", this.request);
    this.resized.disconnect();
    this.themed.disconnect();
    for (const type of ["beforeprint", "afterprint"]) window.removeEventListener(type, this.printing);
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.charts.forEach((chart) => chart.destroy());
    this.store.model.off("change:controls", this.drawPanel);
    this.store.model.off("change:standing", this.drawPanel);
    this.store.model.off("change:ranks", this.request);
    this.store.model.off("change:rank_notes", this.request);
    this.form.close();
    this.root.remove();
  }
}

/** anywidget calls this once per model; a model may have several views. */
export default () => {
  let store;
  return {
    initialize({ model }) {
      store = new Store(model);
      return () => store.close();
    },
    render({ model, el }) {
      const view = new View(store, model, el);
      return () => view.close();
    },
  };
};
