// Color modes of the nodes, and their legends.
import { amount } from "./format.js";

const NONE = "#7d828a";
const FORWARD = "#2f7fd0";
const BACKWARD = "#b8601c";
const MARKED = "#8f4fb0";
const SCALE = ["#3d6fa8", "#a77a14", "#c2362f"]; // from low to high; white text is readable on each
const TEXT = "#ffffff";

/** Returns [name, label] of the modes that a graph has data for. */
export function modes(graph) {
  const found = [["operator", "operator"]];
  if (graph.phases.length > 1) found.push(["phase", "phase"]);
  for (const overlay of graph.overlays) {
    if (overlay.values.some((value) => value != null)) found.push([`overlay ${overlay.name}`, overlay.name]);
  }
  if (!graph.overlays.some(({ name }) => name === "memory") && graph.tensors.bytes.some((bytes) => bytes != null)) {
    found.push(["bytes", "bytes of results"]);
  }
  if (graph.fused.length) found.push(["fused", "fusion"]);
  if (graph.recompute.length) found.push(["recompute", "recompute"]);
  return found;
}

/** Returns the size of a node's results in bytes; null if it is unknown. */
export function bytesOf(graph, node) {
  const known = graph.nodes.gives[node].map((tensor) => graph.tensors.bytes[tensor]).filter((bytes) => bytes != null);
  return known.length ? known.reduce((sum, bytes) => sum + bytes, 0) : null;
}

/** Returns {colors: {phase: {id: [fill, text]}}, legend: [{color, label}]} of a mode; `style` is netron's. */
export function coloring(graph, mode, style) {
  if (mode === "phase") return phases(graph);
  if (mode === "fused") return marks(graph, graph.fused, "fused by ORT from several nodes", "as exported, or its gradient");
  if (mode === "recompute") return marks(graph, graph.recompute, "recomputed in backward", "computed once");
  if (mode === "bytes") return scale(graph, (node) => bytesOf(graph, node), "bytes");
  const overlay = graph.overlays.find(({ name }) => mode === `overlay ${name}`);
  if (overlay) return scale(graph, (node) => overlay.values[node], overlay.unit);
  return { colors: {}, legend: kinds(graph, style) };
}

/** Returns netron's own colors, by category of operator. */
function kinds(graph, style) {
  const found = new Map([...style.matchAll(/\.node-item-type-(\w+) path \{ fill: ([^;]+);/g)].map(([, kind, color]) => [kind, color]));
  const there = new Set(Object.values(graph.categories).map((category) => category.toLowerCase()));
  return [...found].filter(([kind]) => there.has(kind)).map(([kind, color]) => ({ color, label: kind }));
}

function phases(graph) {
  const colors = {};
  for (const phase of graph.phases) {
    const color = phase === "forward" ? FORWARD : BACKWARD;
    colors[phase] = Object.fromEntries(graph.drawn(phase).map((id) => [id, [color, TEXT]]));
  }
  return { colors, legend: [{ color: FORWARD, label: "forward" }, { color: BACKWARD, label: "backward" }] };
}

/** Colors the marked nodes; the color of a folded module depends on its share of marked nodes. */
function marks(graph, marked, label, other) {
  const inside = new Set(marked);
  const colors = {};
  for (const phase of graph.phases) {
    colors[phase] = {};
    for (const [id, nodes] of groups(graph, phase)) {
      const share = nodes.filter((node) => inside.has(node)).length / nodes.length;
      colors[phase][id] = [share ? mix(NONE, MARKED, 0.4 + 0.6 * share) : NONE, TEXT];
    }
  }
  const legend = [{ color: MARKED, label: `${label}: ${marked.length} of ${graph.count}` }, { color: NONE, label: other }];
  return { colors, legend };
}

/** Colors by a figure, summed over folded modules; the scale ends at the maximum of both panes. */
function scale(graph, figure, unit) {
  const sums = {};
  let most = 0;
  for (const phase of graph.phases) {
    sums[phase] = new Map();
    for (const [id, nodes] of groups(graph, phase)) {
      const known = nodes.map(figure).filter((value) => value != null);
      const sum = known.length ? known.reduce((total, value) => total + value, 0) : null;
      sums[phase].set(id, sum);
      most = Math.max(most, sum ?? 0);
    }
  }
  // Square root: a few nodes have most of the total, and the others still need distinct colors.
  const color = (sum) => (sum == null ? NONE : ramp(most ? Math.sqrt(sum / most) : 0));
  const colors = {};
  for (const phase of graph.phases) {
    colors[phase] = Object.fromEntries([...sums[phase]].map(([id, sum]) => [id, [color(sum), TEXT]]));
  }
  const stops = [0, 0.25, 0.5, 1].map((part) => ({ color: ramp(part), label: amount(part ** 2 * most, unit) }));
  return { colors, legend: [...stops, { color: NONE, label: "no data" }] };
}

function groups(graph, phase) {
  const found = new Map();
  const ids = graph.drawn(phase);
  graph.nodesOf(phase).forEach((node, i) => {
    if (!found.has(ids[i])) found.set(ids[i], []);
    found.get(ids[i]).push(node);
  });
  return found;
}

function ramp(part) {
  const at = Math.min(part, 1) * (SCALE.length - 1);
  const low = Math.min(Math.floor(at), SCALE.length - 2);
  return mix(SCALE[low], SCALE[low + 1], at - low);
}

function mix(from, to, part) {
  const channel = (color, i) => parseInt(color.slice(1 + 2 * i, 3 + 2 * i), 16);
  const mixed = [0, 1, 2].map((i) => Math.round(channel(from, i) + part * (channel(to, i) - channel(from, i))));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}
