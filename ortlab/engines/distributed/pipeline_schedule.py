"""Schedules of a pipeline: the order in which each rank computes its stages, and what it waits for.

One forward, one backward (Harlap et al. 2018, arXiv:1806.03377), and its interleaved form with
several stages on each rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). With `ranks`
ranks, stage s is on rank s modulo `ranks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

BACKWARD_COST: Final = 2.0
"""Time of a backward pass in forward passes, in a prediction: it has two products for each one."""


@dataclass(frozen=True)
class Action:
    """Forward or backward pass of one stage for one micro-batch.

    Attributes:
        backward: True for the backward pass.
        stage: Number of the stage in the model.
        micro_batch: Number of the micro-batch in the step.
    """

    backward: bool
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Span:
    """Action of a rank with its time, from the beginning of the step.

    Attributes:
        rank: Rank in the pipeline.
        action: What it computed.
        begin: Begin, in forward passes of a stage or in seconds.
        end: End.
    """

    rank: int
    action: Action
    begin: float
    end: float


def training_order(ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of each rank in a training step.

    Args:
        ranks: Number of ranks in the pipeline.
        chunks: Number of stages of each rank.
        micro_batches: Number of micro-batches.

    Returns:
        The actions, by rank. No rank waits for an action that comes after one that waits for it.
    """
    for more in itertools.count():
        found = [_order(rank, ranks, chunks, micro_batches, more) for rank in range(ranks)]
        # With a last group of few micro-batches, interleaved stages need more in flight.
        if spans(found) is not None:
            return found
    raise AssertionError("all forwards before all backwards is always possible")


def _order(rank: int, ranks: int, chunks: int, micro_batches: int, more: int) -> list[Action]:
    groups = [
        range(begin, min(begin + ranks, micro_batches)) for begin in range(0, micro_batches, ranks)
    ]
    own = [chunk * ranks + rank for chunk in range(chunks)]
    forward = [Action(False, stage, each) for few in groups for stage in own for each in few]
    backward = [Action(True, stage, each) for few in groups for stage in own[::-1] for each in few]
    in_flight = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    first = min(in_flight + more, len(forward))
    steady = itertools.zip_longest(forward[first:], backward)
    return [*forward[:first], *(each for pair in steady for each in pair if each is not None)]


def evaluation_order(ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of each rank in an evaluation, which has no backward pass.

    Args:
        ranks: Number of ranks in the pipeline.
        chunks: Number of stages of each rank.
        micro_batches: Number of micro-batches.
    """
    return [
        [
            Action(False, chunk * ranks + rank, each)
            for each in range(micro_batches)
            for chunk in range(chunks)
        ]
        for rank in range(ranks)
    ]


def spans(
    order: Sequence[Sequence[Action]],
    cost: Callable[[Action], float] = lambda action: BACKWARD_COST if action.backward else 1.0,
) -> list[Span] | None:
    """Return when each action runs if nothing but the order and the computations takes time.

    Args:
        order: Actions of each rank.
        cost: Time of an action.

    Returns:
        The actions with their times; None if the ranks would wait for each other.
    """
    last = max(action.stage for each in order for action in each)
    free, places = [0.0] * len(order), [0] * len(order)
    ended: dict[Action, float] = {}
    found: list[Span] = []
    while len(found) < sum(map(len, order)):
        before = len(found)
        for rank, actions in enumerate(order):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needs = _needs(action, last)
                if any(each not in ended for each in needs):
                    break
                begin = max([free[rank], *(ended[each] for each in needs)])
                free[rank] = ended[action] = begin + cost(action)
                found.append(Span(rank, action, begin, free[rank]))
                places[rank] += 1
        if len(found) == before:
            return None
    return found


def _needs(action: Action, last: int) -> list[Action]:
    """Return the actions whose results an action reads."""
    stage, number = action.stage, action.micro_batch
    if not action.backward:
        return [Action(False, stage - 1, number)] if stage else []
    own = [Action(False, stage, number)]
    return own if stage == last else [*own, Action(True, stage + 1, number)]


def idle(found: Sequence[Span], ranks: int) -> float:
    """Return the share of all ranks' time in which they do not compute: the pipeline's bubble.

    Args:
        found: Actions with their times.
        ranks: Number of ranks.
    """
    length = max(each.end for each in found) - min(each.begin for each in found)
    return 1 - sum(each.end - each.begin for each in found) / (ranks * length)
