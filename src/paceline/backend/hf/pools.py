"""The tensors behind the page tables: one pair of key and value pools per layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import BackendError

__all__ = ["Pools"]


class Pools:
    """Keys and values of num_pages * page_size cells, layer by layer.

    A pool is [1, heads, cells, width], with the layer's own heads and widths, and comes to be when the layer is
    first met. The memory is left as the system gives it: a CPU hands it out when it is written for the first time.
    """

    def __init__(self, num_pages: int, page_size: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The pools of a layer whose new rows are keys [1, heads, T, Dk] and values [1, heads, T, Dv].

        Raises BackendError where there is no memory for them.
        """
        pools = self._layers.get(layer)
        if pools is None:
            pools = self._layers[layer] = (self._pool(layer, keys), self._pool(layer, values))
        return pools

    def _pool(self, layer: int, rows: Tensor) -> Tensor:
        shape = (1, rows.shape[1], self.num_pages * self.page_size, rows.shape[3])
        try:
            with torch.inference_mode(False):  # pages are also moved between forwards, outside of that mode
                return torch.empty(shape, dtype=rows.dtype, device=rows.device)
        except RuntimeError as error:
            raise BackendError(
                f"no memory for {shape[2]} tokens of keys or values in layer {layer} ({rows.dtype}, shape "
                f"{shape}); lower kv_tokens or max_len ({error})"
            ) from None

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) in every layer, in the order given."""
        size = self.page_size
        for layer in self._layers.values():
            for pool in layer:
                for source, target in copies:
                    pool[:, :, target * size : (target + 1) * size] = pool[:, :, source * size : (source + 1) * size]

    def move_cells(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cells to other cells in every layer; all are read before any is written."""
        read = torch.tensor(sources, dtype=torch.int64, device=self.device)
        write = torch.tensor(targets, dtype=torch.int64, device=self.device)
        for layer in self._layers.values():
            for pool in layer:
                pool.index_copy_(2, write, pool.index_select(2, read))

    def read(self, cells: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Copies of the keys and values in `cells`, by layer: [heads, len(cells), width] each. For tests."""
        index = torch.tensor(cells, dtype=torch.int64, device=self.device)
        return {
            layer: (keys[0].index_select(1, index), values[0].index_select(1, index))
            for layer, (keys, values) in self._layers.items()
        }

    @property
    def layers(self) -> list[int]:
        """The layers met so far, ascending."""
        return sorted(self._layers)

    def free(self) -> None:
        """Let go of the memory."""
        self._layers.clear()
