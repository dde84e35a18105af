"""Tests of Hugging Face's Trainer, PEFT, Accelerate and Fabric with wrapped models."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from lightning_fabric import Fabric
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

import ortlab
from ortlab import hf
from ortlab.engines.ortmodule.engine import execution_of, is_wrapped
from ortlab.history.run_folder import RunFolder
from ortlab.metrics.recorder import INDEX, Watched
from ortlab.session import session
from ortlab.settings import FinetuneSettings
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread", "threads_end")
WORDS = 50


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = torch.Tensor.backward
    AcceleratorState._reset_state(reset_partial_state=True)  # precision is process-wide
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.Tensor.backward is before


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Return texts labeled by their first word, with a column that forward does not take."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (96, 12), generator=generator)
    return Dataset.from_dict(
        {"input_ids": ids.tolist(), "labels": (ids[:, 0] % 2).tolist(), "title": ["x"] * 96}
    )


def bert(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return tiny.bert(dropout, vocab_size=WORDS)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "max_steps": 30,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": [],
    }
    return TrainingArguments(str(folder), **{**chosen, **more})


def trained(model: nn.Module, folder: Path, data: Any, **more: Any) -> transformers.Trainer:
    """Train `model` by a plain Trainer."""
    resume = more.pop("resume", None)
    callbacks = more.pop("callbacks", None)
    collator = more.pop("collator", None)
    trainer = transformers.Trainer(
        model,
        arguments(folder, **more),
        data_collator=collator,
        train_dataset=data,
        eval_dataset=data.select(range(16)),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: transformers.Trainer, name: str = "loss") -> list[float]:
    return [each[name] for each in trainer.state.log_history if name in each]


def farthest(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


# ---- a plain Trainer -----------------------------------------------------------------------------


def test_a_plain_trainer_takes_a_wrapped_model_as_it_is(tmp_path: Path, data: Dataset) -> None:
    """Losses, evaluations, checkpoints and a resumed run equal those of the unwrapped model."""
    often = {"save_strategy": "steps", "save_steps": 15, "eval_strategy": "steps", "eval_steps": 10}
    eager = trained(bert(), tmp_path / "eager", data, **often)
    model = bert()
    before = set(vars(model))
    wrapped = trained(ortlab.wrap(model), tmp_path / "ort", data, **often)
    assert wrapped.label_names == eager.label_names == ["labels"]
    losses, held_out = logged(wrapped), logged(wrapped, "eval_loss")
    far = farthest(losses, logged(eager)), farthest(held_out, logged(eager, "eval_loss"))
    print(f"30 steps: losses within {far[0]:.1e} of eager torch, 3 evaluations within {far[1]:.1e}")
    assert len(losses) == 30
    assert len(held_out) == 3
    assert max(far) < 1e-4
    assert losses[-1] < losses[0] - 0.1, "it learns"
    assert set(vars(model)) == before

    folder, beside = (tmp_path / name / "checkpoint-30" for name in ("ort", "eager"))
    assert {p.name for p in folder.iterdir()} == {p.name for p in beside.iterdir()}
    assert (folder / "config.json").read_text() == (beside / "config.json").read_text()
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor(data[:16]["input_ids"])
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert torch.equal(loaded.eval()(input_ids=ids).logits, expected)
        off = (wrapped.model(input_ids=ids).logits - expected).abs().max().item()
    print(f"logits of the checkpoint are the model's; the wrapped model's within {off:.1e}")
    assert off < 1e-5

    resumed = trained(
        ortlab.wrap(bert()),
        tmp_path / "ort",
        data,
        **often,
        resume=str(folder.with_name("checkpoint-15")),
    )
    assert logged(resumed)[15:] == losses[15:]


def test_accumulation_and_clipping(tmp_path: Path, data: Dataset) -> None:
    several = {"max_steps": 6, "gradient_accumulation_steps": 3, "max_grad_norm": 0.3}
    eager = trained(bert(), tmp_path, data, **several)
    wrapped = trained(ortlab.wrap(bert()), tmp_path, data, **several)
    assert farthest(logged(wrapped), logged(eager)) < 1e-4
    assert farthest(logged(wrapped, "grad_norm"), logged(eager, "grad_norm")) < 1e-4


def test_bf16_on_a_cpu(tmp_path: Path, data: Dataset) -> None:
    """Losses agree with eager torch within bfloat16's rounding, and are not float32's."""
    more: dict[str, Any] = {"bf16": True, "max_steps": 12}
    eager = trained(bert(), tmp_path, data, **more)
    model = bert()
    before = set(vars(model))
    wrapped = trained(ortlab.wrap(model), tmp_path, data, **more)
    far = farthest(logged(wrapped), logged(eager))
    print(f"bf16, 12 steps: losses within {far:.1e} of eager torch under autocast")
    assert 1e-7 < far < 5e-3
    assert set(vars(model)) == before, "accelerate's forward is the wrapper's"
    assert execution_of(wrapped.model).settings.precision == "bf16"


def test_a_language_model_with_padded_batches(tmp_path: Path) -> None:
    """The loss is divided by the words of all accumulated batches; the model can generate text."""
    words = {"<pad>": 0, **{f"word{n}": n for n in range(1, WORDS)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>"
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 14, (48,), generator=generator).tolist()
    texts = [torch.randint(1, WORDS, (n,), generator=generator).tolist() for n in lengths]
    data = Dataset.from_dict({"input_ids": texts})
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    more = {"max_steps": 6, "gradient_accumulation_steps": 2, "collator": collator}
    torch.manual_seed(0)
    model = tiny.gpt2()
    eager = trained(copy.deepcopy(model), tmp_path, data, **more)
    wrapped = trained(ortlab.wrap(model), tmp_path, data, **more)
    assert wrapped.model_accepts_loss_kwargs
    assert farthest(logged(wrapped), logged(eager)) < 1e-4
    wrapped.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    start = torch.tensor([texts[0][:3]])
    said = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(wrapped.model.eval().generate(start, **said), loaded.generate(start, **said))


# ---- the callback --------------------------------------------------------------------------------


def test_the_callback_shows_and_keeps_a_run(
    tmp_path: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds for an unwrapped model; every step is recorded, though few are logged."""
    shown: list[Watched] = []
    monkeypatch.setattr(session, "viewers", [shown.append])
    watch = hf.OrtLabCallback(name="mine")
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps"}
    more |= {"max_steps": 8, "gradient_accumulation_steps": 2, "logging_steps": 4, "save_steps": 4}
    trainer = trained(bert(), tmp_path, data, callbacks=[watch], lr_scheduler_type="linear", **more)
    run = watch.run
    assert run is not None
    assert shown == [run]
    assert run.name == "mine"
    rows = run.recorder.rows()
    assert rows[:, INDEX["step"]].tolist() == list(range(1, 9))
    losses = rows[:, INDEX["loss"]]
    assert losses.reshape(2, 4).mean(axis=1) == pytest.approx(logged(trainer), rel=1e-6)
    norms = rows[:, INDEX["grad_norm"]]
    assert norms[[3, 7]] == pytest.approx(logged(trainer, "grad_norm"))
    assert rows[0, INDEX["lr"]] == 2e-3
    assert rows[:, INDEX["samples"]].tolist() == [16] * 8
    assert rows[:, INDEX["tokens"]].tolist() == [16 * 12] * 8
    times = [rows[:, INDEX[f"{name}_ms"]] for name in ("data", "forward", "backward", "optimizer")]
    assert (np.array(times) > 0).all()
    assert (np.sum(times, axis=0) <= rows[:, INDEX["step_ms"]]).all()
    evaluations = [event.values["loss"] for event in run.recorder.events("eval")]
    assert evaluations == logged(trainer, "eval_loss")
    assert [event.text for event in run.recorder.events("checkpoint")] == [
        "checkpoint-4 was written",
        "checkpoint-8 was written",
    ]
    assert run.status().state == "finished"
    assert run.over()

    folder = RunFolder(run.folder)
    about = folder.read_json("run")
    assert (about["state"], about["steps"], about["engine_used"]) == ("finished", 8, "eager")
    assert about["model"] == "BertForSequenceClassification"
    assert about["result"]["final_loss"] == pytest.approx(losses[-1])
    kept = FinetuneSettings.of(folder.read_json("settings"))
    assert (
        kept.model.engine,
        kept.data.batch_size,
        kept.data.gradient_accumulation_steps,
        kept.optim.learning_rate,
    ) == ("eager", 8, 2, 2e-3)
    np.testing.assert_allclose(folder.read_metrics().rows[:, INDEX["loss"]], losses, rtol=1e-6)
    assert str(tmp_path) not in (run.folder / "trainer.json").read_text()
    assert folder.read_json("trainer")["logging_steps"] == 4
    assert not trainer.model._forward_pre_hooks
    (listed,) = [each for each in ortlab.list_runs() if each.name == "mine"]
    assert (listed.state, listed.engine_asked, listed.precision) == ("finished", "eager", "fp32")
    assert listed.held_out_loss == min(evaluations)
    assert run.to_frame()["loss"].tolist() == pytest.approx(losses.tolist(), rel=1e-6)


