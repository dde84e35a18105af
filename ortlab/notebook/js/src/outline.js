// The modules of a graph as a foldable table, down to its nodes.
import { bytesOf } from "./colours.js";
import { amount } from "./format.js";
import { button, make } from "./elements.js";

const NODES = 200; // of one module that are listed

/** [head, text of a module's row, text of a node's row]; without figures a column is left out. */
function columns(graph) {
  const whole = graph.rows[0];
  const time = graph.overlays.find(({ name }) => name === "time");
  const took = (node, phase) => (time && graph.phaseOf(node) === phase ? amount(time.values[node], "us") : "");
  return [
    ["calls", (row) => row.calls, () => ""],
    ["nodes", (row) => row.forward.toLocaleString("en-US"), () => ""],
    whole.backward && ["gradient nodes", (row) => row.backward.toLocaleString("en-US"), () => ""],
    ["parameters", (row) => (row.parameters ? row.parameters.toLocaleString("en-US") : ""), () => ""],
    whole.activations != null && ["activations", (row) => amount(row.activations, "bytes"), (node) => (node < graph.split ? amount(bytesOf(graph, node), "bytes") : "")],
    whole.forwardUs != null && ["forward time", (row) => amount(row.forwardUs, "us"), (node) => took(node, "forward")],
    whole.backwardUs != null && whole.backward && ["backward time", (row) => amount(row.backwardUs, "us"), (node) => took(node, "backward")],
  ].filter(Boolean);
}

export class Outline {
  /** `acts` has toggle(module), pickModule(module) and pickNode(node). */
  constructor(acts) {
    this.acts = acts;
    this.element = make("div", "ortlab-outline");
  }

  draw(graph) {
    this.graph = graph;
    this.columns = columns(graph);
    const heads = ["module", ...this.columns.map(([head]) => head)];
    const head = make("thead", "", {}, make("tr", "", {}, ...heads.map((text) => make("th", "", { scope: "col" }, text))));
    this.body = make("tbody");
    this.#rows(0);
    this.element.replaceChildren(make("table", "", {}, head, this.body));
  }

  /** Marks the rows of what is selected: "m3", "n12"; the first comes into sight. */
  select(ids) {
    const wanted = new Set(ids);
    for (const row of this.body.rows) row.classList.toggle("ortlab-selected", wanted.has(row.dataset.id));
    const first = this.body.querySelector(".ortlab-selected");
    if (!first) return;
    const { scrollTop, clientHeight } = this.element;
    const hidden = first.offsetTop < scrollTop + first.offsetHeight || first.offsetTop + first.offsetHeight > scrollTop + clientHeight;
    if (hidden) this.element.scrollTop = first.offsetTop - clientHeight / 2; // not the page, as scrollIntoView would
  }

  #rows(module) {
    const row = this.graph.rows[module];
    const open = this.graph.open.has(module);
    this.body.append(this.#moduleRow(module, row, open));
    if (!open) return;
    for (const child of row.children) this.#rows(child);
    for (const node of row.nodes.slice(0, NODES)) this.body.append(this.#nodeRow(node, row.depth + 1));
    const left = row.nodes.length - NODES;
    if (left > 0) this.body.append(this.#row("", row.depth + 1, [`${left.toLocaleString("en-US")} more nodes`], []));
  }

  #moduleRow(module, row, open) {
    const name = row.name || this.graph.model;
    const fold = `${open ? "Fold" : "Unfold"} ${row.path || name}`;
    const twisty = button("ortlab-twisty", open ? "▾" : "▸", fold, () => this.acts.toggle(module));
    twisty.setAttribute("aria-expanded", String(open));
    const pick = button("ortlab-name", name, row.path || name, () => this.acts.pickModule(module));
    return this.#row(`m${module}`, row.depth, [twisty, pick], this.columns.map(([, text]) => text(row)));
  }

  #nodeRow(node, depth) {
    const { op, name } = this.graph.nodes;
    const pick = button("ortlab-name ortlab-op", op[node], name[node], () => this.acts.pickNode(node));
    const phase = node < this.graph.split ? [] : [make("span", "ortlab-hint", {}, "gradient")];
    return this.#row(`n${node}`, depth, [pick, ...phase], this.columns.map(([, , text]) => text(node)));
  }

  #row(id, depth, name, cells) {
    const first = make("th", "", { scope: "row" }, ...name);
    first.style.paddingLeft = `${4 + 14 * depth}px`;
    return make("tr", "", { "data-id": id }, first, ...cells.map((text) => make("td", "", {}, text)));
  }
}
