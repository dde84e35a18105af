"""Tests of questions in SQuAD's format: read, tokenized, answered, and scored as by its script."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PreTrainedTokenizerFast

from ortlab.data import squad
from ortlab.data.squad import Question, Questions

DATA = Path(__file__).parents[2] / "notebooks" / "data"
TEXT = "The kernel was written by Ada Moss in 1999, at Delft."


def asked(name: str, answers: list[str], context: str = TEXT) -> Question:
    starts = tuple(context.index(answer) for answer in answers)
    return Question(name, f"{name}?", context, tuple(answers), starts)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word and per punctuation mark."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    )


SAMPLE = (
    # (answers, prediction, exact match, F1), the last two by the script evaluate-v1.1.py
    (["Ada Moss"], "Ada Moss", 1, 1.0),
    (["Ada Moss"], "ada moss.", 1, 1.0),
    (["Ada Moss"], "the Ada Moss", 1, 1.0),
    (["Ada Moss"], "by Ada Moss in 1999", 0, 2 * (2 / 5) * 1 / (2 / 5 + 1)),
    (["Ada Moss", "Ada"], "Ada", 1, 1.0),
    (["The kernel"], "a  kernel", 1, 1.0),
    (["The kernel"], "The", 0, 0.0),  # nothing of the prediction remains
    (["Delft"], "Ada Moss", 0, 0.0),
    (["Moss in 1999", "1999"], "Moss, 1999", 0, 2 * 1 * (2 / 3) / (1 + 2 / 3)),
    (["at Delft"], "At-Delft", 0, 0.0),  # without the hyphen, it is one word
)


def test_the_scores_are_those_of_the_script() -> None:
    """The scores are computed by hand from the script, which gave the same for the whole sample."""
    for answers, prediction, exact, f1 in SAMPLE:
        found = squad.score(Questions([asked("q", answers)]), {"q": prediction})
        assert found.exact_match == 100 * exact, prediction
        assert found.f1 == pytest.approx(100 * f1), prediction
    together = Questions(asked(str(number), case[0]) for number, case in enumerate(SAMPLE))
    found = squad.score(together, {str(n): case[1] for n, case in enumerate(SAMPLE)})
    assert found.exact_match == pytest.approx(50.0)
    assert found.f1 == pytest.approx(63.7142857142857)
    assert str(found) == "exact match 50.0, F1 63.7"


def test_words_are_compared_as_the_script_has_them() -> None:
    assert squad.normalized("The  U.S.A., an Example") == "usa example"
    assert squad.normalized("a\tb\nthe c\u2019s") == "b c\u2019s"  # not an ASCII punctuation mark
    # A word counts as often as it occurs: 2 of 3 and 2 of 2.
    twice = Questions([asked("q", ["to to do"], "It has to to do it.")])
    assert squad.score(twice, {"q": "to to"}).f1 == pytest.approx(80)


def test_a_question_without_a_prediction_scores_nothing() -> None:
    two = Questions([asked("one", ["1999"]), asked("two", ["Delft"])])
    with pytest.warns(UserWarning, match="1 of 2 questions have no prediction .* 'two'"):
        assert squad.score(two, {"one": "1999"}).exact_match == 50
    with pytest.raises(ValueError, match="no question"):
        squad.score(Questions([]), {})


def test_what_is_no_question() -> None:
    with pytest.raises(ValueError, match="'q': its context has 'kernel was' at 4"):
        Question("q", "who?", TEXT, ("kernel war",), (4,))
    with pytest.raises(ValueError, match="'q': its context has '' at 3, not the answer ''"):
        Question("q", "who?", TEXT, ("",), (3,))
    with pytest.raises(ValueError, match="'q' has no answer; remove"):
        Question("q", "who?", TEXT, (), ())
    with pytest.raises(ValueError, match="2 questions have the id 'q'"):
        Questions([asked("q", ["1999"]), asked("q", ["Delft"])])


def test_samples_hold_the_answers_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    samples = Questions([asked("who", ["Ada Moss", "Moss"]), asked("year", ["1999"])]).encoded(
        tokenizer, max_length=24
    )
    assert len(samples) == 2
    for (begin, end), text in zip(places(samples), ("Ada Moss", "1999"), strict=True):
        row = samples.offsets[0] if text == "Ada Moss" else samples.offsets[1]
        assert TEXT[row[begin, 0] : row[end, 1]] == text
    ids = samples.columns["input_ids"]
    assert ids.shape == samples.columns["attention_mask"].shape == (2, 24)
    # [CLS] who ? [SEP] are not tokens of the text, and neither are those after it.
    assert (samples.offsets[0][:4] == -1).all()
    assert (samples.offsets[0][4 + 13 :] == -1).all()


def test_long_texts_are_cut_into_windows(tokenizer: PreTrainedTokenizerFast) -> None:
    """An answer is the target of the windows that contain all of it; other windows have none."""
    context = " ".join(f"w{number}" for number in range(20)) + " the end"
    samples = Questions([asked("q", ["w9 w10"], context)]).encoded(
        tokenizer, max_length=13, stride=3
    )
    assert len(samples) > 2
    assert samples.owners.tolist() == [0] * len(samples)
    covered = {int(each) for each in samples.offsets[..., 0].flatten() if each >= 0}
    assert len(covered) == 22, "every token is in a window"
    targets = []
    for (begin, end), offsets in zip(places(samples), samples.offsets, strict=True):
        whole = context[offsets[begin, 0] : offsets[end, 1]] if begin else ""
        targets.append(whole)
    assert set(targets) == {"", "w9 w10"}
    # 13 tokens minus three special ones and two of the question: eight of the text in each window.
    assert shared(samples) == 3
    assert shared(Questions([asked("q", ["w9"], context)]).encoded(tokenizer, 13)) == 4


def test_the_best_span_over_all_windows_is_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    context = " ".join(f"w{number}" for number in range(20))
    questions = Questions([asked("q", ["w3"], context), asked("r", ["w5"], context)])
    samples = questions.encoded(tokenizer, max_length=13, stride=3)
    starts = torch.zeros(samples.columns["input_ids"].shape)
    ends = starts.clone()
    second = samples.owners.tolist().index(0) + 1  # the second window of the first question
    starts[second, 6], ends[second, 7] = 5.0, 5.0
    starts[:, 0], ends[:, 0] = 50.0, 50.0  # of [CLS], which is not an answer
    starts[second, 9], ends[second, 5] = 4.0, 9.0  # ends before it begins
    found = samples.answers(starts, ends)
    offsets = samples.offsets[second]
    assert found["q"] == context[offsets[6, 0] : offsets[7, 1]]
    assert samples.answers(starts, ends, most_tokens=1)["q"] == context[slice(*offsets[5].tolist())]
    assert set(found) == {"q", "r"}


def test_a_model_answers_in_the_mode_that_it_is_in(tokenizer: PreTrainedTokenizerFast) -> None:
    class Oracle(nn.Module):
        """Scores the known targets; `modes` records its training modes."""

        def __init__(self, samples: squad.Spans) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.samples, self.modes, self.seen = samples, set[bool](), 0

        def forward(self, input_ids: torch.Tensor, **others: Any) -> SimpleNamespace:
            assert not {name for name in others if name.endswith("positions")}
            self.modes.add(self.training)
            rows = slice(self.seen, self.seen + len(input_ids))
            self.seen += len(input_ids)
            starts, ends = (
                nn.functional.one_hot(self.samples.columns[name][rows], input_ids.shape[1])
                for name in ("start_positions", "end_positions")
            )
            return SimpleNamespace(start_logits=starts * self.weight, end_logits=ends * self.weight)

    questions = Questions([asked("who", ["Ada Moss"]), asked("year", ["1999"])])
    oracle = Oracle(questions.encoded(tokenizer, max_length=24))
    found = squad.predict(oracle, oracle.samples, batch_size=1)
    assert found == {"who": "Ada Moss", "year": "1999"}
    assert oracle.modes == {False}
    assert oracle.training


def test_a_slow_tokenizer_is_refused() -> None:
    slow = SimpleNamespace(is_fast=False)
    with pytest.raises(ValueError, match="use the model's fast tokenizer"):
        Questions([asked("q", ["1999"])]).encoded(slow)  # type: ignore[arg-type]


def test_files_and_rows(tmp_path: Path) -> None:
    answers = [{"text": "1999", "answer_start": TEXT.index("1999")}]
    rows = {"id": "q", "question": "When?", "answers": answers}
    form = {"data": [{"paragraphs": [{"context": TEXT, "qas": [rows]}]}]}
    path = tmp_path / "some.json"
    path.write_text(json.dumps(form))
    (read,) = squad.read(path).questions
    columns = {"text": ["1999"], "answer_start": [TEXT.index("1999")]}
    of_hub = {"id": "q", "question": "When?", "context": TEXT, "answers": columns}
    assert squad.of_rows([of_hub]).questions == (read,)
    assert read.answers == ("1999",)
    for wrong in ("{}", "no json", '{"data": [{"paragraphs": 1}]}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"some\.json is not in SQuAD's format"):
            squad.read(path)


def test_the_tutorials_own_set_is_in_order() -> None:
    """Every answer is at its stated place (reading checks it); the parts share no text or work."""
    train, held_out = (
        squad.read(DATA / f"computing_{name}.json") for name in ("train", "held_out")
    )
    texts = [{each.context for each in side.questions} for side in (train, held_out)]
    assert len(texts[0] | texts[1]) == len(texts[0]) + len(texts[1]) >= 60
    assert len(train) + len(held_out) >= 200
    works = [{each.id.rsplit("-", 1)[0] for each in side.questions} for side in (train, held_out)]
    assert not works[0] & works[1]


def shared(samples: squad.Spans) -> int:
    """Return the number of text tokens that the first two windows have in common."""
    first, second = (set(each[each[:, 0] >= 0][:, 0].tolist()) for each in samples.offsets[:2])
    return len(first & second)


def places(samples: squad.Spans) -> list[tuple[int, int]]:
    begins, ends = (samples.columns[f"{name}_positions"].tolist() for name in ("start", "end"))
    return list(zip(begins, ends, strict=True))
