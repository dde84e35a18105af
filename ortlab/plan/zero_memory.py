"""What training takes of each device of a fleet, by arithmetic: ZeRO's stages side by side.

Rajbhandari et al. 2020 (arXiv:1910.02054, sections 3 and 5) say what each stage shares out, Ren et
al. 2021 (arXiv:2101.06840, section 3) what goes to the host, Korthikanti et al. 2022
(arXiv:2205.05198, sections 4 and 5) what a transformer's activations take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ortlab.metrics.zero_bytes import zero_bytes
from ortlab.settings import FleetSettings
from ortlab.utils import svg_bars
from ortlab.utils.process_memory import memory, parse_bytes
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    from torch import nn

    from ortlab.engines.wrapped_models import WrappedModels
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.recompute import RecomputePlans

STAGES: Final = (0, 1, 2, 3)
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_TIMES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SIZES: Final = ("hidden", "layers", "sequence", "batch")
_SERIES: Final = {  # the colours of `timeline`
    "parameters": ("#6c757d", 1.0),
    "gradients": ("#d9772b", 1.0),
    "optimizer state": ("#a5acb3", 1.0),
    "activations": ("#2f7fd0", 1.0),
}


@dataclass(frozen=True)
class Placement:
    """Bytes that one device holds at a stage of ZeRO, and what its process has on the host.

    ``activations`` is None where no sizes are known. In mixed precision ``optimizer_state`` has
    the fp32 copy of the parameters in it, and offloaded ``host`` has it in fp32 too.
    """

    stage: int
    offload: bool
    recompute: bool
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int | None = None
    host: int = 0

    @property
    def device(self) -> int:
        """All that the device holds."""
        known = self.activations or 0
        return self.parameters + self.gradients + self.optimizer_state + known

    @property
    def name(self) -> str:
        """Stage, offload and recompute in words."""
        more = [word for word in ("offload", "recompute") if getattr(self, word)]
        return " + ".join([f"stage {self.stage}", *more])


@dataclass(frozen=True)
class Activations:
    """Bytes of activations in one device: all of them kept, and with layers computed again.

    ``source`` says where the figures come from. ``recomputed`` is None where there is no such form.
    """

    kept: int
    recomputed: int | None
    source: str


class ZeroPlan:
    """Stages 0 to 3 of ZeRO for a fleet; ``placements`` are the rows of the table.

    ``best`` is the first that fits, by what it costs: a lower stage before a higher one, then
    recompute (up to a third more computing), then offload (the host's link in every step).
    """

    def __init__(
        self,
        parameters: int,
        settings: FleetSettings,
        *,
        trained: int | None = None,
        activations: Activations | None = None,
    ) -> None:
        self.parameters = parameters
        self.trained = parameters if trained is None else trained
        self.settings = settings
        self.precision = settings.precision or "mixed"
        self.memory_bytes = None if settings.memory is None else parse_bytes(settings.memory)
        self.activations = activations
        self.placements = tuple(self._placements())

    @property
    def best(self) -> Placement | None:
        """What fits and costs least; None where nothing fits, or no memory was given."""
        by_cost = sorted(self.placements, key=lambda one: (one.offload, one.recompute, one.stage))
        return next((placement for placement in by_cost if self.fits(placement)), None)

    def fits(self, placement: Placement) -> bool:
        """Whether a device has room for it; of a plan without memory none does."""
        return self.memory_bytes is not None and placement.device <= self.memory_bytes

    def at(self, stage: int, *, offload: bool = False, recompute: bool = False) -> Placement:
        """One row; ValueError where there is none."""
        wanted = (stage, offload, recompute)
        for each in self.placements:
            if (each.stage, each.offload, each.recompute) == wanted:
                return each
        raise ValueError(
            f"the plan has no stage={stage}, offload={offload}, recompute={recompute}; it has "
            f"{', '.join(placement.name for placement in self.placements)}"
        )

    def _placements(self) -> Iterator[Placement]:
        kept = None if self.activations is None else self.activations.kept
        forms = [(False, kept)]
        if self.activations is not None and self.activations.recomputed is not None:
            forms.append((True, self.activations.recomputed))
        for recompute, activations in forms:
            for stage in STAGES:
                # ZeRO moves what it shares out: at stage 0 that is nothing.
                for offload in (False, True) if stage else (False,):
                    yield self._placement(stage, offload, recompute, activations)

    def _placement(
        self, stage: int, offload: bool, recompute: bool, activations: int | None
    ) -> Placement:
        held = zero_bytes(
            self.parameters,
            self.trained,
            stage=stage,
            ranks=self.settings.gpus,
            optimizer=self.settings.optimizer,
            mixed=self.precision != "fp32",
            offload=offload,
        )
        return Placement(
            stage,
            offload,
            recompute,
            held.parameters,
            held.gradients,
            held.optimizer_state,
            activations,
            held.host,
        )

    def table(self) -> Table[Placement]:
        """The rows; the notes say which is best, and what comes on top."""
        columns = [
            Column[Placement]("ZeRO", lambda one: f"stage {one.stage}"),
            Column[Placement]("offload", lambda one: "yes" if one.offload else ""),
        ]
        if any(one.recompute for one in self.placements):
            columns.append(Column("recompute", lambda one: "yes" if one.recompute else ""))
        columns += [
            Column("parameters", lambda one: _told(one.parameters), number=True),
            Column("gradients", lambda one: _told(one.gradients), number=True),
            Column("optimizer", lambda one: _told(one.optimizer_state), number=True),
        ]
        if self.activations is not None:
            columns.append(
                Column("activations", lambda one: memory(one.activations or 0), number=True)
            )
        columns += [
            Column("a device", lambda one: memory(one.device), number=True),
            Column("on the host", lambda one: _told(one.host), number=True),
        ]
        if self.memory_bytes is not None:
            columns.append(Column("fits", self._verdict))
        return Table(self.placements, columns, notes=self._notes())

    def _verdict(self, placement: Placement) -> str:
        if placement == self.best:
            return "yes, at the least cost"
        assert self.memory_bytes is not None
        over = placement.device - self.memory_bytes
        return "yes" if over <= 0 else f"no, {memory(over)} more"

    def _notes(self) -> list[str]:
        count, gpus = self.parameters, self.settings.gpus
        some = "" if self.trained == count else f", {self.trained:,} of them trained"
        notes = [
            f"{count:,} parameters{some}, {gpus} {'GPUs' if gpus > 1 else 'GPU'}, "
            f"{_BYTES[self.precision]}, {self.settings.optimizer}"
        ]
        if self.memory_bytes is not None:
            best = self.best
            fits = "nothing fits" if best is None else f"{best.name} costs least of what fits"
            notes.append(f"{fits} into {memory(self.memory_bytes)}")
        if self.activations is None:
            notes.append(
                "activations come on top: give --hidden, --layers, --sequence and --batch, or a "
                "model that engine 'ort' has trained a step of"
            )
        else:
            notes.append(f"activations: {self.activations.source}")
        notes.append(
            "buffers of collectives, what an allocator keeps and, at stage 3, the layer that is "
            "gathered come on top; the host's bytes are those of each device's process"
        )
        return notes

    def picture(self) -> str:
        """What a device holds in each row as bars, in SVG, with a line at its memory."""
        rows = []
        for one in self.placements:
            parts = {
                "parameters": one.parameters,
                "gradients": one.gradients,
                "optimizer state": one.optimizer_state,
                "activations": one.activations or 0,
            }
            rows.append((one.name, [{name: float(size) for name, size in parts.items() if size}]))
        return svg_bars.svg(rows, _SERIES, told=memory, limit=self.memory_bytes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        picture = svg_bars.image(self.picture(), "Bytes of a device by stage of ZeRO")
        return f"{picture}{self.table()._repr_html_()}"


_BYTES: Final = {
    "fp32": "fp32 weights and gradients",
    "mixed": "weights and gradients of 2 bytes, fp32 copies with the optimizer (as a run's "
    "param_dtype=bf16 trains from stage 1 on)",
}


def _told(size: int) -> str:
    return memory(size) if size else "none"


class Lab(Protocol):
    """The part of `ortlab.lab.Session` that a plan needs."""

    @property
    def wrapped(self) -> WrappedModels:
        """The wrapped models."""
        ...

    def memory_plan(self, model: nn.Module) -> MemoryPlan:
        """Return the memory plan of a wrapped model."""
        ...

    def recompute_plans(self, model: nn.Module) -> RecomputePlans:
        """Return the recompute plans of a wrapped model."""
        ...


def zero_plan(lab: Lab, model: str | int | nn.Module, **settings: Any) -> ZeroPlan:
    """See `ortlab.api.zero_plan`; `lab` knows the graphs of wrapped models."""
    chosen = FleetSettings.of(settings)
    if not isinstance(model, (str, int)):
        return _of_module(lab, model, chosen.replace(precision=chosen.precision or "fp32"))
    chosen = chosen.replace(precision=chosen.precision or "mixed")
    count, activations = parse_count(model), _of_transformer(chosen)
    if activations is None and (chosen.sequence or chosen.batch):
        raise ValueError(
            "sequence and batch are for activations, which need hidden and layers too; give them, "
            "or leave those out"
        )
    return ZeroPlan(count, chosen, activations=activations)


def parse_count(count: str | int) -> int:
    """A number of parameters: 1_558_000_000, "350M", "2.7B"; ValueError shows the form."""
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return count
    match = _COUNT.fullmatch(str(count).strip().replace("_", "").replace(",", ""))
    found = 0 if match is None else round(float(match[1]) * _TIMES[match[2].upper()])
    if found < 1:
        raise ValueError(
            f"{count!r} is no number of parameters; give such as 350M, 2.7B or 1558000000"
        )
    return found


def _of_transformer(settings: FleetSettings) -> Activations | None:
    """Equations 1, 2 and 5 of Korthikanti et al.; None where no size of a layer is given.

    A layer keeps 16 s b h elements in the compute type, 2 s b h bytes of dropout masks, and, where
    attention is not fused, 2 a s s b elements and a s s b bytes. Recomputed, each layer keeps its
    input, and one at a time has the rest. Logits are fp32.
    """
    given = {name: getattr(settings, name) for name in (*_SIZES, "heads", "vocabulary")}
    if not any(given[name] for name in ("hidden", "layers", "heads", "vocabulary")):
        return None
    if missing := [name for name in _SIZES if given[name] is None]:
        raise ValueError(
            f"activations need {', '.join(_SIZES)}, and there is no {', '.join(missing)}; give "
            "all, or none of the model's"
        )
    h, layers, s, b = (given[name] for name in _SIZES)
    each = 4 if settings.precision == "fp32" else 2
    a, v = given["heads"] or 0, given["vocabulary"]
    if a and h % a:
        raise ValueError(f"hidden={h} is no multiple of heads={a}; give the model's own")
    layer = s * b * h * (16 * each + 2) + a * s * s * b * (2 * each + 1)
    ends = 0 if v is None else s * b * h * (2 * each + 1) + 4 * s * b * v
    attention = "" if a else ", attention fused (no scores kept)"
    logits = "" if v else ", without embedding and logits (--vocabulary)"
    return Activations(
        layers * layer + ends,
        layers * s * b * h * each + layer + ends,
        f"{layers} layers of width {h}, batch {b} of {s} tokens{attention}{logits} "
        "(arXiv:2205.05198)",
    )


def _of_module(lab: Lab, model: nn.Module, settings: FleetSettings) -> ZeroPlan:
    from ortlab.engines.wrapped_models import check_model

    module = check_model("the first argument", model)
    entry = lab.wrapped.entry(module)
    original = module if entry is None else entry.engine.unwrap(module)
    found = _of_transformer(settings)
    if found is None and entry is not None and entry.engine.name == "ort":
        found = _of_graph(lab, module, settings)
    if found is None:
        found = _of_transformer(_with_config(settings, original))
    return ZeroPlan(
        sum(p.numel() for p in original.parameters()),
        settings,
        trained=sum(p.numel() for p in original.parameters() if p.requires_grad),
        activations=found,
    )


def _with_config(settings: FleetSettings, model: nn.Module) -> FleetSettings:
    """The sizes of a transformers model, where those of a batch are given; else none."""
    config = getattr(model, "config", None)
    names = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "vocabulary": "vocab_size",
    }
    sizes = {name: getattr(config, known, None) for name, known in names.items()}
    if None in (*sizes.values(), settings.sequence, settings.batch):
        return settings
    return settings.replace(**sizes)


def _of_graph(lab: Lab, module: nn.Module, settings: FleetSettings) -> Activations | None:
    """What the graph that ORT made of `module` keeps; None before it has made one."""

    try:
        plan = lab.memory_plan(module)
    except ValueError:  # it was not called yet: then they come on top
        return None
    given = {"batch": settings.batch, "seq": settings.sequence}
    sizes = {name: size for name, size in given.items() if size is not None}
    plan = plan.at(**sizes)
    of = ", ".join(f"{name} {size}" for name, size in plan.dims.items())
    try:
        plans = lab.recompute_plans(module).at(**sizes)
        recomputed = plans.memory("layers").activation_bytes() if plans.layers else None
    except ValueError:  # its graph is recomputed already, or has no training step
        recomputed = None
    source = f"those of ORT's graph as it computes now, for {of}"
    return Activations(plan.activation_bytes(), recomputed, source)
