"""Checks of profiles."""

from __future__ import annotations

import pytest

from ortlab.graph.profile import Profile
from ortlab.graph.timed_step import PHASES


def assert_sums_add_up(found: Profile) -> None:
    """Check that each table of a training step's profile has all of its time.

    Args:
        found: Profile of a model that ORT runs.
    """
    assert found.ort is not None
    assert found.phases == PHASES
    *phases, step = found.by_phase()
    assert [row.phase for row in phases] == list(PHASES)
    for row in phases:
        assert row.ort is not None
        nodes = sum(node.us for node in found.nodes if node.phase == row.phase)
        assert row.ort.kernels_us == pytest.approx(nodes)
        assert nodes > 0
        for depth in (None, 1, 2, 9):
            modules = found.by_module(depth)
            ort = sum(module.ort_us[row.phase] for module in modules)
            assert ort == pytest.approx(row.ort.us), "modules, and what is around them"
            eager = sum(module.eager_us[row.phase] for module in modules)
            assert eager == pytest.approx(row.eager_us)
        lines = sum(line.us[row.phase] for line in found.by_line(most=1000))
        assert lines == pytest.approx(nodes)
        ops = sum(op.us[row.phase] for op in found.by_op(most=1000))
        assert ops == pytest.approx(nodes)
    assert step.ort is not None
    assert step.ort.us == pytest.approx(sum(row.ort.us for row in phases if row.ort))
    assert step.ort.session_us == pytest.approx(step.ort.kernels_us + step.ort.between_us)
    assert step.eager_us == pytest.approx(sum(row.eager_us for row in phases))
    assert sum(op.nodes for op in found.by_op(most=1000)) == len(found.nodes)
