"""One exported graph of a module: built with ORTModule's own components, and run.

ORTModule keeps a single graph and replaces it at unpredictable times. Here every graph has its own
graph manager, so that a pending backward pass keeps the graph of its forward pass.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from ortlab.engines.ortmodule import dropout, graph_cache, kernels, options
from ortlab.engines.ortmodule.compat import (
    gradient_checkpointing,
    interop,
    outputs,
    restoring,
    traced_decisions,
)
from ortlab.engines.ortmodule.compat.symbolics import builder
from ortlab.engines.ortmodule.fingerprint import Unknowable, fingerprint
from ortlab.engines.ortmodule.kernels import kernel_choice, substitutes
from ortlab.engines.ortmodule.kernels import recomputed_graph as recomputing
from ortlab.engines.plan_names import UnknownPlan
from ortlab.engines.torchscript import decisions, streams, undifferentiated, weightless
from ortlab.utils import session_profile

_HALF = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}


class Export:
    """Exported graph of a module that fits one kind of call.

    `build` creates the graph, `run` calls it.

    Args:
        ort_module: ORTModule whose options the export uses.
        module: The user's module.
        gradient: True for a graph of forward and backward pass, False for forward only.
    """

    def __init__(self, ort_module: nn.Module, module: nn.Module, *, gradient: bool) -> None:
        self._ort_module: Any = ort_module
        self._module = module
        self.gradient = gradient
        self._name: str | None = None
        self._executed: bytes | None = None
        self._as_it_is = False  # True if the session was given this graph and reorders its nodes
        self.plans: tuple[str, ...] = ()
        """Recompute plans of the backward pass, see `kernels.recomputed_graph`."""
        self._rewritten = False  # by recompute plans, or by layers in place of checkpointing
        self._optimized: bytes | None = None
        self._resting_bytes: int | None = None
        self._build_s = 0.0
        self.from_cache = False
        self.weightless = False
        """True if forward was exported without computing values that depend on weights."""
        self.cache_note = ""
        """One line for the user about the use of the graph cache."""
        self.decisions: tuple[decisions.Decision, ...] = ()
        """Expected values of the graph's last outputs, compared after each run."""
        self.by_size = False
        """True if forward branches on input sizes in Python; the graph contains one branch."""
        self.left_out: tuple[str, ...] = ()
        """Names of the model's outputs that are None in the graph's outputs."""
        self.without_kernels: str | None = None
        """Reason why only ORT's own kernels run although others were requested."""
        self.checkpointing: str | None = None
        """Description of the replacement for the model's gradient checkpointing."""
        self._let_go_of_memory: Callable[[], object] | None = None
        self.torch_module = self._unbuilt()

    def _unbuilt(self) -> Any:
        model: Any = self._ort_module._torch_module
        manager = model._execution_manager(self.gradient)
        torch_module = type(model)(
            self._module,
            manager._debug_options,
            self._ort_module._fallback_manager,
            self._ort_module._logger,
        )
        options.share(manager, torch_module._execution_manager(self.gradient))
        self._choose_kernels(torch_module._execution_manager(self.gradient))
        torch_module._flattened_module.training = self._module.training
        torch_module.is_training = lambda: self.gradient
        return torch_module

    def _choose_kernels(self, manager: Any) -> None:
        """Disable torch's kernels if they cannot be used; see `without_kernels`."""
        runtime = manager._runtime_options
        if not runtime.torch_kernels:
            return
        if manager._debug_options.save_onnx_models.save:
            self._leave_kernels(runtime, "save_onnx writes graphs with ORT's own kernels")
        elif not self._on_cpu:
            self._leave_kernels(runtime, None)
        elif (reason := kernels.unavailable()) is not None:
            self._leave_kernels(runtime, reason)

    @property
    def _on_cpu(self) -> bool:
        return all(parameter.device.type == "cpu" for parameter in self._module.parameters())

    def _leave_kernels(self, runtime: Any, why: str | None) -> None:
        self.without_kernels = why
        runtime.torch_kernels, runtime.low_precision = "", False

    @property
    def manager(self) -> Any:
        """ORT's graph execution manager for this graph."""
        return self.torch_module._execution_manager(self.gradient)

    @property
    def functions(self) -> list[Any]:
        """Classes of the torch.autograd.Functions that the graph calls."""
        exported = self.manager._graph_transition_manager._exported_model_info.exported_model
        return interop.functions(exported.graph)

    def build_weightless(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Try to `build` in a fraction of the time, without most of forward's computation.

        The graph must be compared with forward before use; see `weightless.without_weights`.

        Args:
            args: Positional arguments of a call.
            kwargs: Keyword arguments of a call.

        Returns:
            False if this failed; then call `build`, which raises the error, if any.
        """
        try:
            with weightless.without_weights():
                self.build(args, kwargs)
        # Forward may need values anywhere, and raise anything without them.
        except Exception:  # noqa: BLE001
            self.torch_module = self._unbuilt()
            return False
        self.weightless = True
        return True

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Export the module in its current state and create the session.

        Args:
            args: Positional arguments of a call.
            kwargs: Keyword arguments of a call.

        Raises:
            Exception: Any exception of ORT.
        """
        started = time.perf_counter()
        manager = self.manager
        transitions = manager._graph_transition_manager
        runtime = manager._runtime_options
        attention = builder.attention_as(_attention(runtime))
        with streams.EXPORT, attention, undifferentiated.as_now():
            transitions.get_post_processed_model(args, kwargs)
        self.decisions, self.by_size = (
            traced_decisions.last_decisions(),
            traced_decisions.last_by_size(),
        )
        self.left_out = outputs.last_left_out()
        manager._initialize_graph_builder(transitions._post_export_processed_model_info)
        manager._detect_from_inputs(args, kwargs)
        manager._build_graph(manager._get_graph_transformer_config())
        self._open_session(shapes=self._shapes(args, kwargs) if runtime.torch_kernels else None)
        self._build_s = time.perf_counter() - started

    def restore(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], call: Mapping[str, Any]
    ) -> bool:
        """Try to load the graph from the cache instead of a `build`.

        Args:
            args: Positional arguments of a call.
            kwargs: Keyword arguments of a call.
            call: Further values that the graph depends on, besides the module and ORT's options.

        Returns:
            False if the cache has no matching graph.
        """
        started = time.perf_counter()
        try:
            name = fingerprint(self._module, {**call, **self._surroundings()})
            entry = graph_cache.load(name)
        except (Unknowable, graph_cache.Unusable, OSError) as error:
            self.cache_note = f"the graph is not cached: {error}"
            return False
        self._name = name
        if entry is None:
            return False
        try:
            restoring.put_together(self.manager, entry.graphs, entry.facts, args, kwargs)
            self._open_session(entry.graphs.get(restoring.OPTIMIZED))
            self.left_out, self.by_size = tuple(entry.facts["left out"]), entry.facts["by size"]
            saved_s = entry.facts["seconds"] - (time.perf_counter() - started)
        # An old or damaged file can cause any error; the graph is then exported.
        except Exception:  # noqa: BLE001
            self.forget()
            self.torch_module = self._unbuilt()
            return False
        self.from_cache = True
        self.cache_note = f"graph from the cache (saved {saved_s:.1f} s)"
        return True

    def _surroundings(self) -> dict[str, Any]:
        runtime = dict(vars(self.manager._runtime_options))
        del runtime["_logger"]
        return {
            "gradient": self.gradient,
            "options": runtime,
            "versions": restoring.versions(),
            "default type": torch.get_default_dtype(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            # The choice of kernels was measured with this number.
            "threads": torch.get_num_threads(),
        }

    def keep(self) -> None:
        """Store the graph in the cache, if `restore` found none and `build` created it."""
        if self._name is None or self.from_cache:
            return
        name, self._name = self._name, None
        try:
            if self.decisions:
                raise restoring.NotPlain("forward decides by a tensor's value")
            graphs, facts = restoring.take_apart(self.manager)
            if self._optimized is not None:
                graphs[restoring.OPTIMIZED] = self._optimized
            facts |= {"left out": self.left_out, "by size": self.by_size}
            facts |= {"seconds": self._build_s}
            graph_cache.store(name, graph_cache.CachedGraph(graphs, facts))
        except (restoring.NotPlain, graph_cache.Unusable, OSError) as error:
            self.cache_note = f"the graph is not cached: {error}"

    def forget(self) -> None:
        """Remove the graph from the cache."""
        if self._name is not None:
            graph_cache.remove(self._name)

    def _open_session(
        self,
        optimized: bytes | None = None,
        configure: Callable[[Any], None] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Create the session from an `optimized` graph without changes, or from the built graph.

        `shapes` of the graph's inputs enable the choice of other kernels for them.
        """
        manager = self.manager
        runtime = manager._runtime_options
        self._rewritten = bool(self.plans)
        if self.gradient and gradient_checkpointing.asks_for_checkpointing(manager):
            if self.plans:
                gradient_checkpointing.withdraw(manager)
                self.checkpointing = gradient_checkpointing.CHOSEN
            elif runtime.low_precision:  # which ORT's own kernels lack
                self._rewritten = True
            else:
                self.checkpointing = gradient_checkpointing.replace_checkpointing(manager)
        # ORT's own graph has kernels of ours, too: the dropouts.
        of_ours = self._on_cpu and not kernels.unavailable()
        if of_ours and self._let_go_of_memory is None:
            keep = runtime.enable_cpu_mem_arena
            self._let_go_of_memory = kernels.keep_memory_for(self, keep)
        planned = runtime.memory_optimizer_is_enabled()
        if planned:
            optimized = None  # made for plans of modules, which were chosen before
        if planned and runtime.torch_kernels:  # gradient checkpointing has become a plan
            self._leave_kernels(runtime, "ORT's recompute plans support only its own kernels")
        executed = optimized
        if executed is None or not self._rewritten:
            with self._dropouts_of_ours() if optimized is None else contextlib.nullcontext():
                executed = restoring.open_session(manager, optimized, configure=configure)
        self._as_it_is = optimized is not None
        if runtime.torch_kernels and shapes is not None and executed is not None:
            executed = self._substituted(executed, shapes)
            self._as_it_is = True
            if not self._rewritten:
                restoring.open_session(manager, executed, configure=configure)
        self._executed = self._recomputing(executed, configure) if self._rewritten else executed
        # A graph that ORT's plans have changed cannot be loaded in another session.
        self._optimized = None if planned else executed
        self._check_outputs(manager._graph_transition_manager)
        if self.gradient:
            manager._gradient_accumulation_manager.initialize(
                manager._runtime_options.enable_grad_acc_optimization,
                manager._flattened_module,
                manager._graph_info,
            )

    @property
    def draws_poorly(self) -> str | None:
        """Reason why ORT's own dropouts, which draw poorly, run on a CPU; None if none runs."""
        built = self.manager._onnx_models.optimized_model
        if not (self._on_cpu and dropout.draws(built.graph)):
            return None
        if (why := kernels.unavailable()) is not None:
            return f"ortlab's kernels are not available ({why})"
        drawing = self._drawing(built) if self._executed is None else self.executed()[0]
        left = "one has a mask of unknown type, or a mask that not only its gradient reads"
        return left if dropout.draws(drawing.graph) else None

    @contextlib.contextmanager
    def _dropouts_of_ours(self) -> Iterator[None]:
        """Replace ORT's dropouts in the built graph inside this context."""
        models = self.manager._onnx_models
        built = models.optimized_model
        models.optimized_model = self._drawing(built)
        try:
            yield
        finally:
            models.optimized_model = built

    def _drawing(self, built: onnx.ModelProto) -> onnx.ModelProto:
        """Return `built` with ortlab's kernels in place of ORT's dropouts, if there are any."""
        if not (self._on_cpu and dropout.draws(built.graph)) or kernels.unavailable():
            return built
        copied = onnx.ModelProto()
        copied.CopyFrom(built)
        return substitutes.substitute(copied, low=False, rules=substitutes.DROPOUT)

    def _recomputing(self, graph: bytes | None, configure: Callable[[Any], None] | None) -> bytes:
        """Create the session of an optimized `graph` with the recompute plans; return its graph.

        Without plans, recomputation of whole layers replaces checkpointing. Raises UnknownPlan for
        a plan that does not fit the graph.
        """
        if graph is None:
            raise UnknownPlan(
                f"recompute={','.join(self.plans)!r} needs the graph that the session runs, which "
                "ORT reports only on a CPU and without save_onnx; otherwise choose ORT's own plans "
                "with memory_level=1 or recompute='BiasGelu+:1:-1'"
            )
        plans = recomputing.Plans(onnx.load_model_from_string(graph))
        if not self.plans:
            self.checkpointing = (
                gradient_checkpointing.LAYERS if plans.layers else gradient_checkpointing.NOTHING
            )
        executed = plans.applied(self.plans or plans.layers).SerializeToString()
        restoring.open_session(self.manager, executed, configure=configure, in_file_order=True)
        return bytes(executed)

    def recompute(self, plans: tuple[str, ...]) -> None:
        """Change the recompute plans: creates a new session of the same graph, without an export.

        Args:
            plans: New plans.

        Raises:
            UnknownPlan: If a plan does not fit the graph; the previous plans then stay.
        """
        if plans == self.plans or not self.gradient:
            return
        before, self.plans = self.plans, plans
        try:
            self.close()  # first, so that memory is never needed for two sessions
            self.open()
        except UnknownPlan:
            self.plans = before
            raise

    def close(self) -> None:
        """Release the session and its memory.

        The graph stays: `open` or the next run creates a new session. A pending backward pass of
        this session still works.
        """
        self.manager._execution_agent = None
        self._resting_bytes = None
        if self._let_go_of_memory is not None:
            self._let_go_of_memory()
            self._let_go_of_memory = None

    def open(self) -> None:
        """Create the session if there is none."""
        if not self.is_open:
            self._open_session(self._optimized)

    @property
    def is_open(self) -> bool:
        """True if there is a session, which keeps memory between steps."""
        return self.manager._execution_agent is not None

    @property
    def resting_bytes(self) -> int:
        """Serialized size of the graphs, which stay without a session, in bytes."""
        if (
            self._resting_bytes is None
        ):  # cached, because it iterates over the graphs, which do not change without a session
            self._resting_bytes = self._graph_bytes()
        return self._resting_bytes

    def _graph_bytes(self) -> int:
        graphs = [self.manager._onnx_models.optimized_model]
        made = self.manager._graph_transition_manager
        if made._exported_model_info is not None:
            graphs.append(made._exported_model_info.exported_model)
        if made._post_export_processed_model_info is not None:
            graphs.append(made._post_export_processed_model_info._post_export_processed_model)
        written = {id(each): each for each in (self._optimized, self._executed) if each is not None}
        sizes = [int(each.ByteSize()) for each in graphs if each is not None]
        return sum(map(len, written.values())) + sum(sizes)

    def _substituted(self, executed: bytes, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
        """Return the graph of a session with the kernels that the options choose."""
        runtime = self.manager._runtime_options
        model = onnx.load_model_from_string(executed)
        if runtime.torch_kernels == "measured":
            chosen = kernel_choice.KernelChoice(model.graph.input, shapes)
            substitutes.substitute(model, low=runtime.low_precision, better=chosen.better)
            chosen.keep()
        else:
            substitutes.substitute(model, low=runtime.low_precision)
        if spared := substitutes.spare_zeros(model):
            info = self.manager._graph_info
            info.output_grad_indices_require_full_shape = [
                i for i in info.output_grad_indices_require_full_shape if i not in spared
            ]
        return bytes(model.SerializeToString())

    def _shapes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the graph's inputs in such a call, by the graph's names."""
        return {name: tuple(tensor.shape) for name, tensor in self.inputs(args, kwargs).items()}

    def _check_outputs(self, transitions: Any) -> None:
        """Make each run check its decisions and cast outputs to the types that the graph declares.

        The CPU provider runs half-precision nodes in float32 and drops the casts around them, even
        those of the graph's outputs.
        """
        given = transitions._exported_model_info.exported_model.graph.output
        count = len(given) - len(self.decisions)
        declared = [_HALF.get(each.type.tensor_type.elem_type) for each in given[:count]]
        if not any(declared) and not self.decisions:
            return
        info = transitions._post_export_processed_model_info
        # From the class: in a copy of an export, the instance already has our function.
        restore = functools.partial(type(info).restore_outputs, info)

        def restore_outputs(found: Sequence[torch.Tensor]) -> Any:
            decisions.check(self.decisions, found[count:])
            typed = zip(found, declared, strict=False)  # `declared` has no types of decisions
            return restore([value.to(dtype) if dtype else value for value, dtype in typed])

        info.restore_outputs = restore_outputs

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph in ORT.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The module's outputs.

        Raises:
            OtherDecision: If forward would take another branch than the graph in this call.
        """
        self.open()
        return self.manager.forward(*args, **kwargs)

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the user's tensors in the last call, by the graph's names."""
        info = self.manager._graph_transition_manager._post_export_processed_model_info
        given = info._buffer_for_ort_runs or {}
        names = info.onnx_graph_input_names_user_defined
        return {name: tuple(given[name].shape) for name in names if given.get(name) is not None}

    def stages(self) -> dict[str, onnx.ModelProto]:
        """Return the stages of the export, by the names of `ortlab.graph.capture.STAGES`.

        The graph that the session runs is included only on a CPU, where ORT reports it.
        """
        manager = self.manager
        built = manager._onnx_models.optimized_model
        if not self.gradient:
            return {"eval": built}
        found = {
            "exported": manager._graph_transition_manager._exported_model_info.exported_model,
            "forward": restoring.forward_graph(manager),
            "gradient": built,
        }
        if self._executed is not None:
            executed = onnx.load_model_from_string(self._executed)
            ordered = self._as_it_is and not self._rewritten
            found["execution"] = restoring.in_order(executed) if ordered else executed
        return found

    def without_dropout(self) -> Export:
        """Return an export with all dropout ratios 0; this one if it has no dropout."""
        edited = self.graph_to_run()
        if not dropout.switch_off(edited.graph):
            return self
        return self._twin(edited)

    def profiled(self, folder: Path) -> Export:
        """Return an export of the same graph with its own session, which records ORT's profile.

        Its dropouts draw from their own generators, so that those of the training do not advance.

        Args:
            folder: Folder for the profile's file.
        """
        edited = self.graph_to_run()
        dropout.seed(edited.graph)
        return self._twin(edited, configure=functools.partial(session_profile.record, folder))

    @property
    def without_workers(self) -> bool:
        """True if the last session could not start its thread pool and runs on one thread."""
        return bool(self.manager._runtime_options.without_workers)

    @property
    def ort_plans(self) -> tuple[str, ...]:
        """ORT's own recompute plans that the session applies, such as "BiasGelu+:1:-1"."""
        path = self.manager._runtime_options.memory_optimizer_config_file_path
        if not path:
            return ()
        plans = json.loads(Path(path).read_text(encoding="utf-8"))
        return tuple(dict.fromkeys(p for each in plans for p in each.split(",") if p))

    def subgraphs(self) -> tuple[dict[str, Any], str]:
        """Return ORT's own recompute plans for the graph, with what it counts of their savings.

        They hold for ORT's own kernels, which an export with others does not contain.

        Returns:
            ORT's summary of each plan, and its table of the results that plans do not store.
        """
        built = onnx.ModelProto()
        built.CopyFrom(self.manager._onnx_models.optimized_model)
        manager = self._unopened(built).manager
        runtime = manager._runtime_options
        # Of the graph without plans, in which those that are applied are found, too.
        runtime.memory_optimization_level = type(runtime.memory_optimization_level)(0)
        runtime.memory_optimizer_config_file_path = ""
        found = gradient_checkpointing.opportunities(manager)
        agent, probe = manager._execution_agent, runtime.recompute_probe_config
        return found, agent.get_serialized_ortmodule_memory_stat("", probe, True)[0]

    def graph_to_run(self) -> onnx.ModelProto:
        """Return a copy of the session's graph, or of its input graph if ORT does not report it.

        The changes of `plans` are not included: a session of the copy applies them again.
        """
        copied = onnx.ModelProto()
        if self._optimized is not None:
            copied.ParseFromString(self._optimized)
        else:
            copied.CopyFrom(self._drawing(self.manager._onnx_models.optimized_model))
        return copied

    def executed(self) -> tuple[onnx.ModelProto, bool]:
        """Return a copy of the session's graph, with the changes of `plans`.

        Returns:
            The graph, and True if the session runs its nodes in the order of the graph.

        Raises:
            ValueError: If ORT does not report the graph on this device.
        """
        if self._executed is None:
            raise ValueError("ORT reports the graph that a session runs only on a CPU")
        return onnx.load_model_from_string(self._executed), self._rewritten

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the graph's inputs for a call, including parameters and buffers, by name.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        info = self.manager._graph_transition_manager._post_export_processed_model_info
        found = info.construct_inputs(args, kwargs, True, self.manager._device)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def own_inputs(self) -> dict[str, torch.Tensor]:
        """Return the graph's inputs that are parameters and buffers of the module, by name."""
        info = self.manager._graph_transition_manager._post_export_processed_model_info
        own = dict(self.manager._flattened_module.named_parameters())
        own |= dict(self.manager._flattened_module.named_buffers())
        return {name: own[name] for name in info.onnx_graph_input_names if name in own}

    def gradients(self) -> dict[str, str]:
        """Return the graph's inputs with a gradient, each with the name of the gradient output."""
        manager = self.manager
        info = manager._graph_transition_manager._post_export_processed_model_info
        outputs = [each.name for each in manager._onnx_models.optimized_model.graph.output]
        names = info.onnx_graph_input_names
        pairs = zip(names, manager._gradient_map, strict=True)
        return {name: outputs[place] for name, place in pairs if place != -1}

    def plain_session(self, graph: onnx.ModelProto, *, in_file_order: bool) -> Any:
        """Return a plain inference session of a graph that was made from `executed`.

        Args:
            graph: Graph to run from its inputs to its outputs.
            in_file_order: True to run the nodes in the order of the graph.
        """
        written = graph.SerializeToString()
        return restoring.plain_session(self.manager, written, in_file_order=in_file_order)

    def _twin(
        self, edited: onnx.ModelProto, configure: Callable[[Any], None] | None = None
    ) -> Export:
        """Return an export that runs `edited`, a changed `graph_to_run`, for the same calls."""
        twin = self._unopened(edited)
        # A session optimizes the graph unless that is done.
        optimized = None if self._optimized is None else edited.SerializeToString()
        twin._open_session(optimized, configure)
        return twin

    def _unopened(self, graph: onnx.ModelProto) -> Export:
        """Return an export of `graph` for the same calls, without a session."""
        twin = Export(self._ort_module, self._module, gradient=self.gradient)
        options.share(self.manager, twin.manager, save=False)
        twin.decisions, twin.plans = self.decisions, self.plans
        source, target = self.manager, twin.manager
        given, taking = source._graph_transition_manager, target._graph_transition_manager
        taking._device = given._device
        taking._exported_model_info = given._exported_model_info
        taking._model_info_for_export = given._model_info_for_export
        processed = copy.copy(given._post_export_processed_model_info)
        processed._buffer_for_ort_runs = None
        taking._post_export_processed_model_info = processed
        target._graph_info = source._graph_info
        target._onnx_models.optimized_model = graph
        if self.gradient:
            target._gradient_map = source._gradient_map
        return twin


def _attention(runtime: Any) -> builder.Attention | None:
    """Return the form of attention in an export with ORT's options; None for ONNX operators."""
    if runtime.attention == "fused":
        return builder.Attention(fused=True)
    if runtime.attention == "onnx" or not runtime.torch_kernels:
        return None
    return builder.Attention(fused=False, low=runtime.low_precision)
