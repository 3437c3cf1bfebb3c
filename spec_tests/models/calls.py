"""Models that are difficult to call: by their inputs, their outputs, or a forward that runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from spec_tests.models.info import SAMPLES, WIDTH, Batch, dice, floats, keep
from spec_tests.models.modules import MLP

# --- inputs and outputs of forward ---


class ByName(nn.Module):
    """Takes only keyword arguments, some of them nested."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, inputs: dict[str, Any], power: int = 1) -> Tensor:
        mixed = inputs["pair"][0] + inputs["more"]["x"] ** power
        return torch.tanh(self.linear(mixed))


class ByNameModel(nn.Module):
    """Calls its units with keyword arguments only, and takes only keyword arguments itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = ByName(), ByName()

    def forward(self, *, batch: dict[str, Any]) -> Tensor:
        x = self.first(inputs={"pair": (batch["x"], None), "more": batch["more"]}, power=2)
        return self.last(inputs={"pair": [x, "label"], "more": {"x": x}})


def _nested_batch(seed: int, step: int, rank: int) -> Batch:
    left, right = torch.randn(2, SAMPLES, WIDTH, generator=dice(seed, step, rank))
    return (), {"batch": {"x": left, "more": {"x": right, "name": "right", "nothing": None}}}


# No positional argument: code that looks for input tensors in the first position finds none.
keep("keywords", ByNameModel, ByName, batch=_nested_batch)


class Bundle(MLP):
    """Returns its result together with values that are not tensors."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"value": y, "nothing": None, "count": 3}, [y.detach(), (y.sum(),)]


class Bundles(nn.Module):
    """Passes the value of one `Bundle` to another one, and returns that one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Bundle(), Bundle()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x)[0]["value"])


# The output tensors that need backward hooks are deeply nested, and one of them requires no gradient.
keep(
    "nested_outputs",
    Bundles,
    Bundle,
    loss=lambda output: output[0]["value"].square().mean() + output[1][1][0] / output[0]["count"],
)


class Updates(nn.Module):
    """Takes a dictionary and returns one with another item."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__()
        self.block, self.source, self.target = MLP(), source, target

    def forward(self, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, self.target: self.block(record[self.source])}


# The only positional argument is a dictionary. The output also contains tensors of the earlier units.
keep(
    "dict_input",
    lambda: nn.Sequential(Updates("x", "y"), Updates("y", "z")),
    Updates,
    batch=lambda seed, step, rank: (({"x": floats(4, 8)(seed, step, rank)[0][0], "step": step},), {}),
    loss=lambda output: (output["y"] * output["z"]).mean(),
)


class View(nn.Module):
    """Returns a view of the left half of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, :8]


# The output of a unit is a view. The tensors that it was computed from must not be freed while the view is needed.
keep("view_output", lambda: nn.Sequential(View(), nn.Tanh(), View()), View)


class Overwrites(nn.Module):
    """Changes the outputs of its units in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mul_(2.0).tanh_())


# The caller changes outputs in place, and the loss changes the root's output. Hooks on the outputs must survive this.
keep("overwritten_output", Overwrites, MLP, loss=lambda output: output.add_(1.0).square().mean())


# A unit begins with an in-place ReLU, which overwrites the input. The input must not have been replaced by a view.
def _writes_input() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.ReLU(inplace=True), MLP()) for _ in range(3)))


keep("writes_input", _writes_input, nn.Sequential)

# --- a forward that runs again in backward ---


def _checkpointed(implementation: CheckpointImpl) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(checkpoint_wrapper(MLP(), checkpoint_impl=implementation) for _ in range(3)))


# Checkpointing inside the unit: backward recomputes the inside of a unit that it has already all-gathered.
keep("checkpoint_inside", _checkpointed(CheckpointImpl.NO_REENTRANT), CheckpointWrapper)

# The same with the older implementation, which runs a backward inside backward. Its input must require a gradient.
keep(
    "checkpoint_inside_reentrant",
    _checkpointed(CheckpointImpl.REENTRANT),
    CheckpointWrapper,
    batch=floats(SAMPLES, WIDTH, requires_grad=True),
)


class Recomputing(nn.Module):
    """Checkpoints its units from outside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.use_reentrant = nn.ModuleList(MLP() for _ in range(3)), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


# Checkpointing around the unit: the unit's whole forward, including its hooks, runs again in the middle of backward.
keep("checkpoint_outside", lambda: Recomputing(use_reentrant=False), MLP)

# The same with the older implementation: the unit's backward is a separate backward inside the outer one.
keep(
    "checkpoint_outside_reentrant",
    lambda: Recomputing(use_reentrant=True),
    MLP,
    batch=floats(SAMPLES, WIDTH, requires_grad=True),
)
