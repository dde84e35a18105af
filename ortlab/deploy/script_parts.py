"""The parts of a training script that depend on the settings: templates that are filled in."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ortlab.settings import CheckpointSettings, FinetuneSettings, OptimSettings

if TYPE_CHECKING:
    from torch import nn

STOPPED = 75
"""Exit code of a script that stopped after SIGTERM and can go on (EX_TEMPFAIL of sysexits.h)."""
_SAVE_STEPS = 100
_ELASTIC = (
    "Every SAVE_STEPS steps, and when it gets SIGTERM, it writes checkpoint.pt; the next start",
    "continues from there, also with another number of processes.",
    "",
)
_DROPPED = (
    *("engine", "workers", "isolated", "device"),
    *CheckpointSettings.declarations(),
)
"""Settings that have no effect on the steps of the script."""


def head(
    settings: FinetuneSettings, *, model_name: str, steps: int | None, imports: list[str]
) -> str:
    """Return the docstring, the imports and the constants of a script.

    Args:
        settings: Settings of the run.
        model_name: Name of the model's class.
        steps: Optimizer steps of the training; None for as many as the data has.
        imports: Import lines that the user's code needs.
    """
    parallel = settings.parallel
    declared = FinetuneSettings.declarations()
    options = " ".join(
        declared[name].typed(value)
        for name, value in settings.changed().items()
        if name not in _DROPPED
    )
    by = "ortlab for the settings " + options if options else "ortlab"
    stage = parallel.zero_stage
    how = ("DistributedDataParallel", "ZeroRedundancyOptimizer", "DeepSpeed", "DeepSpeed")
    lines = [
        f'"""Train {model_name} in several processes: ZeRO stage {stage} with {how[stage]}.',
        "",
        f"    torchrun --standalone --nproc-per-node {parallel.workers} train.py",
        "",
        "On several machines, add torchrun's options --nnodes and --rdzv-endpoint, or start it by",
        "srun (job.sbatch, beside this file, is a job of Slurm) or by mpirun. Any number of",
        "processes trains on the same batches.",
        "",
        *(_ELASTIC if stage < 2 else []),
        *textwrap.wrap(f"Written by {by}.", 98),
        '"""',
        "",
        "import contextlib",
        "import fcntl",
        "import gc",
        "import itertools",
        "import math",
        "import os",
        *(["import signal"] if stage < 2 else []),
        "import socket",
        "import subprocess",
        "import sys",
        "from collections.abc import Iterator",
        "from pathlib import Path",
        "from typing import Any",
        "",
        *(["import deepspeed"] if parallel.zero_stage > 1 else []),
        "import numpy as np",
        "import torch",
        "import torch.distributed as dist",
        "from safetensors.torch import load_file, load_model, save_file",
        "from torch import nn",
        "from torch.nn import functional",
    ]
    known = set(lines)
    lines += [line for line in imports if line not in known]
    lines += ["", "HERE = Path(__file__).parent", *_constants(settings, steps)]
    if stage < 2:
        lines += ['CHECKPOINT = HERE / "checkpoint.pt"', f"STOPPED = {STOPPED}  # exit code"]
    return "\n".join(lines)


def _constants(settings: FinetuneSettings, steps: int | None) -> list[str]:
    from ortlab.training import schedule  # heavy: torch

    data, optim = settings.data, settings.optim
    constants = {
        "EPOCHS": settings.limits.num_train_epochs if settings.limits.max_steps is None else None,
        "STEPS": steps,
        "BATCH_SIZE": data.batch_size,
        "ACCUMULATION": data.gradient_accumulation_steps,
        "LR": optim.learning_rate,
        "WARMUP_STEPS": schedule.warmup(steps, optim),
        "WEIGHT_DECAY": optim.weight_decay,
        "CLIP_NORM": optim.max_grad_norm,
        "SEED": data.seed,
    }
    if settings.parallel.zero_stage < 2:
        constants["SAVE_STEPS"] = settings.checkpoint.save_steps or _SAVE_STEPS
    return [f"{name} = {value!r}{_COMMENTS.get(name, '')}" for name, value in constants.items()]


