"""ORT session bound to the memory of torch tensors; bindings are reused between calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ortlab.engines.ortmodule.compat import native
from ortlab.engines.ortmodule.compat.passes import lent


class Bound:
    """An onnxruntime.InferenceSession bound to the memory of torch tensors, on a CPU.

    Lasting tensors are bound again only after their memory or layout changed.

    Args:
        session: The session.
        outputs: Names of its outputs.
    """

    def __init__(self, session: Any, outputs: Sequence[str]) -> None:
        from onnxruntime.capi import _pybind_state  # optional: onnxruntime-training
        from onnxruntime.training.ortmodule import _utils  # optional: onnxruntime-training

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
        """Run the session and return its outputs.

        Args:
            names: Names of the lasting inputs.
            tensors: Lasting inputs. They must be contiguous, because the graph may change them.
            given: Inputs of this call alone, by name.
        """
        layout = native.layout(tensors)
        if layout != self._layout:
            for name, tensor in zip(names, tensors, strict=True):
                self._bind(name, tensor)
            self._layout = layout
        for name, tensor in given.items():
            self._bind(name, tensor)
        for name in self._outputs:  # otherwise this call would overwrite the last call's outputs
            self._binding.bind_output(name)
        with torch.no_grad():
            self._session.run_with_iobinding(self._binding)
        found = self._binding._iobinding.get_outputs()
        outputs: tuple[torch.Tensor, ...] = self._utils._ortvalues_to_torch_tensor(found, None)
        return outputs

    def _bind(self, name: str, tensor: torch.Tensor) -> None:
        value = self._ort.OrtValue.from_dlpack(*lent(tensor.detach()))
        self._binding._iobinding.bind_ortvalue_input(name, value)
