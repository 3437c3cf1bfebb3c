"""Ranks may wrap their modules differently if all issue the same collectives: with checkpoints, names, orders, roots.

torch's FSDP trains all of these programs (``--engine torch``).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import device, ranks
from spec_tests.healthy.quiet import healthy
from spec_tests.healthy.support import Net, Training
from spec_tests.models import apis
from spec_tests.models.sharding import SHARD_GRAD_OP

# --- modules around layers or units on one rank ---


class Checkpointing(Net):
    """Recomputes its layers in backward if the batch is long, and is then late."""

    seconds = 0.0

    def forward(self, x: Tensor, num_layers: int | None = None) -> Tensor:
        for layer in self.layers:
            if len(x) > 100:
                time.sleep(self.seconds)
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
            x = x.tanh()
        return self.head(x)


@pytest.mark.cpu
@pytest.mark.spec("HEALTHY-04")
@healthy(2)
def test_only_one_rank_may_recompute_and_be_late(api: str) -> None:
    training = Training(api, Checkpointing(2))
    (net,) = (module for module in training.model.modules() if isinstance(module, Checkpointing))
    for step in range(3):
        # Longer than the watchdog waits before it queries the other ranks.
        net.seconds = 2.6 if step == 1 else 0.0
        training.step(step, lambda of_rank: 200 if of_rank == 0 else 2)
    training.check()


class Around(nn.Module):
    """Holds a module under another name, as `torch.compile` and `DistributedDataParallel` do."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return getattr(self, self.name)(x)


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "_orig_mod": partial(Around, "_orig_mod"),
    "module": partial(Around, "module"),
}


@pytest.mark.cpu
@pytest.mark.spec("HEALTHY-04")
@pytest.mark.parametrize("outer", AROUND)
@pytest.mark.parametrize("when", ["before sharding", "after sharding"])
@healthy(2)
def test_only_one_rank_may_put_its_layers_into_other_modules(api: str, when: str, outer: str) -> None:
    def put_into_others(net: Any) -> None:
        for index, layer in enumerate(net.layers if dist.get_rank() == 1 else ()):
            net.layers[index] = AROUND[outer](layer)

    net = Net()
    if when == "before sharding":
        put_into_others(net)
    training = Training(api, net)
    if when == "after sharding":
        put_into_others(net)
    for step in range(3):
        training.step(step)
    training.check()


# --- other names, orders and roots ---

WIDTH = 4


class Layer(nn.Module):
    """A linear layer whose parameters have any names."""

    def __init__(self, weight: str = "weight", bias: str = "bias") -> None:
        super().__init__()
        self.names = (weight, bias)
        self.register_parameter(weight, nn.Parameter(torch.full((WIDTH, WIDTH), 0.1)))
        self.register_parameter(bias, nn.Parameter(torch.zeros(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *(getattr(self, name) for name in self.names)).tanh()


class Half(nn.Module):
    """Has a parameter that no API shards, and no effect on the result."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


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


@pytest.mark.spec("HEALTHY-04")
@apis.both_apis
@ranks(2)
def test_one_rank_may_have_more_ignored_modules_so_that_indices_differ(api: apis.Api) -> None:
    ignored = [Half() for _ in range(1 + dist.get_rank())]
    model: Any = nn.Sequential(Layer(), *ignored, Layer(), nn.Sequential(*ignored, Layer())).to(device())
    options: dict[str, Any] = {"ignored_modules": ignored}
    if api.name == "fully_shard":
        options = {"ignored_params": {half.factor for half in ignored}}
    for index in (0, len(model) - 2, len(model) - 1):
        model[index] = api.unit(model[index], **options)
    losses = losses_of(api.unit(model, **options))
    assert losses[2] < losses[0]


Unit = Callable[[nn.Module], Any]


class Model(nn.Module):
    """Two units, which run in the order of their names, whatever the order in which they were added."""

    def __init__(self, unit: Unit, names: str = "ab", make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, unit(make()))

    def forward(self, x: Tensor, names: str = "") -> Tensor:
        for name in names or sorted(self._modules):
            x = getattr(self, name)(x)
        return x


def another_model_before(unit: Unit) -> Any:
    unit(Model(unit))
    return unit(Model(unit))


# By name: the model of rank 1. Rank 0 has `unit(Model(unit))`.
OF_RANK_1: dict[str, Callable[[Unit], Any]] = {
    "other names": lambda unit: unit(Model(unit, "xy")),
    "other names of parameters": lambda unit: unit(Model(unit, make=lambda: Layer("matrix", "offset"))),
    "one more level": lambda unit: unit(nn.Sequential(Model(unit))),
    "another order of construction": lambda unit: unit(Model(unit, "ba")),
    "another model before": another_model_before,
    "two roots instead of one": lambda unit: nn.Sequential(unit(Layer()), unit(Layer())),
}


@pytest.mark.spec("HEALTHY-04", "AGREE-01")
@pytest.mark.parametrize("name", OF_RANK_1)
@apis.both_apis
@ranks(2)
def test_a_job_whose_names_differ_is_not_ended(api: apis.Api, name: str) -> None:
    # After forward, two roots stay unsharded, but units of one root do not.
    unit = partial(api.unit, strategy=SHARD_GRAD_OP) if name == "two roots instead of one" else api.unit
    model = OF_RANK_1[name](unit) if dist.get_rank() == 1 else unit(Model(unit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = losses_of(model)
    assert losses[2] < losses[1] < losses[0]
    assert len([one for one in caught if "different numbers in their roots" in str(one.message)]) <= 1


@pytest.mark.spec("HEALTHY-04", "AGREE-01")
@apis.both_apis
@ranks(2)
def test_a_part_of_a_model_on_one_rank_is_the_whole_model_on_another(api: apis.Api) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    a = api.unit(Layer(), strategy=SHARD_GRAD_OP)
    if dist.get_rank() == 0:
        own: dict[str, Any] = {"process_group": alone}
        if api.name == "fully_shard":
            own = {"mesh": DeviceMesh.from_group(alone, device().type)}
        model = Model(api.unit, "")
        model.a, model.b = a, api.unit(Layer(), strategy=SHARD_GRAD_OP, **own)
    for which in "abaab":
        x = torch.ones(2, WIDTH, device=device())
        if dist.get_rank() == 0:
            model(x, which).sum().backward()
        elif which == "a":
            a(x).sum().backward()
    gradient = next(a.parameters()).grad
    assert gradient is not None and gradient.abs().sum() > 0
