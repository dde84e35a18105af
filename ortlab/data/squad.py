"""Extractive question answering in SQuAD's format: samples, answers and their score.

The format is that of SQuAD 1.1 (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250), in which
every question has an answer. Scores are computed as in its evaluation script, in percent.
"""

from __future__ import annotations

import json
import re
import string
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from ortlab.data.samples import Examples
from ortlab.utils.errors import brief

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_HIDDEN = float("-inf")


@dataclass(frozen=True)
class Question:
    """Question about a context, with its accepted answers.

    Attributes:
        id: Unique ID of the question.
        text: The question.
        context: The text that contains the answers.
        answers: Accepted answers.
        starts: Position of each answer in the context, in characters from 0.

    Raises:
        ValueError: There is no answer, or an answer is not at its position.
    """

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError(
                f"question {self.id!r} has no answer; remove SQuAD 2.0's questions without answers"
            )
        for answer, start in zip(self.answers, self.starts, strict=True):
            found = self.context[start : start + len(answer)] if start >= 0 else ""
            if found != answer or not answer:
                raise ValueError(
                    f"question {self.id!r}: its context has {found!r} at {start}, not the answer "
                    f"{answer!r}; count characters from 0"
                )


class Questions(Dataset[Question]):
    """Ordered data set of questions.

    Args:
        questions: The questions.

    Raises:
        ValueError: Several questions have the same ID.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self.questions = tuple(questions)
        (twice, times), *_ = Counter(each.id for each in self.questions).most_common(1) or [("", 0)]
        if times > 1:
            raise ValueError(f"{times} questions have the id {twice!r}; ids must be unique")

    def encoded(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int = 384, stride: int | None = None
    ) -> Spans:
        """Tokenize the questions, each with a window of its context.

        A longer context gives several samples with overlapping windows. As in BERT, both target
        positions are 0 if the window does not contain the answer. The first of several answers is
        the target.

        Args:
            tokenizer: A fast tokenizer.
            max_length: Number of tokens of a sample.
            stride: Number of tokens that neighboring windows share; None is a third of
                `max_length`.

        Returns:
            The samples, with the columns of the tokenizer of shape [max_length],
            ``start_positions`` and ``end_positions``.

        Raises:
            ValueError: The tokenizer does not report the characters of a token.
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not report the characters of a token; use the "
                "model's fast tokenizer, as AutoTokenizer returns it"
            )
        encoding = tokenizer(
            [each.text for each in self.questions],
            [each.context for each in self.questions],
            max_length=max_length,
            truncation="only_second",
            stride=max_length // 3 if stride is None else stride,
            padding="max_length",
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        owners = encoding["overflow_to_sample_mapping"]
        of_text = torch.tensor(
            [[part == 1 for part in encoding.sequence_ids(window)] for window in range(len(owners))]
        )
        # Tokens outside of the context have no characters.
        offsets = encoding["offset_mapping"].where(of_text.unsqueeze(-1), -1)
        positions = [
            _positions(self.questions[owner], window)
            for owner, window in zip(owners.tolist(), offsets, strict=True)
        ]
        begins, ends = zip(*positions, strict=True)
        columns = {name: encoding[name] for name in tokenizer.model_input_names if name in encoding}
        columns |= {"start_positions": torch.tensor(begins), "end_positions": torch.tensor(ends)}
        return Spans(columns, self, owners, offsets)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]

    def __repr__(self) -> str:
        texts = len({each.context for each in self.questions})
        return f"<{len(self)} questions on {texts} texts>"


