"""One step of an LSTM and of a GRU, which torch runs as a single kernel on every device except the CPU.

On the CPU, ``nn.LSTM`` is a few matrix products, sigmoids and additions. On other devices, everything after the two
products is *one* operator, ``_thnn_fused_lstm_cell``, with its own backward. The CPU has no kernel for it, so the
simulated device could not execute it. This module implements it with plain operators. The simulated device sees one
kernel with its inputs and outputs, as CUDA does, and does not see the operators inside.

A step of an LSTM with one number in each gate (input, forget, candidate, output)::

    gates 0, 0, 1, 0   state 2      sigmoid(0) = 0.5, tanh(1) = 0.76
    new state 0.5 * 2 + 0.5 * 0.76 = 1.38       output 0.5 * tanh(1.38) = 0.44

The last result of a forward is an input of its backward.

*In torch:* ``aten/src/ATen/native/cuda/RNN.cu``.

Spec: SIM-02.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["install_cells"]


def install_cells() -> torch.library.Library:
    """Registers CPU kernels for the fused cells. They exist as long as the returned library."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_thnn_fused_lstm_cell", lstm, "CPU")
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward, "CPU")
    library.impl("_thnn_fused_gru_cell", gru, "CPU")
    library.impl("_thnn_fused_gru_cell_backward", gru_backward, "CPU")
    return library


def lstm(
    from_input: Tensor,
    from_hidden: Tensor,
    state: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the new state, and the four gates."""
    gates = _biased(from_input, input_bias) + _biased(from_hidden, hidden_bias)
    enter, forget, candidate, leave = gates.chunk(4, 1)
    enter, forget, candidate, leave = enter.sigmoid(), forget.sigmoid(), candidate.tanh(), leave.sigmoid()
    new_state = forget * state + enter * candidate
    return leave * new_state.tanh(), new_state, torch.cat([enter, forget, candidate, leave], 1)


def lstm_backward(
    of_output: Tensor | None, of_new_state: Tensor | None, state: Tensor, new_state: Tensor, gates: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of the sum of both inputs, of the previous state, and of each bias."""
    nothing = torch.zeros_like(state)
    of_output = nothing if of_output is None else of_output
    of_new_state = nothing if of_new_state is None else of_new_state
    enter, forget, candidate, leave = gates.chunk(4, 1)
    bounded = new_state.tanh()
    of_state = of_new_state + of_output * leave * (1 - bounded * bounded)
    of_gates = torch.cat(
        [
            of_state * candidate * enter * (1 - enter),
            of_state * state * forget * (1 - forget),
            of_state * enter * (1 - candidate * candidate),
            of_output * bounded * leave * (1 - leave),
        ],
        1,
    )
    return of_gates, of_state * forget, of_gates.sum(0) if biased else None


def gru(
    from_input: Tensor,
    from_hidden: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the output, and the workspace for the backward."""
    reset_in, keep_in, candidate_in = _biased(from_input, input_bias).chunk(3, 1)
    reset_hidden, keep_hidden, candidate_hidden = _biased(from_hidden, hidden_bias).chunk(3, 1)
    reset, keep = (reset_in + reset_hidden).sigmoid(), (keep_in + keep_hidden).sigmoid()
    candidate = (candidate_in + reset * candidate_hidden).tanh()
    output = (hidden - candidate) * keep + candidate
    return output, torch.cat([reset, keep, candidate, hidden, candidate_hidden], 1)


def gru_backward(
    of_output: Tensor, workspace: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of both inputs, of the previous hidden state, and of both biases."""
    reset, keep, candidate, hidden, candidate_hidden = workspace.chunk(5, 1)
    of_candidate = of_output * (1 - keep) * (1 - candidate * candidate)
    of_keep = of_output * (hidden - candidate) * keep * (1 - keep)
    of_reset = of_candidate * candidate_hidden * reset * (1 - reset)
    of_input = torch.cat([of_reset, of_keep, of_candidate], 1)
    of_hidden = torch.cat([of_reset, of_keep, of_candidate * reset], 1)
    of_biases = (of_input.sum(0), of_hidden.sum(0)) if biased else (None, None)
    return of_input, of_hidden, of_output * keep, *of_biases


def _biased(values: Tensor, bias: Tensor | None) -> Tensor:
    return values if bias is None else values + bias
