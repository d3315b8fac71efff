"""NeuralSort's matrix, column by column: against the plain loop, and without documents."""

import pytest
import torch
from reference import sorting as reference
from torch import Tensor

from ltrscale.ranking.sorting import sort_entries


def matrix(scores_N: Tensor, offsets_Q1: Tensor, k: int | None) -> Tensor:
    """The weight of each document of the batch at the first k ranks of each list, shape [T, N]."""
    columns = [
        sort_entries(torch.stack([scores_N, one_N], dim=1), offsets_Q1, temperature=0.7, k=k, mode="soft")[:, 1]
        for one_N in torch.eye(len(scores_N), dtype=scores_N.dtype)
    ]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("k", [None, 1, 4, 20])
def test_the_matrix_is_that_of_the_plain_loop(k: int | None) -> None:
    scores_N = (2 * torch.randn(13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).round()
    scores_N.requires_grad_()
    matrix_TN = matrix(scores_N, torch.tensor([0, 9, 9, 13]), k)
    lists = [reference.neural_sort(scores_L, 0.7)[:k] for scores_L in (scores_N[:9], scores_N[9:])]
    expected_TN = torch.block_diag(*lists)
    torch.testing.assert_close(matrix_TN, expected_TN)
    weights_TN = torch.arange(float(expected_TN.numel()), dtype=torch.float64).reshape(expected_TN.shape).cos()
    gradient, expected = (torch.autograd.grad((weights_TN * m).sum(), scores_N)[0] for m in (matrix_TN, expected_TN))
    torch.testing.assert_close(gradient, expected)


def test_no_list_and_no_document_give_no_entries() -> None:
    for offsets_Q1 in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        entries_T2 = sort_entries(torch.zeros(0, 2), offsets_Q1, temperature=1.0, k=None, mode="soft")
        assert entries_T2.shape == (0, 2)
