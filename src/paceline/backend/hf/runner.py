"""Calling the model for one step: tensors in, the wanted rows of logits out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .step import Step, current_step

__all__ = ["Runner"]


class Runner:
    """A model, or what was compiled from it, called with one packed row.

    model: gives the logits of every row where it does not know logits_to_keep. forward: called in its place.
    """

    def __init__(self, model: Any, forward: Callable[..., Any] | None = None) -> None:
        self._forward = model if forward is None else forward
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, step: Step, ids: NDArray[np.int64], rows: NDArray[np.int64]) -> Tensor:
        """ids: int64[total]. rows: int64[R], R >= 1, of the packed row. Returns [R, V] on the model's device."""
        device = step.pools.device
        keep = torch.from_numpy(rows).to(device)
        token = current_step.set(step)
        try:
            with torch.inference_mode():
                logits: Tensor = self._forward(
                    input_ids=torch.from_numpy(ids).to(device)[None],
                    position_ids=torch.from_numpy(step.positions()).to(device)[None],
                    use_cache=False,
                    **({"logits_to_keep": keep} if self._keeps_rows else {}),
                ).logits[0]
                return logits if self._keeps_rows else logits.index_select(0, keep)
        finally:
            current_step.reset(token)
