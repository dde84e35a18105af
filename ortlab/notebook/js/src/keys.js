// Lets the arrow keys reach the sliders among Jupyter's own controls. Notebook 7 handles its shortcuts before the
// elements of the page: there an arrow key moved to another cell (seen in 7.6; JupyterLab handles them after).
export default {
  render() {
    const closed = new AbortController();
    const reserve = ({ target }) => {
      if (target.matches(".ortlab-recompute [role=slider]")) target.setAttribute("data-lm-suppress-shortcuts", "true");
    };
    document.addEventListener("focusin", reserve, { signal: closed.signal });
    return () => closed.abort();
  },
};
