"""What can be chosen: settings, declared once.

The magics' options, the panel's controls, the CLI's flags and the table in the docs are all made
from these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Declaration:
    """How one setting may be chosen: its help text, its bounds and its unit.

    ``type`` is the plain type of the value (``str``, ``int``, ``float`` or ``bool``); ``optional``
    says that ``None`` is a value too.
    """

    name: str
    type: type
    default: Any
    help: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    unit: str = ""

    @property
    def flag(self) -> str:
        """The option's name on a command line: ``batch_size`` is ``--batch-size``."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value that a user typed as `text`; ValueError says what would have been right."""
        lowered = text.strip().lower()
        if self.optional and lowered in ("none", "off"):
            return None
        if self.type is bool:
            if lowered in ("on", "true", "yes", "1"):
                return True
            if lowered in ("off", "false", "no", "0"):
                return False
            raise ValueError(f"{self.flag} takes on or off, not {text!r}")
        if self.type is str:
            return text
        try:
            return self.type(text)
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            raise ValueError(f"{self.flag} takes {kind}, not {text!r}") from None

    def check(self, value: Any) -> Any:
        """`value`, converted to the declared type where that loses nothing; else ValueError."""
        if value is None:
            if self.optional:
                return None
            raise ValueError(f"{self.name} needs a value; the default is {self.default!r}")
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        wrong_bool = isinstance(value, bool) and self.type is not bool
        if wrong_bool or not isinstance(value, self.type):
            raise ValueError(
                f"{self.name}={value!r} is {type(value).__name__}, expected {self.type.__name__}"
            )
        if isinstance(value, str) and self.choices and value not in self.choices:
            raise ValueError(f"{self.name}={value!r}: {unknown_name(value, self.choices)}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def _check_bounds(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"{self.name}={value!r} must be finite")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.name}={value!r} must be at least {self.minimum:g}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"{self.name}={value!r} must be above {self.above:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.name}={value!r} must be at most {self.maximum:g}")


def unknown_name(name: str, known: Iterable[str]) -> str:
    """A phrase that lists the known names and offers the one nearest to `name`."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    offer = f"; did you mean {near[0]!r}?" if near else ""
    return f"choose from {', '.join(known) or 'nothing (there is none)'}{offer}"


def setting(default: Any, *, help: str, **bounds: Any) -> Any:  # noqa: A002 - argparse's word
    """A dataclass field with its `Declaration`: help, choices, minimum, above, maximum, unit."""
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen set of settings: validated when made, changed by replacement.

    Raises ValueError, naming the setting and what would be right.
    """

    def __post_init__(self) -> None:
        for declaration in self.declarations().values():
            value = declaration.check(getattr(self, declaration.name))
            object.__setattr__(self, declaration.name, value)

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """Every setting of this class by its name, in the order of declaration."""
        hints = typing.get_type_hints(cls)
        return {
            field.name: _declaration(field, hints[field.name]) for field in dataclasses.fields(cls)
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Settings from a mapping of names; an unknown name raises and offers the nearest."""
        known = cls.declarations()
        for name in values:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}: {unknown_name(name, known)}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """These settings with `changes` made; validated like new ones."""
        return type(self).of({**self.as_dict(), **changes})

    def as_dict(self) -> dict[str, Any]:
        """Name to value, as settings.json holds it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _declaration(field: dataclasses.Field[Any], hint: Any) -> Declaration:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (member for member in members if member is not type(None))
    return Declaration(
        name=field.name,
        type=plain,
        default=field.default,
        optional=type(None) in members,
        **field.metadata,
    )


ENGINES = ("eager", "compile", "ort")
LOSSES = ("cross_entropy", "mse", "l1", "bce_with_logits")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """How a model is executed; the options of ``%%ort`` and ``ortlab.wrap``."""

    engine: str = setting("ort", choices=ENGINES, help="what executes the model")
    self_check: bool = setting(
        True, help="compare ORT's outputs and gradients with eager torch before the first step"
    )
    fallback: bool = setting(
        False, help="let ORTModule run plain torch, with a badge, where ORT cannot run the model"
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(EngineSettings):
    """How a model is fine-tuned; the options of ``%ort finetune`` and ``ortlab.finetune``."""

    loss: str | None = setting(
        None,
        help=f"a loss function of the notebook, or one of {', '.join(LOSSES)}; "
        "the model's own where it returns one",
    )
    epochs: int = setting(1, minimum=1, help="passes over the training data")
    max_steps: int | None = setting(None, minimum=1, help="end after so many optimizer steps")
    batch_size: int = setting(16, minimum=1, unit="samples", help="samples in a micro-batch")
    accumulation: int = setting(1, minimum=1, help="micro-batches for one optimizer step")
    lr: float = setting(5e-5, above=0, help="the highest learning rate")
    optimizer: str = setting("adamw", choices=("adamw", "sgd"), help="the update rule")
    weight_decay: float = setting(0.01, minimum=0, help="decoupled weight decay")
    schedule: str = setting(
        "linear", choices=("constant", "linear", "cosine"), help="the learning rate after warm-up"
    )
    warmup_steps: int = setting(0, minimum=0, unit="steps", help="steps of rising learning rate")
    clip_norm: float | None = setting(1.0, above=0, help="the largest norm of all gradients")
    eval_every: int | None = setting(
        None, minimum=1, unit="steps", help="evaluate every so many steps, not after every epoch"
    )
    seed: int = setting(0, minimum=0, help="seeds the order of the data and every random number")
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="where the model trains")
