"""Conflicts between settings, decided from values alone before anything is loaded or started.

This is the module that decides which settings go together; the registry, the engines and the
steppers of several processes ask it. Settings of one class that exclude each other are refused when
they are made (`ortlab.settings`). Each function returns the message of the first rule that the
settings break, or None. Conditions of this machine (a device, a compiler) are decided by each
engine's own `unavailable` and `refuses`; only `deepspeed_missing` looks at what is installed.

==========================  ====================================================================
`engine_conflict`           an engine and the settings
`ranks_conflict`            settings of several ranks: the rules of the four functions below
`_model_parallel_conflict`  tensor or pipeline parallelism with other settings
`deepspeed_conflict`        ZeRO by DeepSpeed with other settings
`fully_sharded`             whether FSDP2 shards the weights, and its rules
`_adasum_conflict`          Adasum with other settings
`group_conflict`            the settings and the process group that a stepper is given
`script_conflict`           a run and the plain training script that is written for it
`trainer_conflict`          a ZeRO stage and the engine in Hugging Face's Trainer
==========================  ====================================================================
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any, Final

from ortlab.engines.base import Capabilities
from ortlab.settings import OWN, EngineSettings, FinetuneSettings, ParallelSettings, is_own

DEEPSPEED: Final = "0.19.8"
"""DeepSpeed's version whose internals `deepspeed_library` and `deepspeed_checkpoint` use."""

_ONE_PROCESS: Final[dict[str, Any]] = {
    "zero_stage": 0,
    "tensor_parallel": 1,
    "pipeline_stages": 1,
    "param_dtype": "fp32",
    "offload_optimizer": False,
}
"""Settings that need several workers, with the value that one process has."""

_CAPTURED: Final = ("eager", "compile", "ort")
"""Engines that run operators of torch.library, by which ranks exchange activations."""

_Rules = Iterator[tuple[bool, str]]
"""Conditions under which settings conflict, each with its message; the first that holds counts."""


def _first(rules: _Rules) -> str | None:
    return next((message for applies, message in rules if applies), None)


# --- an engine


def engine_conflict(
    engine: str, capabilities: Capabilities, settings: EngineSettings, parallel: ParallelSettings
) -> str | None:
    """Return why an engine cannot run under the settings, or None.

    Args:
        engine: The engine's name, for the message.
        capabilities: What the engine supports.
        settings: Settings of the model.
        parallel: Settings of the processes; the defaults for a wrapped model.

    Returns:
        A message that names the value and the alternatives.
    """
    return _first(_engine_rules(engine, capabilities, settings, parallel))


def _engine_rules(
    engine: str, capabilities: Capabilities, settings: EngineSettings, parallel: ParallelSettings
) -> _Rules:
    workers = parallel.workers
    yield (
        workers > 1 and not capabilities.workers,
        f"workers={workers}: engine {engine!r} trains in one process; choose workers=1, or "
        "engine='eager'",
    )
    yield (
        parallel.isolated and not capabilities.workers,
        f"isolated=True: engine {engine!r} trains in the calling process only; choose "
        "isolated=False, or engine='eager'",
    )
    for name, single in _ONE_PROCESS.items():
        value = parallel[name]
        needed = value if name in ("tensor_parallel", "pipeline_stages") else 2
        yield (
            value != single and workers == 1,
            f"{name}={value!r} needs at least {needed} workers (workers=1); choose "
            f"workers={needed}, or {name}={single!r}",
        )
    yield (
        parallel.pipeline_interleave > 1 and parallel.pipeline_stages == 1,
        f"pipeline_interleave={parallel.pipeline_interleave} needs a pipeline (pipeline_stages=1); "
        "choose pipeline_stages=2, or pipeline_interleave=1",
    )
    stage = parallel.zero_stage
    known = ", ".join(map(str, capabilities.zero_stages))
    yield (
        stage not in capabilities.zero_stages and workers > 1,
        f"zero_stage={stage}: engine {engine!r} supports {known}; choose one of those",
    )
    yield (
        settings.recompute != "off" and not capabilities.recompute,
        f"recompute={settings.recompute!r} is for engines 'ort' and 'ortmodule'; choose "
        f"recompute='off' with engine {engine!r}",
    )
    yield (
        settings.activation_budget != 1 and not capabilities.activation_budget,
        f"activation_budget={settings.activation_budget!r} is for engine 'ort'; choose "
        f"activation_budget=1.0 with engine {engine!r}",
    )


