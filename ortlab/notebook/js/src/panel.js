// Panel as a separate view: the settings of a run with its buttons, or of a model before its run.
import { hidesStill, make } from "./elements.js";
import { Form, KEYS, onClick } from "./form.js";

const OVER = new Set(["finished", "stopped", "failed"]);

class View {
  constructor(model, el) {
    this.model = model;
    this.root = make("section", "ortlab-panel-view", KEYS);
    this.title = make("span", "ortlab-panel-title");
    this.state = make("span", "ortlab-panel-state", { role: "status" });
    this.pause = make("button", "ortlab-panel-button", { type: "button", ...KEYS });
    this.stop = make("button", "ortlab-panel-button", { type: "button", ...KEYS }, "Stop");
    this.stop.title = "Stop the run after the current step and keep its weights";
    onClick(this.pause, () => model.send({ do: this.#paused() ? "resume" : "pause" }));
    onClick(this.stop, () => model.send({ do: "stop" }));
    this.buttons = make("span", "ortlab-panel-buttons", {}, this.pause, this.stop);
    const head = make("div", "ortlab-panel-head", {}, this.title, this.state, this.buttons);
    this.form = new Form((message) => model.send(message));
    this.root.append(hidesStill(model), head, this.form.root);
    el.append(this.root);
    this.draw = () => this.#draw();
    model.on("change:controls", this.draw);
    model.on("change:standing", this.draw);
    this.draw();
    model.send({ do: "open" });
  }

  #paused() {
    return this.model.get("standing").state === "paused";
  }

  #draw() {
    const standing = this.model.get("standing");
    this.title.textContent = `Settings of ${standing.title}`;
    this.root.setAttribute("aria-label", this.title.textContent);
    if (this.state.textContent !== standing.state) this.state.textContent = standing.state;
    this.buttons.hidden = !standing.state || OVER.has(standing.state);
    this.pause.textContent = this.#paused() ? "Resume" : "Pause";
    const stopping = standing.state === "stopping";
    this.stop.ariaDisabled = String(stopping);
    this.pause.ariaDisabled = String(stopping || standing.state === "starting");
    this.form.draw(this.model.get("controls"), standing);
  }

  close() {
    this.model.off("change:controls", this.draw);
    this.model.off("change:standing", this.draw);
    this.form.close();
    this.root.remove();
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};
