// One row of controls over the charts of a run: smoothing, x axis, log axes, zoom; and the key of the marks.
import { button, make, setText } from "./elements.js";
import { KEYS, onClick } from "./form.js";
import { SIGNS } from "./marks.js";

const AXES = { step: "step", time: "time", samples: "samples" };

export class Controls {
  /** `changed` is called after each change; `smoothing`, `log`, `axis` and `zoom` are the state. */
  constructor(series, changed) {
    this.series = series;
    this.changed = changed;
    this.smoothing = 0;
    this.log = false;
    this.axis = "step";
    this.zoom = null; // [from, to] on the x axis; null shows everything
    this.#build();
  }

  #build() {
    const { series } = this;
    this.slider = make("input", "ortlab-tools-smoothing", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", ...KEYS });
    this.strength = make("output", "ortlab-tools-number", {}, "0");
    this.slider.addEventListener("input", () => {
      this.smoothing = Number(this.slider.value);
      setText(this.strength, this.smoothing ? this.smoothing.toFixed(2) : "0");
      this.changed();
    });
    const averages = "Exponential moving average of loss and throughput; the raw values stay as a faint line";
    const smoothing = make("label", "ortlab-tool", { title: averages }, "Smoothing", this.slider, this.strength);
    this.axes = make("select", "ortlab-tools-axis", KEYS, ...Object.entries(AXES).map(([value, text]) => make("option", "", { value }, text)));
    this.axes.addEventListener("change", () => {
      const steps = this.zoom?.map((place) => series.step(place, this.axis));
      this.axis = this.axes.value;
      this.zoom = steps?.map((step) => series.place(step, this.axis)) ?? null;
      this.changed();
    });
    this.logs = make("input", "ortlab-tools-log", { type: "checkbox", ...KEYS });
    this.logs.addEventListener("change", () => {
      this.log = this.logs.checked;
      this.changed();
    });
    const positive = "Logarithmic y axes; values of 0 and below are left out";
    this.reset = button("ortlab-tools-reset", "Reset zoom", "Show the whole run (double-click on a chart)", () => {});
    onClick(this.reset, () => this.show(null));
    this.reset.dataset.lmSuppressShortcuts = "true";
    this.key = make("span", "ortlab-tools-key");
    this.root = make(
      "div", "ortlab-tools", { role: "group", "aria-label": "Charts" },
      smoothing,
      make("label", "ortlab-tool", {}, "X axis", this.axes),
      make("label", "ortlab-tool", { title: positive }, this.logs, "Log"),
      this.reset,
      make("span", "ortlab-tools-hint", {}, "drag: zoom · double-click: reset"),
      this.key,
    );
    this.draw([]);
  }

  /** Zooms all charts to [from, to] of the x axis; null shows everything. */
  show(zoom) {
    this.zoom = zoom;
    this.changed();
  }

  /** Shows the state; `kinds` are the marks that the charts have. */
  draw(kinds) {
    for (const option of this.axes.options) option.disabled = !this.series.measures(option.value);
    this.reset.ariaDisabled = String(this.zoom == null);
    const key = kinds.map((kind) => `${SIGNS[kind]} ${kind}`).join("   ");
    setText(this.key, key);
  }

  /** Returns the range of the x axis that all charts have in common. */
  extent() {
    const { data, evaluations } = this.series;
    const steps = [data[0][0], data[0].at(-1), evaluations[0]?.[0], evaluations.at(-1)?.[0]].filter((step) => step !== undefined);
    const [low, high] = [Math.min(...steps), Math.max(...steps)].map((step) => this.series.place(step, this.axis));
    return low === high ? [Math.max(low - 1, 0), high + 1] : [low, high];
  }
}
