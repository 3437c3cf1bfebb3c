"""Models for programs that use autograd beyond ``loss.backward()``, and their sharded copies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_tests.models.kinds import KINDS, shard
from spec_tests.subject import FullyShardedDataParallel


class Block(nn.Module):
    """A residual block that keeps an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.router = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        y = x + self.second(torch.tanh(self.first(x)))
        self.kept = {"losses": [self.router(y).softmax(-1).mean(0).pow(2).sum()]}
        return y


class OnlyKeeps(Block):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return x


class KeepsEachRun(Block):
    """Keeps the auxiliary losses of all its runs, also under a private name."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self._runs = [*getattr(self, "_runs", []), self.kept["losses"][0]]
        self.kept = None
        return y


class InPlace(Block):
    def forward(self, x: Tensor) -> Any:
        x = nn.functional.relu(x, inplace=True)
        return self.second(torch.tanh(self.first(x))) + self.router(x).sum()


class IntoList(Block):
    def forward(self, x: Any) -> Any:
        x.append(self.router(x[-1]).sum() + self.second(torch.tanh(self.first(x[-1]))))


class IntoDict(Block):
    def forward(self, x: Any) -> Any:
        given = x.pop("input")
        x["output"] = self.router(given).sum() + self.second(torch.tanh(self.first(given)))


class IntoInput(Block):
    def forward(self, x: Any) -> Any:
        y = 1 * x
        x += self.router(y).sum() + self.second(torch.tanh(self.first(y)))


class ListsPenalty(Block):
    def forward(self, x: Tensor, penalties: list[Tensor] | None = None) -> Any:
        assert penalties is not None
        y = x + self.second(torch.tanh(self.first(x)))
        # Newer than the operation of the output, so autograd runs its backward first.
        penalties.append(self.second.weight.square().mean())
        return y


class ListsPenaltyOfTwoOutputs(Block):
    def forward(self, x: Tensor, penalties: list[Tensor] | None = None) -> Any:
        assert penalties is not None
        y = x + self.second(torch.tanh(self.first(x)))
        # The caller only uses the first output, from which the second one is computed.
        both = y, self.router(y)
        penalties.append(self.second.weight.square().mean())
        return both


class GivesView(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.router.weight.t()


class GivesWeight(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.router.weight


class GivesSparse(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).to_sparse()


class Net(nn.Module):
    """Two blocks between parameters of the root."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(kind() for _ in range(2)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x))


class RunsTwice(Net):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) + block(2 * x)
        return self.head(torch.tanh(x))


class UsesInputAgain(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.head.weight * x
        for block in self.blocks:
            y = block(x)
            x = (x if y is None else y + x) * 1
        return self.head(x)


class ReadsWeights(Net):
    """Computes with weights that its blocks return."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x, weight = block(x)
            x = x + (weight.sum() * x).tanh()
        return self.head(x)


class ReadsSparse(Net):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x).to_dense()
        return self.head(x)


class OneList(Net):
    def forward(self, x: Tensor) -> Any:
        passed = [x]
        for block in self.blocks:
            block(passed)
        assert len(passed) == 3
        return self.head(passed[-1])


class SumsPenalties(Net):
    def forward(self, x: Tensor) -> Any:
        penalties: list[Tensor] = []
        for block in self.blocks:
            output = block(x, penalties)
            x = output[0] if isinstance(output, tuple) else output
        assert len(penalties) == len(self.blocks)
        return self.head(x) + sum(penalties)


class GivesDict(Net):
    def forward(self, x: Tensor) -> Any:
        return {"result": super().forward(x)}


class OneDict(Net):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            passed = {"input": x}
            block(passed)
            assert list(passed) == ["output"], "a key that the block has removed"
            x = passed["output"]
        return self.head(x)


class Forces(Net):
    """An energy and its gradient, computed inside the forward."""

    with_graph = True

    def forward(self, x: Tensor) -> Any:
        h = x = x.clone().requires_grad_()
        for block in self.blocks:
            h = block(h)
        energy = self.head(h).sum()
        force = torch.autograd.grad(energy, x, create_graph=self.with_graph, retain_graph=True)[0]
        return energy + self.head(self.blocks[1](x + force)).sum(), force


class ForcesWithoutGraph(Forces):
    with_graph = False


class ForcesInEvaluation(Forces):
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class Recomputed(Net):
    """Computes its last two blocks again in backward, together."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__(kind)
        self.blocks.append(kind())

    def forward(self, x: Tensor) -> Any:
        first, *others = self.blocks
        return self.head(torch.tanh(checkpoint(nn.Sequential(*others), first(x), use_reentrant=False)))


def original(block: nn.Module) -> Any:
    return block.module if isinstance(block, FullyShardedDataParallel) else block


def blocks_of(model: nn.Module) -> list[Any]:
    inside: Any = original(model)
    return [original(block) for block in inside.blocks]


def units_of(model: Net) -> list[str]:
    """The names of the blocks, which are the units."""
    return [f"blocks.{index}" for index in range(len(model.blocks))]


def layouts(model: Net) -> Iterator[tuple[str, nn.Module]]:
    """The model in all layouts and strategies."""
    for kind in KINDS:
        yield kind, shard(kind, copy.deepcopy(model), units_of(model))
