"""Memory plan of ZeRO: formulas for the bytes per device at each stage.

Rajbhandari et al. 2020 (arXiv:1910.02054, sections 3 and 5) describe what each stage partitions,
Ren et al. 2021 (arXiv:2101.06840, section 3) what is offloaded to the host, and Korthikanti et al.
2022 (arXiv:2205.05198, sections 4 and 5) the activations of a transformer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ortlab.metrics.zero_bytes import zero_bytes
from ortlab.plan import activations
from ortlab.plan.transformer import Transformer, parse_count
from ortlab.settings import FleetSettings
from ortlab.utils import svg_bars
from ortlab.utils.process_memory import memory, parse_bytes
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    from torch import nn

    from ortlab.engines.wrapped_models import WrappedModels
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.recompute_plans import RecomputePlans

STAGES: Final = (0, 1, 2, 3)
_SIZES: Final = ("hidden", "layers", "sequence", "batch")
SERIES: Final = {  # the colors of `timeline`
    "parameters": ("#6c757d", 1.0),
    "gradients": ("#d9772b", 1.0),
    "optimizer state": ("#a5acb3", 1.0),
    "activations": ("#2f7fd0", 1.0),
}


@dataclass(frozen=True)
class Placement:
    """Bytes on one device at a stage of ZeRO, and in the host memory of its process.

    Attributes:
        stage: Stage of ZeRO, 0 to 3.
        offload: True if the optimizer runs on the host.
        recompute: True if activations are recomputed in the backward pass.
        parameters: Parameters.
        gradients: Gradients.
        optimizer_state: Optimizer state; in mixed precision including the fp32 copy of the
            parameters.
        activations: Activations; None if the sizes of the model or the batch are unknown.
        host: Host memory of an offloaded optimizer, with a copy of the parameters, also in fp32.
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
        """Total bytes on the device."""
        known = self.activations or 0
        return self.parameters + self.gradients + self.optimizer_state + known

    @property
    def name(self) -> str:
        """Name of the row: stage, offload and recompute."""
        more = [word for word in ("offload", "recompute") if getattr(self, word)]
        return " + ".join([f"stage {self.stage}", *more])


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one device.

    Attributes:
        kept: Bytes if all activations are stored.
        recomputed: Bytes if each layer is recomputed; None if that is not possible.
        source: Source of the numbers.
    """

    kept: int
    recomputed: int | None
    source: str


class ZeroPlan:
    """Memory plan of ZeRO's stages 0 to 3 for a number of devices.

    Args:
        parameters: Number of parameters (elements) of the model.
        settings: Devices and training settings.
        trained: Number of trained parameters; None is all.
        activations: Activations per device; None if unknown.

    Attributes:
        placements: Rows of the table.
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
        """Cheapest placement that fits; None if none does, or no memory is given.

        A lower stage is cheaper than a higher one; recompute (up to a third more computation) costs
        more than any stage, and offload (transfers to the host in every step) more than recompute.
        """
        by_cost = sorted(self.placements, key=lambda one: (one.offload, one.recompute, one.stage))
        return next((placement for placement in by_cost if self.fits(placement)), None)

    def fits(self, placement: Placement) -> bool:
        """Return True if a placement fits into the memory of a device.

        Args:
            placement: A row of the plan.

        Returns:
            True if it fits; False if no memory is given.
        """
        return self.memory_bytes is not None and placement.device <= self.memory_bytes

    def at(self, stage: int, *, offload: bool = False, recompute: bool = False) -> Placement:
        """Return one row.

        Args:
            stage: Stage of ZeRO, 0 to 3.
            offload: Run the optimizer on the host.
            recompute: Recompute activations.

        Raises:
            ValueError: The plan has no such row.
        """
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
        for recompute, held in forms:
            for stage in STAGES:
                # ZeRO offloads partitioned state only, and stage 0 partitions nothing.
                for offload in (False, True) if stage else (False,):
                    yield self._placement(stage, offload, recompute, held)

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
        """Return the rows as a table; its notes name the best row and what is not included."""
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
            Column("per device", lambda one: memory(one.device), number=True),
            Column("on the host", lambda one: _told(one.host), number=True),
        ]
        if self.memory_bytes is not None:
            columns.append(Column("fits", self._verdict))
        return Table(self.placements, columns, notes=self._notes())

    def _verdict(self, placement: Placement) -> str:
        if placement == self.best:
            return "yes, at the lowest cost"
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
            fits = "nothing fits" if best is None else f"{best.name} is the cheapest that fits"
            notes.append(f"{fits} into {memory(self.memory_bytes)}")
        if self.activations is None:
            notes.append(
                "activations are not included: give hidden, layers, sequence and batch (--hidden "
                "and so on), or a model that engine 'ortmodule' has trained for a step"
            )
        else:
            notes.append(f"activations: {self.activations.source}")
        notes.append(
            "communication buffers, memory that the allocator caches and, at stage 3, the gathered "
            "layer are not included; host memory is that of each device's process"
        )
        return notes

    def picture(self) -> str:
        """Return an SVG bar chart of the bytes per device, with a line at the device's memory."""
        rows = []
        for one in self.placements:
            parts = {
                "parameters": one.parameters,
                "gradients": one.gradients,
                "optimizer state": one.optimizer_state,
                "activations": one.activations or 0,
            }
            rows.append((one.name, [{name: float(size) for name, size in parts.items() if size}]))
        return svg_bars.svg(rows, SERIES, told=memory, limit=self.memory_bytes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        picture = svg_bars.image(self.picture(), "Bytes per device by stage of ZeRO")
        return f"{picture}{self.table()._repr_html_()}"


_BYTES: Final = {
    "fp32": "fp32 weights and gradients",
    "mixed": "2-byte weights and gradients, fp32 copies in the optimizer (as a run with "
    "param_dtype=bf16 trains from stage 1 on)",
}


def _told(size: int) -> str:
    return memory(size) if size else "none"


class Lab(Protocol):
    """Part of `ortlab.session.Session` that a plan needs."""

    @property
    def wrapped(self) -> WrappedModels:
        """Wrapped models of the session."""
        ...

    def memory_plan(self, model: nn.Module) -> MemoryPlan:
        """Return the memory plan of a wrapped model.

        Args:
            model: The model.
        """
        ...

    def recompute_plans(self, model: nn.Module) -> RecomputePlans:
        """Return the recompute plans of a wrapped model.

        Args:
            model: The model.
        """
        ...


def zero_plan(lab: Lab, model: str | int | nn.Module, **settings: Any) -> ZeroPlan:
    """See `ortlab.api.zero_plan`; `lab` has the graphs of wrapped models."""
    chosen = FleetSettings.of(settings)
    if not isinstance(model, (str, int)):
        return _of_module(lab, model, chosen.replace(precision=chosen.precision or "fp32"))
    chosen = chosen.replace(precision=chosen.precision or "mixed")
    count, found = parse_count(model), _of_transformer(chosen)
    if found is None and (chosen.sequence or chosen.batch):
        raise ValueError(
            "sequence and batch are for activations, which also need hidden and layers; add these, "
            "or leave out sequence and batch"
        )
    return ZeroPlan(count, chosen, activations=found)


def _of_transformer(settings: FleetSettings) -> Activations | None:
    """Return the activations of a transformer; None if no size of the model is given.

    With recompute, each layer stores its input, and one layer at a time the rest.
    """
    given = {name: getattr(settings, name) for name in (*_SIZES, "heads", "vocabulary")}
    if not any(given[name] for name in ("hidden", "layers", "heads", "vocabulary")):
        return None
    if missing := [name for name in _SIZES if given[name] is None]:
        raise ValueError(
            f"activations need {', '.join(_SIZES)}, but there is no {', '.join(missing)}; give "
            "all, or leave out the model's sizes"
        )
    h, layers, s, b = (given[name] for name in _SIZES)
    each = 4 if settings.precision == "fp32" else 2
    a, v = given["heads"] or 0, given["vocabulary"]
    if a and h % a:
        raise ValueError(f"hidden={h} is not a multiple of heads={a}; use the model's sizes")
    model = Transformer(layers, h, a or 1, s, v or 0)
    layer = activations.layer_bytes(model, b, each=each, scores=bool(a))
    ends = 0
    if v is not None:
        ends = activations.first_bytes(model, b) + activations.last_bytes(model, b, each=each)
    attention = "" if a else ", fused attention (no scores stored)"
    logits = "" if v else ", without embedding and logits (--vocabulary)"
    return Activations(
        layers * layer + ends,
        layers * activations.input_bytes(model, b, each=each) + layer + ends,
        f"{layers} layers of width {h}, batch {b} of {s} tokens{attention}{logits} "
        "(arXiv:2205.05198)",
    )


def _of_module(lab: Lab, model: nn.Module, settings: FleetSettings) -> ZeroPlan:
    from ortlab.engines.wrapped_models import check_model  # heavy: torch

    module = check_model("the first argument", model)
    entry = lab.wrapped.entry(module)
    original = module if entry is None else entry.engine.unwrap(module)
    found = _of_transformer(settings)
    if found is None and entry is not None and entry.engine.name == "ortmodule":
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
    """Add the sizes of a transformers model, if sequence and batch are given."""
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
    """Return the activations in ORT's graph of a model; None before it has a graph."""
    try:
        plan = lab.memory_plan(module)
    except ValueError:  # the model was not called yet, so its activations are unknown
        return None
    given = {"batch": settings.batch, "seq": settings.sequence}
    sizes = {name: size for name, size in given.items() if size is not None}
    plan = plan.at(**sizes)
    of = ", ".join(f"{name} {size}" for name, size in plan.dims.items())
    try:
        plans = lab.recompute_plans(module).at(**sizes)
        recomputed = plans.memory("layers").activation_bytes() if plans.layers else None
    except ValueError:  # the graph already recomputes activations, or has no training step
        recomputed = None
    source = f"from ORT's current graph, for {of}"
    return Activations(plan.activation_bytes(), recomputed, source)
