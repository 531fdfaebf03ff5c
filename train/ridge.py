"""Ridge regression from sums over batches, for initial weights in closed form."""

# M rows, K inputs, H outputs

import torch
from torch import Tensor

FITTED_ROWS = 40_000
"""Tokens used for a fit; for SPD's, twice as many changed nothing."""


class Ridge:
    """W = argmin sum |x W - y|^2 + lambda |W|^2, from the sums of x^T x and x^T y."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device) -> None:
        # In float64: normal equations square the condition number.
        like = torch.zeros(0, dtype=torch.float64, device=device)
        self.gram_KK = like.new_zeros(num_inputs, num_inputs)
        self.cross_KH = like.new_zeros(num_inputs, num_outputs)

    def add(self, x_MK: Tensor, y_MH: Tensor) -> None:
        x_MK, y_MH = x_MK.double(), y_MH.double()
        self.gram_KK += x_MK.T @ x_MK
        self.cross_KH += x_MK.T @ y_MH

    def solve(self, penalty: float, start: int = 0) -> Tensor:
        """Return W, float64 [K, H].

        Args:
            penalty: lambda relative to the mean square, so that it fits any scale and any number
                of rows.
            start: first input of a second part, whose scale differs from that of the first.
        """
        gram_KK = self.gram_KK.clone()
        for part_K in (gram_KK.diagonal()[:start], gram_KK.diagonal()[start:]):
            if len(part_K):
                part_K.add_(penalty * part_K.mean())
        return torch.linalg.solve(gram_KK, self.cross_KH)

    def solve_rank(self, penalty: float, rank: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return A [K, R] and B [R, H], whose product fits best among all of this rank.

        Reduced-rank regression: W projected on the directions in which x W varies most.

        Args:
            start: as in ``solve``. Only the second part of x and W is taken, though W fits both.
        """
        w_KH = self.solve(penalty, start)[start:]
        _, directions_HH = torch.linalg.eigh(w_KH.T @ self.gram_KK[start:, start:] @ w_KH)
        best_HR = directions_HH[:, -rank:]  # eigenvalues ascend
        return w_KH @ best_HR, best_HR.T
