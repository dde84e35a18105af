"""Convolutions with a single position, as matrix products.

In the last stage of a network for small images a kernel is as large as the image, or larger, and
most of it over padding. oneDNN computes that part, too, and reserves several times the weight's
memory for it. ResNet-18 of 32 x 32 pixels has three such layers, of 3 x 3 over 1 x 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

aten = torch.ops.aten


@dataclass(frozen=True)
class _Window:
    """The only position of a kernel.

    Attributes:
        begins: First element of the kernel that is not over padding, in each dimension.
        sizes: Number of elements that are not over padding, in each dimension. They cover that many
            elements at the beginning of the image.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        groups: int,
    ) -> _Window | None:
        """Return the window of a convolution; None if it has several positions, or one element."""
        if transposed:
            return None
        image, kernel = x.shape[2:], weight.shape[2:]
        steps, around, apart = (
            [*given] * (len(image) if len(given) == 1 else 1)
            for given in (stride, padding, dilation)
        )
        numbers = (*image, *kernel, *steps, *around, *apart, groups)
        if not all(isinstance(each, int) for each in numbers):
            return None  # a symbol: other images may have more positions
        if groups != 1 or any(each != 1 for each in apart) or math.prod(kernel) == 1:
            return None
        sizes = []
        for n, k, step, p in zip(image, kernel, steps, around, strict=True):
            if k <= p or not k <= n + 2 * p < k + step:
                return None
            sizes.append(min(n, k - p))
        return cls(tuple(around), tuple(sizes))

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight's elements in the window, [outputs, inputs times elements]."""
        return self._rows(weight, self.begins)

    def of_image(self, x: torch.Tensor) -> torch.Tensor:
        """Return the image's elements in the window, [batch, inputs times elements]."""
        return self._rows(x, [0] * len(self.sizes))

    def _rows(self, of: torch.Tensor, begins: Sequence[int]) -> torch.Tensor:
        for dim, (begin, size) in enumerate(zip(begins, self.sizes, strict=True), 2):
            of = of if size == of.shape[dim] else of.narrow(dim, begin, size)
        return of.reshape(of.shape[0], math.prod(of.shape[1:]))

    def to_weight(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight for that of its elements in the window."""
        return self._placed(rows, weight, self.begins)

    def to_image(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the image for that of its elements in the window."""
        return self._placed(rows, x, [0] * len(self.sizes))

    def _placed(
        self, rows: torch.Tensor, like: torch.Tensor, begins: Sequence[int]
    ) -> torch.Tensor:
        found = rows.reshape(*like.shape[:2], *self.sizes)
        around = [
            side
            for begin, size, whole in zip(begins, self.sizes, like.shape[2:], strict=True)
            for side in (whole - begin - size, begin)
        ]
        return functional.pad(found, around[::-1]) if any(around) else found


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Compute ``aten.convolution`` with a single position.

    Args:
        x: Images, [batch, inputs, ...].
        weight: Kernels, [outputs, inputs, ...].
        bias: Numbers that are added, [outputs].
        stride: Distance between two positions in each dimension.
        padding: Zeros on each side of each dimension.
        dilation: Distance between two elements of the kernel in each dimension.
        transposed: True for the gradient of a convolution.
        output_padding: Of transposed convolutions alone.
        groups: Number of groups of inputs and outputs.

    Returns:
        The result, [batch, outputs, 1, ...]; NotImplemented for other convolutions, and for kernels
        of one element, which have rules of their own.
    """
    del output_padding
    window = _Window.of(x, weight, stride, padding, dilation, transposed, groups)
    if window is None:
        return NotImplemented
    rows, columns = window.of_image(x), window.of_weight(weight).t()
    found = rows @ columns if bias is None else torch.addmm(bias, rows, columns)
    return found.reshape(*found.shape, *[1] * len(window.sizes))


def convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Compute ``aten.convolution_backward`` with a single position.

    Args:
        gradient: Gradient of the result, [batch, outputs, 1, ...].
        x: See `convolution`.
        weight: See `convolution`.
        bias_sizes: Shape of the bias, which the gradient has anyway.
        stride: See `convolution`.
        padding: See `convolution`.
        dilation: See `convolution`.
        transposed: See `convolution`.
        output_padding: See `convolution`.
        groups: See `convolution`.
        output_mask: Which of the gradients of images, weight and bias to compute.

    Returns:
        The gradients, None for others; NotImplemented where `convolution` returns it.
    """
    del bias_sizes, output_padding
    window = _Window.of(x, weight, stride, padding, dilation, transposed, groups)
    if window is None:
        return NotImplemented
    rows = gradient.reshape(gradient.shape[0], gradient.shape[1])
    of_x, of_weight, of_bias = output_mask
    return (
        window.to_image(rows @ window.of_weight(weight), x) if of_x else None,
        window.to_weight(rows.t() @ window.of_image(x), weight) if of_weight else None,
        rows.sum(0) if of_bias else None,
    )


DECOMPOSITIONS: Final[dict[Any, Callable[..., Any]]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
"""Decompositions by operator, which return NotImplemented where the operator is to stay."""