# --- an optimizer or a scheduler of the user's own


def own_optimizer_conflict(settings: FinetuneSettings) -> str | None:
    """Return why an optimizer or scheduler of the user's cannot train under the settings, or None.

    Args:
        settings: The run's settings.

    Returns:
        A message that names the values and the alternatives.
    """
    optim, parallel = settings.optim, settings.parallel
    own = [each for each in (optim.optimizer, optim.lr_scheduler_type) if is_own(each)]
    if not own:
        return None
    what = f"an optimizer or lr_scheduler of your own ({own[0].removeprefix(OWN)})"
    if settings.model.engine == "ort_fused":
        return (
            f"{what} runs in torch, and engine 'ort_fused' steps in ORT; choose "
            "engine='ortmodule', or one of optimizer='adamw', 'sgd' and 'lamb'"
        )
    for name, single in (*_ONE_PROCESS.items(), ("reduction", "mean")):
        if parallel[name] != single:
            return (
                f"{name}={parallel[name]!r} with {what}: it needs whole gradients and parameters; "
                f"choose {name}={single!r}"
            )
    return None


# --- several ranks


def ranks_conflict(settings: FinetuneSettings, size: int, *, elsewhere: bool = False) -> str | None:
    """Return why ranks cannot train together under the settings, or None.

    Args:
        settings: The run's settings.
        size: Number of ranks. A single one (an isolated run) has nothing to combine, so that only
            the rules of model parallelism apply.
        elsewhere: True for ranks of other machines: what is installed here does not matter.

    Returns:
        A message that names the values and the alternatives.
    """
    if (reason := _model_parallel_conflict(settings, size)) is not None or size == 1:
        return reason
    parallel, batch_size = settings.parallel, settings.data.batch_size
    if settings.optim.optimizer == "lamb" and parallel.reduction == "adasum":
        return (
            "reduction='adasum' with optimizer='lamb' is not supported: both scale the step of "
            "each tensor, and their combination has not been studied; choose reduction='mean'"
        )
    if fully_sharded(settings):
        if (reason := _first(_sharding_rules(settings))) is not None:
            return reason
    elif (
        needs_deepspeed(parallel)
        and (reason := deepspeed_conflict(settings, elsewhere)) is not None
    ):
        return reason
    places = data_parallel_size(parallel, size)
    if batch_size < places:
        return (
            f"{batch_size=} cannot be split across {places} workers; choose "
            f"batch_size={places} or more"
        )
    return _adasum_conflict(settings, size) if parallel.reduction == "adasum" else None


def data_parallel_size(parallel: ParallelSettings, size: int) -> int:
    """Return the number of parts that a batch is split into.

    Args:
        parallel: Settings of the processes.
        size: Number of ranks. Ranks that share one model, by tensor or pipeline parallelism, train
            on the same part.

    Returns:
        The number of model replicas.
    """
    return size // (parallel.tensor_parallel * parallel.pipeline_stages)


# --- tensor and pipeline parallelism


def _model_parallel_conflict(settings: FinetuneSettings, size: int) -> str | None:
    """Return why `size` ranks cannot share a model under `settings`, or None."""
    parallel = settings.parallel
    if parallel.tensor_parallel == parallel.pipeline_stages == 1:
        return None
    return _first(_model_parallel_rules(settings, size))


