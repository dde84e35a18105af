"""How a model runs in ORT: which exported graph a call gets, and whether that one is right."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ortlab.engines.base import (
    EngineUnavailable,
    Report,
    tell,
)
from ortlab.engines.batch import tensors
from ortlab.engines.ortmodule import compat, kernels, options
from ortlab.engines.ortmodule.autocast import asks_for_bfloat16, autocast_now, in_types, types_of
from ortlab.engines.ortmodule.call_signature import CallSignature
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
from ortlab.engines.ortmodule.kernels.recompute import UnknownPlan
from ortlab.engines.ortmodule.self_check import (
    EagerOnly,
    Observed,
    SelfCheckFailed,
    Verdict,
    compare,
    depends_on_seed,
    in_double,
    is_at_a_kink,
    is_rounding,
    nudged,
    observe,
    parts_of,
)
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
_WITHOUT_WORKERS = "no room for ORT's threads: its own kernels compute in one"


class GraphDispatcher:
    """How one module runs in ORT: its exports, their checks, and what happened.

    An export serves the calls that it fits: the same state of the module (`Guard`), the same
    structure, types and ranks of the arguments, the same Python values among them, the same
    autocast. Another call gets an export of its own; the last few are kept. It should fit every
    shape; a model whose graph turns out to hold the sizes of its input gets one for each shape.
    """

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
        self.last_call: CallSignature | None = None
        """What the last call was given, without its data."""
        # A cell may call a model that a run trains; a check puts buffers and random states back.
        self._lock = threading.RLock()

    def attach(self, ort_module: Any, no_fallback: Any) -> None:
        """Takes over from `ort_module`, once it is made; fallback is decided here from now on."""
        self._ort_module = ort_module
        pending = ort_module._fallback_manager._exception
        if pending is not None:
            raise EngineUnavailable(f"ORTModule cannot wrap the model: {pending}")
        ort_module._fallback_manager.policy = no_fallback
        options.apply(ort_module, self.settings)

    def reseed(self, seed: int) -> None:
        """See `WrappedModel.reseed`: ORT's own dropout draws on a GPU, torch's on a CPU."""
        compat.ortmodule().set_seed(seed)

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """See `WrappedModel.example`."""
        return None if self.last_call is None else self.last_call.placeholders()

    def configure(self, settings: EngineSettings) -> None:
        """Lets `settings` hold from now on: where ORT's options differ, calls get a new export.

        ValueError names an option that cannot work here.
        """
        options.check(settings)
        self._own_settings = self._asked = settings
        self._use(settings)

    def _use(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._plans = options.recomputed(settings)
        if options.key(settings) != self._options:
            self.rest()
            self._options = options.key(settings)
            options.apply(self._ort_module, settings)

    def begin_run(self, settings: EngineSettings) -> Callable[[], Report]:
        """Starts a run: `settings` hold until `end_run`. Returns what reports on this run alone."""
        options.check(settings)
        self._asked = settings
        self._use(settings)
        self._let_some_go()
        self._checks = 0
        self._fallback, self._fallbacks = None, 0
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
        """The settings that the model was wrapped with hold again, and no memory is kept."""
        self.rest()
        self._asked = self._own_settings
        self._use(self._own_settings)

    def rest(self) -> None:
        """Gives back what sessions keep from step to step; a call makes its own anew.

        The graphs stay for a return to the settings that they were made with, see `kept`. Where
        some have to be let go, those that were called last are so last.
        """
        for served in self._served():
            served.rest()

    def kept(self) -> dict[str, int]:
        """The graphs that wait for a return to their settings: what those are, and their bytes."""
        found: dict[str, int] = {}
        for served in self._served():
            if not served.export.is_open:
                found.setdefault(served.made_with, 0)
                found[served.made_with] += served.export.resting_bytes
        return found

    def report(self) -> Report:
        """What there is to say by now, since the model was wrapped."""
        alone = any(served.export.without_workers for served in self._served())
        return Report(
            engine_used="eager" if self._fallback else "ort",
            fallback_reason=self._fallback[1] if self._fallback else None,
            export_s=self._export_s,
            check_s=self._check_s,
            notes=tuple(self._notes),
            remarks=(*self._remarks, _WITHOUT_WORKERS) if alone else tuple(self._remarks),
        )

    def exports(self, settings: EngineSettings | None = None) -> list[Export]:
        """The exports at hand, the one that was used last at the end; those for `settings` alone.

        Whatever they compute again, which makes no other export.
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
        """The module's forward, by the export that fits."""
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
        """Forward with torch's bfloat16 products in the graph, as ``precision="bf16"`` has it.

        The results have the `types` that autocast gives them in eager torch. The settings stay so
        for the next call: another precision has sessions made anew.
        """
        if self._fallback is not None and self._falls_back():
            return self._eagerly(args, kwargs)
        lowered = self._asked.replace(precision="bf16")
        if self.settings != lowered:
            try:
                options.check(lowered)
            except ValueError as error:
                reason = f"torch.autocast in bfloat16: {error}"
                if self._asked.fallback:
                    return self._fall_back(reason, args, kwargs)
                raise ExportFailed(reason) from None
            self._use(lowered)
        with torch.autocast("cpu", enabled=False):
            outputs = self._forward(args, kwargs)
        return in_types(outputs, types)

    def _types_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.dtype, ...] | None:
        """See `types_of`; asked once for each form of a call."""
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
            why = f"{name} was defined again"
        for served in kind.fitting(shapes):
            try:
                served.recompute(self._plans)
                if shapes in served.shapes and not served.again:
                    outputs = served.run(args, kwargs, dropout=dropout)
                else:
                    outputs = self._first(served, key, shapes, args, kwargs, dropout=dropout)
            except OtherDecision as other:
                why = f"forward decides otherwise at {place(*other.place)}"
            else:
                kind.use(served)
                if kind is not next(reversed(self._kinds.values())):
                    self._kinds[key] = self._kinds.pop(key)  # the last one of all
                return outputs
        try:
            return self._first(None, key, shapes, args, kwargs, why=why, dropout=dropout)
        except OtherDecision as other:
            reason = (
                f"forward decides by random numbers at {place(*other.place)}, which ORT draws "
                "otherwise; use engine='eager'"
            )
            if self.settings.fallback:
                return self._fall_back(reason, args, kwargs)
            raise ExportFailed(reason) from None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps calls from other threads waiting meanwhile."""
        with self._lock:
            yield

    def edited(self) -> str | None:
        """What of the model is not as in any export at hand; None where one is of this model."""
        with self._lock:
            now = self._guard.key()
            made_of = [key[0] for key in self._kinds]
            return None if now in made_of else self._guard.change or "the model"

    def export_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Export | None:
        """The export that serves such a call, with a session; None where torch runs the model.

        Where there is none yet, or only a call tells which, the call is made, with gradients in
        training; the model and the arguments are left as they are.
        """
        with self._lock:
            served = self.served_for(args, kwargs)
            if served is None:
                return None
            served.export.open()
            return served.export

    def served_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedExport | None:
        """`export_for`, with what it has served, and without a session where none is open."""
        with self._lock, torch.set_grad_enabled(self.module.training):
            if self._fallback is not None and self._falls_back():
                return None
            served = self._met(args, kwargs)
            if served is None or served.definitions or served.export.decisions:
                kept = inputs_kept(tensors([args, kwargs]))
                with undisturbed(self.module), kept, interop.without_reentry():
                    # Without dropout, whose generator in ORT nobody can give back its state.
                    self._forward(args, kwargs, dropout=False)
                served = self._met(args, kwargs)
            return served

    def _met(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedExport | None:
        """The export that has served such a call."""
        key, shapes = self._kind(args, kwargs)
        fitting = self._kinds.get(key, Kind()).fitting(shapes)
        return next((served for served in fitting if shapes in served.shapes), None)

    def _kind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Hashable, ...], Shapes]:
        """What an export must fit, and the shapes, which every export should take."""
        form = CallSignature.of(args, kwargs)
        return self._key(form), form.shapes

    def _key(self, form: CallSignature) -> tuple[Hashable, ...]:
        return (
            self._guard.key(),
            self._options,
            torch.is_grad_enabled(),  # a check without gradients stands for calls without them
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
        """A call with a new export, the one after that, or one with shapes that are new to it.

        ``why`` tells what is new, where that is not an edit of the model or the kind of input.
        """
        try:
            if served is None:
                _refuse_backward_hooks(self.module)
                _refuse_swapped(self.module)
            if any(0 in shape for shape in shapes) and torch.is_grad_enabled():
                raise ExportFailed(
                    f"an input is empty ({', '.join(map(str, map(list, shapes)))}), and some of "
                    "ORT's CPU gradients end the process on it; leave such batches out, or use "
                    "engine='eager'"
                )
            if self._due(served, shapes):
                served = self._check_or_split(served, key, args, kwargs, why)
            elif served is None:
                served = self._make(args, kwargs, why, checked=False)
                self._keep(served.export)
        except (ExportFailed, NotInGraph, SelfCheckFailed) as error:
            if not self.settings.fallback:
                raise
            return self._fall_back(str(error), args, kwargs)
        if len(served.shapes) >= _MOST_SHAPES:
            served.shapes.clear()
        served.shapes_met += shapes not in served.shapes
        served.shapes.add(shapes)
        served.buckets.add(bucket(shapes))
        return served.run(args, kwargs, dropout=dropout)

    def _fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch gives, which goes on from here for `reason`."""
        outputs = self._eagerly(args, kwargs)
        # What forward has set by now belongs to the model that fell back.
        self._fallback = (self._guard.key(), reason)
        self._fallbacks += 1
        warn_once.say(type(self.module).__name__, f"fallback to eager torch: {reason}")
        return outputs

    def _eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch gives, in the precision that ORT's graph would have had."""
        precision = self.settings.precision if autocast_now() is None else "fp32"
        device = next(self.module.parameters()).device
        with autocast_for(precision, device):
            return self.module(*args, **kwargs)

    def _falls_back(self) -> bool:
        """Whether torch goes on: while the model is the one that ORT could not run.

        One that has been edited since is tried again, a few times.
        """
        assert self._fallback is not None
        if self._fallbacks >= _MOST_FALLBACKS or self._guard.key() == self._fallback[0]:
            return True
        self._fallback = None
        return False

    def _make(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str, *, checked: bool
    ) -> CachedExport:
        """Makes an export; the quickest way where it is to be `checked` before it is used."""
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
        # Without gradients ORTModule exports as for evaluation: no dropout, BatchNorm as it is.
        gradient = differentiable and (torch.is_grad_enabled() or self.module.training)
        tell("exporting the model to ORT")
        started = time.perf_counter()
        try:
            export = Export(self._ort_module, self.module, gradient=gradient)
            export.plans = self._plans if gradient else ()
            with self._as_it_is(args, kwargs):
                made = self._cached() and export.restore(args, kwargs, self._call(args, kwargs))
            if not made and checked and self.settings.copy_for_export:  # which that way has to do
                with self._as_it_is(args, kwargs):
                    made = export.build_weightless(args, kwargs)
            if not made:
                with self._as_it_is(args, kwargs):
                    export.build(args, kwargs)
            options.check_plans(export.manager, self.settings)
        except UnknownPlan:
            raise
        # ORT raises all kinds of exceptions; what they mean is said in one line.
        except Exception as error:
            if out_of_memory(error):  # which says nothing of the model
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
        if hooked := _forward_hooked(self.module):
            self._remark(
                f"forward hooks of {', '.join(hooked[:3])}: ORT's graph has what they compute on "
                "tensors, but does not call them"
            )
        counters, buffers = _batch_counters(self.module), list(self.module.buffers())
        made_with = options.told(self.settings)
        served = CachedExport(export, shapes, counters, buffers, made_with)
        # Forward ran by now, and may have set attributes: what fits the export is what it left.
        self._kinds.setdefault(self._kind(args, kwargs)[0], Kind()).served.insert(0, served)
        self._let_some_go()
        return served

    @contextlib.contextmanager
    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Gives model and arguments back as they were."""
        with undisturbed(self.module), inputs_kept(tensors([args, kwargs])):
            yield

    def _let_some_go(self) -> None:
        """Drops exports where there are too many, or too little memory: those at rest first."""
        resting = [key for key, kind in self._kinds.items() if not kind.is_open]
        while len(self._kinds) > _EXPORTS:
            del self._kinds[resting.pop(0) if resting else next(iter(self._kinds))]
        if resting and is_scarce(next(self.module.parameters()).device.type):
            self._note(f"graphs for {', '.join(self.kept())} were let go: memory is scarce")
            for key in resting:
                del self._kinds[key]

    def _judge_precision(self, export: Export) -> None:
        """ExportFailed where products would be of another precision than the settings say."""
        why = export.without_kernels
        if why is not None and why == kernels.unavailable():
            self._remark(f"ORT's own kernels compute alone: {why}")
        if (poorly := export.draws_poorly) is not None:
            self._remark(
                "ORT's own dropout draws poor random numbers, some elements are dropped by rote: "
                f"{poorly}"
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
                f"precision={self.settings.precision!r} on a GPU is torch's autocast: put it "
                "around forward and loss, or train with finetune, which does"
            )

    def _cached(self) -> bool:
        return self.settings.cache and not options.ask_for_an_export(self.settings)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What a graph depends on besides the module and ORT's options, for the cache.

        Sizes are among it where no check would notice that a graph holds other ones.
        """
        key, shapes = self._kind(args, kwargs)
        # The guard's key and ORT's options come first.
        known = self._kinds.get(key)
        sized = not self.settings.self_check or (known is not None and known.per_shape)
        return {"call": repr(key[2:]), "sizes": repr(shapes) if sized else ""}

    def _keep(self, export: Export) -> None:
        export.keep()
        if export.cache_note:
            self._note(export.cache_note)

    def _let_eager_fail(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises what eager torch raises, if it does: then the model is at fault and not ORT."""
        with undisturbed(self.module), torch.no_grad():
            self.module(*args, **kwargs)

    def _due(self, served: CachedExport | None, shapes: Shapes) -> bool:
        """Whether this call is to be checked: new exports, and new shapes while there are few.

        An export's second call is, whose data it was not made with. Its first three shapes are,
        then the first of every bucket of sizes (rounded up to powers of two), until sixteen checks
        of the run are spent. A dimension that changes for the first time is checked in any case:
        the graph may hold its size. Where the user's code reads sizes as Python's numbers or
        truths, every new shape is.
        """
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
        """`_check`; what is right for one shape and wrong for another gets an export for each."""
        started, exported_s = time.perf_counter(), self._export_s
        known = served is not None and self._kind(args, kwargs)[1] in served.shapes
        try:
            return self._check(served, args, kwargs, why, part=served is None or known)
        except (ExportFailed, SelfCheckFailed) as error:
            if served is None or not served.checked:
                raise
            if known and isinstance(error, SelfCheckFailed):
                raise SelfCheckFailed(
                    "ORT's graph is right for what was checked of the batch that it was exported "
                    f"with, and not for the next, so by more than its shape: {error}"
                ) from None
            if known:
                raise
            self._remark(
                "the graph holds the sizes of the input that it was exported with and is wrong for "
                f"others: every shape is exported for itself, at most {OF_A_KIND}"
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
        """Compares the export with eager torch, after making it where there is none.

        With `part` on a part of the batch: what is right for other sizes than it was exported with
        is right for its own. Where that does not hold the whole batch decides.
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
            except Exception as error:  # whatever forward raises where it needs the whole batch
                if call is whole or out_of_memory(error):
                    raise
            else:
                # The loss of a few tokens is no number where none of them has a label.
                if call is whole or again or reference.has_finite_outputs():
                    break
        if served is None:
            served = self._make(args, kwargs, why, checked=not reference.drew)
            if call is not whole and self._by_shape(served, args, kwargs):
                return self._check(served, args, kwargs, why, part=False)
        elif served.again and not reference.is_finite():
            return served  # engines differ in what NaN becomes, and another batch will come
        tell("checking ORT against eager torch")
        if reference.wrote:
            names = ", ".join(sorted(reference.wrote)[:3])
            self._remark(
                f"forward sets {names}: ORT's graph does not, and keeps what it read there"
            )
        if reference.drew and self._random(reference, *call):
            self._remark("not checked: forward draws random numbers besides dropout")
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
                how = "from the cache" if export.from_cache else "of a forward without values"
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
        """Whether it is another matter for some of the batch's rows."""
        export, kind = served.export, self._kinds.get(self._kind(args, kwargs)[0])
        return bool(export.by_size or export.decisions or (kind and kind.per_shape))

    def _reference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
        """What eager torch gives; ExportFailed where forward changes what no graph would."""
        given = tensors([args, kwargs])
        parameters = dict(self.module.named_parameters())
        versions = [parameter._version for parameter in parameters.values()]
        constants = self._guard.constants()
        held = inputs_kept(list(constants.values()))
        with NoDropout(), EagerOnly() as seen, inputs_kept(given) as changed, held as written:
            call = functools.partial(self.module, *args, **kwargs)
            reference = observe(
                call,
                self.module,
                inputs=_differentiable(given),
                gradients=torch.is_grad_enabled(),
            )
        # Torch counts an edit of .data with that alone.
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
                "ORT's graph; compute what it holds outside of forward, or use engine='eager'"
            )
        if reference.rebound:
            name = reference.rebound[0]
            raise ExportFailed(
                f"forward puts another tensor in the place of its buffer {name}, which ORT's graph "
                "would not; set it before the model is wrapped, outside of forward, or use "
                "engine='eager'"
            )
        if changed:
            shapes = ", ".join(str(list(given[i].shape)) for i in changed)
            self._remark(
                f"forward changes its input in place ({shapes}): ORT's graph leaves it as it is"
            )
        return reference

    def _random(self, reference: Observed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether results depend on random numbers; ExportFailed where a graph would keep those.

        Torch's are drawn by ORT in the graph; what Python or numpy drew is a constant there.
        """
        call = functools.partial(self.module, *args, **kwargs)
        with NoDropout():
            if depends_on_seed(reference, call, self.module, drawn_by_torch=False):
                raise ExportFailed(
                    "forward draws random numbers of Python's or numpy's, and ORT's graph would "
                    "keep those of the export; draw them with torch, or use engine='eager'"
                )
            return depends_on_seed(reference, call, self.module, drawn_by_torch=True)

    def _compare(
        self,
        reference: Observed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        served: CachedExport,
    ) -> None:
        given = tensors([args, kwargs])
        try:
            observed = observe(
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
            told = not low_precision or self.settings.precision != "fp32"
            if found is not None:
                verdict = found
            elif told and (why := self._rounding(reference, observed, args, kwargs)):
                verdict = f"{why}; {error}"
            else:
                raise SelfCheckFailed(
                    f"ORT would not train this model right: {error}; use engine='eager', "
                    "or fallback=True to go on in torch"
                ) from None
        shapes = ", ".join(str(list(value.shape)) for value in given)
        self._note(f"checked on {shapes}: {verdict}")

    def _with_plain_attention(
        self,
        reference: Observed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        held_against: Callable[[Observed], Verdict],
    ) -> Verdict | None:
        """The verdict by gradients of torch's attention in plain operators, None where they differ.

        Where a mask is the lowest finite number along a whole row, torch 2.13's flash attention on
        a CPU goes back as if each weight of that row were 1, in double precision too.
        """
        try:
            with sdpa_kernel(SDPBackend.MATH):
                plain = self._reference(args, kwargs)
            verdict = held_against(dataclasses.replace(reference, gradients=plain.gradients))
        except RuntimeError:  # a SelfCheckFailed is one, and so is too little memory for the scores
            return None
        self._remark(
            "torch's fused attention gives another gradient here than its plain one "
            "(SDPBackend.MATH), as for rows that a mask hides whole: ORT gives the plain one's"
        )
        return verdict

    def _rounding(
        self,
        reference: Observed,
        observed: Observed,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str:
        """Why ORT may be off as it is, by what its precision is; nothing where it may not.

        Single precision is held against double precision, beside torch's own and what a few
        roundings of the parameters make of that, bfloat16 products against single precision, beside
        torch's own under autocast.
        """

        def eager(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Observed | None:
            try:
                with NoDropout(), autocast_for(self.settings.precision, torch.device("cpu")):
                    return observe(
                        functools.partial(module, *args, **kwargs),
                        module,
                        inputs=_differentiable(tensors([args, kwargs])),
                        gradients=torch.is_grad_enabled(),
                    )
            except Exception:  # noqa: BLE001 - forward may mix the types, and then nothing is told
                return None

        nearer = "as near to eager torch in higher precision as eager torch is"
        if self.settings.precision != "fp32":
            lowered = eager(self.module, args, kwargs)
            return nearer if lowered and is_rounding(lowered, observed, reference) else ""
        call = in_double(self.module, args, kwargs)
        exact = call and eager(*call)
        if not exact:
            return ""
        if is_rounding(reference, observed, exact):
            return nearer
        others = (eager(*each) for each in nudged(self.module, args, kwargs))
        if is_at_a_kink(exact, observed, filter(None, others)):
            return "as near to eager torch as that is with parameters off by a few roundings"
        return ""

    def _cannot_run(self, error: Exception) -> ExportFailed:
        way_out = "use engine='eager'"
        if any(p.dtype == torch.float64 for p in self.module.parameters()):
            way_out += ", or model.float(): ORT has few kernels for double precision"
        elif asks_for_bfloat16(self.module):
            way_out += (
                ", or leave out forward's own autocast, within which nothing is lowered for ORT"
            )
        return ExportFailed(f"ORT cannot run this model: {compat.explain(error)}; {way_out}")

    def _remark(self, text: str) -> None:
        """Notes what the user has to know, once."""
        if text not in self._remarks:
            self._remarks.append(text)
            self._note(text)
            warn_once.say(f"{type(self.module).__name__} in engine 'ort'", text)

    def _note(self, text: str) -> None:
        if len(self._notes) < _MOST_NOTES:
            self._notes.append(text)
        elif len(self._notes) == _MOST_NOTES:
            self._notes.append("and so on: later notes are not kept")


def _differentiable(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value for value in given if value.requires_grad]


def _batch_counters(module: nn.Module) -> list[torch.Tensor]:
    """The counters of the batches that BatchNorm has seen, as far as its forward would count on."""
    norms = [
        child
        for child in module.modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training
    ]
    for norm in norms:
        if norm.track_running_stats and norm.momentum is None:
            raise ExportFailed(
                "BatchNorm with momentum=None weighs every batch differently, which an exported "
                "graph cannot; give a momentum, or use engine='eager'"
            )
    return [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]


def _forward_hooked(module: nn.Module) -> list[str]:
    return [
        name or type(child).__name__
        for name, child in module.named_modules()
        if child._forward_hooks or child._forward_pre_hooks
    ]


def _refuse_backward_hooks(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise ExportFailed(
                f"{name or type(child).__name__} has a backward hook, which ORT would never call; "
                "remove it, or use engine='eager'"
            )


def is_swapped(parameter: object) -> bool:
    """Whether it is a plain tensor, as torch.func.functional_call has in a parameter's place."""
    return isinstance(parameter, torch.Tensor) and not isinstance(parameter, nn.Parameter)


def swapped(name: str) -> str:
    """What to say of the parameter `name` that `is_swapped`."""
    return (
        f"{name} is a plain tensor in the place of a parameter, as torch.func.functional_call "
        "gives it, and ORT would export the model for every such call; give that the model itself, "
        "ortlab.unwrap(model), or use engine='eager'"
    )


def _refuse_swapped(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_swapped(parameter):
            raise ExportFailed(swapped(name))
