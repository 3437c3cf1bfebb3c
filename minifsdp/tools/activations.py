"""What depends on the batch: activations and arithmetic, estimated from the shapes of the matrices alone.

The rule behind it: for each token *a matrix keeps what comes in and what goes out*. What comes in is needed for the
gradient of the weight. What goes out is not needed by the matrix, but by what follows: a norm, an attention or an
activation function keeps its own input. Worked example, a block of GPT-2 with width h::

    matrix                 in + out
    queries, keys, values  h  + 3 h       the norm's output; three inputs of the attention
    projection             h  + h         the attention's output; the sum, which is the next norm's input
    up                     h  + 4 h       the norm's output; the input of the activation function
    down                   4 h + h        its output; the sum, which is the next block's input
    together               16 h           in 16-bit numbers 32 bytes for each token and h

This is the count of arXiv 2205.05198 without its masks of dropout and without the scores of attention. In a block with
a gate the true count is 6 h + 2 k + 4 i, for k numbers of keys and i in between; the rule says 9 h + 2 k + 3 i, which
for Llama-3 is 2 or 3 in a hundred less.

From that, for t tokens and b bytes of an element that is computed with::

    kept       b t * the sum over all blocks
    working    b t * in + out of the largest matrix: gradients of a block at work
    head       t * (12 v + 2 b h): three float32 copies of the v scores, the last norm's input and output

    activations                    kept + max(head, working)
    with checkpointing, per block  b t h for each block + max(head, one block + working)

The three copies are the logarithms of the probabilities, which the loss keeps, and in its backward two gradients.

What is assumed: units are blocks, and their first matrix reads what comes into the block; the largest matrix of the
root gives the scores, all others of the root are looked up; attention is a fused kernel that keeps no scores; there is
no dropout. What code does beside it comes on top: a cast to float32 in a norm, a copy before a projection, a slice that
keeps the whole alive. The small GPT of ``train_gpt.py`` and a small Llama keep up to a quarter more.

Operations are those of matrix products, two for each element of a matrix and token in forward and twice as many in
backward. With checkpointing those of forward come once more, but for each block's last matrix: nothing in the block
waits for its output, and PyTorch stops there. The products of attention itself are not in it; for s tokens in a
sequence they add about s / (12 h) of it.

*In torch:* ``torch.utils.flop_counter`` counts in a run; of the memory there are tools that look at a run.

Spec: COST-16, COST-17.
"""

from collections.abc import Sequence
from math import prod

from minifsdp.tools.formulas import Shape
from minifsdp.tools.job import Job

__all__ = ["activation_bytes", "operations"]


def activation_bytes(job: Job, tokens: int, *, checkpointing: bool = False) -> float:
    """An estimate of what a rank keeps for backward, at its peak (COST-16); for the ``activations`` of a `Job`.

    Args:
        job: what is trained, and how.
        tokens: of one micro-batch on one rank: sequences times their length.
        checkpointing: each unit keeps its input only, and computes the rest once more in backward.
    """
    blocks = [matrices for unit in job.units if (matrices := _matrices(unit))]
    of_token = job.width * tokens
    kept = [of_token * sum(map(sum, matrices)) for matrices in blocks]
    working = of_token * max((sum(matrix) for matrices in blocks for matrix in matrices), default=0)
    if checkpointing:
        inputs = of_token * sum(matrices[0][1] for matrices in blocks)
        return inputs + max(_head(job, tokens), max(kept, default=0) + working)
    return sum(kept) + max(_head(job, tokens), working)


def operations(job: Job, tokens: int, *, checkpointing: bool = False) -> float:
    """Additions and multiplications of a rank's matrix products in a step, all micro-batches together (COST-17)."""
    blocks = [[prod(matrix) for matrix in _matrices(unit)] for unit in job.units]
    again = sum(sum(block[:-1]) for block in blocks) if checkpointing else 0
    return 2.0 * job.micro_batches * tokens * (3 * (sum(map(sum, blocks)) + prod(_scores(job))) + again)


def _matrices(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape for shape in shapes if len(shape) == 2]


def _scores(job: Job) -> Shape:
    """The matrix that gives the scores, output before input; of no elements if there is none."""
    return max(_matrices(job.root), key=prod, default=(0, 0))


def _head(job: Job, tokens: int) -> float:
    """Bytes of the scores' logarithms and gradients, and around the last norm."""
    vocabulary, width = _scores(job)
    return tokens * (12 * vocabulary + 2 * job.width * width)
