"""Measured choice between two kernels for given shapes, cached per machine.

Each pair of kernels runs in two separate sessions, in turn, on random numbers, with ORT's threads
as in training. Times are cached in the user's cache folder as plain numbers, for one processor,
number of threads and version of the libraries.
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
)
from ortlab.utils import files
from ortlab.utils.onnx_shapes import follows, size_of
from ortlab.utils.plain_onnxruntime import let_threads_sleep
from ortlab.utils.tables import Column, Table

_ROUNDS = 8
_MOST_S = 0.03
"""Seconds after which fewer rounds of a pair are enough, see `_suffices`."""
_CLEAR = 1.3
_FAR = 3.0
"""Ratios of the slower kernel's shortest call to the faster one's longest, see `_suffices`."""
_DRAWN = 2**16
"""Number of random numbers, repeated to fill an input. A kernel's time does not depend on them."""
_MOST_ELEMENTS = 2**23
_OF_NO_MATTER = frozenset(
    {"__backwardpass", "operator", "overload_name", "stash_type"}  # set by ORT and the exporter
    | {"alpha", "beta", "epsilon", "keepdims", "noop_with_empty_axes", "transBatchA", "transBatchB"}
)
"""Attributes that do not affect a kernel's time where a rule applies."""
_TOLD = "means, with as many threads in ORT as in torch"
"""Kind of the cached times. Times of another kind are ignored."""
_RANDOM = {TensorProto.FLOAT: np.float32}


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call of ORT's nodes and of their replacement."""

    ort_us: float
    torch_us: float


class KernelChoice:
    """Choice of the kernels that a graph uses.

    Args:
        inputs: Inputs of the graph.
        shapes: Shape of each input, keyed by its name.
    """

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
        """Return True if a replacement is faster than ORT's nodes, and measure it if necessary.

        A replacement that cannot be measured is used: if sizes are unknown, if an input has more
        than `_MOST_ELEMENTS` elements, or if an input is not float32.

        Args:
            found: Replacement.
            graph: Graph that it belongs to.
        """
        feeds = self._feeds(found.replaced, graph)
        if feeds is None:
            return True
        name = _name(found, feeds)
        timing = self._known.get(name) or self._new.get(name)
        if timing is None:
            try:
                timing = self._new[name] = _measure(found, feeds, graph)
            except Exception:  # noqa: BLE001 - what fails to run here would also fail in training
                return False
        return timing.torch_us < timing.ort_us

    def keep(self) -> None:
        """Add new times to the user's cache file, if it can be written."""
        if self._new:
            with contextlib.suppress(OSError):
                _write({**_read(), **self._new})

    def _feeds(
        self, nodes: Sequence[onnx.NodeProto], graph: Graph
    ) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the inputs of `nodes`, or None if one is unknown or not float32."""
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


def _name(found: Substitution, feeds: Mapping[str, tuple[int, ...]]) -> str:
    """Return the key of a time, without tensor names: "Softmax axis=-1 8x12x64x64 > ..."."""
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
    """Return the time of a call over a few rounds, the first ones included, see `_typical`.

    Each call follows a call of torch's, as in a graph whose other nodes run in torch: torch's
    threads still wait for work on the cores on which ORT's threads have to wake up. If half of
    ORT's calls take twice as long because of that, they also do so in training, so the best call is
    not representative.
    """
    import onnxruntime  # heavy: onnxruntime, for processes that measure

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
    """Return the mean, without the longest of four or more, which other load may have delayed."""
    return fmean(sorted(taken)[:-1] if len(taken) > 3 else taken)


def _suffices(times: Sequence[Sequence[float]], spent_s: float) -> bool:
    """Return True if enough rounds were measured to know which kernel is faster.

    Four rounds are enough after `_MOST_S`. Two are enough if every call of one kernel was clearly
    shorter than all calls of the other, or after three times `_MOST_S`, as chance has little effect
    on calls of 20 ms. One round is enough after `_MOST_S` if the two differ greatly.
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
    """Return a function that runs `nodes` in a session of their own."""
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
    import onnxruntime  # heavy: onnxruntime

    options = onnxruntime.SessionOptions()
    let_threads_sleep(options)
    restoring.with_threads_of_torch(options)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run_with_ort_values(results, values)


def table() -> Table[tuple[str, Timing]]:
    """Return a table of the cached times on this machine with these versions, slowest first."""
    columns: list[Column[tuple[str, Timing]]] = [
        Column("ORT's operators, sizes", lambda row: row[0].partition(" > ")[0]),
        Column("replacement", lambda row: row[0].partition(" > ")[2].replace(f"{DOMAIN}::", "")),
        Column("ORT us", lambda row: f"{row[1].ort_us:,.0f}", number=True),
        Column("ortlab us", lambda row: f"{row[1].torch_us:,.0f}", number=True),
        Column("used", lambda row: "ortlab" if row[1].torch_us < row[1].ort_us else "ORT"),
    ]
    found = sorted(_read().items(), key=lambda row: -row[1].ort_us)
    empty = "nothing was measured yet: train a model in engine 'ortmodule' first"
    threads = f"{torch.get_num_threads()} threads; each call follows a torch call, as in a graph"
    return Table(
        found, columns, notes=[f"{threads}; cached in {path()}"] if found else (), empty=empty
    )


# ---- the user's file -----------------------------------------------------------------------------


_elsewhere: Path | None = None


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Ignore all cached times and store no new ones."""
    global _elsewhere
    before = _elsewhere
    with tempfile.TemporaryDirectory(prefix="ortlab-choice-") as folder:
        _elsewhere = Path(folder)
        try:
            yield
        finally:
            _elsewhere = before


def path() -> Path:
    """Return the cache file for this machine and these versions. It need not exist."""
    what = "\0".join((*restoring.versions().values(), str(torch.get_num_threads()), _TOLD))
    digest = hashlib.sha256(what.encode()).hexdigest()[:12]
    folder = _elsewhere or extensions.cache_folder().with_name("timings")
    return folder / f"{digest}.json"


def _read() -> dict[str, Timing]:
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
        return {name: Timing(float(ort), float(torch)) for name, (ort, torch) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # missing or damaged; everything is measured again


def _write(timings: Mapping[str, Timing]) -> None:
    file = path()
    files.private(file.parent)
    plain = {name: (each.ort_us, each.torch_us) for name, each in sorted(timings.items())}
    with graph_cache.replacing(file) as written:
        written.write(json.dumps(plain, indent=0).encode())