def batch_split(model: nn.Module, loss: str | None) -> str:
    """Return the functions that split a batch across the processes.

    The split is that of `ortlab.engines.distributed.batch_split`.

    Args:
        model: The model; with its own loss, a causal one ignores the first label of a sequence.
        loss: The loss function as the script calls it; None for the model's own.
    """
    from ortlab.engines.distributed.batch_split import _is_causal  # heavy: torch

    if loss not in (None, "functional.cross_entropy"):
        return _SHARE.replace("WEIGHTS", "torch.ones(samples)")
    causal = loss is None and _is_causal(model)
    shifted = "[:, 1:]" if causal else ""
    sharing = _SHARE.replace("WEIGHTS", "weights_of(batch)")
    return _TARGETS.replace("SHIFTED", shifted) + sharing.lstrip("\n")


def objective(loss: str | None) -> str:
    """Return the function that computes the loss of a batch.

    Args:
        loss: The loss function as the script calls it; None for the model's own.
    """
    return _OWN_LOSS if loss is None else _LOSS.replace("LOSS", loss)


def learning_rate(optim: OptimSettings, steps: int | None) -> str:
    """Return the function that computes the learning rate of a step.

    Args:
        optim: Settings with the schedule.
        steps: Optimizer steps of the training; None, if unknown, makes the rate constant.
    """
    fall = {
        "constant": "    return LR",
        "linear": "    return LR * (1 - done)",
        "cosine": "    return LR * (1 + math.cos(math.pi * done)) / 2",
    }[optim.lr_scheduler_type if steps is not None else "constant"]
    done = (
        "    done = min((step - WARMUP_STEPS) / max(STEPS - WARMUP_STEPS, 1), 1.0)\n"
        if "done" in fall
        else ""
    )
    return f"{_RATE}{done}{fall}"


def optimizer(settings: FinetuneSettings) -> str:
    """Return the function that makes the optimizer."""
    name = settings.optim.optimizer
    kind, more = {
        "adamw": ("torch.optim.AdamW", ", fused=True"),
        "sgd": ("torch.optim.SGD", ", momentum=0.9, fused=True"),
        "lamb": ("Lamb", ", weight_decouple=False, adam_debias=True"),
    }[name]
    lamb = _LAMB if name == "lamb" else ""
    ratios = (', "adam": False', ', "adam": True') if name == "lamb" else ("", "")
    if settings.parallel.zero_stage == 1:
        made = f"ZeroRedundancyOptimizer(groups, {kind}, lr=LR{more})"
        lamb = f"    from torch.distributed.optim import ZeroRedundancyOptimizer\n{lamb}"
    else:
        made = f"{kind}(groups, lr=LR{more})"
    text = _OPTIMIZER.replace("MATRIX", ratios[0]).replace("OTHER", ratios[1])
    return text.replace("IMPORTS", lamb and f"{lamb}\n").replace("MADE", made)


def meeting(settings: FinetuneSettings) -> str:
    """Return the functions by which the processes find each other under any launcher.

    Args:
        settings: Settings of the run.
    """
    workers = str(settings.parallel.workers)
    text = _MEETING.replace("WORKERS", workers)
    return (
        text
        + _CHECKPOINT.replace(
            "CONSOLIDATED",
            "    optimizer.consolidate_state_dict()\n" * (settings.parallel.zero_stage == 1),
        )
        if settings.parallel.zero_stage < 2
        else text
    )


def job(workers: int) -> str:
    """Return a batch script for Slurm, which starts the training and goes on after a time limit.

    Args:
        workers: Number of processes.
    """
    return _JOB.format(workers=workers, stopped=STOPPED)