def test_an_evaluation_after_the_run_changes_nothing(tmp_path: Path, data: Dataset) -> None:
    watch = hf.OrtLabCallback()
    trainer = trained(bert(), tmp_path, data, callbacks=[watch], max_steps=2)
    assert watch.run is not None
    before = watch.run.recorder.events()
    trainer.evaluate()
    assert watch.run.recorder.events() == before


def test_a_trainer_that_raised_is_told_of_at_the_next_run(tmp_path: Path, data: Dataset) -> None:
    watch = hf.OrtLabCallback()
    trainer = trained(bert(), tmp_path, data, callbacks=[watch], max_steps=1)
    collate = trainer.data_collator
    trainer.data_collator = lambda samples: {"input_ids": torch.tensor([[WORDS + 1]])}
    with pytest.raises(IndexError):
        trainer.train()
    broken = watch.run
    assert broken is not None
    assert not broken.over()
    trainer.data_collator = collate
    trainer.train()
    assert broken.status().state == "failed"
    assert "train ended without on_train_end" in (broken.status().error or "")
    assert watch.run is not None
    assert watch.run.status().state == "finished"


def test_fp16_on_a_cpu_is_told_of(tmp_path: Path, data: Dataset) -> None:
    """Accelerate used to refuse it; now it silently trains in float32."""
    watch = hf.OrtLabCallback()
    more: dict[str, Any] = {"max_steps": 2, "callbacks": [watch]}
    halved = trained(bert(), tmp_path, data, **more, fp16=True)
    run = watch.run
    assert run is not None
    assert [e.text for e in run.recorder.events("warning")] == [
        "fp16=True has no effect: accelerate silently trains in float32 on a CPU"
    ]
    assert RunFolder(run.folder).read_json("settings")["precision"] == "fp32"
    assert logged(halved) == logged(trained(bert(), tmp_path, data, **more))


