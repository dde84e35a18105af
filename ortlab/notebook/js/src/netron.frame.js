// One pane of the graph view: netron's drawing in a separate sandboxed frame, without netron's page.
//
// The page sends one message with netron's modules and a port; all other messages use that port.
// From the page:
//   {do: "draw", graph, settle}   a graph in netron's format whose nodes have an `id`, and the id of the
//                                 node to scroll to, or null for the beginning
//   {do: "color", colors}       {node id: [fill, text]}; other nodes get netron's own colors
//   {do: "select", ids}           marks these nodes and scrolls to them
//   {do: "zoom", by}              a factor; 0 fits the whole graph
//   {do: "theme", dark}
// To the page:
//   {is: "ready"}, {is: "drawn", ms}, {is: "failed", text}
//   {is: "node", id}, {is: "unfold", id}, {is: "tensor", id}, {is: "nothing"}   clicked element
"use strict";

const blob = (text) => URL.createObjectURL(new Blob([text], { type: "text/javascript" }));

/** The interface that netron expects of its application. */
class Host {
  constructor(dagre) {
    this.window = window;
    this.document = document;
    this.type = "Browser";
    this.dagre = dagre;
  }

  environment() {}
  event() {}
  update() {}
  async require() {} // readers of other file formats, which netron preloads
  async asset() {}

  /** Netron asks whether to continue a slow layout; the answer is always yes. */
  message(text) {
    return text ? new Promise(() => {}) : Promise.resolve();
  }

  /** Starts a classic worker: a frame without an origin cannot start a module worker, which netron's is. */
  worker() {
    const answer = ({ data }) => {
      try {
        dagre.layout(data.nodes, data.edges, data.layout, data.state);
        self.postMessage(data);
      } catch (error) {
        self.postMessage({ type: "error", message: error.message });
      }
    };
    const source = this.dagre.replace(/^export .*$/gm, "");
    return new Worker(blob(`${source}\nself.addEventListener("message", ${answer});`));
  }
}

const MARGIN = 100; // empty pixels around a drawing of netron
const EDGE = 70; // pixels of the margin that are scrolled out at first
const READABLE = 0.7;

/** Adds the method that netron calls on types; messages cannot contain methods. */
const TYPE = {
  toString() {
    return this.text;
  },
};

class Pane {
  constructor(view, port, dark) {
    this.view = view;
    this.port = port;
    this.dark = dark;
    this.byId = new Map();
    view.options.attributes = true;
    view.showNodeProperties = (node) => this.tell({ is: "node", id: node.id });
    view.pushTarget = (type) => this.tell({ is: "unfold", id: type.id });
    view.showConnectionProperties = (value) => this.tell({ is: "tensor", id: value.id });
    view.showTensorProperties = (argument) => this.tell({ is: "tensor", id: argument.value[0].id });
    view.showTargetProperties = () => {};
    port.onmessage = ({ data }) => this.hear(data);
    this.work = Promise.resolve();
    document.getElementById("target").addEventListener("click", () => this.tell({ is: "nothing" }));
  }

  tell(message) {
    this.port.postMessage(message);
  }

  /** Handles messages in order; of several waiting drawings, only the last is made. */
  hear(message) {
    if (message.do === "draw") this.wanted = message;
    this.work = this.work.then(() => (message.do !== "draw" || message === this.wanted) && this[message.do](message));
    this.work = this.work.catch((error) => this.tell({ is: "failed", text: String(error?.message ?? error) }));
  }

  async draw({ graph, settle }) {
    const began = performance.now();
    this.byId = new Map(graph.nodes.map((node) => [node.id, node]));
    for (const { value } of graph.nodes.flatMap((node) => node.inputs)) Object.setPrototypeOf(value[0].type, TYPE);
    this.view.model = { identifier: "" };
    await this.view.render(graph, null);
    for (const node of graph.nodes) if (node.type.nodes) this.#unfolds(node);
    if (this.byId.has(settle)) this.reveal([settle], "instant");
    else this.#begin();
    await new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)));
    this.tell({ is: "drawn", ms: performance.now() - began });
  }

  /** Scrolls to the beginning of the drawing, and fits its width if it stays readable. */
  #begin() {
    const pane = document.getElementById("target");
    const { width } = document.getElementById("origin").getBBox();
    const fits = pane.clientWidth / (width + 2 * (MARGIN - EDGE));
    this.view.target.zoom = Math.min(1, Math.max(READABLE, fits));
    const zoom = this.view.target.zoom;
    if (width * zoom <= pane.clientWidth) pane.scrollLeft = (MARGIN + width / 2) * zoom - pane.clientWidth / 2;
    pane.scrollTop = EDGE * zoom;
  }

  /** Netron draws a button on nodes that have a definition; here, the button unfolds the module. */
  #unfolds(node) {
    const { element, definition } = this.drawn(node);
    element.addEventListener("dblclick", () => this.tell({ is: "unfold", id: node.id }));
    definition.text.textContent = "+";
    definition.element.querySelector("title").textContent = "Unfold";
  }

  drawn(node) {
    return this.view.target.find(node);
  }

  color({ colors }) {
    for (const [id, node] of this.byId) {
      const [fill, text] = colors[id] ?? ["", ""];
      for (const item of this.drawn(node).element.querySelectorAll(".node-item")) {
        item.querySelector("path").style.fill = fill;
        item.querySelector("text").style.fill = text;
      }
    }
  }

  select({ ids }) {
    this.reveal(ids, "smooth");
  }

  reveal(ids, behavior) {
    const nodes = ids.map((id) => this.byId.get(id)).filter(Boolean);
    const elements = this.view.target.select(nodes);
    this.view.target.scrollTo(elements.slice(0, 1), behavior);
  }

  zoom({ by }) {
    const target = this.view.target;
    target.zoom = by ? target.zoom * by : 0;
  }

  theme({ dark }) {
    this.dark.disabled = !dark;
  }
}

async function boot({ modules, light, dark }, port) {
  const style = (text) => document.head.appendChild(Object.assign(document.createElement("style"), { textContent: text }));
  style(light);
  const urls = {};
  for (const [name, source] of Object.entries(modules)) {
    // Modules for other file formats are not included, and never requested.
    urls[name] = blob(source.replace(/(['"])\.\/([\w-]+\.js)\1/g, (as, quote, file) => (urls[file] ? quote + urls[file] + quote : as)));
  }
  const { View } = await import(urls["view.js"]);
  new Pane(new View(new Host(modules["dagre.js"])), port, style(dark));
}

addEventListener("message", async ({ data, ports: [port] }) => {
  try {
    await boot(data, port);
    port.postMessage({ is: "ready" });
  } catch (error) {
    port.postMessage({ is: "failed", text: String(error?.message ?? error) });
  }
}, { once: true });
