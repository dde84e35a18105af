"""What can be chosen: settings, declared once.

The magics' options, the panel's controls, the CLI's flags and the table in the docs are all made
from these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict

_VARIABLES = "ORTMODULE_"
_STANDING = object()
"""Stands for a setting that was not given."""


@dataclass(frozen=True)
class Declaration:
    """How one setting may be chosen: its help text, its bounds and its unit.

    ``type`` is the plain type of the value (``str``, ``int``, ``float`` or ``bool``); ``optional``
    says that ``None`` is a value too; ``many`` that it is several of the choices, with commas.

    ``source`` is where ORTModule itself takes the setting from: a variable of the environment,
    which stands where nothing else is chosen, or a key of its JSON file or of its DebugOptions.
    ``prefix`` is what the names among the variable's values begin with.

    ``panel`` puts the setting's control in front on the panel; the others stand behind a fold.

    ``here`` says that a checkpoint does not choose it, which may be anybody's: it names files of
    this machine, or leaves out a check.
    """

    name: str
    type: type
    default: Any
    help: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    unit: str = ""
    many: bool = False
    source: str = ""
    prefix: str = ""
    panel: bool = False
    here: bool = False

    @property
    def variable(self) -> str:
        """The variable of the environment that stands where nothing is chosen; "" for none."""
        return self.source if self.source.startswith(_VARIABLES) else ""

    @property
    def flag(self) -> str:
        """The option's name on a command line: ``batch_size`` is ``--batch-size``."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value that a user typed as `text`; ValueError says what would have been right."""
        lowered = text.strip().lower()
        if self.optional and lowered in ("none", "off"):
            return None
        if self.type is bool:
            if lowered in ("on", "true", "yes", "1"):
                return True
            if lowered in ("off", "false", "no", "0"):
                return False
            raise ValueError(f"{self.flag} takes on or off, not {text!r}")
        if self.type is str:
            return text
        try:
            return self.type(text)
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            raise ValueError(f"{self.flag} takes {kind}, not {text!r}") from None

    def show(self, value: Any) -> str:
        """`value` as a user types it: what `parse` takes back."""
        if value is None:
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        return (
            f"{value:g}"
            if isinstance(value, float) and float(f"{value:g}") == value
            else f"{value}"
        )

    def standing(self) -> Any:
        """What holds where nothing is chosen: the variable's value, else the default."""
        given = os.environ.get(self.variable, "") if self.variable else ""
        if not given:
            return self.default
        try:
            # ORTModule reads it too and takes no other spelling than these.
            if self.type is bool and given not in ("0", "1"):
                raise ValueError("choose from 0, 1")
            if self.choices:
                names = {(self.prefix + name).upper(): name for name in self.choices}
                chosen = given.split("|") if self.many else [given]
                for name in chosen:
                    if name not in names:
                        raise ValueError(unknown_name(name, names))
                return self.check(",".join(names[name] for name in chosen))
            return self.check(self.parse(given))
        except ValueError as error:
            raise ValueError(f"{self.variable}={given!r}: {error}") from None

    def check(self, value: Any) -> Any:
        """`value`, converted to the declared type where that loses nothing; else ValueError."""
        if value is None:
            if self.optional:
                return None
            raise ValueError(f"{self.name} needs a value; the default is {self.default!r}")
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        wrong_bool = isinstance(value, bool) and self.type is not bool
        if wrong_bool or not isinstance(value, self.type):
            raise ValueError(
                f"{self.name}={value!r} is {type(value).__name__}, expected {self.type.__name__}"
            )
        if isinstance(value, str) and self.choices:
            names = [name.strip() for name in value.split(",")] if self.many else [value]
            for name in names:
                if name not in self.choices:
                    raise ValueError(f"{self.name}={name!r}: {unknown_name(name, self.choices)}")
            value = ",".join(name for name in self.choices if name in names)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def _check_bounds(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"{self.name}={value!r} must be finite")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.name}={value!r} must be at least {self.minimum:g}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"{self.name}={value!r} must be above {self.above:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.name}={value!r} must be at most {self.maximum:g}")