# ---- ortlab's Trainer ----------------------------------------------------------------------------


def test_the_trainer_takes_ortlabs_settings(tmp_path: Path, data: Dataset) -> None:
    """The model is wrapped and the run recorded; losses are those of the plain Trainer."""
    eager = trained(bert(), tmp_path, data, max_steps=5)
    args = arguments(tmp_path, max_steps=5)
    trainer = hf.Trainer(bert(), args, train_dataset=data, recompute="layers", opset=16)
    assert trainer.run is None
    trainer.train()
    settings = execution_of(trainer.model).settings
    assert (settings.engine, settings.recompute, settings.ortmodule.opset) == (
        "ortmodule",
        "layers",
        16,
    )
    assert farthest(logged(trainer), logged(eager)) < 1e-4
    run = trainer.run
    assert run is not None
    assert run.title == f"{run.name}: BertForSequenceClassification in a Trainer on ortmodule"
    assert json.loads((run.folder / "settings.json").read_text())["recompute"] == "layers"
    assert not run.interactive
    run.pause()
    assert run.status().state == "finished"
    assert any("checked on" in event.text for event in run.recorder.events("note"))

    plain = hf.Trainer(model_init=lambda: bert(), args=args, train_dataset=data, engine="eager")
    assert not is_wrapped(plain.model)
    again = hf.Trainer(model_init=lambda: bert(), args=args, train_dataset=data)
    assert is_wrapped(again.model)
    wrapped = ortlab.wrap(bert())
    own = hf.OrtLabCallback()
    kept = hf.Trainer(wrapped, args, train_dataset=data, callbacks=[own])
    assert kept.model is wrapped
    assert [
        each for each in kept.callback_handler.callbacks if isinstance(each, hf.OrtLabCallback)
    ] == [own]


