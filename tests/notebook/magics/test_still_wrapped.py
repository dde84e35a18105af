"""Tests of ``%ort unwrap`` where other objects of the user still refer to the wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest

import ortlab
from tests.support.needed_engines import needs
from tests.support.typed_magics import Typist

ADVICE = "; assign the unwrapped model there, or create these objects again\n"


@pytest.mark.parametrize("engine", ["compile", "ortmodule"])
@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("models = [Net(), model]", "models[1]"),
        ("pair = ('a', model)", "pair[1]"),
        ("nets = {'small': {'first': model}}", "nets['small']['first']"),
        ("group = {model}", "group"),
        ("trainer.model = model", "trainer.model"),
        ("trainer.inner = Trainer(); trainer.inner._net = model", "trainer.inner._net"),
        ("bigger = nn.Sequential(nn.ReLU(), model)", "bigger[1]"),
        ("bigger = Net(); bigger.head = model", "bigger.head"),
        ("trainer.nets = [[model]]; models = trainer.nets", "models[0][0]"),
    ],
)
def test_a_place_that_refers_to_the_wrapper(ip: Typist, engine: str, code: str, place: str) -> None:
    needs(engine)
    ip("class Trainer:\n    @property\n    def lazy(self): 1 / 0\ntrainer = Trainer()")
    ip(f"%%ort --engine {engine}\nmodel = Net()")
    ip(f"{code}\nmodel")
    assert ip("%ort unwrap model") == f"still wrapped: {place}{ADVICE}"
    assert type(ip["model"]) is ip["Net"]
    ip(f"%ort wrap model --engine {engine}")
    assert ip("%ort unwrap model") == "", "the new wrapper is not there"


def test_places_and_models_are_counted(ip: Typist) -> None:
    ip("%%ort --engine compile\nmodel, head = Net(), Net()")
    ip("models = [model] * 7; heads = [head]")
    assert ip("%ort unwrap model head") == (
        "still wrapped: models[0], models[1], models[2], models[3], models[4] and 2 more"
        f"{ADVICE}still wrapped: heads[0]{ADVICE}"
    )


@pytest.mark.parametrize("engine", ["eager", "ortmodule", "ort_fused"])
def test_what_needs_no_word(ip: Typist, engine: str) -> None:
    """Other names are bound again, and an optimizer's parameters are the model's own."""
    needs(engine)
    ip(f"%%ort --engine {engine}\nmodel = Net()")
    ip(
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        "alias = model; shell = get_ipython(); data = batches(); x, y = data[0]\n"
        "before = model.head.weight.detach().clone()\n"
        "nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()"
    )
    ip("model")
    ip("run = %ort finetune model data --loss cross_entropy --engine eager\nresult = await run")
    if engine == "ortmodule":
        ip("plans = %ort recompute model")
    assert ip("%ort unwrap model") == ""
    assert type(ip["model"]) is type(ip["alias"]) is ip["Net"]
    ip("before = model.head.weight.detach().clone()\noptimizer.zero_grad()")
    ip("nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()")
    assert not ip["torch"].equal(ip["before"], ip["model"].head.weight), "the model is trained"


def test_the_python_twin_warns_at_the_user_s_line(ip: Typist) -> None:
    ip("%%ort --engine compile\nmodel = Net()")
    ip("import ortlab\nmodels = [model]")
    with pytest.warns(UserWarning, match=r"^still wrapped: models\[0\]; assign") as warned:
        ip("import sys\nmodel = ortlab.unwrap(model)")
    assert warned[0].lineno == 2
    assert "ortlab" not in warned[0].filename
    plain = ortlab.wrap(ip["Net"](), engine="compile")
    assert type(ortlab.unwrap(plain)) is ip["Net"]


def test_a_trainer_of_transformers(ip: Typist, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    needs("ortmodule")
    ip(
        "from transformers import Trainer, TrainingArguments\nfrom ortlab import hf\n"
        "from tests.support import tiny\n"
        f"args = TrainingArguments({str(tmp_path)!r}, use_cpu=True, report_to=[])"
    )
    for kind in ("Trainer", "hf.Trainer"):
        ip("%%ort\nmodel = tiny.bert()")
        ip(f"trainer = {kind}(model, args)")
        assert ip("%ort unwrap model").startswith("still wrapped: trainer.model, ")
