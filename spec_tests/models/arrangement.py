"""Models with difficult units: how they are arranged, how often they are used, and which parameters have gradients."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from spec_tests.models.info import floats, keep, tokens
from spec_tests.models.modules import MLP, Nested, Scale, Twice

# --- how units are arranged ---

# Only equal units, and a root without parameters. Training must work although the root never all-gathers.
keep("blocks", lambda: nn.Sequential(MLP(), MLP(), MLP()), MLP)


# The usual shape: equal units between layers of the root, which is in use from the beginning to the end.
def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), MLP(), MLP(), MLP(), MLP(), nn.Linear(8, 3))


keep("mlp", _mlp, MLP)


# The sizes do not divide evenly, and `Scale` has fewer elements than there are ranks: some rank stores only padding.
def _uneven() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7)), Scale(1))


keep("uneven", _uneven, nn.Sequential, Scale)


# Units inside units: the outer unit's parameters are needed before and after the inner unit runs.
keep("nested", lambda: nn.Sequential(Nested(), nn.Tanh(), Nested()), Nested, MLP)


# --- how often a unit is used ---


class LanguageModel(nn.Module):
    """A minimal language model, in which the embedding is also the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 8), MLP(), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.embedding(tokens[:, :-1]))).transpose(1, 2), tokens[:, 1:])


# One parameter under two names, used at both ends. Its gradient is complete only at the end of backward.
keep("tied", LanguageModel, MLP, batch=tokens, loss=lambda output: output)


# One forward of the root runs each unit twice, and a unit's gradient is complete only after its second backward.
keep("called_twice", lambda: Twice(MLP() for _ in range(3)), MLP)


class Alias(nn.Module):
    """One unit under two names, with another unit in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = MLP(), MLP()
        self.last = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


# Code that wraps by name would create two units from one, and in backward the two uses are far apart.
keep("shared_module", Alias, MLP)

# Two forwards of the whole model, then one backward: all units run again before the first one is finished.
keep("several_forwards", lambda: nn.Sequential(MLP(), MLP(), MLP()), MLP, num_forwards=2)


class Detour(nn.Module):
    """A unit in the middle that runs on odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = MLP(), MLP(), MLP()

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        x = self.first(x)
        return self.last(self.side(x) if detour else x)


# The second iteration has another order than the first: a prefetch by recorded order all-gathers the wrong unit.
keep(
    "sometimes",
    Detour,
    MLP,
    batch=lambda seed, step, rank: ((*floats(4, 8)(seed, step, rank)[0], step % 2 == 1), {}),
    leaves_some_out=True,
)


# --- which parameters have a gradient ---


def _frozen() -> nn.Module:
    model = nn.Sequential(*(MLP() for _ in range(4)))
    for index in (0, 2):
        model[index].requires_grad_(False)
    return model


# Frozen units: the first has no backward; the third must be unsharded in backward without a gradient of its own.
keep("frozen", _frozen, MLP)


class Spare(MLP):
    """A block with a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 5)


# Parameters without a gradient in a unit that has gradients: the unit must not wait for them.
keep("unused", lambda: nn.Sequential(Spare(), nn.Linear(8, 8), Spare()), Spare, leaves_some_out=True)


class OneSided(nn.Module):
    """Two blocks. The first one has a layer that runs only if ``with_extra`` is true."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Skipping(), MLP()

    def forward(self, x: Tensor, with_extra: bool) -> Tensor:
        return self.last(self.first(x, with_extra))


class Skipping(MLP):
    """A block with an optional layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor, with_extra: bool = False) -> Tensor:
        return super().forward(self.extra(x) if with_extra else x)


# A gradient on even ranks and none on odd ones: all ranks must still reduce the same number of elements.
keep(
    "one_sided",
    OneSided,
    MLP,
    batch=lambda seed, step, rank: ((*floats(4, 8)(seed, step, rank)[0], rank % 2 == 0), {}),
    leaves_some_out=True,
)
