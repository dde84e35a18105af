"""A session of ORT's that works in the memory of torch's tensors, bound from call to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ortlab.engines.ortmodule.compat import native
from ortlab.engines.ortmodule.compat.passes import lent


class Bound:
    """An onnxruntime.InferenceSession that works in the memory of torch's tensors, on a CPU.

    What lies where it lay in the call before is not handed over again.
    """

    def __init__(self, session: Any, outputs: Sequence[str]) -> None:
        from onnxruntime.capi import _pybind_state
        from onnxruntime.training.ortmodule import _utils

        self._ort, self._utils = _pybind_state, _utils
        self._session = session
        self._binding = session.io_binding()
        self._outputs = outputs
        self._layout: object = None

    def run(
        self,
        names: Sequence[str],
        tensors: tuple[torch.Tensor, ...],
        given: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, for `tensors` called `names` that last and what is `given` to this call.

        Lasting ones have to be contiguous: the graph may change them.
        """
        layout = native.layout(tensors)
        if layout != self._layout:
            for name, tensor in zip(names, tensors, strict=True):
                self._bind(name, tensor)
            self._layout = layout
        for name, tensor in given.items():
            self._bind(name, tensor)
        for name in self._outputs:  # where the last call's lie the next one would write
            self._binding.bind_output(name)
        with torch.no_grad():
            self._session.run_with_iobinding(self._binding)
        found = self._binding._iobinding.get_outputs()
        outputs: tuple[torch.Tensor, ...] = self._utils._ortvalues_to_torch_tensor(found, None)
        return outputs

    def _bind(self, name: str, tensor: torch.Tensor) -> None:
        value = self._ort.OrtValue.from_dlpack(*lent(tensor.detach()))
        self._binding._iobinding.bind_ortvalue_input(name, value)
