// A stage of a model, as sent by the kernel, and the state of its folded modules.
//
// Nodes, tensors and modules are identified by index. Drawn elements have an id: "n12" is a node, "m3" is a
// folded module with everything inside it.

const OPENED = 60; // maximum number of nodes in a pane at first
export const MOST = 6000; // maximum number of nodes in a pane that netron lays out within seconds

export const PHASES = ["forward", "backward"];

const NO_NODES = {
  split: 0,
  nodes: { name: [], op: [], module: [], of: [], reads: [], gives: [], attributes: [], source: [] },
  tensors: { name: [], kind: [], sizes: [], shape: [], bytes: [] },
  inputs: [], outputs: [], parameters: {}, parameterGradients: {}, categories: {}, fused: [], recompute: [], overlays: [],
};

export class Graph {
  /** Creates a graph of the modules only, or with their nodes. */
  constructor(modules, nodes = NO_NODES) {
    Object.assign(this, modules, nodes);
    this.count = nodes.nodes.name.length;
    this.rows = modules.modules.map(
      ([name, parent, calls, forward, backward, parameters, activations, forwardUs, backwardUs]) =>
        ({ name, parent, calls, forward, backward, parameters, activations, forwardUs, backwardUs, children: [], nodes: [] }),
    );
    this.rows.forEach((row, i) => {
      const above = this.rows[row.parent];
      row.path = above?.path ? `${above.path}.${row.name}` : row.name;
      row.depth = above ? above.depth + 1 : 0;
      above?.children.push(i);
    });
    for (const row of this.rows) {
      const within = (phase) => row.children.reduce((sum, child) => sum + this.rows[child][phase], 0);
      row.own = Object.fromEntries(PHASES.map((phase) => [phase, row[phase] - within(phase)]));
    }
    this.nodes.module.forEach((module, i) => this.rows[module].nodes.push(i));
    this.gradients = Array.from({ length: this.count }, () => []);
    this.nodes.of.forEach((of, i) => of >= 0 && this.gradients[of].push(i));
    this.makers = new Map();
    this.readers = new Map();
    for (let i = 0; i < this.count; i++) {
      for (const tensor of this.nodes.gives[i]) this.makers.set(tensor, i);
      for (const tensor of this.nodes.reads[i]) {
        if (!this.readers.has(tensor)) this.readers.set(tensor, []);
        this.readers.get(tensor).push(i);
      }
    }
    this.open = new Set();
    this.#openWhatFits();
  }

  get phases() {
    return PHASES.filter((phase) => this.rows[0][phase] > 0);
  }

  phaseOf(node) {
    return node < this.split ? "forward" : "backward";
  }

