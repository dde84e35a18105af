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
