// Table of a graph's modules that can be unfolded down to its nodes. Only visible rows are created.
import { bytesOf } from "./node_colors.js";
import { amount } from "./format.js";
import { button, make } from "./elements.js";

/** Returns [head, text for a module, text for a node] of each column; empty columns are omitted. */
function columns(graph) {
  const whole = graph.rows[0];
  const time = graph.overlays.find(({ name }) => name === "time");
  const took = (node, phase) => (time && graph.phaseOf(node) === phase ? amount(time.values[node], "us") : "");
  return [
    graph.rows.some((row) => row.calls > 1) && ["calls", (row) => row.calls, () => ""],
    ["nodes", (row) => row.forward.toLocaleString("en-US"), () => ""],
    whole.backward && ["gradient", (row) => row.backward.toLocaleString("en-US"), () => ""],
    ["parameters", (row) => (row.parameters ? row.parameters.toLocaleString("en-US") : ""), () => ""],
    whole.activations != null && ["activations", (row) => amount(row.activations, "bytes"), (node) => (node < graph.split ? amount(bytesOf(graph, node), "bytes") : "")],
    whole.forwardUs != null && ["forward time", (row) => amount(row.forwardUs, "us"), (node) => took(node, "forward")],
    whole.backwardUs != null && whole.backward && ["backward time", (row) => amount(row.backwardUs, "us"), (node) => took(node, "backward")],
  ].filter(Boolean);
}

const ROW = 21; // height of a row in pixels, as in graphview.css
const COLUMN = 114; // width of a column of figures in pixels
const NAME = 220; // minimum width of the modules' column in pixels
const BEYOND = 40; // additional rows above and below the visible ones

export class Outline {
  /** `acts` has toggle(module), pickModule(module) and pickNode(node). */
  constructor(acts) {
    this.acts = acts;
    this.selected = new Set();
    this.element = make("div", "ortlab-outline");
    this.made = [0, 0]; // range of lines that have rows
    this.element.addEventListener("scroll", () => this.#follow());
    this.resized = new ResizeObserver(() => this.#follow());
    this.resized.observe(this.element);
  }

  draw(graph) {
    this.graph = graph;
    this.columns = columns(graph);
    this.lines = [];
    this.#list(0);
    const heads = ["module", ...this.columns.map(([head]) => head)];
    const head = make("thead", "", {}, make("tr", "", {}, ...heads.map((text) => make("th", "", { scope: "col" }, text))));
    this.body = make("tbody");
    const focused = this.element.contains(document.activeElement) ? document.activeElement.title : null;
    const style = `min-width: ${NAME + COLUMN * this.columns.length}px`;
    this.element.replaceChildren(make("table", "", { "aria-rowcount": this.lines.length, style }, head, this.body));
    this.#paint();
    if (focused) this.#focus(focused);
  }

  /** Marks the rows of the selected ids ("m3", "n12") and scrolls to the first. */
  select(ids) {
    this.selected = new Set(ids);
    const first = this.lines.findIndex(({ id }) => this.selected.has(id));
    const { scrollTop, clientHeight } = this.element;
    const top = (first + 1) * ROW; // below the head
    if (first >= 0 && (top < scrollTop + ROW || top + ROW > scrollTop + clientHeight)) {
      this.element.scrollTop = top - clientHeight / 2; // scrollIntoView would also scroll the page
    }
    this.#follow();
    for (const row of this.body.rows) row.classList.toggle("ortlab-selected", this.selected.has(row.dataset.id));
  }

  close() {
    this.resized.disconnect();
  }

  /** Adds the lines of a module and, unless it is folded, of its contents. */
  #list(module) {
    const row = this.graph.rows[module];
    this.lines.push({ id: `m${module}`, depth: row.depth, module });
    if (!this.graph.open.has(module)) return;
    for (const child of row.children) this.#list(child);
    for (const node of row.nodes) this.lines.push({ id: `n${node}`, depth: row.depth + 1, node });
  }

  #inSight() {
    const { scrollTop, clientHeight } = this.element;
    return [Math.floor(scrollTop / ROW), Math.min(this.lines.length, Math.ceil((scrollTop + clientHeight) / ROW))];
  }

  /** Creates new rows when the view reaches the end of the existing ones. */
  #follow() {
    const [first, last] = this.lines ? this.#inSight() : [0, 0];
    if (first < this.made[0] || last > this.made[1]) this.#paint();
  }

  /** Creates the visible rows and those next to them, and space for the others. */
  #paint() {
    const [first, last] = this.#inSight();
    const [from, to] = [Math.max(0, first - BEYOND), Math.min(this.lines.length, last + BEYOND)];
    const room = (rows) => make("tr", "ortlab-room", { style: `height: ${rows * ROW}px`, "aria-hidden": "true" });
    this.body.replaceChildren(room(from), ...this.lines.slice(from, to).map((line) => this.#row(line)), room(this.lines.length - to));
    this.made = [from, to];
  }

  #row({ id, depth, module, node }) {
    const name = node == null ? this.#moduleName(module) : this.#nodeName(node);
    const cells = this.columns.map(([, ofModule, ofNode]) => (node == null ? ofModule(this.graph.rows[module]) : ofNode(node)));
    const first = make("th", "", { scope: "row" }, ...name);
    first.style.paddingLeft = `${4 + 14 * depth}px`;
    return make("tr", this.selected.has(id) ? "ortlab-selected" : "", { "data-id": id }, first, ...cells.map((text) => make("td", "", {}, text)));
  }

  #moduleName(module) {
    const row = this.graph.rows[module];
    const open = this.graph.open.has(module);
    const path = row.path || this.graph.model;
    const twisty = button("ortlab-twisty", open ? "▾" : "▸", `${open ? "Fold" : "Unfold"} ${path}`, () => this.acts.toggle(module));
    twisty.setAttribute("aria-expanded", String(open));
    return [twisty, button("ortlab-name", row.name || this.graph.model, path, () => this.acts.pickModule(module))];
  }

  #nodeName(node) {
    const { op, name } = this.graph.nodes;
    const pick = button("ortlab-name ortlab-op", op[node].split(".").at(-1), name[node] || op[node], () => this.acts.pickNode(node));
    return node < this.graph.split ? [pick] : [pick, make("span", "ortlab-hint", {}, "gradient")];
  }

  /** Keeps the focus on a module's button when folding changes its label. */
  #focus(title) {
    const path = title.replace(/^(Unfold|Fold) /, "");
    const titles = [`Fold ${path}`, `Unfold ${path}`];
    [...this.body.querySelectorAll(".ortlab-twisty")].find((twisty) => titles.includes(twisty.title))?.focus();
  }
}
