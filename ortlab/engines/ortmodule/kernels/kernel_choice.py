"""Which kernel is faster on this machine, for these shapes: measured once, and kept.

Each pair runs in two sessions of its own, in turn, on random numbers, with ORT's threads as in
training. What was measured lies in the user's cache as plain numbers, for one processor, number of
threads and version of the libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from ortlab.engines.ortmodule import graph_cache
from ortlab.engines.ortmodule.compat import extensions, restoring
from ortlab.engines.ortmodule.kernels import DOMAIN
from ortlab.engines.ortmodule.kernels.substitutes import (
    Graph,
    Substitution,
    Value,
    attributes,
    substitute,
)
from ortlab.utils import files
from ortlab.utils.onnx_shapes import follows, size_of
from ortlab.utils.tables import Column, Table

_ROUNDS = 8
_MOST_S = 0.03
"""Of one pair's rounds, see `_suffices`."""
_CLEAR = 1.3
_FAR = 3.0
"""Times that the slower one's shortest call takes as long as the faster one's longest."""
_DRAWN = 2**16
"""Random numbers of an input, again and again: a kernel's time does not depend on them."""
_MOST_ELEMENTS = 2**23
_OF_NO_MATTER = frozenset(
    {"__backwardpass", "operator", "overload_name", "stash_type"}  # notes of ORT and the exporter
    | {"alpha", "beta", "epsilon", "keepdims", "noop_with_empty_axes", "transBatchA", "transBatchB"}
)
"""Attributes that a kernel's time does not depend on, where a rule applies."""
_TOLD = "means"
"""What a timing is, by which those of another kind are not believed."""
_RANDOM = {TensorProto.FLOAT: np.float32}


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: of ORT's nodes, and of what may take their place."""

    ort_us: float
    torch_us: float


class KernelChoice:
    """Decides for a graph whose `inputs` have these shapes, by name."""

    def __init__(
        self, inputs: Iterable[onnx.ValueInfoProto], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._dims = {
            dim.dim_param: size
            for each in inputs
            for dim, size in zip(
                each.type.tensor_type.shape.dim, shapes.get(each.name, ()), strict=False
            )
            if dim.dim_param
        }
        self._names = tuple(self._dims)
        self._known = _read()
        self._new: dict[str, Timing] = {}

    def better(self, found: Substitution, graph: Graph) -> bool:
        """Whether what was found is faster.

        What cannot be measured stays with the rest: of sizes that are not known, of more than
        `_MOST_ELEMENTS` numbers, or with inputs that are no float32.
        """
        feeds = self._feeds(found.replaced, graph)
        if feeds is None:
            return True
        name = _name(found, feeds)
        timing = self._known.get(name) or self._new.get(name)
        if timing is None:
            try:
                timing = self._new[name] = _measure(found, feeds, graph)
            except Exception:  # noqa: BLE001 - whatever does not run here would not run in training
                return False
        return timing.torch_us < timing.ort_us

    def known(self, found: Substitution, graph: Graph) -> Timing | None:
        """What was measured of it so far; None where that is nothing, or sizes are not known."""
        feeds = self._feeds(found.replaced, graph)
        return None if feeds is None else self._known.get(_name(found, feeds))

    def keep(self) -> None:
        """Adds what was measured to the user's file, where there can be one."""
        if self._new:
            with contextlib.suppress(OSError):
                _write({**_read(), **self._new})

    def _feeds(
        self, nodes: Sequence[onnx.NodeProto], graph: Graph
    ) -> dict[str, tuple[int, ...]] | None:
        """The sizes of what `nodes` read; None where one is not known or no float32."""
        made = {name for node in nodes for name in node.output}
        found: dict[str, tuple[int, ...]] = {}
        for name in (name for node in nodes for name in node.input if name):
            if name in made or graph.constant(name) is not None:
                continue
            value = graph.value(name)
            if value.kind not in _RANDOM or value.sizes is None:
                return None
            sizes = []
            for size in value.sizes:
                if size is None or not (isinstance(size, int) or follows(size, self._names)):
                    return None
                sizes.append(size_of(size, self._dims))
            if int(np.prod(sizes)) > _MOST_ELEMENTS:
                return None
            found[name] = tuple(sizes)
        return found


def kept(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], *, low: bool
) -> dict[str, Timing]:
    """What was measured so far of the nodes of `model`, a graph with ORT's own kernels alone.

    By a node's name, which the kernel in its place has too; where a pair replaces several nodes it
    is the first of them. `shapes` are those of the graph's inputs; with `low` products, which take
    bfloat16 in any case, have none. Nothing is measured, and `model` is changed.
    """
    chosen = KernelChoice(model.graph.input, shapes)
    found: dict[str, Timing] = {}

    def better(pair: Substitution, graph: Graph) -> bool:
        timing = chosen.known(pair, graph)
        if timing is None:
            return False
        found[pair.replaced[0].name] = timing
        return timing.torch_us < timing.ort_us

    substitute(model, low=low, better=better)
    return found


def _name(found: Substitution, feeds: Mapping[str, tuple[int, ...]]) -> str:
    """What a timing is for, whatever its tensors are called: "Softmax axis=-1 8x12x64x64 > ..."."""
    words = []
    for node in found.replaced:
        given = sorted((k, v) for k, v in attributes(node).items() if k not in _OF_NO_MATTER)
        words.append(node.op_type)
        for name, value in given:
            if value or not name.startswith("trans"):
                text = ",".join(map(str, value)) if isinstance(value, list) else value
                words.append(f"{name}={text}")
        words += ["x".join(map(str, feeds[name])) or "1" for name in node.input if name in feeds]
    calls = ",".join(attributes(node)["operator"].decode() for node in found.made)
    return f"{' '.join(words)} > {calls}"


