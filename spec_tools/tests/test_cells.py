"""The simulated device computes an RNN cell as one kernel, with the results of torch's cell of several operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness.simulated import cells


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    library = cells.install_cells()
    yield
    library._destroy()


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def products_and_biases(cell: nn.RNNCellBase, values: Tensor, hidden: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [values @ cell.weight_ih.T, hidden @ cell.weight_hh.T], [cell.bias_ih, cell.bias_hh] if cell.bias else []


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Equal values, and equal gradients of all inputs."""
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    of_found, of_expected = (torch.autograd.grad((t * weights).sum(), inputs) for t in (found, expected))
    torch.testing.assert_close(of_found, of_expected)


biased_or_not = pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])


@biased_or_not
@pytest.mark.parametrize("looked_at", ["output", "state", "both"])
def test_a_fused_lstm_step_has_the_values_and_gradients_of_an_lstm_cell(biased: bool, looked_at: str) -> None:
    cell = nn.LSTMCell(3, 4, bias=biased, dtype=torch.float64)
    values, hidden, state = double(2, 3), double(2, 4), double(2, 4)
    products, biases = products_and_biases(cell, values, hidden)
    results = torch.ops.aten._thnn_fused_lstm_cell(*products, state, *biases)[:2]
    expected = cell(values, (hidden, state))
    chosen = {"output": slice(0, 1), "state": slice(1, 2), "both": slice(0, 2)}[looked_at]
    inputs = [values, hidden, state, *cell.parameters()]
    assert_same(torch.cat(results[chosen]), torch.cat(expected[chosen]), inputs)


@biased_or_not
def test_a_fused_gru_step_has_the_values_and_gradients_of_a_gru_cell(biased: bool) -> None:
    cell = nn.GRUCell(3, 4, bias=biased, dtype=torch.float64)
    values, hidden = double(2, 3), double(2, 4)
    products, biases = products_and_biases(cell, values, hidden)
    output, _ = torch.ops.aten._thnn_fused_gru_cell(*products, hidden, *biases)
    assert_same(output, cell(values, hidden), [values, hidden, *cell.parameters()])
