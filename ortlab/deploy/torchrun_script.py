"""The training of a run as a plain script, for torchrun: PyTorch and DeepSpeed, nothing of ortlab.

The script's steps are those of `ortlab.training.trainer` and
`ortlab.engines.distributed.data_parallel`: the same batches in the same order, the same shares of
them, the same rates.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab.deploy.lab import Lab
from ortlab.deploy.source_code import Sources
from ortlab.engines import wrapped_models
from ortlab.settings import IN_ORT, LOSSES, FinetuneSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_BYTES = 2**30
"""Of data that is written beside a script."""
_DROPPED = (
    *("engine", "workers", "isolated", "device", "checkpoint_every", "eval_every"),
    *("checkpoint_minutes", "keep_checkpoints", "keep_best"),
)
"""Settings that say nothing of the steps of the script."""


@dataclass(frozen=True)
class Script:
    """A script that was written: where, how it is started, what is still to be filled in."""

    path: Path
    command: str
    open: tuple[str, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"{self.path}: {self.command}"]
        lines += [f"fill in {each}" for each in self.open]
        return "\n".join([*lines, *self.notes])


def script(
    lab: Lab,
    model: nn.Module,
    data: Iterable[Any] | None = None,
    *,
    to: str | Path = "standalone",
    make_model: str | None = None,
    make_data: str | None = None,
    loss: Any = None,
    **settings: Any,
) -> Script:
    """See `ortlab.api.script`; `lab` knows which models are wrapped."""
    module = wrapped_models.check_model("the first argument", model)
    entry = lab.wrapped.entry(module)
    original = module if entry is None else entry.engine.unwrap(module)
    own = {} if entry is None else entry.settings.as_dict()
    named = {"loss": loss} if isinstance(loss, str) else {}
    chosen = FinetuneSettings.of({**own, **settings, **named})
    _refuse(chosen)
    folder = Path(to)
    if (folder / "train.py").exists():
        raise ValueError(f"{folder / 'train.py'} is there already; name another folder with to=...")
    sources = Sources(lab.wrapped.namespace or vars(sys.modules["__main__"]))
    for code in (make_model, make_data):
        if code is not None:
            sources.add_code(code)
    writer = _Writer(original, chosen, folder, sources, loss)
    folder.mkdir(parents=True, exist_ok=True)
    text = writer.text(data, make_model, make_data)
    (folder / "train.py").write_text(text)
    command = f"torchrun --standalone --nproc-per-node {chosen.workers} {shlex.quote(str(folder))}"
    return Script(
        folder / "train.py", f"{command}/train.py", tuple(writer.open), tuple(writer.notes)
    )


def _refuse(settings: FinetuneSettings) -> None:
    """ValueError for what the script has no lines for."""
    if settings.reduction != "mean":
        raise ValueError(
            f"reduction={settings.reduction!r} is ortlab's own, and a plain script has none; "
            "choose reduction='mean'"
        )
    if settings.precision == "fp16":
        raise ValueError(
            "precision='fp16' needs a loss scale, which the script has none of; choose 'bf16'"
        )
    if settings.param_dtype != "fp32":
        raise ValueError(
            f"param_dtype={settings.param_dtype!r}: the script trains fp32 weights; choose "
            "param_dtype='fp32', or DeepSpeed's bf16 block in a script of your own"
        )
    if settings.offload_optimizer:
        raise ValueError(
            "offload_optimizer=True: the script's optimizer steps on the device; choose "
            "offload_optimizer=False"
        )
    if settings.recompute != "off":
        raise ValueError(
            f"recompute={settings.recompute!r} is for ORT's graph; choose recompute='off', and "
            "torch.utils.checkpoint in the model"
        )
    if settings.zero_stage > 1 and (settings.precision == "bf16" or settings.engine == "compile"):
        what = "engine='compile'" if settings.engine == "compile" else "precision='bf16'"
        raise ValueError(
            f"{what} with zero_stage={settings.zero_stage}: DeepSpeed takes compiling and casting "
            "into its own hands; choose engine='eager' and precision='fp32', or zero_stage=1"
        )
    if settings.optimizer == "lamb" and settings.zero_stage > 1:
        raise ValueError(
            f"optimizer='lamb' with zero_stage={settings.zero_stage}: its ratios are of whole "
            "tensors, which DeepSpeed cuts up; choose zero_stage=1, or optimizer='adamw'"
        )


class _Writer:
    """Writes one script. ``open`` is what is to be filled in, ``notes`` what else is to be said."""

    def __init__(
        self,
        model: nn.Module,
        settings: FinetuneSettings,
        folder: Path,
        sources: Sources,
        loss: Any,
    ) -> None:
        self.open: list[str] = []
        self.notes: list[str] = []
        self._model = model
        self._settings = settings
        self._folder = folder
        self._sources = sources
        self._deepspeed = settings.zero_stage > 1
        self._loss = self._loss_called(loss)
        self._steps: int | None = settings.max_steps

    def text(self, data: Any, make_model: str | None, make_data: str | None) -> str:
        """The script."""
        model = self._making(make_model)
        reading = self._reading(data, make_data)
        settings = self._settings
        if settings.engine in IN_ORT:
            self.notes.append("it trains in eager torch: ONNX Runtime is not in a plain script")
        if self._deepspeed:
            self.notes.append(
                "it needs DeepSpeed (pip install deepspeed), which on a CPU compiles for a minute "
                "when it starts the first time"
            )
        self.open += [f"{name}, which the code uses" for name in self._sources.missing]
        parts = [
            self._head(),
            *[part for part in self._sources.definitions if part],
            model,
            reading,
            self._sharing(),
            self._objective(),
            self._rate(),
            self._optimizer(),
            self._main(),
            'if __name__ == "__main__":\n    main()\n',
        ]
        return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"

    # ---- what is the user's

    def _loss_called(self, loss: Any) -> str | None:
        """How the script calls the loss; None for the model's own."""
        name = loss if isinstance(loss, str) else self._settings.loss
        if loss is None and name is None:
            return None
        if isinstance(name, str):
            return f"functional.{_FUNCTIONS[name]}" if name in LOSSES else name
        called = getattr(loss, "__name__", "")
        if not called.isidentifier():
            raise ValueError(
                f"loss is a {type(loss).__name__} without a name; define a function with def"
            )
        self._sources.add(called, loss)
        return called

    def _making(self, code: str | None) -> str:
        """``make_model``, and the weights in a file."""
        from safetensors.torch import save_model

        model, kind = self._model, type(self._model)
        if code is None and kind.__module__.startswith("transformers."):
            model.save_pretrained(self._folder / "model")  # type: ignore[operator]
            return (
                "def make_model() -> nn.Module:\n"
                '    """The model with its weights."""\n'
                f"    from transformers import {kind.__name__}\n\n"
                f'    model = {kind.__name__}.from_pretrained(HERE / "model")\n'
                f"{self._freezing()}    return model"
            )
        save_model(model, str(self._folder / "model.safetensors"))
        made = code or self._anew()
        if made is None:
            self._sources.add(kind.__name__, kind)
            made = f"{kind.__name__}(...)  # fill in its arguments"
            self.open.append(f"the arguments of {kind.__name__} in make_model, or give make_model=")
        return (
            "def make_model() -> nn.Module:\n"
            '    """The model with its weights: the file\'s names and shapes must be its own."""\n'
            f"{textwrap.indent(f'model = {made}', '    ')}\n"
            '    load_model(model, HERE / "model.safetensors")\n'
            f"{self._freezing()}    return model"
        )

    def _freezing(self) -> str:
        """The lines that freeze what is frozen."""
        names = [name for name, p in self._model.named_parameters() if not p.requires_grad]
        if not names:
            return ""
        return (
            f"    for name in {names!r}:\n        model.get_parameter(name).requires_grad_(False)\n"
        )

    def _anew(self) -> str | None:
        """The expression that makes a model of the same form; None where that is not known."""
        from torch import nn

        kind = type(self._model)
        if kind is nn.Sequential:
            code = _layers(self._model)
            return code if code is not None and repr(eval(code)) == repr(self._model) else None
        try:
            fresh = kind()
        except TypeError:
            return None
        form, own = ({n: v.shape for n, v in m.state_dict().items()} for m in (fresh, self._model))
        if form != own:
            return None
        self._sources.add(kind.__name__, kind)
        return f"{kind.__name__}()"

    def _reading(self, data: Any, code: str | None) -> str:
        """``micro_batches``, and the data in a file."""
        from ortlab.training.data_loading import batches
        from ortlab.training.schedule import total_steps

        begin = (
            "def micro_batches(epoch: int) -> Iterator[Any]:\n"
            '    """The micro-batches of an epoch, each with the samples of all processes."""\n'
        )
        if data is not None:
            self._steps = total_steps(batches(data, self._settings), self._settings)
        if code is not None:
            return f"{begin}    yield from {code}"
        found = None if data is None else self._written(data)
        if found is None:
            what = "the data" if data is None else f"what the {type(data).__name__} gave"
            self.open.append(f"{what} in micro_batches, or give make_data=")
            return f'{begin}    raise NotImplementedError("fill in {what}: yield batches")'
        return begin + found

    def _written(self, data: Any) -> str | None:
        """The lines that read `data` from the file that it is written to; None where it is not."""
        from safetensors.torch import save_file

        from ortlab.training.data_loading import collate, of_samples

        samples = of_samples(data) and hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not samples and not isinstance(data, list):
            return None
        try:
            whole = [collate([data[i] for i in range(len(data))])] if samples else data
        except ValueError:  # samples of several shapes: only the user knows how they are padded
            return None
        forms = [_form(batch) for batch in whole]
        if None in forms or len({tuple(form or ()) for form in forms}) != 1:
            return None
        tensors = {
            (name if samples else f"{number}.{name}"): tensor.contiguous().clone()
            for number, form in enumerate(forms)
            for name, tensor in (form or {}).items()
        }
        if sum(tensor.nbytes for tensor in tensors.values()) > MOST_BYTES:
            return None
        save_file(tensors, self._folder / "data.safetensors")
        each = list(forms[0] or ())
        read = 'samples["{0}"][rows]' if samples else 'samples[f"{{number}}.{0}"]'
        values = [read.format(name) for name in each]
        if isinstance(whole[0], Mapping):
            pairs = zip(each, values, strict=True)
            batch = "{" + ", ".join(f"{name!r}: {value}" for name, value in pairs) + "}"
        else:
            batch = f"[{', '.join(values)}]" if isinstance(whole[0], tuple | list) else values[0]
        loop = (
            _SHUFFLED.replace("COUNT", str(len(data)))
            if samples
            else (f"    for number in range({len(whole)}):\n")
        )
        return f'    samples = load_file(HERE / "data.safetensors")\n{loop}        yield {batch}'

    # ---- what is the settings'

    def _head(self) -> str:
        settings = self._settings
        declared = FinetuneSettings.declarations()
        told = " ".join(
            f"{declared[name].flag} {declared[name].show(value)}"
            for name, value in settings.as_dict().items()
            if value != declared[name].default and name not in _DROPPED
        )
        by = "ortlab" if not told else f"ortlab, as it trains with {told}"
        stage = settings.zero_stage
        how = ("DistributedDataParallel", "ZeroRedundancyOptimizer", "DeepSpeed", "DeepSpeed")
        lines = [
            f'"""Trains {type(self._model).__name__} in several processes: ZeRO stage {stage}, by '
            f"{how[stage]}.",
            "",
            f"    torchrun --standalone --nproc-per-node {settings.workers} train.py",
            "",
            "On several machines: torchrun's --nnodes and --rdzv-endpoint.",
            "",
            *textwrap.wrap(f"Written by {by}.", 98),
            '"""',
            "",
            "import contextlib",
            "import gc",
            "import itertools",
            "import math",
            "import os",
            "import sys",
            "from collections.abc import Iterator",
            "from pathlib import Path",
            "from typing import Any",
            "",
            *(["import deepspeed"] if self._deepspeed else []),
            "import numpy as np",
            "import torch",
            "import torch.distributed as dist",
            "from safetensors.torch import load_file, load_model, save_file",
            "from torch import nn",
            "from torch.nn import functional",
        ]
        known = set(lines)
        lines += [line for line in self._sources.imports if line not in known]
        constants = {
            "EPOCHS": settings.epochs,
            "STEPS": self._steps,
            "BATCH_SIZE": settings.batch_size,
            "ACCUMULATION": settings.accumulation,
            "LR": settings.lr,
            "WARMUP_STEPS": settings.warmup_steps,
            "WEIGHT_DECAY": settings.weight_decay,
            "CLIP_NORM": settings.clip_norm,
            "SEED": settings.seed,
        }
        lines += ["", "HERE = Path(__file__).parent"]
        lines += [
            f"{name} = {value!r}{_COMMENTS.get(name, '')}" for name, value in constants.items()
        ]
        return "\n".join(lines)

    def _sharing(self) -> str:
        """How a batch is shared out; see `ortlab.engines.distributed.batch_split`."""
        from ortlab.engines.distributed.batch_split import _is_causal

        if self._loss not in (None, "functional.cross_entropy"):
            return _SHARE.replace("WEIGHTS", "torch.ones(samples)")
        causal = self._loss is None and _is_causal(self._model)
        shifted = "[:, 1:]" if causal else ""
        sharing = _SHARE.replace("WEIGHTS", "weights_of(batch)")
        return _TARGETS.replace("SHIFTED", shifted) + sharing.lstrip("\n")

    def _objective(self) -> str:
        if self._loss is None:
            return _OWN_LOSS
        return _LOSS.replace("LOSS", self._loss)

    def _rate(self) -> str:
        settings = self._settings
        fall = {
            "constant": "    return LR",
            "linear": "    return LR * (1 - done)",
            "cosine": "    return LR * (1 + math.cos(math.pi * done)) / 2",
        }[settings.schedule if self._steps is not None else "constant"]
        done = (
            "    done = min((step - WARMUP_STEPS) / max(STEPS - WARMUP_STEPS, 1), 1.0)\n"
            if "done" in fall
            else ""
        )
        if self._steps is None and settings.schedule != "constant":
            self.notes.append(
                f"the rate stays: the {settings.schedule} schedule needs the run's length, which "
                "--max-steps gives"
            )
        return f"{_RATE}{done}{fall}"

    def _optimizer(self) -> str:
        name = self._settings.optimizer
        kind, more = {
            "adamw": ("torch.optim.AdamW", ", fused=True"),
            "sgd": ("torch.optim.SGD", ", momentum=0.9, fused=True"),
            "lamb": ("Lamb", ", weight_decouple=False, adam_debias=True"),
        }[name]
        lamb = _LAMB if name == "lamb" else ""
        ratios = (', "adam": False', ', "adam": True') if name == "lamb" else ("", "")
        if self._settings.zero_stage == 1:
            made = f"ZeroRedundancyOptimizer(groups, {kind}, lr=LR{more})"
            lamb = f"    from torch.distributed.optim import ZeroRedundancyOptimizer\n{lamb}"
        else:
            made = f"{kind}(groups, lr=LR{more})"
        text = _OPTIMIZER.replace("MATRIX", ratios[0]).replace("OTHER", ratios[1])
        return text.replace("IMPORTS", lamb and f"{lamb}\n").replace("MADE", made)

    def _main(self) -> str:
        settings = self._settings
        tf32 = '    torch.set_float32_matmul_precision("high")\n' * (settings.precision == "tf32")
        forward = "loss = objective(parallel, moved(own, device)) / len(micro)"
        if settings.precision == "bf16":
            forward = f"with torch.autocast(device.type, torch.bfloat16):\n{' ' * 24}{forward}"
        compiled = "torch.compile(model)" if settings.engine == "compile" else "model"
        clip = _CLIP if settings.clip_norm is not None else ""
        text = _DEEPSPEED if self._deepspeed else _TORCH
        for mark, piece in {
            "    TF32\n": tf32,
            "CAST": forward,
            "COMPILED": compiled,
            "            CLIP\n": clip,
            "STAGE": str(settings.zero_stage),
            "HOLDERS": "engine, optimizer" if self._deepspeed else "parallel, optimizer",
            "SHARDED": str(settings.zero_stage == 3),
        }.items():
            text = text.replace(mark, piece)
        return text