def main(settings: FinetuneSettings) -> str:
    """Return the functions that train and save the weights."""
    model, parallel = settings.model, settings.parallel
    deepspeed = parallel.zero_stage > 1
    tf32 = '    torch.set_float32_matmul_precision("high")\n' * (model.precision == "tf32")
    forward = "loss = objective(parallel, moved(own, device)) / len(micro)"
    if model.precision == "bf16":
        forward = f"with torch.autocast(device.type, torch.bfloat16):\n{' ' * 24}{forward}"
    compiled = "torch.compile(model)" if model.engine == "compile" else "model"
    clip = _CLIP if settings.optim.max_grad_norm is not None else ""
    text = _DEEPSPEED if deepspeed else _TORCH
    for mark, piece in {
        "    TF32\n": tf32,
        "CAST": forward,
        "COMPILED": compiled,
        "            CLIP\n": clip,
        "STAGE": str(parallel.zero_stage),
        "HOLDERS": "engine, optimizer" if deepspeed else "parallel, optimizer",
        "SHARDED": str(parallel.zero_stage == 3),
    }.items():
        text = text.replace(mark, piece)
    return text


_COMMENTS = {
    "EPOCHS": "  # passes over the data; None: as many as STEPS take",
    "STEPS": "  # optimizer steps in total; None: until the data ends",
    "BATCH_SIZE": "  # samples of a micro-batch, summed over all processes",
    "ACCUMULATION": "  # micro-batches per optimizer step",
    "SAVE_STEPS": "  # optimizer steps between two checkpoints",
}
_JOB = """\
#!/bin/sh
# Submit it in this folder, which all hosts share: sbatch job.sbatch
#SBATCH --job-name=train
#SBATCH --ntasks={workers}
#SBATCH --time=1:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@60

# A minute before the time limit all processes get SIGTERM, write a checkpoint and exit with code
# {stopped}; the job then waits for its next turn, in which they go on from the checkpoint.
srun --kill-on-bad-exit=0 --wait=60 "${{PYTHON:-python}}" train.py
code=$?
if [ "$code" -eq {stopped} ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
_TARGETS = '''
def weights_of(batch: Any) -> torch.Tensor:
    """Return each sample's weight in the batch loss: its number of targets that are not -100."""
    if isinstance(batch, dict):
        names = ("labels", "label", "target", "targets")
        targets = next((batch[name] for name in names if name in batch), None)
    else:
        targets = batch[-1] if isinstance(batch, list) else None
    if targets is None or targets.is_floating_point():
        return torch.ones(samples_of(batch))
    return (targets != -100).reshape(len(targets), -1)SHIFTED.sum(1).float()