def unknown_name(name: str, known: Iterable[str]) -> str:
    """A phrase that lists the known names and offers the one nearest to `name`."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    offer = f"; did you mean {near[0]!r}?" if near else ""
    return f"choose from {', '.join(known) or 'nothing (there is none)'}{offer}"


def setting(default: Any, *, help: str, **bounds: Any) -> Any:  # noqa: A002 - argparse's word
    """A dataclass field with its `Declaration`: help, choices, minimum, above, maximum, unit."""
    metadata = {"default": default, "help": help, **bounds}
    # The environment is read when settings are made, not when this module is imported.
    return dataclasses.field(default_factory=lambda: _STANDING, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen set of settings: validated when made, changed by replacement.

    Raises ValueError, naming the setting and what would be right.
    """

    def __post_init__(self) -> None:
        for declaration in self.declarations().values():
            value = getattr(self, declaration.name)
            value = declaration.standing() if value is _STANDING else declaration.check(value)
            object.__setattr__(self, declaration.name, value)

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """Every setting of this class by its name, in the order of declaration."""
        return _declarations(cls)  # type: ignore[arg-type]  # mypy asks an instance for the hash

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Settings from a mapping of names; an unknown name raises and offers the nearest."""
        known = cls.declarations()
        for name in values:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}: {unknown_name(name, known)}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """These settings with `changes` made; validated like new ones."""
        return type(self).of({**self.as_dict(), **changes})

    def as_dict(self) -> dict[str, Any]:
        """Name to value, as settings.json holds it."""
        return {name: getattr(self, name) for name in self.declarations()}


@functools.cache
def _declarations(cls: type[Settings]) -> dict[str, Declaration]:
    hints = typing.get_type_hints(cls)
    return {field.name: _declaration(field, hints[field.name]) for field in dataclasses.fields(cls)}


def _declaration(field: dataclasses.Field[Any], hint: Any) -> Declaration:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (member for member in members if member is not type(None))
    return Declaration(
        name=field.name,
        type=plain,
        optional=type(None) in members,
        **field.metadata,
    )


ENGINES = ("eager", "compile", "ort", "offload")
IN_ORT = ("ort", "offload")
"""The engines whose graph runs in ORT."""
REFERENCE = ("eager", "fp32")
"""The engine and precision that others are compared with."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OF_ANY_ENGINE = ("engine", "precision", "recompute")
"""The settings of `EngineSettings` that are not for ORT's graph alone."""
LOWEST_LOSS_SCALE = 1.0
"""Where gradients overflow float16 at this loss scale, a run ends: DeepSpeed's min_loss_scale."""
KERNELS = ("measured", "torch", "ort")
ATTENTION = ("auto", "fused", "onnx")
LOG_LEVELS = ("verbose", "devinfo", "info", "warning", "error", "fatal")
OPSETS = (14, 17)
"""The oldest and the newest ONNX opset that ORTModule's export rules are checked at."""
EXPORT_OPSETS = (14, 20)
"""The oldest opset that has attention, and the newest that torch's exporter writes."""
OPTIMIZERS = ("adamw", "sgd", "lamb")
LOSSES = ("cross_entropy", "mse", "l1", "bce_with_logits")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """How a model is executed; the options of ``%%ort`` and ``ortlab.wrap``."""

    engine: str = setting(
        "ort",
        choices=ENGINES,
        panel=True,
        help="what executes the model",
    )
    precision: str = setting(
        "fp32",
        panel=True,
        choices=PRECISIONS,
        help="of matrix products; weights, gradients and optimizer stay fp32; tf32 is for CUDA, "
        "fp16 on a CPU for checking numerics",
    )
    kernels: str = setting(
        "measured",
        choices=KERNELS,
        help="on a CPU, what computes in ORT's graph: whichever is faster, torch's and ortlab's "
        "kernels wherever there is one, or ORT's own alone",
    )
    attention: str = setting(
        "auto",
        choices=ATTENTION,
        help="in ORT's graph: ortlab's kernel where `kernels` has it and ONNX's operators "
        "elsewhere, torch's fused kernels, or ONNX's operators alone",
    )
    recompute: str = setting(
        "off",
        panel=True,
        help="activations to compute again in the backward pass rather than keep: off, layers (of "
        "every list of layers), modules as in encoder.layer.*.attention, or plans of ORT's such as "
        "BiasGelu+:1:-1; several with commas",
    )
    self_check: bool = setting(
        True,
        here=True,
        help="compare ORT's outputs and gradients with eager torch before the first step",
    )
    fallback: bool = setting(
        False, help="let ORTModule run plain torch, with a badge, where ORT cannot run the model"
    )
    cache: bool = setting(
        True, help="take a model's exported graph from the user's cache, and keep it there"
    )

    # ORTModule's own options, for this model alone. What they do to ORT:
    # `ortlab.engines.ortmodule.options`.
    log_level: str = setting(
        "error",
        choices=LOG_LEVELS,
        source="ORTMODULE_LOG_LEVEL",
        help="the least severe of ORT's messages to print; errors are raised in any case",
    )
    opset: int = setting(
        17,
        minimum=OPSETS[0],
        maximum=OPSETS[1],
        source="ORTMODULE_ONNX_OPSET_VERSION",
        help="the version of the ONNX operators in the exported graph",
    )
    shape_inference: bool = setting(
        True,
        source="JSON RunSymbolicShapeInference",
        help="infer the shapes in the exported graph before ORT optimizes it",
    )
    copy_for_export: bool = setting(
        True,
        source="ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT",
        help="find the outputs' form on a copy of the model; off saves its memory",
    )
    save_onnx: str | None = setting(
        None,
        here=True,
        source="DebugOptions.save_onnx",
        help="write the newest graph, stage by stage, to files that begin with this path",
    )
    compute_optimizer: bool = setting(
        True,
        source="ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",
        help="compute less: let operators that shrink tensors come first",
    )
    label_sparsity: bool = setting(
        False,
        source="ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
        help="skip ignored labels in the loss",
    )
    embedding_sparsity: bool = setting(
        False,
        source="ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER",
        help="skip padding in the whole model",
    )
    cast_propagation: str = setting(
        "flood_fill",
        choices=("none", "insert_and_reduce", "flood_fill"),
        source="JSON PropagateCastOps.Strategy",
        help="how regions of half precision grow, under autocast",
    )
    cast_level: int = setting(
        1,
        minimum=-1,
        maximum=2,
        source="JSON PropagateCastOps.Level",
        help="operators they grow over: -1 none, 0 those of cast-ops, 1 data movement too, "
        "2 GELU, LayerNorm and Dropout too",
    )
    cast_ops: str = setting(
        "",
        source="JSON PropagateCastOps.Allow",
        help="names of more operators that they grow over, with commas",
    )
    memory_efficient_gradient: bool = setting(
        False,
        source="JSON UseMemoryEfficientGradient",
        help="keep outputs rather than inputs for the backward pass where either will do",
    )
    arena: bool = setting(
        True,
        source="SessionOptions.enable_cpu_mem_arena",
        help="on a CPU keep freed memory for the next step; off takes only what %ort memory says",
    )
    memory_level: int = setting(
        0,
        minimum=0,
        maximum=2,
        source="ORTMODULE_MEMORY_OPT_LEVEL",
        help="recompute activations layer by layer: 0 not, 1 the cheap ones, 2 more of them",
    )
    memory_plans: str | None = setting(
        None,
        here=True,
        source="ORTMODULE_MEMORY_OPT_CONFIG",
        help="a JSON file with the list of recompute plans to use",
    )
    memory_stats: bool = setting(
        False,
        source="ORTMODULE_PRINT_MEMORY_STATS",
        help="log the GPU's memory at each phase of a step",
    )
    custom_autograd: bool = setting(
        True,
        source="ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        help="run each torch.autograd.Function of the model with its own backward; off refuses it",
    )
    skip_checks: str = setting(
        "device,build_gradient,execution_agent",
        choices=("device", "build_gradient", "execution_agent", "disabled"),
        many=True,
        prefix="SKIP_CHECK_",
        here=True,
        source="ORTMODULE_SKIPCHECK_POLICY",
        help="ORT's own checks to leave out of every step; ortlab's come before them",
    )
    external_allocator: bool = setting(
        True,
        source="JSON UseExternalGPUAllocator",
        help="let ORT take GPU memory from torch's allocator",
    )
    conv_algo_search: str = setting(
        "heuristic",
        choices=("heuristic", "exhaustive"),
        source="ORTMODULE_CONV_ALGO_SEARCH",
        help="how cuDNN's algorithm for a convolution is found",
    )
    triton: bool = setting(
        False, source="ORTMODULE_USE_TRITON", help="fuse operators into Triton kernels, on CUDA"
    )
    tuning: bool = setting(
        False, source="ORTMODULE_ENABLE_TUNING", help="time CUDA kernels and choose the fastest"
    )
    tuning_ms: int = setting(
        0,
        minimum=0,
        unit="ms",
        source="ORTMODULE_MAX_TUNING_DURATION_MS",
        help="the longest time to tune one operator for; 0 is no limit",
    )
    tuning_results: str | None = setting(
        None,
        here=True,
        source="ORTMODULE_TUNING_RESULTS_PATH",
        help="the folder that tuning writes its choices to, or without it reads them from",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_level and self.memory_plans:
            raise ValueError(
                f"memory_level={self.memory_level} makes plans of its own, and memory_plans="
                f"{self.memory_plans!r} names others; choose one"
            )
        if self.recompute != "off" and (self.memory_level or self.memory_plans):
            raise ValueError(
                f"recompute={self.recompute!r} does not go with memory_level and memory_plans, "
                "which are ORT's own plans; choose one"
            )
        if "disabled" in self.skip_checks and "," in self.skip_checks:
            raise ValueError(f"skip_checks={self.skip_checks!r}: disabled goes with no other")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Settings):
    """How a model is profiled; the options of ``%ort profile`` and ``ortlab.profile``."""

    steps: int = setting(5, minimum=1, help="steps that are timed, in each engine, after two more")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """How a model leaves for inference; the options of ``%ort export`` and ``ortlab.export``."""

    opset: int = setting(
        17,
        minimum=EXPORT_OPSETS[0],
        maximum=EXPORT_OPSETS[1],
        help="the version of the ONNX operators",
    )
    fp16: bool = setting(False, help="one more file in half precision, its difference told")
    int8: bool = setting(False, help="one more file with weights of eight bits, likewise")
    external_data: bool = setting(
        False, help="the weights in a file of their own, as they are from 2 GiB on"
    )


