// Table of the history of runs, with sortable columns and a search field; active runs are at the top.
// Kernel to page: `rows`, and in `live` the rows of active runs, each {name, live, cells, keys}. A key is the
// sort key of its column, null if unknown. `hint` describes how to resume interrupted runs. `wide` says whether
// columns that are `wide` are shown at first.
import { button, hidesStill, make, retire, setText, whenKernelEnds } from "./elements.js";
import "./history.css";

const FIRST = 200; // rows of a long table that are shown at first

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

/** Returns the classes of a column's cells. */
function kind({ number, wide }) {
  return [number && "ortlab-history-number", wide && "ortlab-history-extra"].filter(Boolean).join(" ");
}

class View {
  constructor(model, el) {
    this.model = model;
    this.order = model.get("order");
    this.all = false;
    this.search = make("input", "ortlab-history-search", {
      type: "search", placeholder: "Search, for example: ort finished", "aria-label": "Search the runs", spellcheck: "false",
    });
    this.search.addEventListener("input", () => this.#draw());
    this.said = make("span", "ortlab-history-said", { role: "status" });
    this.heads = model.get("heads").map((head, at) => this.#head(head, at));
    const head = make("tr", "", {}, ...this.heads);
    this.body = make("tbody");
    this.table = make("table", "", {}, make("thead", "", {}, head), this.body);
    this.wide = button("ortlab-history-columns", "", "Show or hide columns", () => this.#widen(!this.isWide));
    this.#widen(model.get("wide"));
    this.more = button("ortlab-history-more", "", "Show all runs", () => {
      this.all = true;
      this.#draw();
    });
    // JupyterLab's shortcuts must not intercept the keys of the field and the headings.
    this.root = make(
      "section", "ortlab-history", { "aria-label": "Runs", "data-lm-suppress-shortcuts": "true" },
      hidesStill(model), make("div", "ortlab-history-head", {}, this.search, this.said, this.wide),
      ...(model.get("hint") ? [make("div", "ortlab-history-hint", {}, model.get("hint"))] : []),
      make("div", "ortlab-history-table", { tabindex: "0" }, this.table, this.more),
    );
    el.append(this.root);
    this.draw = () => this.#draw();
    for (const name of ["rows", "live"]) model.on(`change:${name}`, this.draw);
    this.#draw();
    this.forget = whenKernelEnds(model, () => retire(this.root, "The kernel has ended: run this cell again for the runs of now."));
  }

  #widen(wide) {
    this.isWide = wide;
    this.table.classList.toggle("ortlab-history-all", wide);
    setText(this.wide, wide ? "Fewer columns" : "All columns");
  }

  #head({ head, number, wide }, at) {
    const name = button("ortlab-history-name", head, `Sort by ${head}`, () => this.#sort(at));
    return make("th", kind({ number, wide }), { scope: "col" }, name);
  }

  #sort(at) {
    const high = this.order.at === at ? !this.order.high : this.model.get("heads")[at].high;
    this.order = { at, high };
    this.#draw();
  }

  /** Sorts active runs first, then rows by their key, then rows without a key. */
  #sorted(rows) {
    const { at, high } = this.order;
    return rows
      .map((row, place) => ({ row, place, key: row.keys[at] }))
      .sort((a, b) => {
        if (a.row.live !== b.row.live) return a.row.live ? -1 : 1;
        if ((a.key === null) !== (b.key === null)) return a.key === null ? 1 : -1;
        return (a.key === null ? 0 : compare(a.key, b.key) * (high ? -1 : 1)) || a.place - b.place;
      })
      .map(({ row }) => row);
  }

  #draw() {
    const news = new Map(this.model.get("live").map((row) => [row.name, row]));
    const rows = this.model.get("rows").map((row) => news.get(row.name) ?? row);
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => {
      const text = row.cells.join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const shown = this.#sorted(found).slice(0, this.all ? found.length : FIRST);
    this.body.replaceChildren(...shown.map((row) => this.#row(row)));
    this.heads.forEach((head, at) => {
      const direction = this.order.high ? "descending" : "ascending";
      head.setAttribute("aria-sort", at === this.order.at ? direction : "none");
    });
    const count = (number) => number.toLocaleString("en");
    const runs = `${count(rows.length)} ${rows.length === 1 ? "run" : "runs"}`;
    setText(this.said, words.length ? `${count(found.length)} of ${runs}` : runs);
    this.more.hidden = shown.length === found.length;
    setText(this.more, `Show all ${count(found.length)}`);
  }

  #row(row) {
    const heads = this.model.get("heads");
    const cells = row.cells.map((text, at) => {
      const { head } = heads[at];
      const cell = make("td", kind(heads[at]), {}, text);
      if (head === "state") cell.dataset.state = text;
      if (head === "note") cell.className = "ortlab-history-note";
      if (head === "run" || head === "model") cell.title = text; // long ones are cut off
      return cell;
    });
    return make("tr", row.live ? "ortlab-history-live" : "", {}, ...cells);
  }

  close() {
    this.forget();
    for (const name of ["rows", "live"]) this.model.off(`change:${name}`, this.draw);
    this.root.remove();
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};
