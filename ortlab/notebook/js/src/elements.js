// Elements of the page. What the user or a file called something is only ever text in them.

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

/** Writes only what changed, so that a screen reader hears it once. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
