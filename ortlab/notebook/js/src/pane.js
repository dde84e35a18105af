// One pane of the graph view: a sandboxed frame in which netron draws. This is the page's side; the frame's
// is netron.frame.js.
import FRAME from "./netron.frame.js";

// The frame has no access to the network, this page or its origin.
const POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; worker-src blob:; style-src 'unsafe-inline'";
const PAGE = `<!DOCTYPE html><html><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${POLICY}">
<style>
  html, body { width: 100%; height: 100%; margin: 0; overflow: hidden; background: transparent; }
  .target { display: flex; width: 100%; height: 100%; overflow: auto; outline: none; }
  .canvas { margin: auto; flex-shrink: 0; user-select: none; }
  .node { cursor: pointer; }
</style></head>
<body><div id="target" class="target" tabindex="0"></div><div id="sidebar" hidden></div>
<script>${FRAME.replaceAll("</script", "<\\/script")}</script></body></html>`;
const BOOT_MS = 15000;

export class Pane {
  /** `hear` receives the frame's messages, including {is: "ready"} and {is: "failed", text} at its start. */
  constructor(netron, phase, hear) {
    this.hear = hear;
    this.element = document.createElement("iframe");
    this.element.className = "ortlab-frame";
    this.element.title = `${phase} graph`;
    this.element.setAttribute("sandbox", "allow-scripts");
    this.element.srcdoc = PAGE;
    // A frame that is moved, as JupyterLab does with cells, reloads and loses its state.
    this.element.addEventListener("load", () => this.#start(netron));
  }

  #start(netron) {
    const channel = new MessageChannel();
    this.close();
    this.port = channel.port1;
    this.timer = setTimeout(() => this.hear({ is: "failed", text: "netron did not start" }), BOOT_MS);
    this.port.onmessage = ({ data }) => {
      clearTimeout(this.timer);
      this.hear(data);
    };
    this.element.contentWindow.postMessage(netron, "*", [channel.port2]);
  }

  tell(message) {
    this.port?.postMessage(message);
  }

  close() {
    clearTimeout(this.timer);
    this.port?.close();
  }
}
