"""Values for other processes, as bytes by cloudpickle: what cells define goes by value."""

from __future__ import annotations

import io
from types import CodeType
from typing import Any, Final

import cloudpickle

_NO_FILE: Final = "<dynamic-code>"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with code that knows the file that it is from.

    cloudpickle 3.1.3 takes that away (``_code_reduce``), and with it the lines in a rank's
    traceback and the source of a cell's model there.
    """

    def reducer_override(self, value: Any) -> Any:
        """Has code go without its file's name, and that beside it."""
        if isinstance(value, CodeType) and value.co_filename != _NO_FILE:
            return _from_file, (value.replace(co_filename=_NO_FILE), value.co_filename)
        return super().reducer_override(value)


def _from_file(code: CodeType, name: str) -> CodeType:
    return code.replace(co_filename=name)


def dumps(value: Any) -> bytes:
    """`value` as bytes, for `pickle.loads`; raises whatever the pickling of it raises."""
    packed = io.BytesIO()
    Pickler(packed).dump(value)
    return packed.getvalue()
