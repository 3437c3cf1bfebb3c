"""The estimate of activations, compared with live bytes on the CPU, and of operations, compared with counted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from minifsdp_tools.cost import Job, activation_bytes, operations
from spec_tests.live_bytes import LiveBytes
from tutorials.gpt.model import GPT

HEADS, LENGTH, SEQUENCES = 4, 128, 8
TOKENS = LENGTH * SEQUENCES


class Checkpointed(nn.Module):
    """A checkpointed block: only its inputs are saved for backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def gpt(width: int, num_blocks: int, *, checkpointing: bool = False) -> GPT:
    """The model of ``train_gpt.py``."""
    torch.manual_seed(0)
    model = GPT(width=width, num_blocks=num_blocks, num_heads=HEADS)
    if checkpointing:
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    return model


def job_of(model: GPT) -> Job:
    blocks = {id(p) for p in model.blocks.parameters()}
    root = [tuple(p.shape) for p in model.parameters() if id(p) not in blocks]
    return Job(units=[[tuple(p.shape) for p in block.parameters()] for block in model.blocks], root=root)


def loss_of(model: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    return F.cross_entropy(model(text).flatten(0, 1), text.flatten())


@pytest.mark.spec("COST-16", "COST-17")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("width", "num_blocks"), [(64, 4), (128, 6), (256, 3)])
def test_activations_and_operations_of_the_small_gpt(width: int, num_blocks: int, checkpointing: bool) -> None:
    model = gpt(width, num_blocks, checkpointing=checkpointing)
    job, text = job_of(model), torch.randint(0, 256, (SEQUENCES, LENGTH))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        loss_of(model, text).backward()
    # The estimate omits the rotated queries and keys, and on a CPU a copy of the attention's output. The peak includes
    # the gradient of one matrix before it is accumulated: a few percent of all activations.
    assert 1.0 <= live.peak / activation_bytes(job, TOKENS, checkpointing=checkpointing) < 1.25
    with FlopCounterMode(display=False) as counter:
        loss_of(model, text).backward()
    by_operator = counter.get_flop_counts()["Global"]
    products = sum(number for operator, number in by_operator.items() if "attention" not in str(operator))
    assert operations(job, TOKENS, checkpointing=checkpointing) == products


@pytest.mark.spec("COST-16")
def test_the_count_of_the_paper_about_activations_is_reproduced() -> None:
    h, tokens = 64, 10
    block = [(3 * h, h), (3 * h,), (h, h), (4 * h, h), (h, 4 * h)]
    job = Job(units=[block] * 3, compute=torch.bfloat16)
    working = 2 * tokens * 5 * h
    # 34 bytes for each token and element of h, minus the two dropout masks of one byte each.
    assert activation_bytes(job, tokens) == (34 - 2) * tokens * h * 3 + working
    assert activation_bytes(job, tokens, checkpointing=True) == 2 * tokens * h * 3 + 32 * tokens * h + working


def test_job_without_matrices_has_no_activations_or_operations() -> None:
    job = Job(units=[[(1000,)]] * 4, num_shards=2)
    assert (activation_bytes(job, 100), operations(job, 100)) == (0, 0)
    assert (activation_bytes(job, 100, checkpointing=True), operations(job, 100, checkpointing=True)) == (0, 0)