@dataclass(frozen=True, kw_only=True)
class FleetSettings(Settings):
    """What a fleet is planned for; the options of ``%ort zero plan`` and ``ortlab.zero_plan``."""

    gpus: int = setting(8, minimum=1, help="devices that share the model's state")
    memory: str | None = setting(None, help="of each device, as in 40GiB: what has to fit into it")
    precision: str | None = setting(
        None,
        choices=("fp32", "mixed"),
        help="mixed has weights and gradients of 2 bytes and fp32 copies beside the optimizer's "
        "state; else fp32 for a model of the notebook, which trains so here, and mixed for a count",
    )
    optimizer: str = setting("adamw", choices=OPTIMIZERS, help="whose state counts")
    hidden: int | None = setting(
        None,
        minimum=1,
        help="width of a transformer's layers, for its activations; then layers, "
        "sequence and batch too",
    )
    layers: int | None = setting(None, minimum=1, help="how many of them")
    heads: int | None = setting(
        None, minimum=1, help="of attention whose scores are kept; else it is fused and keeps none"
    )
    vocabulary: int | None = setting(None, minimum=1, help="words, for embedding and logits")
    sequence: int | None = setting(None, minimum=1, unit="tokens", help="in a sample")
    batch: int | None = setting(
        None, minimum=1, unit="samples", help="in a micro-batch of one device"
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings(Settings):
    """How the table of recompute plans is made; the options of ``%ort recompute``."""

    measure: bool = setting(False, help="time the model's own steps, for what each plan costs")


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(EngineSettings):
    """How a model is fine-tuned; the options of ``%ort finetune`` and ``ortlab.finetune``."""

    loss: str | None = setting(
        None,
        help=f"a loss function of the notebook, or one of {', '.join(LOSSES)}; "
        "the model's own where it returns one",
    )
    epochs: int = setting(1, minimum=1, help="passes over the training data")
    max_steps: int | None = setting(None, minimum=1, help="end after so many optimizer steps")
    workers: int = setting(
        1,
        minimum=1,
        panel=True,
        help="processes that train together, each on its rows of every batch",
    )
    isolated: bool = setting(
        False,
        panel=True,
        help="train in a process of its own, as workers do: where it dies, of native code or for "
        "want of memory, the run goes on from its last checkpoint and the notebook is untouched",
    )
    zero_stage: int = setting(
        0,
        minimum=0,
        maximum=3,
        panel=True,
        help="what workers share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too",
    )
    param_dtype: str = setting(
        "fp32",
        choices=("fp32", "bf16"),
        help="type of weights and gradients on workers from zero_stage 1 on; bf16, with precision "
        "bf16, takes 2+2+12 bytes a parameter with an fp32 copy in the optimizer, and fp32 4+4+8",
    )
    offload_optimizer: bool = setting(
        False,
        help="keep each worker's share of the optimizer in host memory and step there, from "
        "zero_stage 1 on",
    )
    reduction: str = setting(
        "mean",
        choices=("mean", "adasum"),
        help="how the workers' gradients become one: their mean over samples, or Adasum's sum, "
        "which adapts to their angle",
    )
    tensor_parallel: int = setting(
        1,
        minimum=1,
        help="workers that share each layer's matrices, with engine eager; the others share data",
    )
    pipeline_stages: int = setting(
        1,
        minimum=1,
        help="parts of a Sequential that workers have one after the other; micro-batches flow "
        "through them",
    )
    batch_size: int = setting(
        16, minimum=1, panel=True, unit="samples", help="samples in a micro-batch"
    )
    accumulation: int = setting(
        1, minimum=1, panel=True, help="micro-batches for one optimizer step"
    )
    lr: float = setting(5e-5, above=0, panel=True, help="the highest learning rate")
    optimizer: str = setting(
        "adamw", choices=OPTIMIZERS, help="the update rule; lamb is for large batches"
    )
    weight_decay: float = setting(0.01, minimum=0, help="decoupled weight decay")
    schedule: str = setting(
        "linear", choices=("constant", "linear", "cosine"), help="the learning rate after warm-up"
    )
    warmup_steps: int = setting(0, minimum=0, unit="steps", help="steps of rising learning rate")
    clip_norm: float | None = setting(
        1.0, above=0, panel=True, help="the largest norm of all gradients"
    )
    eval_every: int | None = setting(
        None, minimum=1, unit="steps", help="evaluate every so many steps, not after every epoch"
    )
    checkpoint_every: int | None = setting(
        None,
        minimum=1,
        unit="steps",
        help="keep a checkpoint every so many steps; else a run on workers every 100",
    )
    checkpoint_minutes: float | None = setting(
        10.0,
        above=0,
        unit="minutes",
        help="keep a checkpoint after so many minutes, and in a pause",
    )
    keep_checkpoints: int = setting(
        2, minimum=1, help="so many of the last checkpoints stay, that of the end among them"
    )
    keep_best: str | None = setting(
        None,
        choices=("eval_loss", "eval_accuracy"),
        help="keep best.safetensors too: the checkpoint of the best evaluation after step 0",
    )
    seed: int = setting(0, minimum=0, help="seeds the order of the data and every random number")
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="where the model trains")

    @property
    def elsewhere(self) -> bool:
        """Whether the model trains in other processes than this one."""
        return self.workers > 1 or self.isolated


