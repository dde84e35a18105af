// Invisible part of a view that consists of Jupyter's own controls, for what these do not do themselves.
import { retire, whenKernelEnds } from "./elements.js";

const VIEWS = ".ortlab-recompute, .ortlab-search";

/**
 * Lets the arrow keys reach a slider. Notebook 7 handles its shortcuts before the elements of the page: there an arrow
 * key moved to another cell (seen in 7.6; JupyterLab handles them after the elements).
 */
function reserveKeys({ target }) {
  if (target.matches("[role=slider]") && target.closest(VIEWS)) target.setAttribute("data-lm-suppress-shortcuts", "true");
}

export default {
  render({ model, el }) {
    const closed = new AbortController();
    document.addEventListener("focusin", reserveKeys, { signal: closed.signal });
    const forget = whenKernelEnds(model, () => el.closest(VIEWS) && retire(el.closest(VIEWS)));
    return () => {
      closed.abort();
      forget();
    };
  },
};