class Spans(Examples):
    """Samples for a model with a span head, such as ``BertForQuestionAnswering``.

    Args:
        columns: Tensors of all samples by name, each of shape [samples, ...].
        questions: The questions.
        owners: Index of each sample's question, of shape [samples].
        offsets: First and last character (exclusive) of each token in its context, of shape
            [samples, tokens, 2]; -1 for tokens outside of it.
    """

    def __init__(
        self,
        columns: Mapping[str, torch.Tensor],
        questions: Questions,
        owners: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        super().__init__(columns)
        self.questions = questions
        self.owners = owners
        self.offsets = offsets

    def answers(
        self, starts: torch.Tensor, ends: torch.Tensor, *, most_tokens: int = 30
    ) -> dict[str, str]:
        """Return the text of the best span of every question.

        A span lies in the context, within one window. Its score is the sum of its start and end
        scores.

        Args:
            starts: Start scores of the model, of shape [samples, tokens].
            ends: End scores of the model, of shape [samples, tokens].
            most_tokens: Maximum number of tokens of a span.

        Returns:
            The texts, by ID of the question.
        """
        best: dict[int, tuple[float, str]] = {}
        for owner, offsets, start, end in zip(
            self.owners.tolist(), self.offsets, starts.float(), ends.float(), strict=True
        ):
            hidden = offsets[:, 0] < 0
            sums = start.masked_fill(hidden, _HIDDEN)[:, None] + end.masked_fill(hidden, _HIDDEN)
            allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(most_tokens - 1)
            score, place = sums.masked_fill(~allowed, _HIDDEN).flatten().max(0)
            first, last = divmod(int(place), len(offsets))
            if float(score) > best.get(owner, (_HIDDEN, ""))[0]:
                context = self.questions[owner].context
                span = context[int(offsets[first, 0]) : int(offsets[last, 1])]
                best[owner] = (float(score), span)
        return {self.questions[owner].id: text for owner, (_, text) in best.items()}


@dataclass(frozen=True)
class Score:
    """Exact match and word-level F1 in percent, as SQuAD's evaluation script defines them."""

    exact_match: float
    f1: float

    def __str__(self) -> str:
        return f"exact match {self.exact_match:.1f}, F1 {self.f1:.1f}"


def read(path: str | Path) -> Questions:
    """Read questions from a JSON file in SQuAD 1.1's format.

    Args:
        path: The file.

    Raises:
        ValueError: The file has another format.
    """
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
        found = [
            Question(
                str(asked["id"]),
                asked["question"],
                paragraph["context"],
                tuple(answer["text"] for answer in asked["answers"]),
                tuple(answer["answer_start"] for answer in asked["answers"]),
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not in SQuAD's format ({type(error).__name__}: {error}); expected "
            '{"data": [{"paragraphs": [{"context": ..., "qas": [{"id", "question", "answers"}]}]}]}'
        ) from error
    return Questions(found)


def of_rows(rows: Iterable[Mapping[str, Any]]) -> Questions:
    """Convert rows of the ``datasets`` library to questions.

    Args:
        rows: Rows of a data set such as ``ortlab.data.hub("rajpurkar/squad")``.
    """
    return Questions(
        Question(
            row["id"],
            row["question"],
            row["context"],
            tuple(row["answers"]["text"]),
            tuple(row["answers"]["answer_start"]),
        )
        for row in rows
    )


def predict(model: nn.Module, samples: Spans, *, batch_size: int = 32) -> dict[str, str]:
    """Return the model's answers to questions.

    The model is evaluated on its device in evaluation mode; its previous mode is restored.

    Args:
        model: Model that takes the columns of `samples` and returns ``start_logits`` and
            ``end_logits``.
        samples: Samples of the questions.
        batch_size: Number of samples per call of the model.

    Returns:
        The answers, by ID of the question.
    """
    names = [name for name in samples.columns if not name.endswith("_positions")]
    device = next(model.parameters()).device
    was_training = model.training
    starts, ends = [], []
    model.eval()
    try:
        with torch.no_grad():
            for begin in range(0, len(samples), batch_size):
                rows = slice(begin, begin + batch_size)
                output = model(**{name: samples.columns[name][rows].to(device) for name in names})
                starts.append(output.start_logits.cpu())
                ends.append(output.end_logits.cpu())
    finally:
        model.train(was_training)
    return samples.answers(torch.cat(starts), torch.cat(ends))


@brief
def score(questions: Questions, predictions: Mapping[str, str]) -> Score:
    """Score predicted answers.

    Of several accepted answers, the best match counts. As in SQuAD's script, a question without a
    prediction scores 0; a warning reports the number of such questions.

    Args:
        questions: The questions.
        predictions: Predicted answers, by ID of the question.

    Raises:
        ValueError: There are no questions.
    """
    if not len(questions):
        raise ValueError("there are no questions to score; give at least one")
    missing = [each.id for each in questions.questions if each.id not in predictions]
    if missing:
        warnings.warn(
            f"{len(missing)} of {len(questions)} questions have no prediction and score 0, such as "
            f"{missing[0]!r}",
            stacklevel=3,
        )
    exact = overlap = 0.0
    for each in questions.questions:
        if each.id in predictions:
            predicted = normalized(predictions[each.id])
            accepted = [normalized(answer) for answer in each.answers]
            exact += predicted in accepted
            overlap += max(_f1(predicted.split(), answer.split()) for answer in accepted)
    return Score(100 * exact / len(questions), 100 * overlap / len(questions))


def normalized(text: str) -> str:
    """Normalize an answer as SQuAD's script does before it compares answers.

    Args:
        text: The answer.

    Returns:
        The answer in lower case without ASCII punctuation and articles, with single spaces between
        words.
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _f1(predicted: Sequence[str], answer: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, with repetitions."""
    shared = (Counter(predicted) & Counter(answer)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def _positions(question: Question, offsets: torch.Tensor) -> tuple[int, int]:
    """Return the first and last token of the first answer; (0, 0) if it is outside the window."""
    begin = question.starts[0]
    end = begin + len(question.answers[0])
    first = ((offsets[:, 0] <= begin) & (begin < offsets[:, 1])).nonzero()
    last = ((offsets[:, 0] < end) & (end <= offsets[:, 1])).nonzero()
    if not len(first) or not len(last):
        return 0, 0
    return int(first[0, 0]), int(last[-1, 0])
