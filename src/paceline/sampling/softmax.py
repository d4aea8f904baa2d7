"""A distribution that no filter has cut, kept as its logits: it computes what it is asked for, when it is asked."""

from __future__ import annotations

import numpy as np

from ..rng import KeyedDraws
from ..types import Distribution, Draws, FloatArray, IntArray, Role
from . import kernels
from .rows import Row

_PICK = KeyedDraws.pick


class Softmax(Distribution):
    """p of logits at a temperature, dense. What is asked first does not change a bit of what is asked later.

    A draw needs neither p nor its normaliser, p of one token needs the normaliser, and only who asks for `probs`
    gets an array made.
    """

    ids = None
    _row: Row
    _peak: float
    _scale: float
    _share: float | None = None  # what turns a weight into a probability
    _probs: FloatArray | None = None

    def __init__(self, row: Row, peak: float, scale: float) -> None:
        """row: float32[V] or float64[V] without NaN, contiguous; it must stay as it is while this is in use.
        peak: its largest, finite. scale: `kernels.scale_of` the temperature."""
        self.__dict__.update(_row=row, _peak=peak, _scale=scale)  # the class is frozen for everybody else

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._row.size

    @property
    def probs(self) -> FloatArray:
        """float64[V]. Do not write."""
        if self._probs is None:
            probs = np.empty(self._row.size)
            if self._share is None:
                share = 1.0 / kernels.weigh(self._row, self._peak, self._scale, probs)
                probs *= share
                self.__dict__["_share"] = share
            else:
                kernels.weights_of(self._row, self._peak, self._scale, self._share, probs)
            self.__dict__["_probs"] = probs
            return probs
        return self._probs

    def _shared(self) -> float:
        if self._share is None:
            share: float = 1.0 / kernels.total(self._row, self._peak, self._scale)
            self.__dict__["_share"] = share
            return share
        return self._share

    def prob(self, token: int) -> float:
        """Probability of one token."""
        weight: float = kernels.weight_of(float(self._row[token]), self._peak, self._scale)
        return weight * self._shared()

    def at(self, ids: IntArray | None) -> FloatArray:
        """Probabilities at `ids` (None: at every token, float64[V]). May be a view: do not write."""
        if ids is None:
            return self.probs
        if self._probs is not None:
            return self._probs[ids]
        probs = np.empty(ids.size)
        kernels.weights_of(self._row[ids], self._peak, self._scale, self._shared(), probs)
        return probs

    def pick(self, draws: Draws, position: int, role: Role, node: int = 0) -> int:
        """A token drawn from it: as `draws.pick` draws from its weights, which need not be made for keyed draws."""
        if not isinstance(draws, KeyedDraws) or type(draws).pick is not _PICK:
            return draws.pick(self.probs, position, role, node=node)  # who replaces or watches draws sees p
        key = draws.key(position, role, node)
        return int(kernels.race(self._row, self._peak, self._scale, *key))
