// One pane of the graph view: netron's drawing in a sandboxed frame of its own, without its page.
//
// The page sends one message with netron's modules and a port; all else goes over that port.
// From the page:
//   {do: "draw", graph, settle}   netron's own form of a graph, its nodes with an `id`; and the id of
//                                 the node to bring into sight, or null for the beginning
//   {do: "colour", colours}       {node id: [fill, text]}; others get netron's own
//   {do: "select", ids}           marks these nodes and brings them into sight
//   {do: "zoom", by}              a factor; 0 fits the whole graph
//   {do: "theme", dark}
// To the page:
//   {is: "ready"}, {is: "drawn", ms}, {is: "failed", text}
//   {is: "node", id}, {is: "unfold", id}, {is: "tensor", id}, {is: "nothing"}   what was clicked
"use strict";

const blob = (text) => URL.createObjectURL(new Blob([text], { type: "text/javascript" }));

/** What netron asks of the application around it. */
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
  async require() {} // readers of other files, which netron loads ahead
  async asset() {}

  /** Netron asks whether to go on with a layout that takes its time: it may. */
  message(text) {
    return text ? new Promise(() => {}) : Promise.resolve();
  }

  /** A frame without an origin may only start a classic script, and netron's worker is a module. */
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

const MARGIN = 100; // pixels that netron leaves empty around a drawing
const EDGE = 70; // of them that need not be seen at first
const READABLE = 0.7;

/** Methods do not travel with messages: netron asks a type for its text. */
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

  /** One thing after another; of drawings that wait, only the last is made. */
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

  /** The beginning of the drawing, and its whole width where that stays easy to read. */
  #begin() {
    const pane = document.getElementById("target");
    const { width } = document.getElementById("origin").getBBox();
    const fits = pane.clientWidth / (width + 2 * (MARGIN - EDGE));
    this.view.target.zoom = Math.min(1, Math.max(READABLE, fits));
    const zoom = this.view.target.zoom;
    if (width * zoom <= pane.clientWidth) pane.scrollLeft = (MARGIN + width / 2) * zoom - pane.clientWidth / 2;
    pane.scrollTop = EDGE * zoom;
  }

  /** Netron draws a node that has a definition with a button for it, which here unfolds. */
  #unfolds(node) {
    const { element, definition } = this.drawn(node);
    element.addEventListener("dblclick", () => this.tell({ is: "unfold", id: node.id }));
    definition.text.textContent = "+";
    definition.element.querySelector("title").textContent = "Unfold";
  }

  drawn(node) {
    return this.view.target.find(node);
  }

  colour({ colours }) {
    for (const [id, node] of this.byId) {
      const [fill, text] = colours[id] ?? ["", ""];
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
    // Those that netron loads when it opens other files are not here, and are never asked for.
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
