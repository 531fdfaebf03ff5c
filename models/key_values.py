"""Keys and values that one layer of a draft keeps while it decodes."""

# R rows of a call, P cached rows, N query heads, J key heads, D head size

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class KeyValues:
    """Keys and values of rows in order, [J, P, D] each; None before the first."""

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return 0 if self.keys is None else self.keys.shape[1]

    def append(self, keys_JRD: Tensor, values_JRD: Tensor) -> None:
        if self.keys is None or self.values is None:
            self.keys, self.values = keys_JRD, values_JRD
        else:
            self.keys = torch.cat([self.keys, keys_JRD], 1)
            self.values = torch.cat([self.values, values_JRD], 1)

    def select(self, rows: list[int]) -> "KeyValues":
        """A copy with some of the rows."""
        if self.keys is None or self.values is None:
            return KeyValues()
        index = torch.tensor(rows, dtype=torch.int64, device=self.keys.device)
        return KeyValues(self.keys[:, index], self.values[:, index])

    def attend(self, query_RND: Tensor, visible_RP: Tensor) -> Tensor:
        """Attention over the cached rows: [R, N, D].

        Args:
            visible_RP: bool, rows of the cache that each query may see.
        """
        assert self.keys is not None and self.values is not None
        attended_NRD = F.scaled_dot_product_attention(
            query_RND.transpose(0, 1)[None],
            self.keys[None],
            self.values[None],
            attn_mask=visible_RP,
            enable_gqa=query_RND.shape[1] != self.keys.shape[0],
        )[0]
        return attended_NRD.transpose(0, 1)
