"""Dispatch of a model's calls to exported ORT graphs, and the self-check of these graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ortlab.engines.base import (
    EngineUnavailable,
    GraphCount,
    Report,
    WrappedModel,
    tell,
    wrapped_model,
)
from ortlab.engines.batch import tensors
from ortlab.engines.call_signature import CallSignature
from ortlab.engines.ortmodule import compat, kernels, options
from ortlab.engines.ortmodule.autocast import asks_for_bfloat16, autocast_now, in_types, types_of
from ortlab.engines.ortmodule.compat import interop
from ortlab.engines.ortmodule.export import Export
from ortlab.engines.ortmodule.export_pool import (
    OF_A_KIND,
    CachedExport,
    ExportFailed,
    Kind,
    Shapes,
    bucket,
)
from ortlab.engines.ortmodule.guard import Guard
from ortlab.engines.plan_names import UnknownPlan
from ortlab.engines.self_check import (
    AS_CLOSE,
    EagerOnly,
    Observed,
    SelfCheckFailed,
    Verdict,
    attempted,
    compare,
    depends_on_seed,
    differences,
    exact_results,
    is_rounding,
    nudged,
    observe,
    parts_of,
    rounding,
)
from ortlab.engines.step_check import Difference, StepCheck
from ortlab.engines.torch.stepper import autocast_for
from ortlab.engines.torchscript.decisions import OtherDecision
from ortlab.engines.torchscript.isolation import NoDropout, NotInGraph, inputs_kept, undisturbed
from ortlab.settings import EngineSettings
from ortlab.utils import warn_once
from ortlab.utils.errors import out_of_memory, place
from ortlab.utils.process_memory import is_scarce

_EXPORTS = 6
_FIRST_SHAPES = 3
_MOST_CHECKS = 16
_MOST_SHAPES = 4096
_MOST_NOTES = 1000
_MOST_FALLBACKS = 3
_BFLOAT16 = 2.0**-9  # of an element, by which rounding to bfloat16 changes it at most
_WITHOUT_WORKERS = "ORT could not start its thread pool: its own kernels run on one thread"


TakeOver = Callable[[nn.Module, EngineSettings], nn.Module | None]
"""Function that wraps a module in another engine for these settings; None if that cannot run."""


class GraphDispatcher:
    """Dispatcher of one module: its exports, their checks, and the report on both.

    An export serves a call with the same state of the module (see `Guard`), the same structure,
    types, ranks and Python values of the arguments, and the same autocast. Any other call gets a
    new export; the most recently used ones are cached. An export should fit every shape. If a graph
    turns out to contain fixed input sizes, the model gets one export for each shape.

    Args:
        module: The user's module.
        settings: Settings that the module is wrapped with.
    """

    engine = "ortmodule"

    def __init__(self, module: nn.Module, settings: EngineSettings) -> None:
        self.module = module
        self.settings = settings
        self._own_settings = settings
        self._options = options.key(settings)
        self._plans = options.recomputed(settings)
        self._asked = settings
        self._types: dict[Hashable, tuple[torch.dtype, ...] | None] = {}
        self._exported_with = settings
        self._ort_module: Any = None
        self._guard = Guard(module)
        self._kinds: dict[tuple[Hashable, ...], Kind] = {}
        self._export_s = 0.0
        self._check_s = 0.0
        self._checks = 0
        self._notes: list[str] = []
        self._remarks: list[str] = []
        self._fallback: tuple[Hashable, str] | None = None
        self._fallbacks = 0
        self.take_over: TakeOver | None = None
        """Wraps the module in another engine if ORTModule refuses it; None for no other engine."""
        self._successor: nn.Module | None = None
        self._demanded: deque[StepCheck] = deque()
        self.last_call: CallSignature | None = None
        """Form of the last call's arguments, without their data; None before a call."""
        # A cell can call a model during a run, and a check restores buffers and random states.
        self._lock = threading.RLock()

    def attach(self, ort_module: Any, no_fallback: Any) -> None:
        """Attach the new ORTModule and disable its own fallback, which this class replaces.

        Args:
            ort_module: ORTModule around the module.
            no_fallback: ORTModule's policy without fallback.

        Raises:
            EngineUnavailable: If ORTModule cannot wrap the model.
        """
        self._ort_module = ort_module
        pending = ort_module._fallback_manager._exception
        if pending is not None:
            raise EngineUnavailable(f"ORTModule cannot wrap the model: {pending}")
        ort_module._fallback_manager.policy = no_fallback
        options.apply(ort_module, self.settings)

    def reseed(self, seed: int) -> None:
        """See `WrappedModel.reseed`; ORT's own dropout runs on a GPU, torch's on a CPU."""
        compat.ortmodule().set_seed(seed)

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """See `WrappedModel.example`."""
        return None if self.last_call is None else self.last_call.placeholders()

    def check_next(self, check: StepCheck) -> None:
        """See `WrappedModel.check_next`."""
        if self._successor is None:
            self._demanded.append(check)
        else:
            _record(self._successor).check_next(check)

    def configure(self, settings: EngineSettings) -> None:
        """Apply settings from the next call on; if ORT's options differ, calls get a new export.

        Args:
            settings: New settings.

        Raises:
            ValueError: If an option cannot work here; the message names it.
        """
        options.check(settings)
        self._own_settings = self._asked = settings
        self._use(settings)

    def _use(self, settings: EngineSettings) -> None:
        self.settings = settings
        if self._successor is not None:
            _record(self._successor).configure(settings)
        self._plans = options.recomputed(settings)
        if options.key(settings) != self._options:
            self.rest()
            self._options = options.key(settings)
            options.apply(self._ort_module, settings)

    def begin_run(self, settings: EngineSettings) -> Callable[[], Report]:
        """Start a run whose settings apply until `end_run`.

        Args:
            settings: Settings of the run.

        Returns:
            A function that returns the report on this run only.

        Raises:
            ValueError: If an option cannot work here; the message names it.
        """
        options.check(settings)
        self._asked = settings
        self._successor, self._fallback, self._fallbacks = None, None, 0
        self._use(settings)
        self._let_some_go()
        self._checks = 0
        before = self.report()

        def report() -> Report:
            now = self.report()
            return dataclasses.replace(
                now,
                export_s=now.export_s - before.export_s,
                check_s=now.check_s - before.check_s,
                notes=now.notes[len(before.notes) :],
            )

        return report

    def end_run(self) -> None:
        """Restore the settings that the model was wrapped with, and release memory."""
        self.rest()
        self._asked = self._own_settings
        self._use(self._own_settings)

    def rest(self) -> None:
        """Release the memory of all sessions; the next call creates its session again.

        The graphs stay cached for their settings, see `kept`. If some must be dropped, the least
        recently used are dropped first.
        """
        for served in self._served():
            served.rest()

    def kept(self) -> dict[str, int]:
        """Return the size of the cached graphs without a session, in bytes, by their settings."""
        found: dict[str, int] = {}
        for served in self._served():
            if not served.export.is_open:
                found.setdefault(served.made_with, 0)
                found[served.made_with] += served.export.resting_bytes
        return found

    def report(self) -> Report:
        """Return the report on the time since the model was wrapped."""
        alone = any(served.export.without_workers for served in self._served())
        own = Report(
            engine_used="eager" if self._fallback else "ortmodule",
            fallback_reason=self._fallback[1] if self._fallback else None,
            export_s=self._export_s,
            check_s=self._check_s,
            notes=tuple(self._notes),
            remarks=(*self._remarks, _WITHOUT_WORKERS) if alone else tuple(self._remarks),
            graphs=GraphCount(len(self.exports())),
        )
        if self._fallback is None or self._successor is None:
            return own
        other = _record(self._successor).report()
        refused = f"engine {self.engine!r} refuses the model: {own.fallback_reason}"
        return Report(
            engine_used=other.engine_used,
            fallback_reason="; ".join(filter(None, (refused, other.fallback_reason))),
            export_s=own.export_s + other.export_s,
            check_s=own.check_s + other.check_s,
            notes=own.notes + other.notes,
            remarks=own.remarks + other.remarks,
            graphs=other.graphs,
        )

    def exports(self, settings: EngineSettings | None = None) -> list[Export]:
        """Return the cached exports, the most recently used last.

        Args:
            settings: If given, only exports for these settings are returned, with any recompute
                plans: plans do not need another export.
        """
        wanted = None if settings is None else options.key(settings)
        return [
            served.export
            for key, kind in list(self._kinds.items())
            for served in reversed(kind.served)
            if wanted is None or key[1] == wanted
        ]

    def _served(self) -> list[CachedExport]:
        return [served for kind in list(self._kinds.values()) for served in kind.served[:]]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward pass with the export that fits the call.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The module's outputs.

        Raises:
            ExportFailed: If ORT cannot run the model and fallback is off.
            SelfCheckFailed: If the graph computes other results than eager torch and fallback is
                off.
        """
        with self._lock:
            if asks_for_bfloat16(self.module):
                types = self._types_of(args, kwargs)
                if types is not None:
                    return self._lowered(args, kwargs, types)
            if self.settings is not self._asked:
                self._use(self._asked)
            return self._forward(args, kwargs)

    def _lowered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], types: tuple[torch.dtype, ...]
    ) -> Any:
        """Run forward with torch's bfloat16 products in the graph, as with ``precision="bf16"``.

        The results have the `types` of eager torch under autocast. The changed settings stay for
        the next call, because another precision needs new sessions.
        """
        if self._fallback is not None and self._falls_back():
            return self._eagerly(args, kwargs)
        lowered = self._asked.replace(precision="bf16")
        if self.settings != lowered:
            try:
                options.check(lowered)
            except ValueError as error:
                refused = ExportFailed(f"torch.autocast in bfloat16: {error}")
                return self._leave(refused, args, kwargs)
            self._use(lowered)
        with torch.autocast("cpu", enabled=False):
            outputs = self._forward(args, kwargs)
        return in_types(outputs, types)

    def _types_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.dtype, ...] | None:
        """Return `types_of` the call, cached by the form of the call."""
        form = CallSignature.of(args, kwargs)
        key = (self._guard.key(), form.args, form.kwargs)
        if key not in self._types:
            if len(self._types) == _EXPORTS:
                self._types.clear()
            with self._as_it_is(args, kwargs):
                self._types[key] = types_of(self.module, args, kwargs)
        return self._types[key]

    def _forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, dropout: bool = True
    ) -> Any:
        self.last_call = form = CallSignature.of(args, kwargs)
        if self._fallback is not None and self._falls_back():
            return self._eagerly(args, kwargs)
        key, shapes = self._key(form), form.shapes
        kind = self._kinds.get(key) or Kind()
        why = ""
        if (name := kind.redefined()) is not None:
            why = f"{name} was redefined"
        for served in kind.fitting(shapes):
            try:
                served.recompute(self._plans)
                if shapes in served.shapes and not served.again and not self._demanded:
                    outputs = served.run(args, kwargs, dropout=dropout)
                else:
                    outputs = self._first(served, key, shapes, args, kwargs, dropout=dropout)
            except OtherDecision as other:
                why = f"forward takes another branch at {place(*other.place)}"
            else:
                kind.use(served)
                if kind is not next(reversed(self._kinds.values())):
                    self._kinds[key] = self._kinds.pop(key)  # most recently used is last
                return outputs
        try:
            return self._first(None, key, shapes, args, kwargs, why=why, dropout=dropout)
        except OtherDecision as other:
            refused = ExportFailed(
                f"forward decides by random numbers at {place(*other.place)}, which ORT draws "
                "differently; use engine='eager'"
            )
            return self._leave(refused, args, kwargs)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Block calls from other threads inside this context."""
        with self._lock:
            yield

    def edited(self) -> str | None:
        """Return the change of the model since its exports.

        Returns:
            Description of the change, or None if a cached export matches the model.
        """
        with self._lock:
            now = self._guard.key()
            made_of = [key[0] for key in self._kinds]
            return None if now in made_of else self._guard.change or "the model"

    def export_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Export | None:
        """Return the export that serves a call, with an open session.

        If there is none yet, or only a call can determine it, the call is run (with gradients in
        training mode); the model and the arguments are restored afterwards.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The export, or None if the model has fallen back to torch.
        """
        with self._lock:
            served = self.served_for(args, kwargs)
            if served is None:
                return None
            served.export.open()
            return served.export

    def export_with(
        self, settings: EngineSettings, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Export:
        """Return an export of the module with other settings, for its graph: no call uses it.

        Args:
            settings: Settings of the export.
            args: Positional arguments of a call.
            kwargs: Keyword arguments of the call.

        Raises:
            ExportFailed: If ORT cannot run the model with these settings.
            ValueError: If an option cannot work here; the message names it.
        """
        # Nothing but the graph is used, so that nothing is checked, and nothing cached for a call.
        settings = settings.replace(self_check=False, cache=False, fallback=False)
        options.check(settings)
        with self._lock:
            other: GraphDispatcher = type(self._ort_module)(self.module, settings)._ortlab
            export = other.export_for(args, kwargs)
        assert export is not None
        export.close()
        return export

    def served_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedExport | None:
        """Return the cached export that serves a call; see `export_for`. Opens no session.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The cached export, or None if the model has fallen back to torch.
        """
        with self._lock, torch.set_grad_enabled(self.module.training):
            if self._fallback is not None and self._falls_back():
                return None
            served = self._met(args, kwargs)
            if served is None or served.definitions or served.export.decisions:
                kept = inputs_kept(tensors([args, kwargs]))
                with undisturbed(self.module), kept, interop.without_reentry():
                    # Without dropout, because the state of ORT's generator cannot be restored.
                    self._forward(args, kwargs, dropout=False)
                served = self._met(args, kwargs)
            return served

    def _met(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedExport | None:
        """Return the export that has already served such a call."""
        key, shapes = self._kind(args, kwargs)
        fitting = self._kinds.get(key, Kind()).fitting(shapes)
        return next((served for served in fitting if shapes in served.shapes), None)

    def _kind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Hashable, ...], Shapes]:
        """Return the key that an export must match, and the shapes, which any export should fit."""
        form = CallSignature.of(args, kwargs)
        return self._key(form), form.shapes

    def _key(self, form: CallSignature) -> tuple[Hashable, ...]:
        return (
            self._guard.key(),
            self._options,
            torch.is_grad_enabled(),  # a check without gradients covers only calls without them
            form.args,
            form.kwargs,
            autocast_now(),
        )

    def _first(
        self,
        served: CachedExport | None,
        key: tuple[Hashable, ...],
        shapes: Shapes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        why: str = "",
        dropout: bool,
    ) -> Any:
        """Run a call that may need a new export or a check.

        `why` is the reason for a new export, unless that is an edit of the model or a new kind of
        input.
        """
        try:
            if served is None:
                _refuse_backward_hooks(self.module)
                _refuse_swapped(self.module)
            if any(0 in shape for shape in shapes) and torch.is_grad_enabled():
                raise ExportFailed(
                    f"an input is empty ({', '.join(map(str, map(list, shapes)))}), and some of "
                    "ORT's CPU gradients crash the process on it; skip such batches, or use "
                    "engine='ort'"
                )
            if self._due(served, shapes):
                served = self._check_or_split(served, key, args, kwargs, why)
            elif served is None:
                served = self._make(args, kwargs, why, checked=False)
                self._keep(served.export)
        except (ExportFailed, NotInGraph, SelfCheckFailed) as error:
            return self._leave(error, args, kwargs)
        if len(served.shapes) >= _MOST_SHAPES:
            served.shapes.clear()
        served.shapes_met += shapes not in served.shapes
        served.shapes.add(shapes)
        served.buckets.add(bucket(shapes))
        return served.run(args, kwargs, dropout=dropout)

    def _leave(self, refused: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this call and later ones in the engine that takes over, or else in eager torch.

        Raises:
            Exception: The refusal itself, if neither may run the model.
        """
        reason = str(refused)
        if not self._has_successor():
            self._answer(reason, passed=False)
            if not self._asked.fallback:
                raise refused from refused.__cause__
        while self._demanded:
            self.check_next(self._demanded.popleft())
        outputs = self._eagerly(args, kwargs)
        # After the call, so that attributes set by forward do not count as an edit of the model.
        self._fallback = (self._guard.key(), reason)
        self._fallbacks += 1
        where = "eager torch" if self._successor is None else _record(self._successor).engine
        warn_once.say(type(self.module).__name__, f"fallback to {where}: {reason}")
        return outputs

    def _has_successor(self) -> bool:
        """Return True if another engine takes over; wrap the model in it at the first time."""
        if self._successor is None and self.take_over is not None:
            self._successor = self.take_over(self.module, self._asked)
        return self._successor is not None

    def _eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call outside ORTModule, in the precision that its graph would have."""
        precision = self.settings.precision if autocast_now() is None else "fp32"
        device = next(self.module.parameters()).device
        module = self.module if self._successor is None else self._successor
        with autocast_for(precision, device):
            return module(*args, **kwargs)

    def _falls_back(self) -> bool:
        """Return True while the fallback applies; ORT is tried again a few times after edits."""
        assert self._fallback is not None
        if self._successor is not None:
            return True
        if self._fallbacks >= _MOST_FALLBACKS or self._guard.key() == self._fallback[0]:
            return True
        self._fallback = None
        return False

    def _make(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str, *, checked: bool
    ) -> CachedExport:
        """Create an export; `checked` allows the faster way, which needs a check before use."""
        change, self._guard.change = self._guard.change, ""
        change = change or options.changed(self._exported_with, self.settings)
        self._exported_with = self.settings
        key, shapes = self._kind(args, kwargs)
        known = self._kinds.get(key)
        if known is not None:
            known.refuse_more()
        if self._kinds and not (known is not None and known.per_shape):
            self._note(f"exported again: {why or change or 'another kind of input'}")
        leaves = (*self.module.parameters(), *tensors([args, kwargs]))
        differentiable = any(leaf.requires_grad for leaf in leaves)
        # Without gradients ORTModule exports in evaluation mode: no dropout, BatchNorm frozen.
        gradient = differentiable and (torch.is_grad_enabled() or self.module.training)
        tell("exporting the model to ORT")
        started = time.perf_counter()
        try:
            export = Export(self._ort_module, self.module, gradient=gradient)
            export.plans = self._plans if gradient else ()
            with self._as_it_is(args, kwargs):
                made = self._cached() and export.restore(args, kwargs, self._call(args, kwargs))
            if (
                not made and checked and self.settings.ortmodule.copy_for_export
            ):  # the faster way copies
                with self._as_it_is(args, kwargs):
                    made = export.build_weightless(args, kwargs)
            if not made:
                with self._as_it_is(args, kwargs):
                    export.build(args, kwargs)
            options.check_plans(export.manager, self.settings)
        except UnknownPlan:
            raise
        # ORT raises all kinds of exceptions; they are explained in one line.
        except Exception as error:
            if out_of_memory(error):  # not caused by the model's operators
                raise
            if not self.settings.self_check:
                self._let_eager_fail(args, kwargs)
            raise self._cannot_run(error) from None
        self._export_s += time.perf_counter() - started
        self._judge_precision(export)
        if export.left_out:
            self._remark(f"{', '.join(export.left_out)} is None: ORT's graph has no cache")
        if export.checkpointing:
            self._remark(export.checkpointing)
        if gradient and options.recomputes(self.settings) and self.settings.kernels != "ort":
            self._remark(
                "ORT's own recompute plans run its own kernels alone, which can take more memory "
                "than a plan saves; %ort recompute compares the peaks"
            )
        if hooked := _forward_hooked(self.module):
            self._remark(
                f"forward hooks of {', '.join(hooked[:3])}: ORT's graph contains their tensor "
                "operations, but does not call them"
            )
        counters, buffers = _batch_counters(self.module), list(self.module.buffers())
        made_with = options.told(self.settings)
        served = CachedExport(export, shapes, counters, buffers, made_with)
        # Compute the key again: forward has run and may have set attributes of the module.
        self._kinds.setdefault(self._kind(args, kwargs)[0], Kind()).served.insert(0, served)
        self._let_some_go()
        return served

    @contextlib.contextmanager
    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Restore the model and the arguments on exit."""
        with undisturbed(self.module), inputs_kept(tensors([args, kwargs])):
            yield

    def _let_some_go(self) -> None:
        """Drop exports if there are too many or memory is low, those without a session first."""
        resting = [key for key, kind in self._kinds.items() if not kind.is_open]
        while len(self._kinds) > _EXPORTS:
            del self._kinds[resting.pop(0) if resting else next(iter(self._kinds))]
        if resting and is_scarce(next(self.module.parameters()).device.type):
            self._note(f"graphs for {', '.join(self.kept())} were released: memory is low")
            for key in resting:
                del self._kinds[key]

    def _judge_precision(self, export: Export) -> None:
        """Raise ExportFailed if products would have another precision than that of the settings."""
        why = export.without_kernels
        if why is not None and why == kernels.unavailable():
            self._remark(f"only ORT's own kernels run: {why}")
        if (poorly := export.draws_poorly) is not None:
            self._remark(
                "ORT's own dropout draws poor random numbers, so that some elements are dropped "
                f"too often or never: {poorly}"
            )
        in_torch = self.settings.precision in ("bf16", "fp16")
        if not in_torch or export.manager._runtime_options.low_precision:
            return
        if why is not None:
            raise ExportFailed(
                f"precision={self.settings.precision!r} needs ortlab's kernels: {why}"
            )
        if autocast_now() is None:
            raise ExportFailed(
                f"precision={self.settings.precision!r} on a GPU needs torch.autocast around "
                "forward and loss; add it, or train with finetune, which adds it"
            )

    def _cached(self) -> bool:
        return self.settings.cache and not options.ask_for_an_export(self.settings)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what a graph depends on besides the module and ORT's options, for the cache.

        Sizes are included if no check would notice that a graph contains other fixed sizes.
        """
        key, shapes = self._kind(args, kwargs)
        # The first two items are the guard's key and ORT's options.
        known = self._kinds.get(key)
        sized = not self.settings.self_check or (known is not None and known.per_shape)
        return {"call": repr(key[2:]), "sizes": repr(shapes) if sized else ""}

    def _keep(self, export: Export) -> None:
        export.keep()
        if export.cache_note:
            self._note(export.cache_note)

    def _let_eager_fail(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise the error of eager torch, if any: then the model is at fault, not ORT."""
        with undisturbed(self.module), torch.no_grad():
            self.module(*args, **kwargs)

    def _due(self, served: CachedExport | None, shapes: Shapes) -> bool:
        """Return True if this call must be checked.

        Always checked are the first call of an export, its second call (whose data it was not
        exported with), and the first change of a dimension, because the graph may contain a fixed
        size. If the user's code converts sizes to Python numbers or truth values, every new shape
        is checked. Otherwise the first three shapes are checked, then the first of every bucket of
        sizes (rounded up to powers of two), up to sixteen checks in a run.
        """
        if self._demanded:
            return True
        if not self.settings.self_check:
            return False
        if served is None or not served.checked or served.again:
            return True
        if served.has_new_dimension(shapes):
            return True
        if served.export.by_size:
            return True
        known = bucket(shapes) in served.buckets and served.shapes_met >= _FIRST_SHAPES
        return self._checks < _MOST_CHECKS and not known

    def _check_or_split(
        self,
        served: CachedExport | None,
        key: tuple[Hashable, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: str,
    ) -> CachedExport:
        """Run `_check`; switch to one export per shape if a graph is right for one shape only."""
        started, exported_s = time.perf_counter(), self._export_s
        known = served is not None and self._kind(args, kwargs)[1] in served.shapes
        try:
            part = (served is None or known) and not self._demanded
            return self._check(served, args, kwargs, why, part=part)
        except (ExportFailed, SelfCheckFailed) as error:
            if served is None or not served.checked:
                raise
            if known and isinstance(error, SelfCheckFailed):
                raise SelfCheckFailed(
                    "ORT's graph is right for the checked part of the batch that it was exported "
                    "with and wrong for the next one, so it depends on more than the shape: "
                    f"{error}"
                ) from None
            if known:
                raise
            self._remark(
                "the graph contains the fixed input sizes of its export and is wrong for others: "
                f"every shape gets its own export, at most {OF_A_KIND}"
            )
            self._kinds[key].per_shape = True
            return self._check(None, args, kwargs, why, part=True)
        finally:
            self._check_s += time.perf_counter() - started - (self._export_s - exported_s)

    def _check(
        self,
        served: CachedExport | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: str,
        *,
        part: bool,
    ) -> CachedExport:
        """Compare the export with eager torch; create it first if there is none.

        With `part`, compare on a part of the batch: a graph that is right for other sizes than
        those of its export is also right for its own. If the part fails, the whole batch decides.
        """
        again = served is not None and served.checked
        part = part and (served is None or not self._by_shape(served, args, kwargs))
        whole = (args, kwargs)
        parts = parts_of(self.module, args, kwargs, again=again) if part else []
        for call in (*parts, whole):
            try:
                reference = self._reference(*call)
            except NotInGraph:
                raise
            except Exception as error:  # forward may need the whole batch, and raise anything
                if call is whole or out_of_memory(error):
                    raise
            else:
                # The loss of a few tokens is NaN if none of them has a label.
                if call is whole or again or reference.has_finite_outputs():
                    break
        draws = reference.drew and self._random(reference, *call)
        if draws and self._has_successor():
            raise ExportFailed(
                "forward draws random numbers besides dropout, which ORTModule draws by itself, so "
                "that its results cannot be checked"
            )
        if served is None:
            served = self._make(args, kwargs, why, checked=not reference.drew)
            if call is not whole and self._by_shape(served, args, kwargs):
                return self._check(served, args, kwargs, why, part=False)
        elif served.again and not reference.is_finite():
            return served  # engines treat NaN differently; a later batch is checked instead
        tell("checking ORT against eager torch")
        if reference.wrote:
            names = ", ".join(sorted(reference.wrote)[:3])
            self._remark(
                f"forward sets {names}: ORT's graph does not, and uses the values of its export"
            )
        if draws:
            self._remark(undrawn := "not checked: forward draws random numbers besides dropout")
            self._answer(undrawn, passed=False)
            served.again = False
        else:
            try:
                self._compare(reference, *call, served)
            except (ExportFailed, SelfCheckFailed):
                if call is not whole:
                    return self._check(served, args, kwargs, why, part=False)
                export = served.export
                if served.checked or not (export.from_cache or export.weightless):
                    raise
                export.forget()
                self._kinds[self._kind(args, kwargs)[0]].served.pop(0)
                how = "from the cache" if export.from_cache else "of an export without values"
                why = f"the graph {how} was wrong"
                served = self._make(args, kwargs, why, checked=False)
                self._compare(reference, *call, served)
            served.again = not served.checked
            if not served.checked:
                self._keep(served.export)
        for each in (call, whole):
            served.passed(self._kind(*each)[1])
        self._checks += 1
        return served

    def _by_shape(
        self, served: CachedExport, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return True if a part of the batch may need another export than the whole batch."""
        export, kind = served.export, self._kinds.get(self._kind(args, kwargs)[0])
        return bool(export.by_size or export.decisions or (kind and kind.per_shape))

    def _reference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
        """Run eager torch; raise ExportFailed if forward has side effects that no graph has."""
        given = tensors([args, kwargs])
        parameters = dict(self.module.named_parameters())
        versions = [parameter._version for parameter in parameters.values()]
        constants = self._guard.constants()
        held = inputs_kept(list(constants.values()))
        with NoDropout(), EagerOnly() as seen, inputs_kept(given) as changed, held as written:
            call = functools.partial(self.module, *args, **kwargs)
            reference = _observed(
                call,
                self.module,
                inputs=_differentiable(given),
                gradients=torch.is_grad_enabled(),
            )
        # An edit of .data increases only the version of .data.
        edited = {id(owner) for owner, data in seen.data if data._version}
        for (name, parameter), version in zip(parameters.items(), versions, strict=True):
            if parameter._version != version or id(parameter) in edited:
                raise ExportFailed(
                    f"forward changes its parameter {name} in place (as max_norm of an embedding "
                    "does), which ORT's graph would not; use engine='eager'"
                )
        if written:
            raise ExportFailed(
                f"forward changes {list(constants)[written[0]]} in place, which is a constant in "
                "ORT's graph; change it outside of forward, or use engine='eager'"
            )
        if reference.rebound:
            name = reference.rebound[0]
            raise ExportFailed(
                f"forward replaces its buffer {name} by another tensor, which ORT's graph would "
                "not; set it outside of forward before the model is wrapped, or use "
                "engine='eager'"
            )
        if reference.kept or seen.keeps_tensors():
            where = f" in {reference.kept[0]}" if reference.kept else ""
            raise ExportFailed(
                f"forward, or a hook of it, keeps a tensor that it computes{where}, which ORT's "
                "graph would not; return it, or use engine='ort'"
            )
        if seen.unfit is not None:
            raise ExportFailed(
                f"forward {seen.unfit}, and some of ORT's CPU gradients are wrong or end the "
                "process on such sizes; use engine='ort'"
            )
        if changed:
            shapes = ", ".join(str(list(given[i].shape)) for i in changed)
            self._remark(
                f"forward changes its input in place ({shapes}): ORT's graph does not change it"
            )
        return reference

    def _random(self, reference: Observed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if results depend on torch's random numbers, which ORT draws in the graph.

        Raises ExportFailed if they depend on those of Python or numpy, constants in the graph.
        """
        call = functools.partial(self.module, *args, **kwargs)
        inputs = _differentiable(tensors([args, kwargs]))
        depends = functools.partial(depends_on_seed, reference, call, self.module, inputs=inputs)
        with NoDropout(), interop.without_reentry():
            if depends(drawn_by_torch=False):
                raise ExportFailed(
                    "forward draws random numbers from Python or numpy, and ORT's graph would "
                    "reuse those of its export; draw them with torch, or use engine='eager'"
                )
            return depends(drawn_by_torch=True)

    def _compare(
        self,
        reference: Observed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        served: CachedExport,
    ) -> None:
        given = tensors([args, kwargs])
        try:
            observed = _observed(
                functools.partial(served.run, args, kwargs, dropout=False),
                self.module,
                inputs=_differentiable(given),
                gradients=torch.is_grad_enabled(),
            )
        except OtherDecision:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise self._cannot_run(error) from None
        low_precision = (
            self.settings.precision != "fp32"
            or autocast_now() is not None
            or any(p.dtype in (torch.float16, torch.bfloat16) for p in self.module.parameters())
        )
        held_against = functools.partial(compare, other=observed, low_precision=low_precision)
        try:
            verdict: object = held_against(reference)
        except SelfCheckFailed as error:
            found = self._with_plain_attention(reference, args, kwargs, held_against)
            if found is not None:
                verdict = found
            elif why := self._rounding(reference, observed, args, kwargs):
                verdict = f"{why}; {error}"
            else:
                raise SelfCheckFailed(
                    f"ORT would not train this model correctly: {error}; use engine='eager', "
                    "or fallback=True to continue in torch"
                ) from None
        shapes = ", ".join(str(list(value.shape)) for value in given)
        self._note(f"checked on {shapes}: {verdict}")
        if self._demanded:
            exact = None
            if not low_precision:
                exact = exact_results(self.module, (args, kwargs), self._in_eager)
            rows = differences(reference, observed, exact)
            self._answer(f"{verdict}, for inputs of shape {shapes}", rows, passed=True)

    def _with_plain_attention(
        self,
        reference: Observed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        held_against: Callable[[Observed], Verdict],
    ) -> Verdict | None:
        """Return the verdict against gradients of SDPBackend.MATH; None if these differ too.

        If a mask is the lowest finite number along a whole row, torch 2.13's flash attention on a
        CPU computes gradients as if each weight of that row were 1, also in double precision.
        """
        try:
            with sdpa_kernel(SDPBackend.MATH):
                plain = self._reference(args, kwargs)
            verdict = held_against(dataclasses.replace(reference, gradients=plain.gradients))
        except RuntimeError:  # SelfCheckFailed, or out of memory for the attention scores
            return None
        self._remark(
            "torch's fused attention computes another gradient here than SDPBackend.MATH, as it "
            "does for fully masked rows: ORT's gradient matches SDPBackend.MATH"
        )
        return verdict

    def _rounding(
        self,
        reference: Observed,
        observed: Observed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str:
        """Return why rounding explains the difference from eager torch; "" if it does not.

        In single precision, both ORT and torch are compared with double precision, also with
        parameters perturbed by a few rounding errors. In 16 bits, both ORT and torch under autocast
        are compared with single precision, torch also with perturbed parameters.
        """
        call = (self.module, args, kwargs)
        if self.settings.precision != "fp32":
            exact: Observed | None = reference
        elif autocast_now() is not None:
            with torch.autocast("cpu", enabled=False):
                exact = attempted(self._in_eager, *call)
        else:
            return rounding(self.module, (args, kwargs), reference, observed, self._in_eager)
        calls = itertools.chain([call], nudged(*call, by=_BFLOAT16))
        lowered = [found for each in calls if (found := attempted(self._in_eager, *each))]
        return AS_CLOSE if exact and lowered and is_rounding(lowered, observed, exact) else ""

    def _in_eager(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Observed:
        with NoDropout(), autocast_for(self.settings.precision, torch.device("cpu")):
            return _observed(
                functools.partial(module, *args, **kwargs),
                module,
                inputs=_differentiable(tensors([args, kwargs])),
                gradients=torch.is_grad_enabled(),
            )

    def _answer(self, verdict: str, rows: tuple[Difference, ...] = (), *, passed: bool) -> None:
        """Give the result of a comparison to the checks that the user has asked for."""
        while self._demanded:
            self._demanded.popleft().finish(passed, verdict, rows)

    def _cannot_run(self, error: Exception) -> ExportFailed:
        way_out = "use engine='ort'"
        if any(p.dtype == torch.float64 for p in self.module.parameters()):
            way_out += ", or model.float(): ORT has few kernels for double precision"
        elif asks_for_bfloat16(self.module):
            way_out += ", or remove the autocast inside forward, which ORT's graph cannot lower"
        return ExportFailed(f"ORTModule cannot run this model: {compat.explain(error)}; {way_out}")

    def _remark(self, text: str) -> None:
        """Record a difference from eager torch that the user must know, once."""
        if text not in self._remarks:
            self._remarks.append(text)
            self._note(text)
            warn_once.say(f"{type(self.module).__name__} in engine 'ortmodule'", text)

    def _note(self, text: str) -> None:
        if len(self._notes) < _MOST_NOTES:
            self._notes.append(text)
        elif len(self._notes) == _MOST_NOTES:
            self._notes.append("further notes are not recorded")


def _record(wrapped: nn.Module) -> WrappedModel:
    record = wrapped_model(wrapped)
    assert record is not None
    return record


def _differentiable(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value for value in given if value.requires_grad]


def _batch_counters(module: nn.Module) -> list[torch.Tensor]:
    """Return the batch counters of the BatchNorm modules whose forward would increase them."""
    norms = [
        child
        for child in module.modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training
    ]
    for norm in norms:
        if norm.track_running_stats and norm.momentum is None:
            raise ExportFailed(
                "BatchNorm with momentum=None weights every batch differently, which an exported "
                "graph cannot; set a momentum, or use engine='eager'"
            )
    return [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]


def _forward_hooked(module: nn.Module) -> list[str]:
    return [
        name or type(child).__name__
        for name, child in module.named_modules()
        if child._forward_hooks or child._forward_pre_hooks
    ]


@functools.wraps(observe)
def _observed(*args: Any, **kwargs: Any) -> Observed:
    with interop.without_reentry():
        return observe(*args, **kwargs)


def _refuse_backward_hooks(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise ExportFailed(
                f"{name or type(child).__name__} has a backward hook, which ORT would never call; "
                "remove it, or use engine='eager'"
            )


def is_swapped(parameter: object) -> bool:
    """Return True for a plain tensor, which torch.func.functional_call sets for a parameter.

    Args:
        parameter: Value of a parameter's attribute.
    """
    return isinstance(parameter, torch.Tensor) and not isinstance(parameter, nn.Parameter)


def swapped(name: str) -> str:
    """Return the error message for a parameter that `is_swapped`.

    Args:
        name: Name of the parameter.
    """
    return (
        f"{name} is a plain tensor in place of a parameter, set by torch.func.functional_call, and "
        "ORT would export the model for every such call; pass it the model itself, "
        "ortlab.unwrap(model), or use engine='eager'"
    )


def _refuse_swapped(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_swapped(parameter):
            raise ExportFailed(swapped(name))