def test_charts_take_the_progress_bars_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for viewers in ([], [lambda watched: None]):
        monkeypatch.setattr(session, "viewers", viewers)
        for quiet in (True, False):
            args = arguments(tmp_path, disable_tqdm=quiet)
            trainer = hf.Trainer(bert(), args, engine="eager")
            kinds = [type(each).__name__ for each in trainer.callback_handler.callbacks]
            shown = {"PrinterCallback", "ProgressCallback"}.intersection(kinds)
            assert bool(shown) is not bool(viewers)


def test_what_cannot_go_together_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match=r"precision='bf16' with engine='eager'.*bf16=True"):
        hf.Trainer(bert(), args, engine="eager", precision="bf16")
    with pytest.raises(
        ValueError, match=r"already wrapped \(engine 'ortmodule'\); pass recompute to"
    ):
        hf.Trainer(ortlab.wrap(bert()), args, recompute="layers")
    with pytest.raises(
        ValueError, match=r"fp16=True: accelerate silently trains in float32 on a CPU"
    ):
        hf.Trainer(bert(), arguments(tmp_path, fp16=True))
    compiled = arguments(tmp_path, torch_compile=True)
    for engine in ("ort", "ortmodule"):
        with pytest.raises(ValueError, match="both replace forward"):
            hf.Trainer(bert(), compiled, engine=engine)
    with pytest.raises(ValueError, match="both replace forward"):
        hf.Trainer(ortlab.wrap(bert()), compiled)
    model = hf.Trainer(bert(), compiled).model
    entry = session.wrapped.entry(model)
    assert entry is not None
    assert entry.settings.engine == "eager", "engine auto leaves it to torch"
    assert "torch_compile=True" in entry.choice, "and says why"
    with pytest.raises(ValueError, match="did you mean 'eager'"):
        hf.Trainer(bert(), args, engine="eagr")


