"""Questions whose answer is a piece of a text, in SQuAD's form: samples, answers and their score.

The form is that of SQuAD 1.1 (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250), where every
question has an answer. Figures are those of its evaluation script, in percent.
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
    """A question on a text, with all that is accepted: each answer and where it begins there.

    ValueError for a question without an answer, and for one that is not where it says.
    """

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError(
                f"question {self.id!r} has no answer; leave out those of SQuAD 2.0 that have none"
            )
        for answer, start in zip(self.answers, self.starts, strict=True):
            found = self.context[start : start + len(answer)] if start >= 0 else ""
            if found != answer or not answer:
                raise ValueError(
                    f"question {self.id!r}: its text has {found!r} at {start} and not the answer "
                    f"{answer!r}; count characters from 0"
                )


class Questions(Dataset[Question]):
    """Questions in an order; two with the same id are refused by ValueError."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.questions = tuple(questions)
        (twice, times), *_ = Counter(each.id for each in self.questions).most_common(1) or [("", 0)]
        if times > 1:
            raise ValueError(f"{times} questions have the id {twice!r}; each needs its own")

    def encoded(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int = 384, stride: int | None = None
    ) -> Spans:
        """Samples of `max_length` tokens: the question, and a window of its text.

        A text that is longer gives several samples, which share `stride` tokens, a third of
        `max_length` where nothing is said. As in BERT, both positions are 0 where the window does
        not have the answer; the first of several answers is the target. ValueError for a tokenizer
        that cannot say which characters a token is from.
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not tell which characters a token is from; take "
                "the fast one of the same model, as AutoTokenizer gives it"
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
        # Outside of the text no token is from any character.
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
    """Questions as samples for a model with a span head, such as ``BertForQuestionAnswering``.

    `owners` [samples] says which question each is of, `offsets` [samples, tokens, 2] which
    characters of its text each token is from, -1 for the others.
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
        """The text of the best span of every question, by its id.

        `starts` and `ends` are the model's scores [samples, tokens]. A span's score is the sum of
        both; it lies in the text, in one window, and has at most `most_tokens` tokens.
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
    """Exact match and F1 over words, in percent, as SQuAD's script has them."""

    exact_match: float
    f1: float

    def __str__(self) -> str:
        return f"exact match {self.exact_match:.1f}, F1 {self.f1:.1f}"


def read(path: str | Path) -> Questions:
    """The questions of a file in SQuAD 1.1's JSON; ValueError where it has another form."""
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
            f"{path} is not in SQuAD's form ({type(error).__name__}: {error}); it is "
            '{"data": [{"paragraphs": [{"context": ..., "qas": [{"id", "question", "answers"}]}]}]}'
        ) from error
    return Questions(found)


def of_rows(rows: Iterable[Mapping[str, Any]]) -> Questions:
    """Those of the ``datasets`` library, as ``ortlab.data.hub("rajpurkar/squad")`` gives them."""
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
    """The answers that `model` gives to the questions of `samples`, by their ids.

    `model` takes their columns and returns ``start_logits`` and ``end_logits``; it is evaluated on
    its own device, and left in the mode that it was in.
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
    """How good `predictions`, texts by the questions' ids, are.

    Of several answers the one that fits best counts. As in the script a question without a
    prediction has 0, and a warning says how many there are.
    """
    if not len(questions):
        raise ValueError("there is no question to score")
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
    """`text` as SQuAD's script compares it: lower case, no ASCII punctuation, no articles.

    White space is one blank between words.
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _f1(predicted: Sequence[str], answer: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, each as often as it occurs."""
    shared = (Counter(predicted) & Counter(answer)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def _positions(question: Question, offsets: torch.Tensor) -> tuple[int, int]:
    """The first and last token of the first answer; (0, 0) where they are not in this window."""
    begin = question.starts[0]
    end = begin + len(question.answers[0])
    first = ((offsets[:, 0] <= begin) & (begin < offsets[:, 1])).nonzero()
    last = ((offsets[:, 0] < end) & (end <= offsets[:, 1])).nonzero()
    if not len(first) or not len(last):
        return 0, 0
    return int(first[0, 0]), int(last[-1, 0])
