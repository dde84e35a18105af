// View that runs an exported model in the browser: input fields, and outputs next to the kernel's.
// Kernel to page: {is: "outputs", outputs: [{name, shape}], ms} with one float64 buffer per output, or
// {is: "refused", why}. Page to kernel: {do: "run", inputs: {name: {shape, values}}}.
import * as ort from "onnxruntime-web/wasm";
import { button, make, setText } from "./elements.js";
import "./inpage.css";

const SHOWN = 8;
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array,
  int16: Int16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};

async function unpacked(data) {
  const bytes = new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(bytes).arrayBuffer();
}

/** Uses one thread and no worker, so nothing is fetched and the page need not be cross-origin isolated. */
async function open(model) {
  ort.env.wasm.wasmBinary ??= await unpacked(model.get("wasm"));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.proxy = false;
  const bytes = model.get("graph");
  return ort.InferenceSession.create(new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength));
}

/** Returns the numbers and the shape of nested lists; throws if they are ragged or not numeric. */
function nested(value, shape = []) {
  if (!Array.isArray(value)) {
    if (typeof value !== "number" && typeof value !== "boolean") throw new Error(`${JSON.stringify(value)} is not a number`);
    return { shape, flat: [Number(value)] };
  }
  const parts = value.map((item) => nested(item));
  const inner = parts[0]?.shape ?? [];
  if (parts.some((part) => part.shape.join() !== inner.join())) throw new Error("the lists are ragged; give lists of equal length");
  return { shape: [value.length, ...inner], flat: parts.flatMap((part) => part.flat) };
}

/** Reads a field: a number that fills the given shape, or nested lists that have their own shape. */
function read(text, shapeText) {
  const given = nested(JSON.parse(text));
  if (given.shape.length) return { shape: given.shape, values: given.flat };
  const shape = shapeText.trim() ? JSON.parse(`[${shapeText}]`) : [];
  if (!shape.every((size) => Number.isInteger(size) && size >= 0)) throw new Error(`${shapeText} is not a shape; give sizes separated by commas`);
  return { shape, values: new Array(shape.reduce((a, b) => a * b, 1)).fill(given.flat[0]) };
}

function tensor(type, { shape, values }) {
  const Kind = ARRAYS[type];
  return new ort.Tensor(type, type === "int64" ? Kind.from(values.map((v) => BigInt(Math.trunc(v)))) : Kind.from(values), shape);
}

function told(values) {
  const first = Array.from(values.slice(0, SHOWN), (value) => Number(value).toPrecision(6));
  return first.join(", ") + (values.length > SHOWN ? ", ..." : "");
}

class View {
  constructor(model, el) {
    this.model = model;
    this.root = make("section", "ortlab-inpage", { "aria-label": "Exported model in this page" });
    this.fields = new Map();
    for (const port of model.get("ports")) this.#addField(port);
    this.run = button("ortlab-inpage-run", "Run", "Run the model in this page and in the kernel", () => this.#run());
    this.said = make("span", "ortlab-inpage-said", { role: "status" });
    this.rows = make("tbody", "");
    const heads = ["output", "shape", "in this page", "in the kernel", "largest difference"];
    const head = make("tr", "", {}, ...heads.map((text) => make("th", "", { scope: "col" }, text)));
    this.table = make("table", "", {}, make("thead", "", {}, head), this.rows);
    this.table.hidden = true;
    this.root.append(make("div", "", {}, this.run, " ", this.said), this.table);
    el.append(this.root);
    this.receive = (message, buffers) => this.#receive(message, buffers);
    model.on("msg:custom", this.receive);
  }

  #addField(port) {
    const label = make("label", "", {}, `${port.name} (${port.type} [${port.dims.join(", ")}]) `);
    const values = make("input", "ortlab-inpage-values", { type: "text", spellcheck: "false" });
    values.value = port.value;
    const shape = make("input", "ortlab-inpage-shape", { type: "text", "aria-label": `shape of ${port.name}` });
    shape.value = port.shape.join(", ");
    shape.title = "Shape that a single number is repeated to; lists have their own shape";
    label.append(values);
    this.root.append(make("div", "", {}, label, " in ", shape));
    this.fields.set(port, { values, shape });
  }

  async #run() {
    this.table.hidden = true;
    try {
      const inputs = {};
      for (const [port, { values, shape }] of this.fields) {
        try {
          inputs[port.name] = read(values.value, shape.value);
        } catch (error) {
          throw new Error(`${port.name}: ${error.message}`);
        }
      }
      setText(this.said, "loading onnxruntime ...");
      this.session ??= open(this.model);
      const session = await this.session;
      const feeds = {};
      for (const { name, type } of this.fields.keys()) feeds[name] = tensor(type, inputs[name]);
      setText(this.said, "running ...");
      const started = performance.now();
      this.found = await session.run(feeds);
      this.ms = performance.now() - started;
      setText(this.said, `${this.ms.toFixed(2)} ms in this page; the kernel has not answered yet`);
      this.model.send({ do: "run", inputs });
    } catch (error) {
      setText(this.said, `refused: ${error.message}`);
    }
  }

  #receive(message, buffers) {
    if (!this.found) return;
    if (message.is === "refused") return setText(this.said, `the kernel refused: ${message.why}`);
    const rows = message.outputs.map(({ name, shape }, i) => {
      const { data } = this.found[name];
      const { buffer, byteOffset, byteLength } = buffers[i];
      const theirs = new Float64Array(buffer.slice(byteOffset, byteOffset + byteLength));
      const ours = Float64Array.from(data, Number);
      const apart = ours.reduce((most, value, at) => Math.max(most, Math.abs(value - theirs[at])), 0);
      const cells = [name, shape.join(" x "), told(ours), told(theirs), apart.toExponential(1)];
      return make("tr", "", {}, ...cells.map((text) => make("td", "", {}, text)));
    });
    this.rows.replaceChildren(...rows);
    this.table.hidden = false;
    setText(this.said, `${this.ms.toFixed(2)} ms in this page, ${message.ms.toFixed(2)} ms in the kernel`);
  }

  close() {
    this.model.off("msg:custom", this.receive);
    this.root.remove();
  }
}

export default {
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};