def _model_parallel_rules(settings: FinetuneSettings, size: int) -> _Rules:
    model, optim, parallel = settings.model, settings.optim, settings.parallel
    layers, stages = parallel.tensor_parallel, parallel.pipeline_stages
    names = [name for name in ("tensor_parallel", "pipeline_stages") if parallel[name] > 1]
    own = " x ".join(f"{name}={parallel[name]}" for name in names)
    none = " and ".join(f"{name}=1" for name in names)
    ranks = layers * stages
    yield (
        size % ranks != 0,
        f"{own} does not divide workers={size}; train with "
        f"{max(1, size // ranks) * ranks} or {(size // ranks + 1) * ranks} workers",
    )
    yield (
        parallel.zero_stage >= 2,
        f"{own} with zero_stage={parallel.zero_stage}: gradients and weights are already "
        f"partitioned across the ranks; choose zero_stage=1 or {none}",
    )
    halves = parallel.param_dtype != "fp32"
    whole_only = "param_dtype='bf16'" if halves else "offload_optimizer=True"
    yield (
        halves or parallel.offload_optimizer,
        f"{own} with {whole_only}: DeepSpeed supports it for whole models only, and these ranks "
        f"have parts of one; choose param_dtype='fp32' and offload_optimizer=False, or {none}",
    )
    yield (
        parallel.reduction != "mean",
        f"{own} with reduction={parallel.reduction!r}: it combines the gradients of whole models, "
        f"and these ranks have parts of one; choose reduction='mean' or {none}",
    )
    yield (
        model.precision == "fp16",
        f"{own} with precision='fp16': only the rank with an overflow would detect it, and the "
        f"ranks' loss scales would differ; choose precision='bf16' or {none}",
    )
    yield (
        layers > 1 and model.engine not in _CAPTURED,
        f"{own}: engine {model.engine!r} cannot execute layers that exchange activations; choose "
        f"engine='ort', 'eager' or {none}",
    )
    yield (
        layers > 1 and optim.optimizer not in ("adamw", "sgd"),
        f"{own} with optimizer={optim.optimizer!r}: it needs the norms of whole layers, and the "
        f"ranks have parts; choose optimizer='adamw' or {none}",
    )


# --- Adasum


def _adasum_conflict(settings: FinetuneSettings, size: int) -> str | None:
    """Return why Adasum cannot combine the gradients of `size` ranks, or None."""
    return _first(_adasum_rules(settings, size))


def _adasum_rules(settings: FinetuneSettings, size: int) -> _Rules:
    optim = settings.optim
    below = 1 << (size.bit_length() - 1)
    yield (
        size & (size - 1) != 0,
        f"reduction='adasum' needs a power of two of workers (workers={size}); train with {below} "
        f"or {2 * below} workers, or choose reduction='mean'",
    )
    if optim.optimizer == "sgd":
        return
    both = f"reduction='adasum' with optimizer={optim.optimizer!r}"
    yield (
        settings.parallel.zero_stage > 0,
        f"{both}: each rank has moments of its own, which ZeRO cannot shard; choose zero_stage=0 "
        "or optimizer='sgd'",
    )
    yield (
        optim.max_grad_norm is not None,
        f"{both}: each rank steps by its own gradient, so there is no norm of the gradients of all "
        "ranks to clip; choose max_grad_norm=None or optimizer='sgd'",
    )
    yield (
        settings.model.precision == "fp16",
        f"{both}: each rank steps by its own gradient and would need its own loss scale; choose "
        "precision='bf16'",
    )


# --- FSDP2


def fully_sharded(settings: FinetuneSettings) -> bool:
    """Return whether torch's FSDP2 shards the weights, and not DeepSpeed.

    Args:
        settings: The run's settings.
    """
    return settings.parallel.zero_stage == 3 and settings.model.engine == "ort"


def _sharding_rules(settings: FinetuneSettings) -> _Rules:
    model, optim, parallel = settings.model, settings.optim, settings.parallel
    stage = "zero_stage=3 with engine='ort'"
    yield (
        parallel.reduction != "mean",
        f"{stage}: FSDP2 averages the gradients itself; choose reduction='mean'",
    )
    yield (
        optim.optimizer not in ("adamw", "sgd"),
        f"{stage} with optimizer={optim.optimizer!r}: its trust ratios need whole tensors, and "
        "ranks have shards; choose optimizer='adamw'",
    )
    yield (
        model.precision == "fp16",
        f"{stage} with precision='fp16': only the rank with an overflow would detect it, and the "
        "ranks' loss scales would differ; choose precision='bf16'",
    )
    own = "param_dtype='bf16'" if parallel.param_dtype != "fp32" else "offload_optimizer=True"
    yield (
        parallel.param_dtype != "fp32" or parallel.offload_optimizer,
        f"{own} with {stage}: DeepSpeed supports it, and here FSDP2 shards; choose zero_stage=2, "
        "or engine='eager'",
    )


# --- DeepSpeed


