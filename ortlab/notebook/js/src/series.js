// Data points of a run in the browser: columns of bounded length, thinned when full.

const SCORES = 6; // as many as there are colors
const CAPACITY = 2400; // rows; more than two per pixel of a chart

/** Merges two rows in the same way as the kernel's recorder. */
const MERGE = {
  last: (a, b) => b ?? a,
  max: (a, b) => (a == null ? b : b == null ? a : Math.max(a, b)),
  mean: (a, b) => (a == null ? b : b == null ? a : (a + b) / 2),
};

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
      if (numbers[row] <= this.data[0].at(-1)) continue; // already known; the step is always present
      this.data.forEach((column, i) => {
        const value = present[i] ? numbers[at++] : NaN;
        column.push(Number.isFinite(value) ? value : null);
      });
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

  #halve() {
    this.data = this.data.map((column, i) => {
      const thin = [];
      const merge = MERGE[this.columns[i].merge];
      for (let row = 0; row + 1 < column.length; row += 2) thin.push(merge(column[row], column[row + 1]));
      if (column.length % 2) thin.push(column.at(-1));
      return thin;
    });
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

  /** Returns the names of the scores of evaluations. */
  scores() {
    return [...new Set(this.evaluations.flatMap((each) => Object.keys(each[2])))].slice(0, SCORES);
  }

  /** Returns whether a column has any value. */
  has(name) {
    return this.values(name).some((value) => value != null);
  }

  /** Returns the mean of a column's last rows; null if they have no value. */
  recent(name, rows = 20) {
    const known = this.values(name).slice(-rows).filter((value) => value != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  }
}
