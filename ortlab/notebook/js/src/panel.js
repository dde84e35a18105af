// Panel as a separate view: the settings of a run with its buttons, or of a model before its run.
import { hidesStill, make, retire, whenKernelEnds } from "./elements.js";
import { Form, KEYS, onClick } from "./form.js";

const OVER = new Set(["finished", "stopped", "failed"]);
const DRAWING_MS = 500; // time in which a view gets its size

/**
 * Keeps the page still while the view of a run replaces the panel, and scrolls that view into sight. Where the page
 * has no output of a cell, as in VS Code, the view is shown without that.
 *
 * Returns a function that ends this; it ends by itself when the view is gone.
 */
function land(root) {
  const output = root.closest(".jp-OutputArea");
  if (!output) return () => {};
  let run;
  const end = () => {
    observer.disconnect();
    output.style.minHeight = "";
  };
  const show = () => [run, run.firstElementChild].forEach((each) => each.scrollIntoView({ block: "nearest" })); // its head at least
  const observer = new MutationObserver(() => {
    const found = output.querySelector(".ortlab-run");
    if (found && !run) {
      run = found;
      show();
      setTimeout(show, DRAWING_MS);
    } else if (run && !found) setTimeout(end, DRAWING_MS);
  });
  output.style.minHeight = `${output.offsetHeight}px`; // otherwise the cells below move up, and down again
  observer.observe(output, { childList: true, subtree: true });
  return end;
}

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
    this.form = new Form((message) => {
      if (message.do === "start") this.landed = land(this.root);
      model.send(message);
    });
    this.root.append(hidesStill(model), head, this.form.root);
    el.append(this.root);
    this.draw = () => this.#draw();
    model.on("change:controls", this.draw);
    model.on("change:standing", this.draw);
    this.draw();
    this.forget = whenKernelEnds(model, () => {
      this.buttons.hidden = true;
      if (this.state.textContent) this.state.textContent = "its kernel has ended";
      retire(this.root);
    });
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
    if (standing.result[0] === "refused") this.landed?.();
  }

  close() {
    this.forget();
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
