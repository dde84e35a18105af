// View of a model's graphs: forward and gradient side by side, drawn by netron, and their outline.
//
// The trait `modules` has the data of a stage's outline. `graph` has all other data and arrives a moment
// later: gzip-compressed JSON, described in graph_view.py. Custom messages to the kernel: {do: "netron"}
// requests netron's modules, {do: "stage", stage} another stage. From the kernel: {is: "netron", error},
// with the modules in its buffer if there is no error. `code` is HTML of the model's code, if it is shown:
// a click on one of its lines selects the line's nodes.
import "./graphview.css";
import { coloring, modes } from "./node_colors.js";
import { Details } from "./details.js";
import { button, hidesStill, make } from "./elements.js";
import { Graph, MOST } from "./graph.js";
import { Outline } from "./outline.js";
import { Pane } from "./pane.js";

const TITLES = { forward: "Forward", backward: "Gradient" };
const TYPED_MS = 150;
const WAITING = "The graph is drawn when the kernel is free, which sends netron’s code once per page.";
const BUSY_MS = 1500; // an idle kernel answers sooner

async function unpack(data) {
  const bytes = new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(bytes).text());
}

/** Returns netron's modules, which the first view of a page requests for all. */
function netron(model) {
  const key = Symbol.for("ortlab.netron");
  globalThis[key] ??= new Promise((resolve, reject) => {
    const receive = (message, [data]) => {
      model.off("msg:custom", receive);
      if (!message.error) return resolve(unpack(data));
      delete globalThis[key];
      reject(new Error(message.error));
    };
    model.on("msg:custom", receive);
    model.send({ do: "netron" });
  });
  return globalThis[key];
}

/**
 * Empties a closed model: JupyterLab 4.6 keeps the models of all widgets as long as their kernel lives
 * (CommHandler never stops listening to its status). Twice, because a model also keeps its previous state.
 */
function forget(model) {
  const empty = { graph: new DataView(new ArrayBuffer(0)), modules: {}, code: "" };
  for (let i = 0; i < 2; i++) model.set(empty, { silent: true });
}

const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));