def deepspeed_conflict(settings: FinetuneSettings, elsewhere: bool = False) -> str | None:
    """Return why DeepSpeed cannot train under the settings, or None.

    Args:
        settings: The run's settings, which ask for a ZeRO stage or for what `needs_deepspeed`
            names.
        elsewhere: True for ranks of other machines: what is installed here does not matter.

    Returns:
        A message that names the values and the alternatives.
    """
    stage, own = f"zero_stage={settings.parallel.zero_stage}", needs_deepspeed(settings.parallel)
    if not elsewhere and (missing := deepspeed_missing()) is not None:
        return f"{own or stage} needs DeepSpeed: {missing}"
    return _first(_deepspeed_rules(settings, stage, own))


def _deepspeed_rules(settings: FinetuneSettings, stage: str, own: str | None) -> _Rules:
    model, parallel = settings.model, settings.parallel
    yield (
        parallel.zero_stage == 0,
        f"{own} with {stage}: DeepSpeed supports it with a sharded optimizer state only; choose "
        "zero_stage=1",
    )
    yield (
        parallel.reduction != "mean",
        f"{stage}: DeepSpeed averages the gradients itself; choose reduction='mean'",
    )
    yield (
        settings.optim.optimizer == "lamb",
        f"{stage} with optimizer='lamb': its trust ratios need whole tensors, and DeepSpeed "
        "partitions them; choose optimizer='adamw'",
    )
    yield (
        model.precision == "fp16",
        f"{stage} with precision='fp16': DeepSpeed scales the loss for float16 weights only, and "
        "these are float32; choose precision='bf16'",
    )
    halves = parallel.param_dtype == "bf16"
    yield (
        halves and model.precision != "bf16",
        f"param_dtype='bf16' with precision={model.precision!r}: matrix products of bfloat16 "
        "weights are bfloat16; choose precision='bf16', or param_dtype='fp32'",
    )
    yield (
        halves and model.engine == "ortmodule",
        "param_dtype='bf16' with engine='ortmodule': ORT's CPU provider has no MatMul of bfloat16, "
        "and on CUDA it has not been tested; choose engine='eager', or param_dtype='fp32'",
    )
    yield (
        parallel.zero_stage == 3 and model.engine != "eager",
        f"{stage} with engine={model.engine!r}: the engine reads all weights of the model at "
        "once, so that every rank would have to store them; choose zero_stage=2, or "
        "engine='eager'",
    )


def needs_deepspeed(parallel: ParallelSettings) -> str | None:
    """Return the first setting that only DeepSpeed implements, or None.

    Args:
        parallel: Settings of the processes.

    Returns:
        Name and value of the setting, as in ``zero_stage=2``.
    """
    if parallel.param_dtype != "fp32":
        return f"param_dtype={parallel.param_dtype!r}"
    if parallel.offload_optimizer:
        return "offload_optimizer=True"
    return f"zero_stage={parallel.zero_stage}" if parallel.zero_stage > 1 else None


def deepspeed_missing() -> str | None:
    """Return why DeepSpeed cannot be used here and how to install it, or None; imports nothing."""
    found = None
    if importlib.util.find_spec("deepspeed") is not None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a folder of that name
            found = importlib.metadata.version("deepspeed")
    if found is None:
        return "DeepSpeed is not installed: pip install 'ortlab[deepspeed]'"
    if found != DEEPSPEED:
        return (
            f"DeepSpeed {found} is installed, and ortlab uses internals of {DEEPSPEED}: "
            "pip install 'ortlab[deepspeed]'"
        )
    return None


# --- a process group


def group_conflict(settings: FinetuneSettings, size: int, *, is_world: bool) -> str | None:
    """Return why a process group cannot train under the settings, or None.

    Args:
        settings: The run's settings.
        size: Number of the group's ranks.
        is_world: True if the group has all ranks of the job.

    Returns:
        A message that names the values and the alternatives.
    """
    parallel = settings.parallel
    if parallel.workers != size:
        return (
            f"workers={parallel.workers}, but the process group has {size} ranks; start "
            f"{parallel.workers}, or set workers={size}"
        )
    if (reason := ranks_conflict(settings, size)) is not None:
        return reason
    if not is_world and max(parallel.tensor_parallel, parallel.pipeline_stages) > 1:
        return (
            "tensor_parallel and pipeline_stages need all ranks, not a part of them; leave `group` "
            "out"
        )
    own = needs_deepspeed(parallel)
    if own is None or fully_sharded(settings) or deepspeed_serves(settings, is_world=is_world):
        return None
    reason = deepspeed_conflict(settings)
    return reason or f"{own}: DeepSpeed needs all ranks, not a part of them; leave `group` out"


