"""Files that launch a planned run, and the settings of `ortlab.finetune` for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ortlab.engines import compatibility
from ortlab.plan.cost import Layout
from ortlab.plan.hardware import Hardware
from ortlab.plan.transformer import Transformer
from ortlab.settings import FinetuneSettings

_JOB: Final = """\
#!/bin/bash
#SBATCH --job-name=ortlab-plan
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --exclusive
# One task of each node starts launch.sh; the first node is where the ranks meet.
export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash launch.sh
"""
_TORCHRUN: Final = """\
torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-id "${{SLURM_JOB_ID:-plan}}" \\
    --rdzv-backend c10d --rdzv-endpoint "${{HEAD_NODE:-localhost}}:29500" \\
    """


def finetune_settings(layout: Layout, optimizer: str) -> dict[str, Any]:
    """Return the settings of `ortlab.finetune` for a layout; see `finetune_conflict`.

    Args:
        layout: The layout.
        optimizer: Name of the optimizer.
    """
    halves = layout.precision == "bf16" and layout.zero > 0
    found: dict[str, Any] = {
        "workers": layout.gpus,
        "batch_size": layout.micro_batch * layout.data,  # of all replicas
        "gradient_accumulation_steps": layout.micro_batches,
        "engine": "ort" if layout.recompute == "full" else "eager",
        "precision": layout.precision,
        "optimizer": optimizer,
    }
    others = {
        "recompute": ("layers" if layout.recompute == "full" else "off", "off"),
        "zero_stage": (layout.zero, 0),
        "param_dtype": ("bf16" if halves else "fp32", "fp32"),
        "tensor_parallel": (layout.tensor, 1),
        "pipeline_stages": (layout.pipeline, 1),
    }
    return {
        **found,
        **{name: value for name, (value, default) in others.items() if value != default},
    }


def finetune_conflict(layout: Layout, optimizer: str) -> str | None:
    """Return why `ortlab.finetune` cannot train a layout, or None.

    Args:
        layout: The layout.
        optimizer: Name of the optimizer.

    Returns:
        A line that says what to plan with.
    """
    ours = "plan with trainer='ortlab'"
    if layout.recompute == "selective":
        return f"it recomputes whole layers only; {ours}"
    if layout.interleave > 1:
        return f"its interleaved pipelines run on CPUs (interleave={layout.interleave}); {ours}"
    settings = FinetuneSettings.of(finetune_settings(layout, optimizer))
    reason = compatibility.ranks_conflict(settings, layout.gpus, elsewhere=True)
    if reason is None and layout.recompute == "full" and layout.zero == 3:
        reason = "zero_stage=3 runs each layer alone, without recompute='layers'"
    if reason is not None:
        return f"{reason.partition(';')[0]}; {ours}"
    if layout.sequence_parallel:
        return f"its tensor parallelism does not share layers by tokens; {ours}"
    if layout.fp32_gradients and layout.zero:
        return f"it accumulates gradients in bf16, with less memory; {ours}"
    return None


def write_files(
    folder: Path,
    model: Transformer,
    layout: Layout,
    settings: dict[str, Any] | str,
    hardware: Hardware,
    steps: int | None,
) -> tuple[Path, ...]:
    """Write ``launch.sh``, ``job.sbatch`` and ``settings.json``.

    Args:
        folder: Folder of the files.
        model: The shape.
        layout: The layout.
        settings: Settings of `ortlab.finetune`; or why it cannot train the layout.
        hardware: The GPUs.
        steps: Number of steps; None if it is not known.

    Raises:
        ValueError: If one of the files exists.
    """
    each = min(layout.gpus, hardware.node)
    nodes = layout.gpus // each
    told = _for_ortlab(settings) if isinstance(settings, dict) else _for_megatron(settings)
    if isinstance(settings, dict):
        command, saved = "train.py\n", settings
    else:
        flags = megatron_flags(model, layout, steps)
        command = "pretrain_gpt.py \\\n    " + " \\\n    ".join(flags) + ' \\\n    "$@"\n'
        saved = {"megatron": flags}
    text = {
        "launch.sh": f"#!/bin/bash\n{told}" + _TORCHRUN.format(nodes=nodes, each=each) + command,
        "job.sbatch": _JOB.format(nodes=nodes, each=each),
        "settings.json": json.dumps(saved, indent=1) + "\n",
    }
    paths = {folder / name: content for name, content in text.items()}
    if exists := [path for path in paths if path.exists()]:
        raise ValueError(f"{exists[0]} already exists; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in paths.items():
        path.write_text(content)
    return tuple(paths)


def _for_ortlab(settings: dict[str, Any]) -> str:
    lines = ["settings.json has the settings of ortlab.finetune(model, data, **settings)."]
    reason = compatibility.script_conflict(FinetuneSettings.of(settings))
    if reason is None:
        lines.append("train.py: ortlab.script(model, data, to='.', **settings) writes it.")
    else:
        lines += [
            f"ortlab.script cannot write train.py: {reason.partition(';')[0]}.",
            "Train with ortlab.finetune, or write a train.py of your own.",
        ]
    return "".join(f"# {line}\n" for line in lines)


def _for_megatron(reason: str) -> str:
    lines = [
        f"ortlab cannot train this layout: {reason}.",
        "These are the options of Megatron-LM's pretrain_gpt.py, which are not tested here; add",
        "those of data, tokenizer and learning rate: bash launch.sh --data-path ...",
    ]
    return "".join(f"# {line}\n" for line in lines)


def megatron_flags(model: Transformer, layout: Layout, steps: int | None) -> list[str]:
    """Return a layout as options of Megatron-LM's ``pretrain_gpt.py``.

    Args:
        model: The shape.
        layout: The layout.
        steps: Number of steps; None if it is not known.
    """
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.mlp_width}",
        f"--num-attention-heads {model.heads}",
        f"--seq-length {model.sequence}",
        f"--max-position-embeddings {model.sequence}",
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.batch}",
    ]
    if model.kv_heads and model.kv_heads != model.heads:
        flags.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if model.gated:
        flags.append("--swiglu --disable-bias-linear --normalization RMSNorm")
    if not model.tied:
        flags.append("--untie-embeddings-and-output-weights")
    if layout.precision != "fp32":
        flags.append(f"--{layout.precision}")
    if layout.stage_layers(model) != layout.end_layers(model):
        flags.append("--account-for-embedding-in-pipeline-split")
        flags.append("--account-for-loss-in-pipeline-split")
    if layout.interleave > 1:
        parts = layout.stage_layers(model) // layout.interleave
        flags.append(f"--num-layers-per-virtual-pipeline-stage {parts}")
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.zero:
        flags.append("--use-distributed-optimizer")
    if layout.zero == 2:
        flags.append("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads")
    if layout.zero == 3:
        flags.append("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    if layout.recompute == "full":
        flags.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    if layout.recompute == "selective":
        flags.append("--recompute-granularity selective")
    if layout.fused_attention:
        flags.append("--use-flash-attn")
    if steps is not None:
        flags.append(f"--train-iters {steps}")
    return flags
