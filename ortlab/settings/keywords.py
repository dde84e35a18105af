"""Types of the settings as keyword arguments, for type checkers and completion in editors.

Generated from the declarations by ``python -m tests.support.keywords``; do not edit.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class EngineKeywords(TypedDict, total=False):
    """Settings of `ortlab.wrap`."""

    engine: Literal["auto", "eager", "compile", "ort", "ortmodule", "ort_fused"]
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    kernels: Literal["measured", "torch", "ort"]
    attention: Literal["auto", "fused", "onnx"]
    recompute: str
    activation_budget: float
    self_check: bool
    fallback: bool
    cache: bool
    log_level: Literal["verbose", "devinfo", "info", "warning", "error", "fatal"]
    opset: int
    shape_inference: bool
    copy_for_export: bool
    save_onnx: str | None
    compute_optimizer: bool
    label_sparsity: bool
    embedding_sparsity: bool
    cast_propagation: Literal["none", "insert_and_reduce", "flood_fill"]
    cast_level: int
    cast_ops: str
    memory_efficient_gradient: bool
    arena: bool
    memory_level: int
    memory_plans: str | None
    memory_stats: bool
    custom_autograd: bool
    skip_checks: str
    external_allocator: bool
    conv_algo_search: Literal["heuristic", "exhaustive"]
    triton: bool
    tuning: bool
    tuning_ms: int
    tuning_results: str | None


class FinetuneKeywords(TypedDict, total=False):
    """Settings of `ortlab.finetune`."""

    engine: Literal["auto", "eager", "compile", "ort", "ortmodule", "ort_fused"]
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    kernels: Literal["measured", "torch", "ort"]
    attention: Literal["auto", "fused", "onnx"]
    recompute: str
    activation_budget: float
    self_check: bool
    fallback: bool
    cache: bool
    num_train_epochs: int
    max_steps: int | None
    batch_size: int
    gradient_accumulation_steps: int
    seed: int
    learning_rate: float
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    warmup_steps: float
    weight_decay: float
    max_grad_norm: float | None
    device: Literal["auto", "cpu", "cuda"]
    workers: int
    isolated: bool
    zero_stage: int
    param_dtype: Literal["fp32", "bf16"]
    offload_optimizer: bool
    reduction: Literal["mean", "adasum"]
    tensor_parallel: int
    pipeline_stages: int
    pipeline_interleave: int
    eval_steps: int | None
    save_steps: int | None
    checkpoint_minutes: float | None
    keep_checkpoints: int
    keep_best: str | None
    keep_best_mode: Literal["auto", "max", "min"]
    early_stopping_patience: int | None
    early_stopping_threshold: float
    log_level: Literal["verbose", "devinfo", "info", "warning", "error", "fatal"]
    opset: int
    shape_inference: bool
    copy_for_export: bool
    save_onnx: str | None
    compute_optimizer: bool
    label_sparsity: bool
    embedding_sparsity: bool
    cast_propagation: Literal["none", "insert_and_reduce", "flood_fill"]
    cast_level: int
    cast_ops: str
    memory_efficient_gradient: bool
    arena: bool
    memory_level: int
    memory_plans: str | None
    memory_stats: bool
    custom_autograd: bool
    skip_checks: str
    external_allocator: bool
    conv_algo_search: Literal["heuristic", "exhaustive"]
    triton: bool
    tuning: bool
    tuning_ms: int
    tuning_results: str | None


class ScriptKeywords(TypedDict, total=False):
    """Settings of `ortlab.script`."""

    engine: Literal["auto", "eager", "compile", "ort", "ortmodule", "ort_fused"]
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    kernels: Literal["measured", "torch", "ort"]
    attention: Literal["auto", "fused", "onnx"]
    recompute: str
    activation_budget: float
    self_check: bool
    fallback: bool
    cache: bool
    num_train_epochs: int
    max_steps: int | None
    batch_size: int
    gradient_accumulation_steps: int
    seed: int
    learning_rate: float
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    warmup_steps: float
    optimizer: Literal["adamw", "sgd", "lamb"]
    weight_decay: float
    max_grad_norm: float | None
    device: Literal["auto", "cpu", "cuda"]
    workers: int
    isolated: bool
    zero_stage: int
    param_dtype: Literal["fp32", "bf16"]
    offload_optimizer: bool
    reduction: Literal["mean", "adasum"]
    tensor_parallel: int
    pipeline_stages: int
    pipeline_interleave: int
    eval_steps: int | None
    save_steps: int | None
    checkpoint_minutes: float | None
    keep_checkpoints: int
    keep_best: str | None
    keep_best_mode: Literal["auto", "max", "min"]
    early_stopping_patience: int | None
    early_stopping_threshold: float
    log_level: Literal["verbose", "devinfo", "info", "warning", "error", "fatal"]
    opset: int
    shape_inference: bool
    copy_for_export: bool
    save_onnx: str | None
    compute_optimizer: bool
    label_sparsity: bool
    embedding_sparsity: bool
    cast_propagation: Literal["none", "insert_and_reduce", "flood_fill"]
    cast_level: int
    cast_ops: str
    memory_efficient_gradient: bool
    arena: bool
    memory_level: int
    memory_plans: str | None
    memory_stats: bool
    custom_autograd: bool
    skip_checks: str
    external_allocator: bool
    conv_algo_search: Literal["heuristic", "exhaustive"]
    triton: bool
    tuning: bool
    tuning_ms: int
    tuning_results: str | None


class RaceKeywords(TypedDict, total=False):
    """Settings of `ortlab.race`."""

    engines: str
    precisions: str
    workers: str
    zero_stages: str
    memory: str | None
    steps: int | None
    rounds: int
    batches: int
    preset: Literal["examples"] | None
    kernels: Literal["measured", "torch", "ort"]
    attention: Literal["auto", "fused", "onnx"]
    recompute: str
    activation_budget: float
    self_check: bool
    fallback: bool
    cache: bool
    batch_size: int
    gradient_accumulation_steps: int
    seed: int
    learning_rate: float
    optimizer: Literal["adamw", "sgd", "lamb"]
    weight_decay: float
    max_grad_norm: float | None
    device: Literal["auto", "cpu", "cuda"]
    reduction: Literal["mean", "adasum"]
    tensor_parallel: int
    pipeline_stages: int
    pipeline_interleave: int
    log_level: Literal["verbose", "devinfo", "info", "warning", "error", "fatal"]
    opset: int
    shape_inference: bool
    copy_for_export: bool
    save_onnx: str | None
    compute_optimizer: bool
    label_sparsity: bool
    embedding_sparsity: bool
    cast_propagation: Literal["none", "insert_and_reduce", "flood_fill"]
    cast_level: int
    cast_ops: str
    memory_efficient_gradient: bool
    arena: bool
    memory_level: int
    memory_plans: str | None
    memory_stats: bool
    custom_autograd: bool
    skip_checks: str
    external_allocator: bool
    conv_algo_search: Literal["heuristic", "exhaustive"]
    triton: bool
    tuning: bool
    tuning_ms: int
    tuning_results: str | None


class TuneKeywords(TypedDict, total=False):
    """Settings of `ortlab.tune`."""

    engines: str
    precisions: str
    workers: str
    zero_stages: str
    memory: str | None
    steps: int | None
    rounds: int
    recompute: str
    global_batch: int | None
    sizes: int
    target: Literal["samples", "tokens"]
    kernels: Literal["measured", "torch", "ort"]
    attention: Literal["auto", "fused", "onnx"]
    activation_budget: float
    self_check: bool
    fallback: bool
    cache: bool
    seed: int
    learning_rate: float
    optimizer: Literal["adamw", "sgd", "lamb"]
    weight_decay: float
    max_grad_norm: float | None
    device: Literal["auto", "cpu", "cuda"]
    reduction: Literal["mean", "adasum"]
    tensor_parallel: int
    pipeline_stages: int
    pipeline_interleave: int
    log_level: Literal["verbose", "devinfo", "info", "warning", "error", "fatal"]
    opset: int
    shape_inference: bool
    copy_for_export: bool
    save_onnx: str | None
    compute_optimizer: bool
    label_sparsity: bool
    embedding_sparsity: bool
    cast_propagation: Literal["none", "insert_and_reduce", "flood_fill"]
    cast_level: int
    cast_ops: str
    memory_efficient_gradient: bool
    arena: bool
    memory_level: int
    memory_plans: str | None
    memory_stats: bool
    custom_autograd: bool
    skip_checks: str
    external_allocator: bool
    conv_algo_search: Literal["heuristic", "exhaustive"]
    triton: bool
    tuning: bool
    tuning_ms: int
    tuning_results: str | None


class ExportKeywords(TypedDict, total=False):
    """Settings of `ortlab.export`."""

    opset: int
    fp16: bool
    int8: bool
    external_data: bool


class HistoryKeywords(TypedDict, total=False):
    """Settings of `ortlab.list_runs`."""

    sort: Literal[
        "started",
        "name",
        "state",
        "model",
        "engine",
        "precision",
        "lr",
        "steps",
        "loss",
        "evaluation",
        "speed",
        "memory",
        "took",
        "size",
    ]
    reverse: bool
    engine: Literal["auto", "eager", "compile", "ort", "ortmodule", "ort_fused"] | None
    state: Literal["running", "finished", "stopped", "failed", "interrupted"] | None
    model: str | None
    tag: str | None
    limit: int | None
    wide: bool


class ProfileKeywords(TypedDict, total=False):
    """Settings of `ortlab.profile`."""

    steps: int


class FleetKeywords(TypedDict, total=False):
    """Settings of `ortlab.zero_plan`."""

    gpus: int
    memory: str | None
    precision: Literal["fp32", "mixed"] | None
    optimizer: Literal["adamw", "sgd", "lamb"]
    hidden: int | None
    layers: int | None
    heads: int | None
    vocabulary: int | None
    sequence: int | None
    batch: int | None


class PlanKeywords(TypedDict, total=False):
    """Settings of `ortlab.training_plan`."""

    tokens: str | None
    days: float | None
    gpus: int | None
    hardware: Literal[
        "v100-32gb", "v100-32gb-dgx2", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb"
    ]
    memory: str | None
    tflops: float | None
    link: float | None
    network: float | None
    node: int | None
    efficiency: float | None
    price: float | None
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    intermediate: int | None
    vocabulary: int | None
    sequence: int | None
    batch: int | None
    micro_batch: int | None
    tensor: int | None
    pipeline: int | None
    zero: int | None
    recompute: Literal["none", "selective", "full"] | None
    precision: Literal["fp32", "fp16", "bf16"] | None
    optimizer: Literal["adamw", "sgd", "lamb"]
    attention_scores: bool
    margin: float
    trainer: Literal["megatron", "ortlab"]
