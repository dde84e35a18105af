"""Pickling of values for other processes by cloudpickle, with definitions of cells by value."""

from __future__ import annotations

import io
from types import CodeType
from typing import Any, Final

import cloudpickle

_NO_FILE: Final = "<dynamic-code>"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of cloudpickle that preserves the file name of code objects.

    cloudpickle 3.1.3 removes it (``_code_reduce``), and with it the source lines in a rank's
    traceback and the source of a cell's model on the rank.

    Args:
        file: The file to write to.
    """

    def reducer_override(self, value: Any) -> Any:
        """Reduce code to code without a file name, and the name separately."""
        if isinstance(value, CodeType) and value.co_filename != _NO_FILE:
            return _from_file, (value.replace(co_filename=_NO_FILE), value.co_filename)
        return super().reducer_override(value)


def _from_file(code: CodeType, name: str) -> CodeType:
    return code.replace(co_filename=name)


def dumps(value: Any) -> bytes:
    """Return a value as bytes, for `pickle.loads`.

    Args:
        value: Any value.

    Raises:
        Exception: Whatever error the pickling of the value raises.
    """
    packed = io.BytesIO()
    Pickler(packed).dump(value)
    return packed.getvalue()