  /** Unfolds the largest modules, similar ones together, while every pane has at most OPENED nodes. */
  #openWhatFits() {
    const size = ({ forward, backward }) => forward + backward;
    for (;;) {
      const folded = this.rows.flatMap((row, i) => (this.open.has(row.parent) || row.parent < 0) && !this.open.has(i) ? [i] : []);
      const largest = Math.max(...folded.map((i) => size(this.rows[i])));
      const next = folded.filter((i) => size(this.rows[i]) > 0.9 * largest);
      if (largest < 2 || !next.length) return;
      const before = this.open;
      this.open = new Set([...before, ...next]);
      if (PHASES.some((phase) => this.size(phase) > OPENED)) {
        this.open = before;
        return;
      }
    }
  }

  /** Returns the number of nodes drawn in the pane of a phase. */
  size(phase) {
    const folded = this.#folded(phase);
    const drawn = ({ own, [phase]: all }, i) => (folded[i] < 0 ? own[phase] : Number(folded[i] === i && all > 0));
    return this.rows.reduce((sum, row, i) => sum + drawn(row, i), 0);
  }

  /** Returns for each module the folded module that contains it, or -1. Modules of one node are not folded. */
  #folded(phase) {
    const folded = [];
    this.rows.forEach((row, i) => {
      const above = row.parent < 0 ? -1 : folded[row.parent];
      folded.push(above >= 0 || this.open.has(i) || row[phase] < 2 ? above : i);
    });
    return folded;
  }

  /** Returns the id of the element that each node of a phase is drawn as, in order. */
  drawn(phase) {
    const folded = this.#folded(phase);
    return this.nodesOf(phase).map((node) => {
      const module = folded[this.nodes.module[node]];
      return module < 0 ? `n${node}` : `m${module}`;
    });
  }

  nodesOf(phase) {
    const [from, to] = phase === "forward" ? [0, this.split] : [this.split, this.count];
    return Array.from({ length: to - from }, (_, i) => from + i);
  }

  foldAll() {
    this.open = new Set([0]);
  }

  unfoldAll() {
    this.open = new Set(this.rows.keys());
  }

  /** Returns a module and its ancestors. */
  around(module) {
    const found = [];
    for (let at = module; at >= 0; at = this.rows[at].parent) found.push(at);
    return found;
  }

  /** Returns all nodes inside a module. */
  within(module) {
    const row = this.rows[module];
    return [...row.nodes, ...row.children.flatMap((child) => this.within(child))];
  }

  /** Returns the nodes of an id: one node, or all nodes of a folded module in this phase. */
  members(id, phase) {
    if (id[0] === "n") return [Number(id.slice(1))];
    return this.within(Number(id.slice(1))).filter((node) => this.phaseOf(node) === phase);
  }

  /** Returns the corresponding nodes of the other phase: gradients of these nodes, or their forward nodes. */
  partners(nodes) {
    return [...new Set(nodes.flatMap((node) => (node < this.split ? this.gradients[node] : [this.nodes.of[node]])))].filter((node) => node >= 0);
  }

  /** Finds modules and nodes whose name, operator, module or line contains `text`, ignoring case. */
  find(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return { modules: [], nodes: [] };
    const has = (value) => value.toLowerCase().includes(wanted);
    const modules = this.rows.flatMap((row, i) => (row.path && has(row.path.split(".").at(-1)) ? [i] : []));
    const inside = this.rows.map((row) => has(row.path));
    const { name, op, module, source } = this.nodes;
    const nodes = name.flatMap((each, i) => (has(each) || has(op[i]) || inside[module[i]] || has(source[i]) ? [i] : []));
    return { modules, nodes };
  }

  /** Returns the nodes of a line of code, such as "model.py:12", and their gradients. */
  ofLine(place) {
    return this.nodes.source.flatMap((each, i) => (each.startsWith(`${place}: `) ? [i] : []));
  }

  /** Returns the label of a module in the drawing: "layer.0" instead of "0". */
  label(module) {
    const path = this.rows[module].path || this.model;
    const parts = path.split(".");
    return /^\d+$/.test(parts.at(-1)) ? parts.slice(-2).join(".") : parts.at(-1);
  }

  /** Returns a phase in netron's format: the drawn elements and the tensors that connect them. */
  netron(phase) {
    const values = new Map();
    const value = (tensor) => {
      if (!values.has(tensor)) values.set(tensor, { id: tensor, name: `t${tensor}`, type: this.#type(tensor) });
      return values.get(tensor);
    };
    const groups = new Map();
    const ids = this.drawn(phase);
    const nodes = this.nodesOf(phase);
    nodes.forEach((node, i) => {
      if (!groups.has(ids[i])) groups.set(ids[i], []);
      groups.get(ids[i]).push(node);
    });
    const made = new Map(nodes.flatMap((node, i) => this.nodes.gives[node].map((tensor) => [tensor, ids[i]])));
    const drawn = [...groups].map(([id, members]) => this.#node(id, members, made, value));
    const outer = [...new Set(nodes.flatMap((node) => this.nodes.reads[node]))].filter((tensor) => this.#comesIn(tensor, phase));
    const goesOut = new Set(this.outputs.filter((tensor) => made.has(tensor) && !(tensor in this.parameterGradients)));
    const named = (tensor) => ({ name: this.tensors.name[tensor], value: [value(tensor)] });
    return { name: "", nodes: drawn, inputs: outer.map(named), outputs: [...goesOut].map(named) };
  }

  /** Returns whether a tensor enters the pane: an input of the user, or a gradient passed in by torch. */
  #comesIn(tensor, phase) {
    if (tensor in this.parameters) return false;
    const maker = this.makers.get(tensor);
    if (maker == null) return this.inputs.includes(tensor);
    return phase === "backward" && this.nodes.op[maker].endsWith("YieldOp");
  }

  #node(id, members, made, value) {
    const reads = [...new Set(members.flatMap((node) => this.nodes.reads[node]))];
    const gives = [...new Set(members.flatMap((node) => this.nodes.gives[node]))];
    const argument = (tensor) => ({ name: "", value: [value(tensor)] });
    const joined = reads.filter((tensor) => !(tensor in this.parameters) && made.get(tensor) !== id).map(argument);
    const outputs = gives.map(argument);
    if (id[0] === "m") {
      const module = Number(id.slice(1));
      // Netron shows only the part after the last dot of a type.
      const name = this.label(module).replaceAll(".", "\u2024");
      const type = { id, name, category: "", nodes: [{}] };
      const attributes = [{ name: "nodes", type: "", value: String(members.length) }];
      return { id, name: this.rows[module].path || this.model, type, inputs: joined, outputs, attributes };
    }
    const [node] = members;
    const op = this.nodes.op[node];
    const weights = reads.filter((tensor) => tensor in this.parameters).map((tensor) => this.#weight(tensor));
    const type = { name: op.replace(/^com\.microsoft\.|^org\.pytorch\.aten\./, ""), category: this.categories[op] ?? "" };
    return { id, name: this.nodes.name[node], type, inputs: [...joined, ...weights], outputs, attributes: [] };
  }

  #weight(tensor) {
    const type = this.#type(tensor);
    const name = this.parameters[tensor].split(".").at(-1);
    return { name, value: [{ id: tensor, name: "", type, initializer: { type } }] };
  }

  /** Returns a tensor's type, for example "float[8, 128]"; if `symbolic`, with the graph's names of sizes. */
  typeOf(tensor, symbolic = false) {
    const { kind, sizes, shape } = this.tensors;
    const known = symbolic ? sizes[tensor] : shape[tensor];
    return known ? `${kind[tensor]}[${known.join(", ")}]` : kind[tensor];
  }

  /** Returns a type in netron's format. */
  #type(tensor) {
    return { shape: { dimensions: this.tensors.shape[tensor] ?? [] }, text: this.typeOf(tensor) };
  }
}
