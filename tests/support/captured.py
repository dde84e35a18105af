"""Reading of what the engine ``ort`` has captured."""

from __future__ import annotations

from ortlab.engines.ort.capture import Backend


def in_torch(backend: Backend) -> dict[str, str]:
    """Return the operators that torch runs, with the reason."""
    return {
        operators.operator: operators.reason
        for graph in backend.graphs
        for operators in graph.division.torch_operators()
    }
