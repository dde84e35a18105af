"""The facts that the name of an exported graph depends on, and those that it must ignore."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from ortlab.engines.ortmodule.fingerprint import Unknowable, fingerprint

CELL = """
from enum import Enum

import numpy as np
import torch
from torch import nn
from torch.nn import functional

SCALE = 2.0
TABLE = {"a": [1, 2], "b": {3, 4}}
STEPS = torch.tensor([1.0, 2.0])
UNUSED = 1


class Kind(Enum):
    FIRST = 1
    SECOND = 2


class Config:
    def __init__(self):
        self.gain = 1.0
        self.deep = {"width": [4, 4]}

    def bias(self):
        return 0.5


def helper(x, power=2):
    return x * SCALE + STEPS.sum()


def shifted(by):
    def shift(x):
        return x + by

    return shift


shift = shifted(1.0)


def unused(x):
    return x * 7


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, flip=False):
        return self.inner(self.norm(self.layer(x)) + self.offset)

    def inner(self, x):
        return shift(helper(x)) * TABLE["a"][0]

    def unused(self):
        return 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
        self.drop = nn.Dropout(0.1)
        self.config = Config()
        self.kind = Kind.FIRST
        self.array = np.arange(3)
        self.act = functional.relu

    def forward(self, x):
        y = [self.act(v) for v in (x, x + 1.0)]
        return self.drop(self.part(y[0])) * getattr(self.config, "gain") + self.config.bias()


model = Net()
"""

EDITS = {
    "a global": ("SCALE = 2.0", "SCALE = 3.0"),
    "a global's type": ("SCALE = 2.0", "SCALE = 2"),
    "inside a global container": ('"a": [1, 2]', '"a": [5, 2]'),
    "inside a global set": ("{3, 4}", "{3, 5}"),
    "a global tensor": ("[1.0, 2.0]", "[1.0, 2.5]"),
    "a function that forward calls": ("x * SCALE +", "x * SCALE -"),
    "its default": ("power=2", "power=3"),
    "forward's own default": ("flip=False", "flip=True"),
    "a closure": ("shifted(1.0)", "shifted(2.0)"),
    "what a closure does": ("return x + by", "return x - by"),
    "a method that forward calls": ('TABLE["a"][0]', 'TABLE["a"][1]'),
    "a constant in a comprehension": ("x + 1.0", "x + 2.0"),
    "a layer's size": ("nn.Linear(4, 4)", "nn.Linear(4, 4, bias=False)"),
    "a buffer's content": ("torch.ones(4)", "torch.zeros(4)"),
    "dropout": ("nn.Dropout(0.1)", "nn.Dropout(0.2)"),
    "an attribute of an object": ("self.gain = 1.0", "self.gain = 2.0"),
    "deep inside an object": ('"width": [4, 4]', '"width": [4, 5]'),
    "a method of an object": ("return 0.5", "return 0.6"),
    "an enumeration": ("Kind.FIRST", "Kind.SECOND"),
    "an array": ("np.arange(3)", "np.arange(1, 4)"),
    "a function of torch's as attribute": ("functional.relu", "functional.gelu"),
    "another kind of layer": ("nn.BatchNorm1d(4)", "nn.LayerNorm(4)"),
}

NO_EDITS = {
    "a global that nothing reads": ("UNUSED = 1", "UNUSED = 2"),
    "a function that nothing calls": ("x * 7", "x * 8"),
    "a method that nothing calls": ("return 3", "return 4"),
    "where the code stands": ("SCALE = 2.0", "\n\n\nSCALE = 2.0"),
    "a comment in forward": ("y = [", "# why\n        y = ["),
    "how the model was made": ("self.drop = nn.Dropout(0.1)", "p = 0.1; self.drop = nn.Dropout(p)"),
    "weights": ("model = Net()", "torch.manual_seed(3); model = Net()"),
    "statistics": ("model = Net()", "model = Net(); model.part.norm.running_mean += 1.0"),
}

_numbers = itertools.count()


def _model(source: str = CELL) -> nn.Module:
    """Return the model of a notebook cell; each call uses its own file name."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, f"/tmp/ipykernel/{next(_numbers)}.py", "exec"), namespace)
    model: nn.Module = namespace["model"]
    return model


def _name(model: nn.Module, **facts: Any) -> str:
    return fingerprint(model, facts)


def _edited(old: str, new: str) -> nn.Module:
    assert CELL.count(old) == 1, old
    return _model(CELL.replace(old, new))


@pytest.mark.parametrize(("old", "new"), EDITS.values(), ids=EDITS)
def test_an_edit_gives_another_name(old: str, new: str) -> None:
    assert _name(_edited(old, new)) != _name(_model())


@pytest.mark.parametrize(("old", "new"), NO_EDITS.values(), ids=NO_EDITS)
def test_what_no_graph_depends_on_does_not(old: str, new: str) -> None:
    assert _name(_edited(old, new)) == _name(_model())


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode": lambda model: model.eval(),
    "mode of a part": lambda model: model.drop.eval(),
    "precision": lambda model: model.to(torch.bfloat16),
    "frozen": lambda model: model.part.layer.weight.requires_grad_(False),
    "a forward of the instance": lambda model: setattr(model, "forward", lambda x: x * 2),
    "a hook": lambda model: model.part.register_forward_hook(lambda *_: None),
    "a forward of torch's class": lambda model: None,
    "another part": lambda model: setattr(model, "drop", nn.Identity()),
    "a tied weight": lambda model: setattr(model.part.layer, "bias", model.part.norm.bias),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_gives_another_name(
    change: Callable[[Any], object], request: pytest.FixtureRequest, monkeypatch: Any
) -> None:
    model = _model()
    before = _name(model)
    change(model)
    if request.node.callspec.id == "a forward of torch's class":
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert _name(model) != before


def test_a_patched_function_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's function is not user code, but a patch of one that it looks up counts."""
    from transformers.models.bert import modeling_bert

    model = _bert()
    before = _name(model)
    monkeypatch.setattr(modeling_bert, "eager_attention_forward", lambda *a, **k: (a[3], None))
    assert _name(model) != before


def test_facts_count() -> None:
    model = _model()
    assert _name(model, call="a") == _name(model, call="a")
    assert _name(model, call="a") != _name(model, call="b")


def test_what_cannot_be_compared_is_named() -> None:
    model = _model()
    model.source = iter([1, 2])
    with pytest.raises(Unknowable, match=r"Net\.source is a list_iterator"):
        fingerprint(model, {})


def test_a_model_that_holds_itself() -> None:
    model = _model()
    model.config.owner = model
    model.config.itself = model.config
    assert len(_name(model)) == 64


def _bert() -> nn.Module:
    config = BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2)
    return BertModel(config)


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from transformers import BertConfig, BertModel
from ortlab.engines.ortmodule.fingerprint import fingerprint
if int(sys.argv[1]):
    import transformers.models.gpt2.modeling_gpt2, email, sqlite3  # more is imported, and earlier
bert = BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2))
print(fingerprint(bert, {{}}))
namespace = {{"__name__": "__main__"}}
exec({cell!r}, namespace)
print(fingerprint(namespace["model"], {{}}))
"""


def test_every_process_gives_the_same_name() -> None:
    found = []
    for i in (0, 1):
        script = SCRIPT.format(folder=os.getcwd(), cell=CELL)
        done = subprocess.run(
            [sys.executable, "-c", script, str(i)],
            env={**os.environ, "PYTHONHASHSEED": str(i)},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.split())
    assert len(found[0]) == 2
    assert found[0] == found[1]
