// The settings as controls, created from the kernel's description; only the kernel validates them.
//
// The kernel updates two traits:
//   controls  [{name, label, alias, help, unit, topic, front, number, range, optional, held,
//             choices: [[text, reason]], says: {text: what is shown}, reason, costs}, ...]; an empty reason means
//             available; without choices, any text is possible
//   standing  {title, state, over, startable, serial, edits, wrong: {name: reason}, blocked, pending, cost, engine,
//             memory, undo, line, result: [kind, text], busy}: state of the edits
// and receives {do: "edit" | "apply" | "start", edits: {name: text}, serial}, {do: "undo"},
// {do: "checkpoint"} and {do: "open"}. The serial number relates an answer to its edits.
import { make, setText } from "./elements.js";
import "./panel.css";

const TYPING_MS = 200; // time after the last key until the text is sent
const SLIDER_STEP = 0.05;
const LONG = 18; // characters that fit into a narrow column
const WAITING_MS = 700; // time without an answer until the page says that it is waiting

/** Uses aria-disabled instead of `disabled`: a disabled button loses the keyboard focus. */
export function onClick(button, action) {
  button.addEventListener("click", () => button.ariaDisabled !== "true" && action());
}

/** Disables JupyterLab's shortcuts on an element. It must be set on the element itself, not on a parent. */
export const KEYS = { "data-lm-suppress-shortcuts": "true" };

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
    this.topics = new Map();
    this.search = make("input", "ortlab-panel-input ortlab-panel-search", {
      type: "search", placeholder: "Search by name or help", "aria-label": "search settings", autocomplete: "off", spellcheck: "false", ...KEYS,
    });
    this.search.addEventListener("input", () => this.#filter());
    this.found = make("span", "ortlab-panel-found", { role: "status" });
    this.more = make("summary", "ortlab-panel-more", KEYS);
    this.others = make("div", "ortlab-panel-others", {}, make("div", "ortlab-panel-place", {}, this.search, this.found));
    const fold = make("details", "ortlab-panel-fold", {}, this.more, this.others);
    this.pending = make("div", "ortlab-panel-pending", { "aria-live": "polite" });
    const button = (text, title, action) => {
      const made = make("button", "ortlab-panel-button", { type: "button", title, ...KEYS }, text);
      onClick(made, action);
      return made;
    };
    this.apply = button("Apply", "", () => this.#submit());
    this.apply.classList.add("ortlab-panel-apply");
    this.reset = button("Reset", "Discard the edits (Escape)", () => this.#reset());
    this.undo = button("Undo", "", () => this.send({ do: "undo" }));
    this.keep = button("Checkpoint", "Save the exact state of the run to a file", () => this.send({ do: "checkpoint" }));
    const buttons = make("div", "ortlab-panel-buttons", {}, this.apply, this.reset, this.undo, this.keep);
    this.result = make("div", "ortlab-panel-result", { role: "status" });
    this.root.append(this.front, fold, this.pending, buttons, this.result);
    this.root.addEventListener("submit", (event) => event.preventDefault());
    this.root.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const { key, target } = event;
    if (event.isComposing) return;
    if (key === "Escape") {
      event.stopPropagation();
      if (target !== this.search) return this.#reset();
      this.search.value = "";
      this.#filter();
    } else if (key === "Enter" && target === this.search) {
      event.preventDefault();
      this.#matching()[0]?.input.focus();
    } else if (key === "Enter" && !this.standing.startable && ["SELECT", "INPUT"].includes(target.tagName)) {
      event.preventDefault(); // a select element does not submit its form on Enter
      this.#submit();
    } else if (key === "Enter" && target.tagName === "INPUT") {
      event.preventDefault();
      this.#tell("edit"); // a run is started by its button alone
    }
  }

  #submit() {
    const { startable, busy, over } = this.standing;
    const edited = Object.keys(this.edits).length > 0;
    if (over || this.starting) return;
    this.queued = busy && edited;
    if (startable) this.#tell("start");
    else if (this.queued) this.#say("asked", "will be applied after the change in flight");
    else if (edited) this.#tell("apply");
    else this.#say("asked", "no setting is edited");
  }

  #say(kind, text) {
    this.result.dataset.kind = kind;
    setText(this.result, text);
  }

  /** Returns the rows that the text of the search fits. */
  #matching() {
    const wanted = this.search.value.toLowerCase().split(/\s+/);
    const text = ({ name, label, alias, help }) => `${name} ${label} ${alias} ${help}`.toLowerCase();
    return [...this.rows.values()].filter(({ control }) => wanted.every((word) => text(control).includes(word)));
  }

  /** Shows the settings that the search finds, in open topics; without a search all, in topics as they were. */
  #filter() {
    const searching = this.search.value.trim() !== "";
    const found = new Set(this.#matching());
    for (const { fold, rows } of this.topics.values()) {
      for (const row of rows) row.root.hidden = !found.has(row);
      fold.hidden = rows.every((row) => row.root.hidden);
      if (searching) fold.dataset.opened ??= String(fold.open);
      if (searching) fold.open = true;
      else if (fold.dataset.opened) {
        fold.open = fold.dataset.opened === "true";
        delete fold.dataset.opened;
      }
    }
    const above = [...found].filter(({ control }) => control.front).map(({ control }) => control.label);
    const counts = [`${found.size - above.length} found`, ...(above.length ? [`above: ${above.join(", ")}`] : [])];
    setText(this.found, searching ? counts.join("; ") : "");
  }

  #reset() {
    this.edits = {};
    this.#tell("edit");
    for (const row of this.rows.values()) this.#fill(row, true);
  }

  #tell(verb) {
    clearTimeout(this.typing);
    if (this.root.closest("[inert], [hidden]")) return; // a field that was edited when the kernel ended loses the focus
    this.serial += 1;
    this.send({ do: verb, edits: this.edits, serial: this.serial });
    this.asked ||= verb !== "edit";
    this.starting = verb === "start";
    this.#say("asked", { apply: "applying…", start: "starting…", edit: "" }[verb]);
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.#wait(), WAITING_MS);
    this.#drawButtons();
  }

  #wait() {
    if (this.heard === this.serial) return;
    this.#say("asked", "waiting for the kernel, which receives no messages while a cell runs (with `await run`, it does from ipykernel 7.3 on)");
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
    const first = !this.standing;
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
    if (this.heard !== this.serial) return;
    const [kind, text] = standing.result;
    this.#say(kind, text);
    this.starting &&= kind === "asked";
    if (kind === "refused" && (this.asked || (first && document.activeElement === document.body))) this.#showFault();
    this.asked &&= kind === "asked";
    if (this.queued && !standing.busy && Object.keys(this.edits).length) this.#submit();
  }

  /** Goes to the first field that is wrong, or to the error. */
  #showFault() {
    const row = [...this.rows.values()].find(({ input }) => input.ariaInvalid === "true" && !input.disabled);
    if (!row) return requestAnimationFrame(() => this.result.scrollIntoView({ block: "nearest" }));
    if (row.root.hidden) {
      this.search.value = "";
      this.#filter();
    }
    for (let fold = row.root.closest("details"); fold && this.root.contains(fold); fold = fold.parentElement.closest("details")) fold.open = true;
    requestAnimationFrame(() => row.input.focus()); // a new view is not in the page yet
  }

  #row(control) {
    let row = this.rows.get(control.name);
    const shape = `${control.choices.map(([text]) => text).join("\n")}|${control.choices.length > 0}`;
    if (!row) {
      const id = `${this.id}-${control.name}`;
      const label = make("label", "ortlab-panel-label", { for: id, title: control.help }, control.label);
      const cost = make("span", "ortlab-panel-cost");
      const place = make("span", "ortlab-panel-place");
      const notes = make("div", "ortlab-panel-notes", { id: `${id}-notes` });
      const help = control.front ? [] : [make("div", "ortlab-panel-help", {}, control.help)];
      const root = make("div", "ortlab-panel-row", {}, make("div", "ortlab-panel-name", {}, label, cost), place, notes, ...help);
      row = { id, root, cost, place, notes, shape: null };
      this.rows.set(control.name, row);
      if (control.front) this.front.append(root);
      else this.#file(row, control.topic);
    }
    row.control = control;
    if (row.shape !== shape) this.#input(row, shape);
  }

  /** Appends a row to the collapsed settings of its topic. */
  #file(row, topic) {
    if (!this.topics.has(topic)) {
      const head = make("summary", "ortlab-panel-more", KEYS, topic);
      const body = make("div", "ortlab-panel-rows");
      const fold = make("details", "ortlab-panel-topic", {}, head, body);
      this.others.append(fold);
      this.topics.set(topic, { fold, body, rows: [] });
    }
    const { body, rows } = this.topics.get(topic);
    rows.push(row);
    body.append(row.root);
  }

  #input(row, shape) {
    const { control, id } = row;
    const focused = row.input && document.activeElement === row.input;
    const attributes = { id, ...KEYS, "aria-description": control.help, "aria-describedby": `${id}-notes`, title: control.help };
    if (control.choices.length) {
      row.input = make("select", "ortlab-panel-input", attributes, ...control.choices.map(([text]) => new Option(control.says[text] ?? text, text)));
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
    if (focused) row.input.focus({ preventScroll: true });
  }

  /** Returns a slider that sets the text of a row's input. */
  #slider(row, { title }) {
    const [min, max] = row.control.range;
    const slider = make("input", "ortlab-panel-slider", {
      type: "range", min, max, step: SLIDER_STEP, title, "aria-label": `${row.control.label} slider`, ...KEYS,
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
    row.root.classList.toggle("ortlab-panel-long", control.held.length > LONG);
    row.root.classList.toggle("ortlab-panel-edited", control.name in this.edits);
    control.choices.forEach(([, reason], i) => {
      input.options[i].disabled = Boolean(reason);
      input.options[i].title = reason;
    });
    setText(row.cost, over || control.reason ? "" : control.costs.join(" or "));
    const wrong = this.standing.wrong[control.name];
    input.ariaInvalid = String(Boolean(wrong));
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
    if (memory && !blocked) lines.push(["", `step memory: ${memory}`]);
    if (line && !blocked) lines.push(["ortlab-panel-line", line]);
    const said = JSON.stringify(lines);
    if (said === this.said) return;
    this.said = said;
    this.pending.replaceChildren(...lines.map(([kind, text]) => make("div", kind, {}, text)));
    this.pending.classList.toggle("ortlab-panel-some", pending.length > 0 && !over);
  }

  #drawButtons() {
    const { over, undo, busy, startable, state } = this.standing ?? {};
    const running = Boolean(state);
    const edited = Object.keys(this.edits).length > 0;
    this.apply.hidden = over || !(running || startable);
    setText(this.apply, startable ? "Start" : "Apply");
    this.apply.title = startable ? "Start a run with these settings" : "Apply the edits to the run (Enter)";
    this.apply.ariaDisabled = String(this.starting || !(edited || startable));
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