def _layers(model: nn.Module) -> str | None:
    """A Sequential of torch's own layers as an expression: they tell their arguments in `repr`."""
    from torch import nn

    children = []
    for child in model.children():
        if type(child) is nn.Sequential:
            inner = _layers(child)
            if inner is None:
                return None
            children.append(inner)
        elif getattr(nn, type(child).__name__, None) is type(child) and not list(child.children()):
            children.append(f"nn.{type(child).__name__}({child.extra_repr()})")
        else:
            return None
    inside = textwrap.indent(",\n".join(children), "    ")
    return f"nn.Sequential(\n{inside},\n)"


def _form(batch: Any) -> dict[str, torch.Tensor] | None:
    """The tensors of a batch by their names or places; None where it holds anything else."""
    import torch

    if isinstance(batch, torch.Tensor):
        return {"0": batch}
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    form = {str(name): value for name, value in pairs}
    return form if all(isinstance(value, torch.Tensor) for value in form.values()) else None


_FUNCTIONS = {
    "cross_entropy": "cross_entropy",
    "mse": "mse_loss",
    "l1": "l1_loss",
    "bce_with_logits": "binary_cross_entropy_with_logits",
}
_COMMENTS = {
    "STEPS": "  # in all; None: as many as the data gives",
    "BATCH_SIZE": "  # samples of a micro-batch, of all processes together",
    "ACCUMULATION": "  # micro-batches for one optimizer step",
}
_SHUFFLED = """\
    order = torch.Generator()
    order.manual_seed(int(np.random.SeedSequence([SEED, epoch]).generate_state(1)[0]))
    torch.empty((), dtype=torch.int64).random_(generator=order)
    for rows in torch.randperm(COUNT, generator=order).split(BATCH_SIZE):
"""
_TARGETS = '''
def weights_of(batch: Any) -> torch.Tensor:
    """What each sample weighs in the loss of its batch: its targets that are not -100."""
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
    """How many samples a batch has."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


def share(batch: Any, rank: int, size: int) -> tuple[Any, float]:
    """The rows of this process, and their part in the loss of the batch."""
    samples = samples_of(batch)
    weights = WEIGHTS
    least, more = divmod(samples, size)
    begin = rank * least + min(rank, more)
    end = begin + least + (rank < more)
    part = float(weights[begin:end].sum() / weights.sum())
    if part == 0:  # every process goes through the same collectives
        begin = int(weights.argmax())
        end = begin + 1
    return rows(batch, slice(begin, end), samples), part


def rows(value: Any, which: slice, samples: int) -> Any:
    """Those rows of every tensor that has one for each sample."""
    if isinstance(value, dict):
        return {name: rows(each, which, samples) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rows(each, which, samples) for each in value]
    is_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == samples
    return value[which] if is_rows else value


def moved(value: Any, device: torch.device) -> Any:
    """The same on a device."""
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
    """The loss that the model gives for a batch."""
{_CALL}    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output[0]
'''
_LOSS = f'''
def objective(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch, whose target is called so or comes last."""
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
    """The rate of a step, counted from 0: a warm-up, then the schedule."""
    if step < WARMUP_STEPS:
        return LR * (step + 1) / (WARMUP_STEPS + 1)
'''
_LAMB = """\
    from pytorch_optimizer import Lamb

    Lamb.clamp = math.inf  # of the norm of weights: the paper has no bound of 10
"""
_OPTIMIZER = '''
def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay acts on matrices alone."""
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
_BEGIN = '''
def save(model: nn.Module) -> None:
    """Writes the weights beside this script."""
    tensors = {
        name: value.cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
    save_file(tensors, HERE / "trained.safetensors")


def main() -> None:
    """Trains; process 0 prints the losses and writes the weights."""
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    TF32
    INIT("nccl" if on_cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model().to(device).train()
'''
_LOOP = """\
    # Dropout draws from a state of each process, data from one that is the same in all.
    torch.manual_seed(int(np.random.SeedSequence([SEED, rank]).generate_state(1)[0]) >> 1)
    own_random = torch.get_rng_state()
    torch.default_generator.manual_seed(SEED)
    step = 0
    for epoch in range(EPOCHS):
        batches = micro_batches(epoch)
        while step != STEPS and (micro := list(itertools.islice(batches, ACCUMULATION))):
            data_random = torch.get_rng_state()
            torch.set_rng_state(own_random)
            total = torch.zeros((), device=device)
            for number, batch in enumerate(micro, 1):
                own, part = share(batch, rank, size)
BACKWARD                total += loss.detach() * part
            own_random = torch.get_rng_state()
            torch.set_rng_state(data_random)
            dist.all_reduce(total)
            if not torch.isfinite(total):
                sys.exit(f"the loss of step {step + 1} is {float(total)}")
UPDATE            step += 1
            if rank == 0:
                print(f"step {step} loss {float(total):.9g}", flush=True)
SAVE    dist.barrier()  # nobody leaves while another is at work
    # What holds the process group would have it end with the interpreter, whose threads are gone.
    del HOLDERS
    gc.collect()
    dist.destroy_process_group()
"""
_TORCH = (
    _BEGIN.replace("INIT", "dist.init_process_group")
    + """\
    # find_unused_parameters=False is faster where all parameters have a part in the loss.
    parallel = nn.parallel.DistributedDataParallel(COMPILED, find_unused_parameters=True)
    optimizer = make_optimizer(model)
"""
    + _LOOP.replace(
        "BACKWARD",
        """\
                # Gradients are reduced in the last backward, to their mean over the processes.
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
    if rank == 0:
        save(model)
""",
    )
)
_DEEPSPEED = (
    _BEGIN.replace("INIT", "deepspeed.init_distributed")
    + """\
    config = {
        "train_micro_batch_size_per_gpu": 1,  # batches are shared out and accumulated below
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
                engine.backward(loss * part * size)  # the mean over the processes is taken
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
)
