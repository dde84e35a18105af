// Panel beside the graph: details of a node, a module or a tensor, and search results.
import { bytesOf } from "./node_colors.js";
import { button, make } from "./elements.js";
import { amount } from "./format.js";

const HITS = 100; // search results that are listed
const LINKS = 12;

export class Details {
  /** `acts` has toggle(module), pickModule(module), pickNode(node), pickTensor(tensor) and pickLine(place). */
  constructor(acts) {
    this.acts = acts;
    this.element = make("div", "ortlab-details", { "aria-live": "polite" });
  }

  clear() {
    const hint = "Click a node to see its shapes, its attributes and its gradient. Double-click a folded module to unfold it.";
    this.element.replaceChildren(make("p", "ortlab-hint", {}, hint));
  }

  node(graph, node) {
    const { name, op, module, source, attributes, reads, gives } = graph.nodes;
    const figures = graph.overlays.flatMap(({ name, unit, values }) => (values[node] == null ? [] : [[name, amount(values[node], unit)]]));
    const bytes = bytesOf(graph, node);
    const partners = graph.partners([node]);
    this.#show(
      op[node],
      name[node] || "unnamed",
      this.#facts([
        ["phase", graph.phases.length > 1 && graph.phaseOf(node)],
        ["module", this.#module(graph, module[node])],
        ["source", source[node] && this.#source(source[node])],
        ...figures,
        ["bytes", bytes != null && `${amount(bytes, "bytes")} of results`],
        ["fusion", graph.fused.includes(node) && "fused by ORT from several nodes"],
      ]),
      this.#list(node < graph.split ? "Gradient" : "Gradient of", this.#nodes(graph, partners)),
      this.#list("Attributes", Object.entries(attributes[node]).map(([key, value]) => [make("b", "", {}, key), ` ${value}`])),
      this.#list("Inputs", this.#tensors(graph, reads[node])),
      this.#list("Outputs", this.#tensors(graph, gives[node])),
    );
  }

  module(graph, module) {
    const row = graph.rows[module];
    const open = graph.open.has(module);
    const number = (value) => value.toLocaleString("en-US");
    this.#show(
      "module",
      row.path || graph.model,
      this.#facts([
        ["calls", row.calls != null && number(row.calls)],
        ["nodes", number(row.forward)],
        ["gradient", row.backward > 0 && `${number(row.backward)} nodes`],
        ["parameters", number(row.parameters)],
        ["activations", row.activations != null && amount(row.activations, "bytes")],
        ["forward", row.forwardUs != null && amount(row.forwardUs, "us")],
        ["backward", row.backwardUs != null && amount(row.backwardUs, "us")],
        ["in", row.parent >= 0 && this.#module(graph, row.parent)],
      ]),
      button("ortlab-button", open ? "Fold" : "Unfold", `${open ? "Fold" : "Unfold"} this module`, () => this.acts.toggle(module)),
    );
  }

  line(graph, nodes, place) {
    const [forward, gradient] = ["forward", "backward"].map((phase) => nodes.filter((node) => graph.phaseOf(node) === phase));
    this.#show(
      "line",
      nodes.length ? graph.nodes.source[nodes[0]] : place,
      nodes.length ? null : make("p", "ortlab-hint", {}, `no node of the stage “${graph.stage}” is of this line`),
      this.#list("Forward", this.#nodes(graph, forward)),
      this.#list("Gradient", this.#nodes(graph, gradient)),
    );
  }

  tensor(graph, tensor) {
    const { name, bytes } = graph.tensors;
    const maker = graph.makers.get(tensor);
    this.#show(
      "tensor",
      name[tensor],
      this.#facts([
        ["type", graph.typeOf(tensor)],
        ["sizes", graph.tensors.sizes[tensor]?.some((size) => typeof size === "string") && graph.tensors.sizes[tensor].join(", ")],
        ["bytes", bytes[tensor] != null && amount(bytes[tensor], "bytes")],
        ["parameter", graph.parameters[tensor]],
        ["gradient of", graph.parameterGradients[tensor]],
      ]),
      this.#list("Output of", maker == null ? [] : this.#nodes(graph, [maker])),
      this.#list("Input of", this.#nodes(graph, graph.readers.get(tensor) ?? [])),
    );
  }

  hits(graph, text) {
    const { modules, nodes } = graph.find(text);
    const count = modules.length + nodes.length;
    const listed = [
      ...modules.slice(0, HITS).map((module) => [this.#module(graph, module), make("span", "ortlab-hint", {}, " module")]),
      ...nodes.slice(0, HITS).map((node) => this.#nodeLine(graph, node)),
    ].slice(0, HITS);
    const more = count > HITS ? make("p", "ortlab-hint", {}, `${(count - HITS).toLocaleString("en-US")} more`) : "";
    this.element.replaceChildren(
      make("p", "ortlab-hint", { role: "status" }, count ? `${count.toLocaleString("en-US")} found` : `no name, operator, module or line contains “${text}”`),
      make("ul", "ortlab-hits", {}, ...listed.map((line) => make("li", "", {}, ...line))),
      more,
    );
    return { modules, nodes };
  }

  #show(kind, name, ...parts) {
    const head = make("div", "ortlab-kind", {}, kind);
    this.element.replaceChildren(head, make("div", "ortlab-path", {}, name), ...parts.filter(Boolean));
    this.element.scrollTop = 0;
  }

  #facts(rows) {
    const given = rows.filter(([, value]) => value != null && value !== false && value !== "");
    return make("dl", "", {}, ...given.flatMap(([term, value]) => [make("dt", "", {}, term), make("dd", "", {}, value)]));
  }

  #list(title, lines) {
    if (!lines.length) return null;
    const shown = lines.slice(0, LINKS).map((line) => make("li", "", {}, ...line));
    const left = lines.length - LINKS;
    if (left > 0) shown.push(make("li", "ortlab-hint", {}, `${left} more`));
    return make("section", "", {}, make("h4", "", {}, title), make("ul", "", {}, ...shown));
  }

  #module(graph, module) {
    const path = graph.rows[module].path;
    return button("ortlab-link", breakable(path || graph.model), "Show this module", () => this.acts.pickModule(module));
  }

  #source(source) {
    return button("ortlab-link", source, "Show the nodes of this line", () => this.acts.pickLine(source.split(": ")[0]));
  }

  #nodes(graph, nodes) {
    return nodes.map((node) => this.#nodeLine(graph, node));
  }

  #nodeLine(graph, node) {
    const { op, name, module } = graph.nodes;
    const link = button("ortlab-link", op[node], name[node] || "Show this node", () => this.acts.pickNode(node));
    const phase = graph.phases.length > 1 && node >= graph.split ? "gradient, " : "";
    return [link, make("span", "ortlab-hint", {}, ` ${phase}${breakable(graph.rows[module[node]].path || graph.model)}`)];
  }

  #tensors(graph, tensors) {
    return tensors.map((tensor) => {
      const what = graph.parameters[tensor] ?? (graph.parameterGradients[tensor] && `gradient of ${graph.parameterGradients[tensor]}`);
      const name = what ?? graph.tensors.name[tensor].split("/").at(-1);
      const link = button("ortlab-link", name, graph.tensors.name[tensor], () => this.acts.pickTensor(tensor));
      return [link, make("span", "ortlab-hint", { title: graph.typeOf(tensor, true) }, ` ${graph.typeOf(tensor)}`)];
    });
  }
}

/** Returns a path that may break after a dot. */
function breakable(path) {
  return path.replaceAll(".", ".\u200b");
}
