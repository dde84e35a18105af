"""The user's model and data in a training script: their files and the code that reads them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab.deploy.source_code import Sources

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_BYTES = 2**30
"""Maximum size of the data that is written beside a script."""


def model_code(
    model: nn.Module, folder: Path, sources: Sources, code: str | None
) -> tuple[str, str | None]:
    """Save the weights of a model and return the source of ``make_model``, which loads them.

    Args:
        model: The model, unwrapped.
        folder: The script's folder, where the weights are written.
        sources: Collects the definitions that the source uses.
        code: The user's expression that makes the model; None to derive one.

    Returns:
        The source, and a description of what the user must fill in, or None.
    """
    from safetensors.torch import save_model  # heavy: torch

    kind, to_fill_in = type(model), None
    if code is None and kind.__module__.startswith("transformers."):
        model.save_pretrained(folder / "model")  # type: ignore[operator]
        return (
            "def make_model() -> nn.Module:\n"
            '    """Return the model with its weights."""\n'
            f"    from transformers import {kind.__name__}\n\n"
            f'    model = {kind.__name__}.from_pretrained(HERE / "model")\n'
            f"{_freezing(model)}    return model"
        ), None
    save_model(model, str(folder / "model.safetensors"))
    made = code or _expression(model, sources)
    if made is None:
        sources.add(kind.__name__, kind)
        made = f"{kind.__name__}(...)  # fill in the arguments"
        to_fill_in = f"the arguments of {kind.__name__} in make_model, or give make_model="
    return (
        "def make_model() -> nn.Module:\n"
        '    """Return the model with its weights; names and shapes must match the file."""\n'
        f"{textwrap.indent(f'model = {made}', '    ')}\n"
        '    load_model(model, HERE / "model.safetensors")\n'
        f"{_freezing(model)}    return model"
    ), to_fill_in


def _freezing(model: nn.Module) -> str:
    """Return the lines that freeze the model's frozen parameters."""
    names = [name for name, p in model.named_parameters() if not p.requires_grad]
    if not names:
        return ""
    return f"    for name in {names!r}:\n        model.get_parameter(name).requires_grad_(False)\n"


def _expression(model: nn.Module, sources: Sources) -> str | None:
    """Return an expression that makes a model of the same architecture, or None if unknown."""
    from torch import nn  # heavy: torch

    kind = type(model)
    if kind is nn.Sequential:
        code = _layers(model)
        return code if code is not None and repr(eval(code)) == repr(model) else None
    try:
        fresh = kind()
    except TypeError:
        return None
    form, own = ({n: v.shape for n, v in m.state_dict().items()} for m in (fresh, model))
    if form != own:
        return None
    sources.add(kind.__name__, kind)
    return f"{kind.__name__}()"


def data_code(data: Any, folder: Path, code: str | None) -> tuple[str, str | None]:
    """Save the data, if possible, and return the source of ``micro_batches``, which reads it.

    Args:
        data: Samples or batches; None if not given.
        folder: The script's folder, where the data is written.
        code: The user's expression that makes the batches; None to write the data to a file.

    Returns:
        The source, and a description of what the user must fill in, or None.
    """
    begin = (
        "def micro_batches(epoch: int) -> Iterator[Any]:\n"
        '    """Yield the micro-batches of an epoch, each with the samples of all processes."""\n'
    )
    if code is not None:
        return f"{begin}    yield from {code}", None
    found = None if data is None else _saved(data, folder)
    if found is None:
        what = "the data" if data is None else f"the batches of the {type(data).__name__}"
        return (
            f'{begin}    raise NotImplementedError("fill in {what}: yield batches")',
            f"{what} in micro_batches, or give make_data=",
        )
    return begin + found, None


def _saved(data: Any, folder: Path) -> str | None:
    """Write the data to a file and return the lines that read it; None if it cannot be written."""
    from safetensors.torch import save_file  # heavy: torch

    from ortlab.training.data_loading import collate, of_samples  # heavy: torch

    samples = of_samples(data) and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not samples and not isinstance(data, list):
        return None
    try:
        whole = [collate([data[i] for i in range(len(data))])] if samples else data
    except ValueError:  # samples of different shapes: only the user knows how to pad them
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
    save_file(tensors, folder / "data.safetensors")
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
        else f"    for number in range({len(whole)}):\n"
    )
    return f'    samples = load_file(HERE / "data.safetensors")\n{loop}        yield {batch}'


def _layers(model: nn.Module) -> str | None:
    """Return a Sequential of torch's own layers as an expression, made of their `repr`."""
    from torch import nn  # heavy: torch

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
    """Return the tensors of a batch by name or position; None if it contains anything else."""
    import torch  # heavy: torch

    if isinstance(batch, torch.Tensor):
        return {"0": batch}
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    form = {str(name): value for name, value in pairs}
    return form if all(isinstance(value, torch.Tensor) for value in form.values()) else None


_SHUFFLED = """\
    order = torch.Generator()
    order.manual_seed(int(np.random.SeedSequence([SEED, epoch]).generate_state(1)[0]))
    torch.empty((), dtype=torch.int64).random_(generator=order)
    for rows in torch.randperm(COUNT, generator=order).split(BATCH_SIZE):
"""