class Parallel(TypedDict):
    """How many train together, and what of ZeRO's they share out."""

    workers: int
    zero_stage: int


@dataclass(frozen=True, kw_only=True)
class SearchSettings(Settings):
    """What a race and a search have in common: set-ups that take turns, and a memory."""

    without: ClassVar[tuple[str, ...]] = (
        *("engine", "precision", "workers", "zero_stage"),  # it has several
        "isolated",
        *("param_dtype", "offload_optimizer"),  # for some of those alone
        # It is no run: its data has no end, its learning rate is one.
        *("epochs", "max_steps", "schedule", "warmup_steps", "eval_every", "checkpoint_every"),
        *("checkpoint_minutes", "keep_checkpoints", "keep_best"),
    )
    """The settings of `FinetuneSettings` that it does not take."""

    engines: str = setting(
        ",".join(ENGINES), choices=ENGINES, many=True, help="engines to compare, with commas"
    )
    precisions: str = setting(
        "fp32,bf16", choices=PRECISIONS, many=True, help="their precisions, with commas"
    )
    workers: str = setting(
        "1", help="processes that train together, as in 1,2: one process, and so many workers"
    )
    zero_stages: str = setting(
        "0",
        choices=("0", "1", "2", "3"),
        many=True,
        help="what workers share out, with commas; see --zero-stage of finetune",
    )
    memory: str | None = setting(
        None, help="what the largest micro-batch is to fit into, as in 16GiB; else what is free"
    )
    steps: int | None = setting(
        None, minimum=1, help="optimizer steps of a turn; else what eager torch does in 30 ms"
    )

    def __post_init__(self) -> None:
        for name in ("workers", "zero_stages"):
            if isinstance(value := getattr(self, name), int):  # of a single one its number will do
                object.__setattr__(self, name, str(value))
        super().__post_init__()
        numbers = self.workers.split(",")
        if not all(number.strip().isdecimal() and int(number) for number in numbers):
            raise ValueError(f"workers={self.workers!r}: numbers with commas, as in 1,2")
        if len(several := {int(number) for number in numbers} - {1}) > 1:
            raise ValueError(
                f"workers={self.workers!r}: there are so many workers or so many; choose one of "
                f"{', '.join(map(str, sorted(several)))} beside 1"
            )
        if self.zero_stages != "0" and not several and getattr(self, "preset", None) is None:
            raise ValueError(
                f"zero_stages={self.zero_stages!r} are for workers, and there are none; choose "
                "workers='1,2', or leave zero_stages out"
            )

    @property
    def parallel(self) -> list[Parallel]:
        """The numbers of workers with the stages of ZeRO that there are to each."""
        numbers = dict.fromkeys(int(number) for number in self.workers.split(","))
        stages = [int(stage) for stage in self.zero_stages.split(",")]
        return [
            Parallel(workers=number, zero_stage=stage)
            for number in numbers
            for stage in (stages if number > 1 else [0])
        ]

    @classmethod
    def besides(cls) -> dict[str, Declaration]:
        """The settings of `FinetuneSettings` that all set-ups share."""
        declared = FinetuneSettings.declarations()
        return {name: declared[name] for name in declared if name not in cls.without}

    @classmethod
    def apart(cls, given: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Keyword arguments by whose they are: these settings, and what all set-ups share.

        ValueError for one that is neither.
        """
        own = cls.declarations()
        known = {**own, **cls.besides()}
        for name in given:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}: {unknown_name(name, known)}")
        mine = cls.of({name: value for name, value in given.items() if name in own})
        return mine, {name: value for name, value in given.items() if name not in own}


@dataclass(frozen=True, kw_only=True)
class RaceSettings(SearchSettings):
    """Who races and how long; the options of ``%ort race`` and ``ortlab.race``."""

    rounds: int = setting(10, minimum=1, help="rounds that count; in each every set-up has a turn")
    batches: int = setting(
        4, minimum=1, help="different steps of data, which all set-ups go through in turn"
    )
    preset: str | None = setting(
        None,
        choices=("examples",),
        help="another field: examples is that of ORT's training examples, torch and ORT, without "
        "DeepSpeed and with",
    )


@dataclass(frozen=True, kw_only=True)
class TuneSettings(SearchSettings):
    """What is searched, and for how long; the options of ``%ort tune`` and ``ortlab.tune``."""

    # Most of what it does not take it finds.
    without = (*SearchSettings.without, "batch_size", "accumulation", "recompute")

    rounds: int = setting(8, minimum=2, help="rounds among those that may win")
    recompute: str = setting(
        "layers", help="what may be computed again where a micro-batch does not fit; off: nothing"
    )
    global_batch: int | None = setting(
        None,
        minimum=1,
        unit="samples",
        help="samples of an optimizer step, which stay the same; else 16, or a loader's own batch",
    )
    sizes: int = setting(
        4, minimum=1, help="micro-batches to choose from: the global batch, its half, and so on"
    )
    target: str = setting(
        "samples", choices=("samples", "tokens"), help="what a second shall have most of"
    )


RUN_SORTS: Mapping[str, str] = {
    "started": "created",
    "name": "name",
    "state": "state",
    "model": "model",
    "engine": "engine_asked",
    "precision": "precision",
    "steps": "steps",
    "loss": "loss",
    "held-out": "held_out_loss",
    "speed": "samples_per_s",
    "memory": "peak_bytes",
    "took": "wall_s",
    "size": "size_bytes",
}
"""What the history is sorted by, and which number of `ortlab.history.entry.RunEntry` that is."""


@dataclass(frozen=True, kw_only=True)
class HistorySettings(Settings):
    """Which runs of the history; the options of ``%ort runs`` and ``ortlab.list_runs``."""

    sort: str = setting(
        "started",
        choices=tuple(RUN_SORTS),
        help="by what; low losses, high speeds and the newest come first, what is not known last",
    )
    reverse: bool = setting(False, help="the other way round")
    engine: str | None = setting(
        None, choices=ENGINES, help="those that asked for an engine, or used it"
    )
    state: str | None = setting(
        None,
        choices=("running", "finished", "stopped", "failed", "interrupted"),
        help="those in a state; interrupted are those whose process ended before they did",
    )
    model: str | None = setting(None, help="those of a model with this in its name")
    tag: str | None = setting(None, help="those with a tag, as run.tag(...) gives it")
    limit: int | None = setting(None, minimum=1, help="so many at most, the first ones")


@dataclass(frozen=True, kw_only=True)
class PruneSettings(Settings):
    """Which runs go; the options of ``%ort runs --prune`` and ``ortlab.prune_runs``."""

    older_than: str | None = setting(
        None, help="runs that began longer ago than this go, as in 12h, 30d or 8w"
    )
    keep: int | None = setting(None, minimum=0, help="so many of the newest stay, the others go")
    max_size: str | None = setting(
        None, help="what the newest may take together, as in 2GB; what is beyond goes"
    )
    yes: bool = setting(False, help="remove them; without it they are only shown")
