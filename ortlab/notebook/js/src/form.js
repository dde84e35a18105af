// The settings as controls, created from the kernel's description; only the kernel validates them.
//
// The kernel updates two traits:
//   controls  [{name, help, unit, topic, front, number, range, optional, held, value, choices: [[text, reason]],
//             reason, costs}, ...]; an empty reason means available; without choices, any text is possible
//   standing  {title, state, over, startable, serial, edits, wrong, blocked, pending, cost, engine, memory,
//             undo, line, result: [kind, text], busy}: state of the edits
// and receives {do: "edit" | "apply" | "start", edits: {name: text}, serial}, {do: "undo"},
// {do: "checkpoint"} and {do: "open"}. The serial number relates an answer to its edits.
import { make, setText } from "./elements.js";
import "./panel.css";

const TYPING_MS = 200; // time after the last key until the text is sent
const SLIDER_STEP = 0.05;
const WAITING_MS = 700; // time without an answer until the page says that it is waiting

/** Uses aria-disabled instead of `disabled`: a disabled button loses the keyboard focus. */
export function onClick(button, action) {
  button.addEventListener("click", () => button.ariaDisabled !== "true" && action());
}

/** Disables JupyterLab's shortcuts on an element. It must be set on the element itself, not on a parent. */
export const KEYS = { "data-lm-suppress-shortcuts": "true" };

const words = (name) => name.replaceAll("_", " ");

