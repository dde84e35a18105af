"""Settings of a run as a TOML file: what differs from the defaults, read and written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ortlab.settings.choices import LOSSES
from ortlab.settings.declaration import Declaration
from ortlab.settings.training import FinetuneSettings
from ortlab.utils import files

_NONE: Final = "off"
"""Value of a setting that is None where its default is not: TOML has no None."""


def read(path: str | Path) -> dict[str, Any]:
    """Read the settings in a file.

    Args:
        path: A TOML file of settings by name, without tables.

    Returns:
        The settings by name, checked one by one.

    Raises:
        ValueError: If the file cannot be read, is no TOML, or has a setting that is unknown or
            wrong. The message is one line with the file's name.
    """
    file = Path(path).expanduser()
    try:
        text = files.read(file.resolve()).decode()
    except OSError as error:
        raise ValueError(
            f"the settings file {path} cannot be read ({error.strerror}); run.save_config() writes "
            "one"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a settings file: it is not text in UTF-8") from None
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for name, value in values.items():
        if isinstance(value, dict):
            raise ValueError(
                f"{path} has a table [{name}]; write its settings without a heading, as "
                "run.save_config() does"
            )
    try:
        return _checked(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    known = FinetuneSettings.declarations()
    values = FinetuneSettings.canonical(values)
    values = {name: _value(known.get(name), value) for name, value in values.items()}
    FinetuneSettings.of(values)
    if (loss := values.get("loss")) not in (None, *LOSSES):
        raise ValueError(
            f"loss={loss!r} is not one of {', '.join(LOSSES)}; give a function of your own as "
            "loss=..., or --loss NAME"
        )
    return values


def _value(declaration: Declaration | None, value: Any) -> Any:
    if declaration is None or not declaration.optional or declaration.type is str:
        return value
    return None if value == _NONE else value


def text(settings: FinetuneSettings, *, run: str) -> str:
    """Return the settings that differ from the defaults as TOML, by topic.

    Args:
        settings: The settings.
        run: Name of the run, for the first line.
    """
    lines = [
        f"# Settings of {run} that are not the defaults.",
        "# %ort finetune MODEL DATA --config FILE, or ortlab.finetune(model, data, config=FILE)",
    ]
    topic = ""
    for name, value in settings.changed().items():
        declaration = settings.declarations()[name]
        if declaration.topic != topic:
            topic = declaration.topic
            lines += ["", f"# {topic}"]
        if name == "loss" and value not in LOSSES:
            lines.append(
                f"# loss: a function called {value!a}; give it again, as loss=... or --loss"
            )
        else:
            lines.append(f"{name} = {_written(value)}")
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    """Return a value in TOML; JSON writes numbers, booleans and text in the same way."""
    # DEL is the only character that TOML wants escaped and JSON does not.
    return json.dumps(_NONE if value is None else value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )
