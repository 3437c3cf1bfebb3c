"""Estimates activations and operations, which depend on the batch, from the shapes of the matrices.

The rule: for each token, *a matrix keeps its input and its output*. The input is needed for the gradient of the weight.
The output is not needed by the matrix, but by the next operation: a norm, an attention or an activation function keeps
its own input. Worked example, a block of GPT-2 with width h::

    matrix                 in + out
    queries, keys, values  h  + 3 h       the norm's output; three inputs of the attention
    projection             h  + h         the attention's output; the sum, which is the next norm's input
    up                     h  + 4 h       the norm's output; the input of the activation function
    down                   4 h + h        the activation's output; the sum, which is the next block's input
    together               16 h           in 16-bit numbers 32 bytes for each token and h

This is the count of arXiv 2205.05198 without its dropout masks and attention scores. In a block with a gate the true
count is 6 h + 2 k + 4 i, where k is the width of the keys and i the intermediate width. The rule gives 9 h + 2 k + 3 i,
which for Llama-3 is 2 or 3 percent less.

The formulas, for t tokens and b bytes per element of the compute dtype::

    kept       b t * the sum over all blocks
    working    b t * in + out of the largest matrix: gradients of the block that is computing
    head       t * (12 v + 2 b h): three float32 copies of the v scores, the last norm's input and output

    activations                    kept + max(head, working)
    with checkpointing, per block  b t h for each block + max(head, one block + working)

The three copies are the log-probabilities, which the loss keeps, and two gradients in its backward.

Assumptions: units are blocks, and their first matrix reads the block's input; the largest matrix of the root computes
the scores, and all others of the root are embeddings; attention is a fused kernel that keeps no scores; there is no
dropout. Other operations need more: a cast to float32 in a norm, a copy before a projection, a slice that keeps the
whole tensor alive. The small GPT of ``train_gpt.py`` and a small Llama keep up to a quarter more.

Operations are those of matrix products: two for each matrix element and token in forward, and twice as many in
backward. Checkpointing repeats those of forward, except for each block's last matrix: no operation in the block needs
its output, and PyTorch stops there. The products of attention itself are not included; for s tokens in a sequence
they add about s / (12 h) of the total.

*In torch:* ``torch.utils.flop_counter`` counts operations in a run; several tools measure the memory of a run.

Spec: COST-16, COST-17.
"""

from collections.abc import Sequence
from math import prod

from minifsdp_tools.formulas import Shape
from minifsdp_tools.job import Job


def activation_bytes(job: Job, tokens: int, *, checkpointing: bool = False) -> float:
    """An estimate of a rank's peak activations for backward (COST-16); for the ``activations`` of a `Job`.

    Args:
        job: the model and the choices.
        tokens: number of tokens in one micro-batch on one rank, sequences times their length.
        checkpointing: each unit keeps only its input, and recomputes the rest in backward.
    """
    blocks = [matrices for unit in job.units if (matrices := _matrices(unit))]
    of_token = job.width * tokens
    kept = [of_token * sum(map(sum, matrices)) for matrices in blocks]
    working = of_token * max(
        (sum(matrix) for matrices in blocks for matrix in matrices), default=0
    )
    if checkpointing:
        inputs = of_token * sum(matrices[0][1] for matrices in blocks)
        return inputs + max(_head(job, tokens), max(kept, default=0) + working)
    return sum(kept) + max(_head(job, tokens), working)


def operations(job: Job, tokens: int, *, checkpointing: bool = False) -> float:
    """Additions and multiplications in a rank's matrix products in a step, for all micro-batches (COST-17)."""
    blocks = [[prod(matrix) for matrix in _matrices(unit)] for unit in job.units]
    again = sum(sum(block[:-1]) for block in blocks) if checkpointing else 0
    return (
        2.0
        * job.micro_batches
        * tokens
        * (3 * (sum(map(sum, blocks)) + prod(_scores(job))) + again)
    )


def _matrices(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape for shape in shapes if len(shape) == 2]


def _scores(job: Job) -> Shape:
    """The shape of the matrix that computes the scores, output before input; zero elements if there is none."""
    return max(_matrices(job.root), key=prod, default=(0, 0))


def _head(job: Job, tokens: int) -> float:
    """Bytes of the scores' log-probabilities and gradients, and of the last norm's input and output."""
    vocabulary, width = _scores(job)
    return tokens * (12 * vocabulary + 2 * job.width * width)
