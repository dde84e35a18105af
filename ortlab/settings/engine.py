"""Settings of the execution of a model, and of the ORT graph of the engines that have one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ortlab.settings.choices import (
    ATTENTION,
    AUTO,
    ENGINES,
    KERNELS,
    LOG_LEVELS,
    OPSETS,
    PRECISIONS,
    SAME_ENGINE,
)
from ortlab.settings.declaration import Settings, setting


@dataclass(frozen=True, kw_only=True)
class OrtModuleSettings(Settings):
    """ORTModule's own options, applied to one model only.

    `ortlab.engines.ortmodule.options` passes them to ORT.
    """

    title: ClassVar[str] = "ORT's graph"

    log_level: str = setting(
        "error",
        choices=LOG_LEVELS,
        source="ORTMODULE_LOG_LEVEL",
        help="lowest severity of ORT's messages to print; errors are always raised",
    )
    opset: int = setting(
        17,
        minimum=OPSETS[0],
        maximum=OPSETS[1],
        source="ORTMODULE_ONNX_OPSET_VERSION",
        help="ONNX opset version of the exported graph",
    )
    shape_inference: bool = setting(
        True,
        source="JSON RunSymbolicShapeInference",
        help="infer the shapes of the exported graph before ORT optimizes it",
    )
    copy_for_export: bool = setting(
        True,
        source="ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT",
        help="determine the structure of the outputs on a copy of the model; off saves the memory "
        "of the copy",
    )
    save_onnx: str | None = setting(
        None,
        here=True,
        source="DebugOptions.save_onnx",
        help="write each stage of the newest graph, or each segment of engine ort, to "
        "files whose paths start with this prefix",
    )
    compute_optimizer: bool = setting(
        True,
        source="ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",
        help="reduce computation by moving operators that shrink tensors to the front",
    )
    label_sparsity: bool = setting(
        False,
        source="ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
        help="skip the computation for ignored labels in the loss",
    )
    embedding_sparsity: bool = setting(
        False,
        source="ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER",
        help="skip the computation for padding in the whole model",
    )
    cast_propagation: str = setting(
        "flood_fill",
        choices=("none", "insert_and_reduce", "flood_fill"),
        source="JSON PropagateCastOps.Strategy",
        help="strategy that extends regions of half precision under autocast",
    )
    cast_level: int = setting(
        1,
        minimum=-1,
        maximum=2,
        source="JSON PropagateCastOps.Level",
        help="operators that regions of half precision extend over: -1 none, 0 those in cast-ops, "
        "1 also data movement, 2 also GELU, LayerNorm and Dropout",
    )
    cast_ops: str = setting(
        "",
        source="JSON PropagateCastOps.Allow",
        help="names of more operators that regions of half precision extend over, separated by "
        "commas",
    )
    memory_efficient_gradient: bool = setting(
        False,
        source="JSON UseMemoryEfficientGradient",
        help="store outputs instead of inputs for the backward pass where either is sufficient",
    )
    arena: bool = setting(
        True,
        source="SessionOptions.enable_cpu_mem_arena",
        help="on a CPU, keep freed memory for the next step; off returns it to malloc",
    )
    memory_level: int = setting(
        0,
        minimum=0,
        maximum=2,
        source="ORTMODULE_MEMORY_OPT_LEVEL",
        help="recompute activations layer by layer: 0 none, 1 the cheap ones, 2 more of them",
    )
    memory_plans: str | None = setting(
        None,
        here=True,
        source="ORTMODULE_MEMORY_OPT_CONFIG",
        help="JSON file with the list of recompute plans to use",
    )
    memory_stats: bool = setting(
        False,
        source="ORTMODULE_PRINT_MEMORY_STATS",
        help="log the GPU memory at each phase of a step",
    )
    custom_autograd: bool = setting(
        True,
        source="ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        help="run each torch.autograd.Function of the model with its own backward; off refuses "
        "such models",
    )
    skip_checks: str = setting(
        "device,build_gradient,execution_agent",
        choices=("device", "build_gradient", "execution_agent", "disabled"),
        many=True,
        prefix="SKIP_CHECK_",
        here=True,
        source="ORTMODULE_SKIPCHECK_POLICY",
        help="checks of ORT to skip in every step; ortlab runs its own checks first",
    )
    external_allocator: bool = setting(
        True,
        source="JSON UseExternalGPUAllocator",
        help="let ORT allocate GPU memory with torch's allocator",
    )
    conv_algo_search: str = setting(
        "heuristic",
        choices=("heuristic", "exhaustive"),
        source="ORTMODULE_CONV_ALGO_SEARCH",
        help="search for cuDNN's algorithm of a convolution",
    )
    triton: bool = setting(
        False, source="ORTMODULE_USE_TRITON", help="fuse operators into Triton kernels on CUDA"
    )
    tuning: bool = setting(
        False, source="ORTMODULE_ENABLE_TUNING", help="measure CUDA kernels and use the fastest"
    )
    tuning_ms: int = setting(
        0,
        minimum=0,
        unit="ms",
        source="ORTMODULE_MAX_TUNING_DURATION_MS",
        help="maximum time to tune one operator; 0 for no limit",
    )
    tuning_results: str | None = setting(
        None,
        here=True,
        source="ORTMODULE_TUNING_RESULTS_PATH",
        help="folder that tuning writes its results to, or that they are read from if tuning is "
        "off",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_level and self.memory_plans:
            raise ValueError(
                f"memory_level={self.memory_level} and memory_plans={self.memory_plans!r} both "
                "select recompute plans; choose one"
            )
        if "disabled" in self.skip_checks and "," in self.skip_checks:
            raise ValueError(
                f"skip_checks={self.skip_checks!r}: disabled cannot be combined with other values; "
                "choose disabled alone, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """Settings of the execution of a model: the options of ``%%ort`` and ``ortlab.wrap``."""

    title: ClassVar[str] = "model"
    command: ClassVar[str] = "wrap"

    engine: str = setting(
        AUTO,
        choices=(AUTO, *ENGINES),
        renamed=SAME_ENGINE,
        panel=True,
        common=True,
        help="engine that executes the model; auto is an ORT engine if one runs here, else eager",
    )
    precision: str = setting(
        "fp32",
        panel=True,
        common=True,
        choices=PRECISIONS,
        help="precision of matrix products; weights, gradients and optimizer state stay fp32; "
        "tf32 is for CUDA, fp16 on CPUs to check numerics",
    )
    kernels: str = setting(
        "measured",
        choices=KERNELS,
        help="kernels of ORT's graph on a CPU: whichever is measured to be faster, those of torch "
        "and ortlab where available, or only ORT's own",
    )
    attention: str = setting(
        "auto",
        choices=ATTENTION,
        help="attention in ORT's graph: ortlab's kernel where `kernels` selects it and ONNX "
        "operators elsewhere, torch's fused kernels, or only ONNX operators",
    )
    recompute: str = setting(
        "off",
        panel=True,
        common=True,
        help="activations to recompute in backward: off, layers, modules such as "
        "encoder.layer.*.attention, or plans of %ort recompute, joined by commas",
    )
    activation_budget: float = setting(
        1.0,
        panel=True,
        minimum=0.05,
        maximum=1,
        help="share of the activations that engine ort stores for the backward pass; it computes "
        "the others again, the cheapest first",
    )
    self_check: bool = setting(
        True,
        here=True,
        help="compare ORT's outputs and gradients with eager torch before the first step",
    )
    fallback: bool = setting(
        False, help="run the model in plain torch, with a badge, if ORT cannot run it"
    )
    cache: bool = setting(
        True, help="load the model's exported graph from the user's cache, and store it there"
    )

    ortmodule: OrtModuleSettings = field(default_factory=OrtModuleSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.ortmodule
        if self.recompute != "off" and (options.memory_level or options.memory_plans):
            raise ValueError(
                f"recompute={self.recompute!r} cannot be combined with memory_level or "
                "memory_plans, which select ORT's own plans; choose one"
            )