class View {
  constructor(model, el) {
    this.model = model;
    this.panes = new Map(); // phase -> Pane
    this.mode = "operator";
    this.selected = { nodes: [], show: () => this.details.clear() };
    this.#build();
    el.append(this.root);
    netron(model).catch(() => {}); // requested early; a failure is reported where it is used
    this.changed = () => this.load();
    model.on("change:graph", this.changed);
    // A theme is an attribute or a class of the page's body.
    this.themed = new MutationObserver(() => this.#theme());
    for (const target of [document.documentElement, document.body]) this.themed.observe(target, { attributes: true });
    this.load();
  }

  #build() {
    const acts = {
      toggle: (module) => this.toggle(module),
      pickModule: (module) => this.pickModule(module),
      pickNode: (node) => this.pickNode(node),
      pickTensor: (tensor) => this.details.tensor(this.graph, tensor),
      pickLine: (place) => this.pickLine(place),
    };
    this.details = new Details(acts);
    this.outline = new Outline(acts);
    this.title = make("span", "ortlab-title");
    this.stage = make("select", "ortlab-select", { "aria-label": "stage" });
    this.stage.addEventListener("change", () => this.model.send({ do: "stage", stage: this.stage.value }));
    this.color = make("select", "ortlab-select", { "aria-label": "color by" });
    this.color.addEventListener("change", () => this.#colorBy(this.color.value));
    const placeholder = "Search name, operator, module, line";
    this.search = make("input", "ortlab-search", { type: "search", placeholder, "aria-label": "search" });
    this.search.addEventListener("input", () => {
      clearTimeout(this.typed);
      this.typed = setTimeout(() => this.#find(), TYPED_MS);
    });
    this.search.addEventListener("keydown", (event) => event.key === "Enter" && this.#firstHit());
    this.legend = make("div", "ortlab-legend", { role: "note", "aria-label": "legend" });
    this.note = make("p", "ortlab-note", { role: "status", hidden: "" });
    this.drawing = make("div", "ortlab-panes");
    this.code = make("div", "ortlab-code", { hidden: "" });
    if (this.model.get("code")) {
      this.code.innerHTML = this.model.get("code"); // the kernel has escaped it
      this.code.hidden = false;
      this.code.addEventListener("click", (event) => this.#clickLine(event.target.closest("[data-line]")));
    }
    const fold = button("ortlab-button", "Fold all", "Draw only the model's outermost modules", () => this.#foldAll());
    const unfold = button("ortlab-button", "Unfold all", "Draw every node", () => this.#unfoldAll());
    const colors = make("label", "ortlab-labelled", {}, "color by ", this.color);
    // JupyterLab's shortcuts must not intercept the keys of fields and buttons.
    this.root = make(
      "section", "ortlab-graph", { "data-lm-suppress-shortcuts": "true", hidden: "" },
      this.code,
      make("div", "ortlab-head", {}, this.title, this.stage, make("span", "ortlab-spring"), fold, unfold, this.search, colors),
      this.legend,
      this.note,
      make("div", "ortlab-body", {}, this.drawing, this.details.element),
      this.outline.element,
    );
  }

  /** Shows the stage that the kernel sent last: its modules at once, its nodes when they arrive. */
  async load() {
    const modules = this.model.get("modules");
    const data = this.model.get("graph");
    const graph = data.byteLength ? new Graph(modules, await unpack(data)) : new Graph(modules);
    if (this.graph?.modules === graph.modules) graph.open = this.graph.open; // keep the folding of the same stage
    else if (!this.model.get("folded")) graph.unfoldAll();
    this.#show(graph);
    if (!data.byteLength) return;
    await painted();
    await this.#makePanes();
  }

  #show(graph) {
    this.graph = graph;
    this.selected = { nodes: [], show: () => this.details.clear() };
    this.title.textContent = graph.model;
    this.stage.replaceChildren(...Object.entries(graph.stages).map(([name, what]) => make("option", "", { value: name, title: what }, name)));
    this.stage.value = graph.stage;
    const offered = modes(graph);
    if (!offered.some(([name]) => name === this.mode)) this.mode = "operator";
    this.color.replaceChildren(...offered.map(([name, label]) => make("option", "", { value: name }, label)));
    this.color.value = this.mode;
    this.root.hidden = false;
    this.#hideStill();
    this.outline.draw(graph);
    this.details.clear();
    this.root.dataset.outlined = graph.stage;
  }

  /** Hides the static picture, which is for pages without a kernel. */
  #hideStill() {
    this.still ??= this.root.appendChild(hidesStill(this.model));
  }

  async #makePanes() {
    const waiting = setTimeout(() => this.#say(WAITING), BUSY_MS);
    try {
      const modules = await netron(this.model);
      this.note.hidden = true;
      this.style = modules.light;
      this.#closePanes();
      for (const phase of this.graph.phases) this.#makePane(modules, phase);
    } catch (error) {
      this.#fallBack(error.message);
    } finally {
      clearTimeout(waiting);
    }
  }

  #say(words) {
    this.note.textContent = words;
    this.note.hidden = false;
  }

  #makePane(modules, phase) {
    const pane = new Pane(modules, phase, (message) => this.#hear(phase, message));
    const zoom = (text, title, by) => button("ortlab-zoom", text, title, () => pane.tell({ do: "zoom", by }));
    pane.words = make("span", "ortlab-hint");
    const title = this.graph.phases.length > 1 ? TITLES[phase] : "";
    const head = make(
      "div", "ortlab-pane-head", {}, make("span", "ortlab-pane-title", {}, title), pane.words, make("span", "ortlab-spring"),
      zoom("−", `Zoom out of the ${phase} graph`, 1 / 1.25), zoom("+", `Zoom into the ${phase} graph`, 1.25), zoom("⤢", `Show the whole ${phase} graph`, 0),
    );
    pane.box = make("div", "ortlab-pane", { "data-phase": phase }, head, pane.element);
    this.panes.set(phase, pane);
    this.drawing.append(pane.box);
  }

  #hear(phase, message) {
    const acts = {
      ready: () => {
        this.#theme();
        this.#drawPane(phase, null);
      },
      drawn: () => this.#drawn(phase),
      node: () => (message.id[0] === "m" ? this.pickModule(Number(message.id.slice(1))) : this.pickNode(Number(message.id.slice(1)))),
      unfold: () => this.toggle(Number(message.id.slice(1))),
      tensor: () => this.details.tensor(this.graph, message.id),
      nothing: () => this.#select([], () => this.details.clear()),
      failed: () => this.#fallBack(message.text),
    };
    acts[message.is]();
  }

  /** Redraws after a change of the folding; `settle` is the module to keep visible. */
  #draw(settle = null) {
    this.outline.draw(this.graph);
    this.outline.select(this.#ids().flat());
    for (const phase of this.panes.keys()) this.#drawPane(phase, settle);
  }

  #drawPane(phase, settle) {
    const pane = this.panes.get(phase);
    delete pane.box.dataset.drawn;
    const ids = this.graph.drawn(phase);
    const count = this.graph.size(phase);
    const tooMany = count > MOST;
    pane.element.hidden = tooMany;
    const nodes = this.graph.rows[0][phase].toLocaleString("en-US");
    if (tooMany) {
      pane.words.textContent = `${count.toLocaleString("en-US")} nodes are too many to draw; fold some modules`;
      return;
    }
    const folded = count < this.graph.rows[0][phase];
    pane.words.textContent = folded ? `${nodes} nodes as ${count.toLocaleString("en-US")}` : `${nodes} nodes`;
    pane.words.title = folded ? "Each folded module is drawn as one node" : "";
    pane.box.classList.add("ortlab-busy");
    const from = phase === "forward" ? 0 : this.graph.split;
    const at = settle == null ? null : ids[this.graph.members(`m${settle}`, phase)[0] - from];
    pane.tell({ do: "draw", graph: this.graph.netron(phase), settle: at });
  }

  #drawn(phase) {
    const pane = this.panes.get(phase);
    pane.box.classList.remove("ortlab-busy");
    this.#colorPane(phase);
    const ids = this.#ids()[this.graph.phases.indexOf(phase)];
    if (ids.length) pane.tell({ do: "select", ids });
    pane.box.dataset.drawn = String(this.graph.size(phase));
  }