'''
_SHARE = '''
def samples_of(batch: Any) -> int:
    """Return the number of samples in a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


def share(batch: Any, rank: int, size: int) -> tuple[Any, float]:
    """Return the rows of this process and their share of the batch loss."""
    samples = samples_of(batch)
    weights = WEIGHTS
    least, more = divmod(samples, size)
    begin = rank * least + min(rank, more)
    end = begin + least + (rank < more)
    part = float(weights[begin:end].sum() / weights.sum())
    if part == 0:  # every process must run the same collectives
        begin = int(weights.argmax())
        end = begin + 1
    return rows(batch, slice(begin, end), samples), part


def rows(value: Any, which: slice, samples: int) -> Any:
    """Return the selected rows of every tensor that has one row per sample."""
    if isinstance(value, dict):
        return {name: rows(each, which, samples) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rows(each, which, samples) for each in value]
    is_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == samples
    return value[which] if is_rows else value


def moved(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on a device."""
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
'''
_CALL = """\
    if isinstance(inputs, dict):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, list) else model(inputs)
"""
_OWN_LOSS = f'''
def objective(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the loss that the model computes for a batch."""
{_CALL}    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output[0]
'''
_LOSS = f'''
def objective(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch, whose target is the last item or is named as one."""
    if isinstance(batch, dict):
        names = ("labels", "label", "target", "targets")
        called = next(name for name in names if name in batch)
        inputs = {{name: value for name, value in batch.items() if name != called}}
        target = batch[called]
    else:
        *inputs, target = batch
{_CALL}    if isinstance(output, dict):
        output = output["logits"]
    scores = output if isinstance(output, torch.Tensor) else output[0]
    return LOSS(scores, target)
'''
_RATE = '''
def learning_rate(step: int) -> float:
    """Return the learning rate of a step, counted from 0: warmup, then the schedule."""
    if step < WARMUP_STEPS:
        return LR * (step + 1) / (WARMUP_STEPS + 1)
'''
_LAMB = """\
    from pytorch_optimizer import Lamb

    Lamb.clamp = math.inf  # upper bound of the weight norm: 10 by default, none in the paper
"""
_OPTIMIZER = '''
def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer. Weight decay applies to matrices only."""
IMPORTS    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    others = [p for p in trained if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAYMATRIX},
        {"params": others, "weight_decay": 0.0OTHER},
    ]
    groups = [group for group in groups if group["params"]]
    return MADE
'''
_CLIP = """\
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
"""
_MEETING = '''
def meet() -> None:
    """Set torchrun's variables under srun and mpirun, which have other names for them."""
    env = os.environ
    if "RANK" in env:  # torchrun
        return
    if "OMPI_COMM_WORLD_RANK" in env:  # mpirun
        names = ("RANK", "SIZE", "LOCAL_RANK")
        rank, size, local = (env[f"OMPI_COMM_WORLD_{name}"] for name in names)
        if env["OMPI_COMM_WORLD_LOCAL_SIZE"] == size:
            env.setdefault("MASTER_ADDR", "127.0.0.1")
        elif "MASTER_ADDR" not in env:
            sys.exit("name the first host: mpirun -x MASTER_ADDR=HOST ...")
        env.setdefault("MASTER_PORT", "29500")
    elif "SLURM_STEP_ID" in env:  # srun
        names = ("PROCID", "STEP_NUM_TASKS", "LOCALID")
        rank, size, local = (env[f"SLURM_{name}"] for name in names)
        if "MASTER_ADDR" not in env:
            words = ("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"])
            hosts = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
            env["MASTER_ADDR"] = hosts[0]
        of_job = int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(20000 + of_job % 20000))
    else:
        sys.exit(
            "start several processes: torchrun --standalone --nproc-per-node WORKERS train.py, "
            "srun python train.py in a job of Slurm, or mpirun -np WORKERS python train.py"
        )
    env.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=local)
    if "GLOO_SOCKET_IFNAME" not in env and (found := interface_to(env["MASTER_ADDR"])):
        # Many hosts take their own name for loopback, where no other one reaches them.
        env["GLOO_SOCKET_IFNAME"] = found


def interface_to(host: str) -> str | None:
    """Return the network interface by which this host reaches another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, 1))  # sends nothing
        own = asked.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                told = fcntl.ioctl(asked, 0x8915, name.encode().ljust(256, b"\\0"))  # SIOCGIFADDR
                if socket.inet_ntoa(told[20:24]) == own:
                    return name
    return None
'''
_CHECKPOINT = '''

def write_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, own_random: torch.Tensor
) -> None:
    """Write what the next start goes on from; all processes call it."""
    random: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(random, own_random)
CONSOLIDATED    if dist.get_rank():
        return
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": random,
    }
    part = CHECKPOINT.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, CHECKPOINT)
'''
_BEGIN = '''
def save(model: nn.Module) -> None:
    """Write the weights to a file beside this script."""
    tensors = {
        name: value.cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
    save_file(tensors, HERE / "trained.safetensors")


def main() -> None:
    """Train the model. Process 0 prints the losses and writes the weights."""
    meet()
    on_cuda = torch.cuda.is_available()
    # A launcher may show each process its own GPU alone.
    index = int(os.environ["LOCAL_RANK"]) % max(torch.cuda.device_count(), 1)
    device = torch.device("cuda", index) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    TF32
    INIT("nccl" if on_cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model().to(device).train()
'''
_LOOP = """\
    # Dropout uses a random state per process; data uses one that is the same in all processes.
    torch.manual_seed(int(np.random.SeedSequence([SEED, rank]).generate_state(1)[0]) >> 1)
    own_random = torch.get_rng_state()
