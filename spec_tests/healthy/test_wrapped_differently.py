"""Ranks may wrap their modules differently if all issue the same collectives: with checkpoints, names, orders, roots.

torch's FSDP trains all of these programs (``--engine torch``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import device, ranks
from spec_tests.healthy.quiet import both_apis as both_names
from spec_tests.healthy.quiet import healthy
from spec_tests.healthy.support import Net, Training, late, rank
from spec_tests.models.apis import Api, both_apis
from spec_tests.models.sharding import SHARD_GRAD_OP

# --- modules around layers or units on one rank ---


class Checkpointing(Net):
    """Recomputes its layers in backward on the rank that has a long batch."""

    seconds = 0.0

    def forward(self, x: Tensor, num_layers: int | None = None) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if len(x) > 100 else layer(x)
            x = x.tanh()
            late(self.seconds, on=0)
        return self.head(x)


@pytest.mark.cpu
@pytest.mark.spec("HEALTHY-04")
@both_names
@healthy(2)
def test_only_one_rank_may_recompute_and_be_late(api: str) -> None:
    training = Training(api, Checkpointing(2))
    (net,) = (module for module in training.model.modules() if isinstance(module, Checkpointing))
    for step in range(3):
        # Longer than the watchdog waits before it queries the other ranks.
        net.seconds = 2.6 if step == 1 else 0.0
        training.step(step, lambda of_rank: 200 if of_rank == 0 else 2)
    training.check()


class Compiled(nn.Module):
    """Holds a module under the name that `torch.compile` uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *arguments: Any) -> Any:
        return self._orig_mod(*arguments)


class Replicated(nn.Module):
    """Holds a module under the name that `DistributedDataParallel` uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "_orig_mod": Compiled,
    "module": Replicated,
}


@pytest.mark.cpu
@pytest.mark.spec("HEALTHY-04")
@pytest.mark.parametrize("outer", AROUND)
@pytest.mark.parametrize("when", ["before sharding", "after sharding"])
@both_names
@healthy(2)
def test_only_one_rank_may_put_its_layers_into_other_modules(api: str, when: str, outer: str) -> None:
    def change(net: Any) -> None:
        if rank() == 1:
            for index, layer in enumerate(net.layers):
                net.layers[index] = AROUND[outer](layer)

    training = Training(api, change=change if when == "before sharding" else lambda net: None)
    if when == "after sharding":
        change(next(module for module in training.model.modules() if isinstance(module, Net)))
    for step in range(3):
        training.step(step)
    training.check()


class Half(nn.Module):
    """Has a parameter that no API shards, and no effect on the result."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.spec("HEALTHY-04")
@both_apis
@ranks(2)
def test_one_rank_may_have_more_ignored_modules_so_that_indices_differ(api: Api) -> None:
    ignored = [Half() for _ in range(1 + dist.get_rank())]
    model: Any = nn.Sequential(layer(), *ignored, layer(), nn.Sequential(*ignored, layer())).to(device())
    options: dict[str, Any] = {"ignored_modules": ignored}
    if api.name == "fully_shard":
        options = {"ignored_params": {half.factor for half in ignored}}
    for index in (0, len(model) - 2, len(model) - 1):
        model[index] = api.unit(model[index], **options)
    losses = losses_of(api.unit(model, **options))
    assert losses[2] < losses[0]


# --- other names, orders and roots ---

WIDTH = 4


class Bias(nn.Module):
    """A linear layer whose parameters have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.matrix, self.offset)


def layer() -> Any:
    made = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(made.weight, 0.1)
    nn.init.zeros_(made.bias)
    return made


class Model(nn.Module):
    """Runs its parts in the order of ``names``, whatever the order in which they were added."""

    def __init__(self, names: list[str], **parts: nn.Module) -> None:
        super().__init__()
        self.names = names
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor, names: list[str] | None = None) -> Tensor:
        for name in names or self.names:
            x = getattr(self, name)(x).tanh()
        return x


class Loose:
    """Runs units that have no common module, so that each unit is a root."""

    def __init__(self, *units: Any) -> None:
        self.units = units

    def __call__(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x).tanh()
        return x

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for unit in self.units for parameter in unit.parameters()]


def two(api: Api, *names: str, added: str = "", make: Callable[[], Any] = layer, **options: Any) -> Any:
    """A model with a unit for each name. The names in ``added`` give another order of construction."""
    units = {name: api.unit(make(), **options) for name in names}
    return Model(list(names), **{name: units[name] for name in added or names})


def another_model_before(api: Api) -> Any:
    api.unit(two(api, "a", "b"))
    return two(api, "a", "b")


def two_roots(api: Api) -> Any:
    return Loose(*(api.unit(layer(), strategy=SHARD_GRAD_OP) for _ in range(2)))


def losses_of(model: Any) -> list[float]:
    """The losses of three training steps, which are equal on all ranks."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, WIDTH, device=device())).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    of_all_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_all_ranks, losses)
    assert of_all_ranks[0] == of_all_ranks[1]
    return losses


CASES: dict[str, tuple[Callable[[Api], Any], Callable[[Api], Any]]] = {
    "other names": (lambda api: two(api, "a", "b"), lambda api: two(api, "x", "y")),
    "other names of parameters": (lambda api: two(api, "a", "b"), lambda api: two(api, "a", "b", make=Bias)),
    "one more level": (lambda api: two(api, "a", "b"), lambda api: nn.Sequential(two(api, "a", "b"))),
    "another order of construction": (lambda api: two(api, "a", "b"), lambda api: two(api, "a", "b", added="ba")),
    "another model before": (lambda api: two(api, "a", "b"), another_model_before),
    "two roots instead of one": (lambda api: two(api, "a", "b", strategy=SHARD_GRAD_OP), two_roots),
}


@pytest.mark.spec("HEALTHY-04", "AGREE-01")
@pytest.mark.parametrize("name", CASES)
@both_apis
@ranks(2)
def test_a_job_whose_names_differ_is_not_ended(api: Api, name: str) -> None:
    model = CASES[name][dist.get_rank()](api)
    if isinstance(model, nn.Module):
        model = api.unit(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = losses_of(model)
    assert losses[2] < losses[1] < losses[0]
    assert len([one for one in caught if "different numbers in their roots" in str(one.message)]) <= 1


@pytest.mark.spec("HEALTHY-04", "AGREE-01")
@both_apis
@ranks(2)
def test_a_part_of_a_model_on_one_rank_is_the_whole_model_on_another(api: Api) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    a = api.unit(layer(), strategy=SHARD_GRAD_OP)
    if dist.get_rank() == 0:
        own = (
            {"process_group": alone}
            if api.name != "fully_shard"
            else {"mesh": DeviceMesh.from_group(alone, device().type)}
        )
        model = Model(["a", "b"], a=a, b=api.unit(layer(), strategy=SHARD_GRAD_OP, **own))
    for which in "abaab":
        x = torch.ones(2, WIDTH, device=device())
        if dist.get_rank() == 0:
            model(x, [which]).sum().backward()
        elif which == "a":
            a(x).tanh().sum().backward()
    gradient = next(a.parameters()).grad
    assert gradient is not None and gradient.abs().sum() > 0
