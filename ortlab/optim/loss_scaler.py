"""Loss scaler of ORT's first training API, with its names and settings."""

from __future__ import annotations

import math

from ortlab.utils.errors import brief


class DynamicLossScaler:
    """Dynamic loss scaling for float16, whose small gradients would become 0 without it.

    A step whose gradients overflow is skipped and halves the scale.

    Args:
        automatic_update: False keeps the scale as it is; steps that overflow are still skipped.
        loss_scale: Scale of the first step.
        up_scale_window: Number of steps in a row without overflow after which the scale doubles.
        min_loss_scale: Lower bound of the scale.
        max_loss_scale: Upper bound of the scale.

    Raises:
        ValueError: A value is out of range.
    """

    loss_scale: float
    """Scale of the next step."""

    @brief
    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        self.automatic_update = automatic_update
        self.loss_scale = loss_scale
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        if not isinstance(up_scale_window, int) or not 1 <= up_scale_window < 2**31:
            raise ValueError(f"{up_scale_window=} must be a number of steps of at least 1")
        bounds = (min_loss_scale, loss_scale, max_loss_scale)
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in bounds):
            raise ValueError(
                f"{min_loss_scale=}, {loss_scale=}, {max_loss_scale=}: scales must be above 0"
            )
        if not min_loss_scale <= loss_scale <= max_loss_scale:
            raise ValueError(
                f"{loss_scale=} must be between {min_loss_scale=} and {max_loss_scale=}"
            )

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"DynamicLossScaler({values})"
