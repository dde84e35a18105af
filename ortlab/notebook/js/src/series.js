// Data points of a run in the browser: columns of bounded length, thinned when full.

const SCORES = 6; // as many as there are colors
const CAPACITY = 2400; // rows; more than two per pixel of a chart
const MARKS = 400; // the newest that are shown

/** Merges two rows in the same way as the kernel's recorder. */
const MERGE = {
  last: (a, b) => b ?? a,
  max: (a, b) => (a == null ? b : b == null ? a : Math.max(a, b)),
  mean: (a, b) => (a == null ? b : b == null ? a : (a + b) / 2),
};

/** Returns the value at `x` of the line through rising `xs` and their `ys`, which starts at the origin. */
function between(x, xs, ys) {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  if (low === xs.length) return ys.at(-1) ?? 0;
  const [left, below] = low ? [xs[low - 1], ys[low - 1]] : [0, 0];
  const share = xs[low] > left ? (x - left) / (xs[low] - left) : 1;
  return below + Math.max(share, 0) * (ys[low] - below);
}

export class Series {
  /** @param {{name: string, unit: string, chart: string, merge: string}[]} columns the step comes first */
  constructor(columns) {
    this.columns = columns;
    this.clear();
  }

  clear() {
    this.data = this.columns.map(() => []);
    this.evaluations = []; // [step, loss, {name: score}]
    this.changes = []; // of settings, by number; replaced, never modified
    this.marks = []; // [kind, step, text] of checkpoints and pauses
    this.times = []; // seconds since the start, at the end of each row
    this.seen = []; // samples up to the end of each row
  }

  get length() {
    return this.data[0].length;
  }

  /** Appends float32 rows that have the columns whose bits are set in `mask`. */
  append(view, mask) {
    const present = this.columns.map((_, i) => Math.floor(mask / 2 ** i) % 2 === 1);
    const width = present.filter(Boolean).length;
    const numbers = new Float32Array(view.byteLength / 4);
    new Uint8Array(numbers.buffer).set(new Uint8Array(view.buffer, view.byteOffset, view.byteLength));
    for (let row = 0; row < numbers.length; row += width) {
      let at = row;
      const before = this.data[0].at(-1) ?? 0;
      if (numbers[row] <= before && this.length) continue; // already known; the step is always present
      this.data.forEach((column, i) => {
        const value = present[i] ? numbers[at++] : NaN;
        column.push(Number.isFinite(value) ? value : null);
      });
      const last = (name) => this.values(name)?.at(-1);
      this.times.push(last("time_s") ?? this.times.at(-1) ?? 0);
      this.seen.push((this.seen.at(-1) ?? 0) + (last("samples") ?? 0) * (numbers[row] - before));
    }
    while (this.length > CAPACITY) this.#halve();
  }

  /** Adds changes of settings, or updates earlier ones. */
  change(told) {
    const known = new Map(this.changes.map((change) => [change.number, change]));
    for (const [number, step, text, costS, ...pairs] of told) {
      known.set(number, { number, step, text, costS, perS: pairs.slice(0, 2), bytes: pairs.slice(2) });
    }
    this.changes = [...known.values()].sort((a, b) => a.number - b.number);
  }

  /** Adds checkpoints and pauses. */
  mark(told) {
    this.marks = [...this.marks, ...told].slice(-MARKS);
  }

  #halve() {
    const halved = (column, merge) => {
      const thin = [];
      for (let row = 0; row + 1 < column.length; row += 2) thin.push(merge(column[row], column[row + 1]));
      if (column.length % 2) thin.push(column.at(-1));
      return thin;
    };
    this.data = this.data.map((column, i) => halved(column, MERGE[this.columns[i].merge]));
    this.times = halved(this.times, MERGE.last);
    this.seen = halved(this.seen, MERGE.last);
  }

  /** Returns whether the series has an x axis: "step", "time" or "samples". */
  measures(axis) {
    return axis === "step" || this.places(axis).at(-1) > 0;
  }

  /** Returns the place of each row on an x axis. */
  places(axis) {
    return { step: this.data[0], time: this.times, samples: this.seen }[axis];
  }

  /** Returns the place of a step on an x axis, between two rows if it has none of its own. */
  place(step, axis) {
    return axis === "step" ? step : between(step, this.data[0], this.places(axis));
  }

  /** Returns the step at a place of an x axis. */
  step(place, axis) {
    return axis === "step" ? place : Math.round(between(place, this.places(axis), this.data[0]));
  }

  index(name) {
    return this.columns.findIndex((column) => column.name === name);
  }

  values(name) {
    return this.data[this.index(name)];
  }

  /** Returns a rate averaged by time over a fiftieth of all steps, for a readable chart. */
  smoothed(name) {
    const rates = this.values(name);
    const times = this.values("step_ms");
    const steps = this.data[0];
    const window = (steps.at(-1) - steps[0]) / 50;
    // A row covers the steps since the previous row.
    const time = rates.map((rate, row) =>
      rate == null ? 0 : (times[row] ?? 0) * Math.max(1, steps[row] - (steps[row - 1] ?? steps[row] - 1)));
    let first = 0;
    let amountSum = 0;
    let timeSum = 0;
    return rates.map((rate, row) => {
      amountSum += (rate ?? 0) * time[row];
      timeSum += time[row];
      while (first < row && steps[row] - steps[first] > window) {
        amountSum -= (rates[first] ?? 0) * time[first];
        timeSum -= time[first];
        first += 1;
      }
      return rate == null || timeSum <= 0 ? rate : amountSum / timeSum;
    });
  }

  /**
   * Returns values as an exponential moving average, corrected for its start, as TensorBoard does.
   * A row that covers more steps than the others counts for more, so that thinning changes little.
   */
  averaged(values, smoothing) {
    const steps = this.data[0];
    const usual = (steps.at(-1) - steps[0]) / Math.max(steps.length - 1, 1) || 1;
    let sum = 0;
    let weight = 0;
    let last = steps[0] - usual;
    return values.map((value, row) => {
      if (value == null) return null;
      const kept = smoothing ** ((steps[row] - last) / usual);
      last = steps[row];
      sum = sum * kept + value * (1 - kept);
      weight = weight * kept + (1 - kept);
      return sum / weight;
    });
  }

  /** Returns the names of the scores of evaluations. */
  scores() {
    return [...new Set(this.evaluations.flatMap((each) => Object.keys(each[2])))].slice(0, SCORES);
  }

  /** Returns whether a column has any value. */
  has(name) {
    return this.values(name).some((value) => value != null);
  }

  /** Returns the mean of a column over all steps but those that export and warm up, which have no rate. */
  overall(name) {
    const [steps, rates] = [this.data[0], this.values("samples_per_s") ?? []];
    const rated = rates.some((rate) => rate != null);
    let [sum, weight] = [0, 0];
    this.values(name).forEach((value, row) => {
      if (value == null || (rated && rates[row] == null)) return;
      const covered = Math.max(1, steps[row] - (steps[row - 1] ?? steps[row] - 1));
      sum += value * covered;
      weight += covered;
    });
    return weight ? sum / weight : null;
  }

  /** Returns the mean of a column's last rows; null if they have no value. */
  recent(name, rows = 20) {
    const known = this.values(name).slice(-rows).filter((value) => value != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  }
}