def deepspeed_serves(settings: FinetuneSettings, *, is_world: bool) -> bool:
    """Return whether DeepSpeed takes the steps of a run.

    Where it does not, torch's ZeroRedundancyOptimizer implements ``zero_stage=1``.

    Args:
        settings: The run's settings.
        is_world: True if the process group has all ranks of the job, as DeepSpeed needs.

    Returns:
        True if a ZeRO stage is chosen and DeepSpeed supports the other settings.
    """
    return settings.parallel.zero_stage > 0 and is_world and deepspeed_conflict(settings) is None


# --- a plain script


def script_conflict(settings: FinetuneSettings) -> str | None:
    """Return why a plain training script cannot do what the settings of a run say, or None.

    Args:
        settings: The run's settings.

    Returns:
        A message that names the values and the alternatives.
    """
    return _first(_script_rules(settings))


def _script_rules(settings: FinetuneSettings) -> _Rules:
    model, optim, parallel = settings.model, settings.optim, settings.parallel
    for name in ("optimizer", "lr_scheduler_type"):
        yield (
            is_own(optim[name]),
            f"{name}={optim[name]!r} is an object of a run, which a script cannot create; leave "
            f"{name} out, and change it in the script",
        )
    yield (
        parallel.reduction != "mean",
        f"reduction={parallel.reduction!r} needs ortlab, and a plain script does without it; "
        "choose reduction='mean'",
    )
    yield (
        model.precision == "fp16",
        "precision='fp16' needs loss scaling, which the script does not have; choose 'bf16'",
    )
    yield (
        parallel.param_dtype != "fp32",
        f"param_dtype={parallel.param_dtype!r} is not supported, as the script trains fp32 "
        "weights; choose param_dtype='fp32', or add DeepSpeed's bf16 block to your own script",
    )
    yield (
        parallel.offload_optimizer,
        "offload_optimizer=True is not supported, as the script's optimizer runs on the device; "
        "choose offload_optimizer=False",
    )
    yield (
        model.recompute != "off",
        f"recompute={model.recompute!r} needs ORT's graph, which the script does not have; "
        "choose recompute='off', and use torch.utils.checkpoint in the model",
    )
    sharded = parallel.zero_stage > 1
    what = "engine='compile'" if model.engine == "compile" else "precision='bf16'"
    yield (
        sharded and (model.precision == "bf16" or model.engine == "compile"),
        f"{what} cannot be combined with zero_stage={parallel.zero_stage}, as DeepSpeed compiles "
        "and casts on its own; choose engine='eager' and precision='fp32', or zero_stage=1",
    )
    yield (
        sharded and settings.optim.optimizer == "lamb",
        f"optimizer='lamb' cannot be combined with zero_stage={parallel.zero_stage}, as its trust "
        "ratios need whole tensors and DeepSpeed partitions them; choose zero_stage=1, or "
        "optimizer='adamw'",
    )


# --- Hugging Face's Trainer


def trainer_conflict(stage: int, model: EngineSettings) -> str | None:
    """Return why a Trainer cannot train at a ZeRO stage with an engine, or None.

    Args:
        stage: ZeRO stage, 1 to 3.
        model: Settings that name the engine.

    Returns:
        A message that names the values and the alternatives.
    """
    return _first(_trainer_rules(stage, model))


def _trainer_rules(stage: int, model: EngineSettings) -> _Rules:
    yield (
        model.engine not in ("eager", "ort", "ortmodule"),
        f"zero_stage={stage} with engine={model.engine!r} is not tested in a Trainer; choose "
        "engine='eager' or engine='ort'",
    )
    yield (
        stage == 3 and model.engine != "eager",
        f"zero_stage=3 with engine={model.engine!r}: it reads all weights of the model at once, so "
        "every process would need all of them; choose zero_stage=2, or engine='eager'",
    )
    yield (
        model.precision != "fp32",
        f"zero_stage={stage} with precision={model.precision!r} is not tested in a Trainer; remove "
        "it, or train with ortlab.finetune and workers",
    )
