// Elements of the page. Names from the user or a file are always inserted as text, never as HTML.

export function make(tag, className, attributes = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function button(className, text, title, action) {
  const made = make("button", className, { type: "button", title, "aria-label": title }, text);
  made.addEventListener("click", action);
  return made;
}

/** Sets a text only if it has changed, so that screen readers announce it once. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Returns a style that hides the output for pages without a kernel, which follows a live view's. */
export function hidesStill(model) {
  const style = make("style", "");
  const mark = model.get("still");
  if (mark) style.textContent = `[data-ortlab-still="${mark}"] { display: none; }`;
  return style;
}

const ENDED = new Set(["restarting", "autorestarting", "terminating", "dead"]); // states of a kernel

/**
 * Calls a function when the kernel of a model ends; returns a function that ends the wait.
 * JupyterLab's widget manager has the kernel's connection; other front ends do not tell.
 */
export function whenKernelEnds(model, ended) {
  const kernel = model.widget_manager?.kernel;
  const hear = (_, state) => ENDED.has(state) && ended();
  const lost = () => ended(); // "Shut Down Kernel" disposes of the connection without another state
  kernel?.statusChanged?.connect(hear);
  kernel?.disposed?.connect(lost);
  return () => {
    kernel?.statusChanged?.disconnect(hear);
    kernel?.disposed?.disconnect(lost);
  };
}

/** Disables a view whose kernel has ended, and says so above it. */
export function retire(root, told = "The kernel has ended: run the cells above and this cell again.") {
  if (root.inert) return;
  root.inert = true;
  root.style.opacity = "0.6";
  root.before(make("div", "ortlab-retired", { role: "status", style: "font-weight: bold" }, told));
}
