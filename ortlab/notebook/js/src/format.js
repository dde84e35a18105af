// Number formatting.

const GIB = 1024 ** 3;
const MIB = 1024 ** 2;

/** Formats with four significant digits and thousands separators; no exponent from 0.001 to ten million. */
export function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return exponent(value);
  return value.toLocaleString("en-US", {
    maximumSignificantDigits: Math.max(4, Math.ceil(Math.log10(size + 1))),
  });
}

/** Formats with an exponent: 0.00005 is 5e-5. */
function exponent(value) {
  return value === 0 ? "0" : Number(value.toPrecision(3)).toExponential();
}

/** Returns the binary unit for a number of bytes. */
export function byteUnit(bytes) {
  return bytes >= GIB ? { name: "GiB", bytes: GIB } : { name: "MiB", bytes: MIB };
}

export function bytes(value) {
  if (value == null) return "–";
  const unit = byteUnit(value);
  return `${(value / unit.bytes).toFixed(unit.name === "GiB" ? 2 : 0)} ${unit.name}`;
}

/** Formats a duration: 7 s, 1:05, 2:03:04. */
export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function milliseconds(value) {
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${number(Number(value.toPrecision(3)))} ms`;
}

/** Formats a value with its unit, for the legends. */
export function withUnit(value, column) {
  if (value == null) return "–";
  if (column.unit === "B") return bytes(value);
  return column.unit && column.unit !== column.label ? `${number(value)} ${column.unit}` : number(value);
}

/** Formats a settings change in one line: step, text, cost, and its effect (before → after). */
export function changed({ step, text, costS, perS, bytes: held }) {
  const three = (value) => number(Number(value.toPrecision(3)));
  const parts = [`step ${number(step)}: ${text}`, costS ? `cost ${milliseconds(1000 * costS)}` : "free"];
  for (const [name, pair, show] of [["samples/s", perS, three], ["memory", held, bytes]]) {
    if (pair.some((value) => value != null)) {
      parts.push(`${name} ${pair.map((value) => (value == null ? "…" : show(value))).join(" → ")}`);
    }
  }
  return parts.join(" · ");
}

/** Formats bytes or microseconds with a suitable unit. */
export function amount(value, unit) {
  if (value == null) return "–";
  const [step, names] = unit === "us" ? [1000, ["µs", "ms", "s"]] : [1024, ["B", "KiB", "MiB", "GiB"]];
  let power = 0;
  while (value >= step && power < names.length - 1) {
    value /= step;
    power += 1;
  }
  return `${number(Number(value.toPrecision(3)))} ${names[power]}`;
}
