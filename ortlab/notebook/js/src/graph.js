// A stage of a model as the kernel told it, and which of its modules are folded.
//
// Nodes, tensors and modules are known by their places. What is drawn has an id: "n12" is a node,
// "m3" a folded module with all that is within it.

const OPENED = 60; // nodes that a pane begins with, at most
export const MOST = 6000; // nodes that netron lays out in one pane within seconds

export const PHASES = ["forward", "backward"];

const NO_NODES = {
  split: 0,
  nodes: { name: [], op: [], module: [], of: [], reads: [], gives: [], attributes: [], source: [] },
  tensors: { name: [], kind: [], sizes: [], shape: [], bytes: [] },
  inputs: [], outputs: [], parameters: {}, parameterGradients: {}, categories: {}, fused: [], recompute: [], overlays: [],
};

export class Graph {
  /** Of the modules alone, or with their nodes. */
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

  /** Unfolds what is largest, layers that are alike together, while a pane is easy to take in. */
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

  /** How many nodes the pane of a phase has. */
  size(phase) {
    const folded = this.#folded(phase);
    const drawn = ({ own, [phase]: all }, i) => (folded[i] < 0 ? own[phase] : Number(folded[i] === i && all > 0));
    return this.rows.reduce((sum, row, i) => sum + drawn(row, i), 0);
  }

  /** For each module, the folded module that it is drawn in, or -1. One node needs no folding. */
  #folded(phase) {
    const folded = [];
    this.rows.forEach((row, i) => {
      const above = row.parent < 0 ? -1 : folded[row.parent];
      folded.push(above >= 0 || this.open.has(i) || row[phase] < 2 ? above : i);
    });
    return folded;
  }

  /** The id of what each node of a phase is drawn as, in their order. */
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

  /** A module and those around it. */
  around(module) {
    const found = [];
    for (let at = module; at >= 0; at = this.rows[at].parent) found.push(at);
    return found;
  }

  /** All nodes within a module. */
  within(module) {
    const row = this.rows[module];
    return [...row.nodes, ...row.children.flatMap((child) => this.within(child))];
  }

  /** The nodes of an id: one, or all of a folded module in this phase. */
  members(id, phase) {
    if (id[0] === "n") return [Number(id.slice(1))];
    return this.within(Number(id.slice(1))).filter((node) => this.phaseOf(node) === phase);
  }

  /** The nodes of the other phase that belong to these: their gradients, or what they are gradients of. */
  partners(nodes) {
    return [...new Set(nodes.flatMap((node) => (node < this.split ? this.gradients[node] : [this.nodes.of[node]])))].filter((node) => node >= 0);
  }

  /** Modules and nodes whose name, operator or module has `text` in it, in any case. */
  find(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return { modules: [], nodes: [] };
    const has = (value) => value.toLowerCase().includes(wanted);
    const modules = this.rows.flatMap((row, i) => (row.path && has(row.path.split(".").at(-1)) ? [i] : []));
    const inside = this.rows.map((row) => has(row.path));
    const { name, op, module } = this.nodes;
    const nodes = name.flatMap((each, i) => (has(each) || has(op[i]) || inside[module[i]] ? [i] : []));
    return { modules, nodes };
  }

  /** How a module is called in the drawing: "layer.0" says more than "0". */
  label(module) {
    const path = this.rows[module].path || this.model;
    const parts = path.split(".");
    return /^\d+$/.test(parts.at(-1)) ? parts.slice(-2).join(".") : parts.at(-1);
  }

  /** A phase in netron's form: what is drawn, and which tensors go from where to where. */
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

  /** Whether a pane begins with this tensor: the user's input, or a gradient that torch hands in. */
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
      // Netron shows what follows the last dot of a type.
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

  /** "float[8, 128]" of a tensor; with the graph's own names for sizes if `symbolic`. */
  typeOf(tensor, symbolic = false) {
    const { kind, sizes, shape } = this.tensors;
    const known = symbolic ? sizes[tensor] : shape[tensor];
    return known ? `${kind[tensor]}[${known.join(", ")}]` : kind[tensor];
  }

  /** Netron's form of a type. */
  #type(tensor) {
    return { shape: { dimensions: this.tensors.shape[tensor] ?? [] }, text: this.typeOf(tensor) };
  }
}