  #colorBy(mode) {
    this.mode = mode;
    for (const phase of this.panes.keys()) this.#colorPane(phase);
  }

  #colorPane(phase) {
    const { colors, legend } = coloring(this.graph, this.mode, this.style);
    this.panes.get(phase).tell({ do: "color", colors: colors[phase] ?? {} });
    this.legend.replaceChildren(...legend.map(({ color, label }) => {
      const mark = make("span", "ortlab-mark");
      mark.style.background = color;
      return make("span", "ortlab-entry", {}, mark, label);
    }));
    this.root.dataset.color = this.mode;
  }

  toggle(module) {
    const { open } = this.graph;
    if (open.has(module)) open.delete(module);
    else this.graph.around(module).forEach((each) => open.add(each));
    this.#draw(module);
    this.selected.show();
  }

  #foldAll() {
    this.graph.foldAll();
    this.#draw();
  }

  #unfoldAll() {
    this.graph.unfoldAll();
    this.#draw();
  }

  pickModule(module) {
    this.#unfold(this.graph.rows[module].parent);
    this.#select(this.graph.within(module), () => this.details.module(this.graph, module), [`m${module}`]);
  }

  pickNode(node) {
    this.#unfold(this.graph.nodes.module[node]);
    this.#select([node, ...this.graph.partners([node])], () => this.details.node(this.graph, node));
  }

  pickLine(place) {
    const nodes = this.graph.ofLine(place);
    if (nodes.length) this.#unfold(this.graph.nodes.module[nodes[0]]);
    this.#select(nodes, () => this.details.line(this.graph, nodes, place));
  }

  #clickLine(row) {
    if (!row) return;
    this.code.querySelector(".chosen")?.classList.remove("chosen");
    row.classList.add("chosen");
    this.pickLine(row.dataset.line);
  }

  /** Unfolds a module and its ancestors if they are folded. */
  #unfold(module) {
    const wanted = this.graph.around(module);
    if (wanted.every((each) => this.graph.open.has(each))) return;
    wanted.forEach((each) => this.graph.open.add(each));
    this.#draw(module);
  }

  #select(nodes, show, rows) {
    this.selected = { nodes, show, rows };
    show();
    const ids = this.#ids();
    this.graph.phases.forEach((phase, i) => this.panes.get(phase)?.tell({ do: "select", ids: ids[i] }));
    this.outline.select(rows ?? ids.flat());
  }

  /** Returns the ids of the selected elements by phase. */
  #ids() {
    return this.graph.phases.map((phase) => {
      const from = phase === "forward" ? 0 : this.graph.split;
      const ids = this.graph.drawn(phase);
      const mine = this.selected.nodes.filter((node) => this.graph.phaseOf(node) === phase);
      return [...new Set(mine.map((node) => ids[node - from]))];
    });
  }

  #find() {
    if (this.search.value.trim()) return this.details.hits(this.graph, this.search.value);
    return this.selected.show();
  }

  #firstHit() {
    const { modules, nodes } = this.details.hits(this.graph, this.search.value);
    if (modules.length) this.pickModule(modules[0]);
    else if (nodes.length) this.pickNode(nodes[0]);
  }

  #theme() {
    const [red, green, blue] = getComputedStyle(this.root).color.match(/\d+/g).map(Number);
    const dark = red + green + blue > 3 * 128; // light text means a dark page
    this.panes.forEach((pane) => pane.tell({ do: "theme", dark }));
  }

  /** Shows only the outline and the search, without netron's drawing. */
  #fallBack(reason) {
    this.#closePanes();
    this.#say(`The graph is not drawn: ${reason}. The outline lists its modules and nodes.`);
  }

  #closePanes() {
    this.panes.forEach((pane) => pane.close());
    this.panes.clear();
    this.drawing.replaceChildren();
  }

  close() {
    this.model.off("change:graph", this.changed);
    this.themed.disconnect();
    this.outline.close();
    clearTimeout(this.typed);
    this.#closePanes();
    this.root.remove();
  }
}

/** anywidget initializes a model once and cleans up when it is closed; a model may have several views. */
export default {
  initialize({ model }) {
    return () => forget(model);
  },
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};