export class Form {
  /** `send` sends a message to the kernel. */
  constructor(send) {
    this.send = send;
    this.edits = {}; // edits on this page that are not applied yet
    this.serial = 0;
    this.heard = 0; // the serial of the last answer
    this.rows = new Map();
    this.id = `ortlab-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.#build();
  }

  #build() {
    this.root = make("form", "ortlab-panel", { novalidate: "" });
    this.front = make("div", "ortlab-panel-rows");
    this.others = make("div", "ortlab-panel-rows ortlab-panel-others");
    this.more = make("summary", "ortlab-panel-more", KEYS);
    const fold = make("details", "ortlab-panel-fold", {}, this.more, this.others);
    this.pending = make("div", "ortlab-panel-pending", { "aria-live": "polite" });
    const button = (text, title, action) => {
      const made = make("button", "ortlab-panel-button", { type: "button", title, ...KEYS }, text);
      onClick(made, action);
      return made;
    };
    this.apply = button("Apply", "Enter", () => this.#submit());
    this.apply.classList.add("ortlab-panel-apply");
    this.reset = button("Reset", "Discard the edits (Escape)", () => this.#reset());
    this.undo = button("Undo", "", () => this.send({ do: "undo" }));
    this.keep = button("Checkpoint", "Save the exact state of the run to a file", () => this.send({ do: "checkpoint" }));
    const buttons = make("div", "ortlab-panel-buttons", {}, this.apply, this.reset, this.undo, this.keep);
    this.result = make("div", "ortlab-panel-result", { role: "status" });
    this.root.append(this.front, fold, this.pending, buttons, this.result);
    this.root.addEventListener("submit", (event) => event.preventDefault());
    this.root.addEventListener("keydown", (event) => {
      // A select element does not submit its form on Enter.
      if (event.key === "Enter" && ["SELECT", "INPUT"].includes(event.target.tagName)) {
        event.preventDefault();
        this.#submit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        this.#reset();
      }
    });
  }

  #submit() {
    if (this.apply.ariaDisabled === "true") return;
    this.#tell(this.standing.startable ? "start" : "apply");
  }

  #reset() {
    this.edits = {};
    this.#tell("edit");
    for (const row of this.rows.values()) this.#fill(row, true);
  }

  #tell(verb) {
    clearTimeout(this.typing);
    this.serial += 1;
    this.send({ do: verb, edits: this.edits, serial: this.serial });
    this.result.dataset.kind = "asked";
    setText(this.result, { apply: "applying…", start: "starting…", edit: "" }[verb]);
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.#wait(), WAITING_MS);
    this.#drawButtons();
  }

  #wait() {
    if (this.heard === this.serial) return;
    setText(this.result, "waiting for the kernel, which receives no messages while a cell runs (with `await run`, it does from ipykernel 7.3 on)");
    this.result.dataset.kind = "asked";
  }

  #edit(row, delay) {
    const { name, held } = row.control;
    if (row.input.value === held) delete this.edits[name];
    else this.edits[name] = row.input.value;
    this.serial += 1; // an answer that is still in flight is for earlier edits
    row.root.classList.toggle("ortlab-panel-edited", name in this.edits);
    clearTimeout(this.typing);
    if (delay) this.typing = setTimeout(() => this.#tell("edit"), delay);
    else this.#tell("edit");
    this.#drawButtons();
  }

  /** Shows the kernel's current state. */
  draw(controls, standing) {
    this.standing = standing;
    if (standing.serial === this.serial) {
      this.edits = { ...standing.edits };
      this.heard = this.serial;
    } else if (standing.serial > this.serial) {
      // Edited on another page with the same panel, or on this one before it was reloaded.
      this.edits = { ...standing.edits };
      this.serial = this.heard = standing.serial;
    }
    if (controls.length) {
      for (const control of controls) this.#row(control);
      const other = controls.filter((control) => !control.front).length;
      setText(this.more, `${other} more settings`);
    }
    for (const row of this.rows.values()) this.#fill(row, false);
    this.#drawPending();
    this.#drawButtons();
    if (this.heard === this.serial) {
      const [kind, text] = standing.result;
      this.result.dataset.kind = kind;
      setText(this.result, text);
    }
  }

  #row(control) {
    let row = this.rows.get(control.name);
    const shape = `${control.choices.map(([text]) => text).join("\n")}|${control.choices.length > 0}`;
    if (!row) {
      const id = `${this.id}-${control.name}`;
      const label = make("label", "ortlab-panel-label", { for: id, title: control.help }, words(control.name));
      const cost = make("span", "ortlab-panel-cost");
      const place = make("span", "ortlab-panel-place");
      const notes = make("div", "ortlab-panel-notes", { id: `${id}-notes` });
      const root = make("div", "ortlab-panel-row", {}, label, place, cost, notes);
      row = { id, root, cost, place, notes, shape: null };
      this.rows.set(control.name, row);
      if (control.front) this.front.append(root);
      else this.#file(root, control.topic);
    }
    row.control = control;
    if (row.shape !== shape) this.#input(row, shape);
  }

  /** Appends a row to the collapsed settings, below the name of its topic. */
  #file(root, topic) {
    if (topic !== this.topic) this.others.append(make("div", "ortlab-panel-topic", {}, topic));
    this.topic = topic;
    this.others.append(root);
  }

  #input(row, shape) {
    const { control, id } = row;
    const attributes = { id, ...KEYS, "aria-description": control.help, "aria-describedby": `${id}-notes`, title: control.help };
    if (control.choices.length) {
      row.input = make("select", "ortlab-panel-input", attributes, ...control.choices.map(([text]) => new Option(text, text)));
      row.input.addEventListener("change", () => this.#edit(row, 0));
    } else {
      row.input = make("input", "ortlab-panel-input", {
        ...attributes, type: "text", autocomplete: "off", spellcheck: "false",
        ...(control.number ? { inputmode: "decimal" } : {}),
        ...(control.optional ? { placeholder: "none" } : {}),
      });
      row.input.addEventListener("input", () => this.#edit(row, TYPING_MS));
      row.input.addEventListener("change", () => this.#edit(row, 0));
    }
    const unit = control.unit ? [make("span", "ortlab-panel-unit", {}, control.unit)] : [];
    row.slider = control.range.length ? this.#slider(row, attributes) : null;
    row.place.replaceChildren(row.input, ...(row.slider ? [row.slider] : []), ...unit);
    row.shape = shape;
  }

  /** Returns a slider that sets the text of a row's input. */
  #slider(row, { title }) {
    const [min, max] = row.control.range;
    const slider = make("input", "ortlab-panel-slider", {
      type: "range", min, max, step: SLIDER_STEP, title, "aria-label": `${words(row.control.name)} slider`, ...KEYS,
    });
    const slide = (delay) => {
      const { held } = row.control;
      row.input.value = Number(slider.value) === Number(held) ? held : slider.value;
      this.#edit(row, delay);
    };
    slider.addEventListener("input", () => slide(TYPING_MS));
    slider.addEventListener("change", () => slide(0));
    row.input.addEventListener("input", () => (slider.value = row.input.value));
    return slider;
  }

  #fill(row, anyhow) {
    const { control, input } = row;
    const text = this.edits[control.name] ?? control.held;
    const typing = document.activeElement === input && input.tagName === "INPUT" && control.name in this.edits;
    if ((anyhow || !typing) && input.value !== text) input.value = text;
    const over = this.standing.over;
    input.disabled = over || Boolean(control.reason);
    if (row.slider) {
      row.slider.disabled = input.disabled;
      if (anyhow || document.activeElement !== row.slider) row.slider.value = input.value;
    }
    row.root.classList.toggle("ortlab-panel-off", input.disabled);
    row.root.classList.toggle("ortlab-panel-edited", control.name in this.edits);
    control.choices.forEach(([, reason], i) => {
      input.options[i].disabled = Boolean(reason);
      input.options[i].title = reason;
    });
    setText(row.cost, over || control.reason ? "" : control.costs.join(" or "));
    const wrong = this.standing.wrong[control.name];
    input.toggleAttribute("aria-invalid", Boolean(wrong));
    const notes = wrong ? [["ortlab-panel-wrong", wrong]] : this.#reasons(control);
    const said = notes.map(([, note]) => note).join("\n");
    if (row.said === said) return;
    row.said = said;
    row.notes.replaceChildren(...notes.map(([kind, note]) => make("div", kind, {}, note)));
  }

  /** Returns why a setting or some of its choices are unavailable; choices are grouped by reason. */
  #reasons({ name, reason, choices }) {
    if (reason) return [["", reason]];
    const found = new Map();
    for (const [text, why] of choices) if (why) found.set(why, [...(found.get(why) ?? []), text]);
    const says = (why, text) => why.includes(`${name}='${text}'`) || why.includes(`${name}=${text}`);
    return [...found].map(([why, texts]) => ["", texts.every((text) => says(why, text)) ? why : `not ${texts.join(", ")}: ${why}`]);
  }

  #drawPending() {
    const { pending, cost, engine, memory, blocked, over, line, title } = this.standing;
    const lines = [];
    if (over) lines.push(["", `${title} has ended; no settings can be applied to it`]);
    else if (pending.length) {
      lines.push(["ortlab-panel-strong", pending.join(", ")]);
      if (blocked) lines.push(["ortlab-panel-wrong", `not supported: ${blocked}`]);
      else if (cost) lines.push(["", cost]);
    }
    if (engine && !blocked) lines.push(["", engine]);
    if (memory && !blocked) lines.push(["", `memory: ${memory}`]);
    if (line && !blocked) lines.push(["ortlab-panel-line", line]);
    const said = JSON.stringify(lines);
    if (said === this.said) return;
    this.said = said;
    this.pending.replaceChildren(...lines.map(([kind, text]) => make("div", kind, {}, text)));
    this.pending.classList.toggle("ortlab-panel-some", pending.length > 0 && !over);
  }

  #drawButtons() {
    const { over, wrong, blocked, undo, busy, startable, state } = this.standing ?? { wrong: {} };
    const running = Boolean(state);
    const edited = Object.keys(this.edits).length > 0;
    const bad = this.heard === this.serial && (Object.keys(wrong).length > 0 || Boolean(blocked));
    this.apply.hidden = over || !(running || startable);
    setText(this.apply, startable ? "Start" : "Apply");
    this.apply.ariaDisabled = String(busy || bad || !(edited || startable));
    this.reset.hidden = over;
    this.reset.ariaDisabled = String(!edited);
    this.undo.hidden = over || !running;
    this.undo.ariaDisabled = String(busy || !undo);
    this.undo.title = undo ? `Restore ${undo}` : "Nothing was changed yet";
    this.keep.hidden = !running;
  }

  close() {
    clearTimeout(this.typing);
    clearTimeout(this.waiting);
  }
}
