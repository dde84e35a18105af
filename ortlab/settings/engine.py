"""How a model is executed."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.settings.choices import ATTENTION, ENGINES, KERNELS, LOG_LEVELS, OPSETS, PRECISIONS
from ortlab.settings.declaration import Settings, setting


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