RESUME    torch.default_generator.manual_seed(SEED)
    step = 0
    for epoch in itertools.count() if EPOCHS is None else range(EPOCHS):
        batches, before = micro_batches(epoch), step
        while step != STEPS and (micro := list(itertools.islice(batches, ACCUMULATION))):
SKIP            data_random = torch.get_rng_state()
            torch.set_rng_state(own_random)
            total = torch.zeros(2, device=device)  # the loss, and who was told to stop
            for number, batch in enumerate(micro, 1):
                own, part = share(batch, rank, size)
BACKWARD                total[0] += loss.detach() * part
            own_random = torch.get_rng_state()
            torch.set_rng_state(data_random)
ASKED            dist.all_reduce(total)
            if not torch.isfinite(total[0]):
                sys.exit(f"the loss of step {step + 1} is {float(total[0])}")
UPDATE            step += 1
            if rank == 0:
                print(f"step {step} loss {float(total[0]):.9g}", flush=True)
WRITE        if step in (STEPS, before)STOPS:
            break
SAVE    dist.barrier()  # no process exits while another is still working
    # Drop all references to the process group now: it cannot shut down cleanly at interpreter exit.
    del HOLDERS
    gc.collect()
    dist.destroy_process_group()
EXIT"""
_TORCH = (
    _BEGIN.replace("INIT", "dist.init_process_group")
    + """\
    # find_unused_parameters=False is faster if every parameter contributes to the loss.
    parallel = nn.parallel.DistributedDataParallel(COMPILED, find_unused_parameters=True)
    optimizer = make_optimizer(model)
"""
    + _LOOP.replace(
        "BACKWARD",
        """\
                # The last backward averages the gradients over the processes.
                with contextlib.nullcontext() if number == len(micro) else parallel.no_sync():
                    CAST
                    (loss * part * size).backward()
""",
    )
    .replace(
        "UPDATE",
        """\
            CLIP
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
""",
    )
    .replace(
        "SAVE",
        """\
    if rank == 0 and not stopped:
        save(model)
        CHECKPOINT.unlink(missing_ok=True)
""",
    )
    .replace(
        "RESUME",
        """\
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    done, stopped = 0, False
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
        if len(saved["random"]) == size:
            own_random = saved["random"][rank]
""",
    )
    .replace(
        "SKIP",
        """\
            if step < done:  # taken before the checkpoint
                step += 1
                continue
""",
    )
    .replace(
        "ASKED",
        """\
            total[1] = len(told)
""",
    )
    .replace(
        "WRITE",
        """\
            stopped = bool(total[1])
            if stopped or step % SAVE_STEPS == 0:
                write_checkpoint(model, optimizer, step, own_random)
            if stopped:
                break
""",
    )
    .replace("STOPS", " or stopped")
    .replace(
        "EXIT",
        """\
    if stopped:
        print(f"process {rank} stopped after step {step}; start again to go on", flush=True)
        sys.exit(STOPPED)
""",
    )
)
_DEEPSPEED = (
    _BEGIN.replace("INIT", "deepspeed.init_distributed")
    + """\
    config = {
        "train_micro_batch_size_per_gpu": 1,  # batches are split and accumulated below
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM or 0.0,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model), config=config
    )
"""
    + _LOOP.replace(
        "BACKWARD",
        """\
                last = number == len(micro)
                engine.set_gradient_accumulation_boundary(last)
                loss = objective(engine, moved(own, device)) / len(micro)
                engine.backward(loss * part * size)  # averaged over processes
                if not last:
                    engine.step()
""",
    )
    .replace(
        "UPDATE",
        """\
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            engine.step()
""",
    )
    .replace(
        "SAVE",
        """\
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=SHARDED):
        if rank == 0:
            save(model)
""",
    )
    .replace("RESUME", "")
    .replace("SKIP", "")
    .replace("ASKED", "")
    .replace("WRITE", "")
    .replace("STOPS", "")
    .replace("EXIT", "")
)