def test_a_run_in_a_thread_is_paused_and_stopped(tmp_path: Path, data: Dataset) -> None:
    """The calls are those of the charts' buttons, in a cell that awaits the run."""
    args = arguments(tmp_path, max_steps=100_000, logging_steps=1000)
    trainer = hf.Trainer(bert(), args, train_dataset=data, engine="eager")

    async def until(condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    async def scenario() -> Any:
        awaited = asyncio.ensure_future(trainer.train_async())
        await until(lambda: trainer.run is not None and trainer.run.recorder.count > 2)
        run = trainer.run
        assert run is not None
        assert run.interactive
        (listed,) = [each for each in ortlab.list_runs() if each.name == run.name]
        assert listed.state == "running", "a living process works on it"
        run.pause()
        assert run.status().state == "paused"
        await asyncio.sleep(0.3)
        step = trainer.state.global_step
        await asyncio.sleep(0.3)
        assert trainer.state.global_step == step
        run.resume()
        await until(lambda: trainer.state.global_step > step)
        run.pause()
        run.stop()
        assert run.status().state == "stopping"
        return await awaited

    result = asyncio.run(scenario())
    assert trainer.run is not None
    assert trainer.run.status().state == "stopped"
    assert result.global_step == trainer.run.status().step < 1000
    assert RunFolder(trainer.run.folder).read_json("run")["state"] == "stopped"


def test_what_a_run_raises_is_its_outcome(tmp_path: Path, data: Dataset) -> None:
    def broken(samples: Any) -> Any:
        raise KeyError("mine")

    args = arguments(tmp_path)
    trainer = hf.Trainer(bert(), args, train_dataset=data, engine="eager", data_collator=broken)
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(trainer.train_async())
    run = trainer.run
    assert run is not None
    assert run.status().state == "failed"
    assert run.status().error == "KeyError: 'mine'"
    assert isinstance(run.error, KeyError)
    assert RunFolder(run.folder).read_json("run")["error"] == "KeyError: 'mine'"


def test_dropout_goes_on_after_a_resume(tmp_path: Path, data: Dataset) -> None:
    """The state of ORT's generator, which is not part of torch's, is restored."""

    def trainer() -> hf.Trainer:
        args = arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=4)
        return hf.Trainer(bert(dropout=0.3), args, train_dataset=data)

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(resumed) == logged(whole)
    assert resumed.run is not None
    assert any(
        "resumed from a checkpoint at step 4" in e.text for e in resumed.run.recorder.events()
    )
    assert resumed.run.recorder.rows()[0, INDEX["step"]] == 5


# ---- PEFT, Accelerate, Fabric --------------------------------------------------------------------

LORA = {"r": 4, "target_modules": ["query", "value"], "lora_dropout": 0.0, "task_type": "SEQ_CLS"}


@pytest.mark.parametrize("first", ["adapters", "wrapper"])
def test_lora_adapters(tmp_path: Path, data: Dataset, first: str) -> None:
    """Adapters on a wrapped model, or wrapped with it: only they change, as in eager torch."""
    eager = trained(
        get_peft_model(bert(), LoraConfig(**LORA)), tmp_path / "eager", data, max_steps=8
    )
    torch.manual_seed(0)
    base = bert()
    if first == "adapters":
        model = ortlab.wrap(get_peft_model(base, LoraConfig(**LORA)))
    else:
        model = get_peft_model(ortlab.wrap(base), LoraConfig(**LORA))
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    wrapped = trained(model, tmp_path / "ort", data, max_steps=8)
    far = farthest(logged(wrapped), logged(eager))
    print(f"LoRA, {first} first: 8 losses within {far:.1e} of eager torch")
    assert far < 1e-4
    moved = {name for name, p in base.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name or "classifier" in name for name in moved)
    wrapped.save_model(str(tmp_path / "saved"))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "saved").iterdir()
    }
    loaded = PeftModel.from_pretrained(bert(), tmp_path / "saved").eval()
    ids = torch.tensor(data[:8]["input_ids"])
    with torch.no_grad():
        found = wrapped.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, found, rtol=1e-4, atol=1e-5)


def batches(data: Dataset) -> DataLoader[Any]:
    columns = data.select_columns(["input_ids", "labels"]).with_format("torch")
    return DataLoader(columns, batch_size=8)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_accelerate_loop(data: Dataset, precision: str) -> None:
    def losses(model: nn.Module) -> list[float]:
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches(data))
        found = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert isinstance(accelerator.unwrap_model(model), transformers.PreTrainedModel)
        return found

    far = farthest(losses(ortlab.wrap(bert())), losses(bert()))
    assert far < (1e-4 if precision == "no" else 5e-3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fabric_loop(data: Dataset, precision: str) -> None:
    def losses(model: nn.Module) -> list[float]:
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer = fabric.setup(model, optimizer)
        found = []
        for batch in fabric.setup_dataloaders(batches(data)):
            loss = model(**batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    far = farthest(losses(ortlab.wrap(bert())), losses(bert()))
    assert far < (1e-4 if precision == "32-true" else 5e-3)
