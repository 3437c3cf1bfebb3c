"""A loss of tensors that modules keep as attributes, or that the program's forward hooks have seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_tests.cases.programs import Block, Net, assert_trains_alike
from spec_tests.harness import ranks
from spec_tests.models.kinds import every_kind


class Keeps(Block):
    """Keeps an auxiliary loss, and returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = {"losses": [super().forward(x).softmax(-1).square().sum()]}
        return x


@pytest.mark.spec("PROG-27")
@every_kind
@ranks(2)
def test_a_loss_of_attributes_of_the_blocks_alone_trains(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        model(x)
        sum(block.kept["losses"][0] for block in model.blocks).backward()

    assert_trains_alike(kind, Net(Keeps), program)


class KeepsEachRun(Block):
    """Keeps an auxiliary loss of each of its runs, under a private name."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self._losses.append(y.softmax(-1).square().sum())
        return y


@pytest.mark.spec("PROG-27")
@pytest.mark.parametrize("num_runs", [1, 2])
@every_kind
@ranks(2)
def test_a_loss_of_attributes_of_each_run_of_a_block_trains(kind: str, num_runs: int) -> None:
    class RunsSeveralTimes(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = sum(block(number * x) for number in range(1, 1 + num_runs))
            return self.head(x)

    def program(model: Any, x: Tensor) -> None:
        for block in model.blocks:
            block._losses.clear()
        model(x)
        sum(loss for block in model.blocks for loss in block._losses).backward()

    assert_trains_alike(kind, RunsSeveralTimes(KeepsEachRun), program)


@pytest.mark.spec("PROG-27")
@pytest.mark.parametrize("depth", range(5))
@every_kind
@ranks(2)
def test_a_loss_of_an_attribute_trains_at_each_depth_of_containers(kind: str, depth: int) -> None:
    class Packs(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept: Any = super().forward(2 * x)
            for level in range(depth):
                self.kept = ([self.kept], (self.kept, None), {0: self.kept})[level % 3]
            return super().forward(x)

    def program(model: Any, x: Tensor) -> None:
        model(x)
        kept = model.blocks[0].kept
        for _ in range(depth):
            kept = kept[0]
        kept.square().mean().backward()

    assert_trains_alike(kind, Net(Packs), program)


@pytest.mark.spec("PROG-28")
@every_kind
@ranks(2)
def test_a_loss_of_activations_that_hooks_have_seen_trains(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        # The second iteration observes another module of each block than the first one.
        for name in ("first", "second"):
            seen: list[Tensor] = []
            hooks = [
                getattr(block, name).register_forward_hook(lambda _, __, output, seen=seen: seen.append(output.tanh()))
                for block in model.blocks
            ]
            model(x)
            for hook in hooks:
                hook.remove()
            torch.stack(seen).square().mean().backward()

    assert_trains_alike(kind, Net(), program)
