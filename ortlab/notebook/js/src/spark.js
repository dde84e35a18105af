// SVG path of a line that is encoded as one byte per point.

export const HIGH = 255;

/** Returns {d, width} of a line in base64: 1 to HIGH are heights from the bottom, 0 is a gap. */
export function path(line) {
  const heights = Uint8Array.from(atob(line), (letter) => letter.charCodeAt(0));
  const parts = [];
  heights.forEach((height, x) => {
    if (height === 0) return;
    parts.push(`${heights[x - 1] ? "L" : "M"}${x} ${HIGH - height}`);
    if (!heights[x - 1] && !heights[x + 1]) parts.push("h0.9"); // a single point would be invisible
  });
  return { d: parts.join(""), width: Math.max(heights.length - 1, 1) };
}