def _measure(found: Substitution, feeds: Mapping[str, tuple[int, ...]], graph: Graph) -> Timing:
    """What a call takes in a few rounds, the first ones among them, see `_typical`.

    Each call comes after one of torch's, as in a graph whose other nodes are torch's: torch's
    threads still wait for work, on the cores that ORT's are to wake up on. Where that makes half of
    ORT's calls take twice as long it does so in training, too, so the best call tells little.
    """
    import onnxruntime  # for the processes that choose

    random = np.random.default_rng(0)
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(
            np.resize(random.standard_normal(_DRAWN, dtype=np.float32), sizes)
        )
        for name, sizes in feeds.items()
    }
    calls = [
        _call(found.replaced, {}, feeds, values, graph),
        _call(found.made, dict(found.tells), feeds, values, graph),
    ]
    times: list[list[float]] = [[], []]
    before = torch.ones(2**18)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            before.add_(1)
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        if _suffices(times, time.perf_counter() - began):
            break
    ort_us, torch_us = (_typical(taken) * 1e6 for taken in times)
    return Timing(round(ort_us, 1), round(torch_us, 1))


def _typical(taken: Sequence[float]) -> float:
    """The mean; of four or more without the longest, which something else may have held up."""
    return fmean(sorted(taken)[:-1] if len(taken) > 3 else taken)


def _suffices(times: Sequence[Sequence[float]], spent_s: float) -> bool:
    """Whether it is known by now which is faster.

    Four rounds are enough after `_MOST_S`. Two are where each call of one was shorter than all of
    the other's, by more than chance, or after three times as long: chance weighs little in calls of
    20 ms. One is after `_MOST_S` where they are far from each other.
    """
    fast, slow = sorted(times, key=min)
    apart = min(slow) / max(fast)
    match len(fast):
        case 1:
            return spent_s > _MOST_S and apart > _FAR
        case 2:
            return spent_s > 3 * _MOST_S or apart > _CLEAR
        case 3:
            return spent_s > 3 * _MOST_S
    return spent_s > _MOST_S


def _call(
    nodes: Sequence[onnx.NodeProto],
    tells: Mapping[str, Value],
    feeds: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Any],
    graph: Graph,
) -> Callable[[], Any]:
    """Runs `nodes` in a session of their own, whose tensors are as `tells` and `graph` say."""
    read = {name for node in nodes for name in node.input if name}
    constants = {name: graph.constant(name) for name in read}
    names = [name for node in nodes for name in node.output if name]
    told = {
        name: helper.make_tensor_value_info(
            name, tells.get(name, graph.value(name)).kind or TensorProto.FLOAT, None
        )
        for name in names
    }
    results = [name for name in names if name not in read]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "timed",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in feeds.items()],
            [told[name] for name in results],
            [numpy_helper.from_array(v, name) for name, v in constants.items() if v is not None],
            value_info=[told[name] for name in names if name in read],
        ),
        opset_imports=graph.model.opset_import,
        ir_version=graph.model.ir_version,
    )
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    restoring.leave_cores_to_torch(options)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run_with_ort_values(results, values)


def table() -> Table[tuple[str, Timing]]:
    """What was measured on this machine so far with these versions, the slowest first."""
    columns: list[Column[tuple[str, Timing]]] = [
        Column("ORT's operators, sizes", lambda row: row[0].partition(" > ")[0]),
        Column("or", lambda row: row[0].partition(" > ")[2].replace(f"{DOMAIN}::", "")),
        Column("ORT us", lambda row: f"{row[1].ort_us:,.0f}", number=True),
        Column("ours us", lambda row: f"{row[1].torch_us:,.0f}", number=True),
        Column("taken", lambda row: "ours" if row[1].torch_us < row[1].ort_us else "ORT's"),
    ]
    found = sorted(_read().items(), key=lambda row: -row[1].ort_us)
    empty = "nothing was measured yet: train a model in engine 'ort' first"
    threads = f"{torch.get_num_threads()} threads; each after a call of torch's, as in a graph"
    return Table(
        found, columns, notes=[f"{threads}; kept in {path()}"] if found else (), empty=empty
    )


# ---- the user's file -----------------------------------------------------------------------------


_elsewhere: Path | None = None


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Meanwhile nothing is known of what was measured before, and nothing new is kept."""
    global _elsewhere
    before = _elsewhere
    with tempfile.TemporaryDirectory(prefix="ortlab-choice-") as folder:
        _elsewhere = Path(folder)
        try:
            yield
        finally:
            _elsewhere = before


def path() -> Path:
    """The file of what was measured on this machine with these versions; it need not exist."""
    what = "\0".join((*restoring.versions().values(), str(torch.get_num_threads()), _TOLD))
    digest = hashlib.sha256(what.encode()).hexdigest()[:12]
    folder = _elsewhere or extensions.cache_folder().with_name("timings")
    return folder / f"{digest}.json"


def _read() -> dict[str, Timing]:
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
        return {name: Timing(float(ort), float(torch)) for name, (ort, torch) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none yet, or damaged: measured again


def _write(timings: Mapping[str, Timing]) -> None:
    file = path()
    files.private(file.parent)
    plain = {name: (each.ort_us, each.torch_us) for name, each in sorted(timings.items())}
    with graph_cache.replacing(file) as written:
        written.write(json.dumps(plain, indent=0).encode())
