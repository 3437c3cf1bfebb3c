"""The number of all-gathers of each call in a sequence of calls, compared with torch's FSDPs.

Ranks can only call a model different numbers of times if they know which calls communicate. The rule is torch's: a call
all-gathers the units that are sharded. Afterwards, a unit is sharded or stays unsharded as `reshard_after_forward` or
the strategy says, with and without grad mode.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models import apis
from spec_tests.models.running import Wire
from spec_tests.subject import ShardingStrategy

pytestmark = [
    pytest.mark.spec("FRESH-09"),
    pytest.mark.not_simulated("the oracle is torch's own FSDP"),
]


class Inner(nn.Linear):
    """An inner unit."""


class Net(nn.Module):
    """Two inner units, and a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Inner(8, 8), Inner(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        result: Tensor = self.head(torch.tanh(self.second(x)))
        return result


class Linear(Net):
    """The gradient of a layer only depends on the other two layers."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x)))
        return result


# By name: the API, and its options.
FULLY_SHARD = {
    f"fully_shard {keeps}": (apis.FULLY_SHARD, {"reshard_after_forward": keeps}) for keeps in (None, True, False, 1)
}
WRAPPER = {
    f"{strategy} {name}": (api, {"strategy": ShardingStrategy[strategy]})
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for name, api in (("flat", apis.WRAPPED), ("original", apis.ORIGINALS))
}
BOTH = FULLY_SHARD | WRAPPER


def shard(kind: str, net: nn.Module, *, is_torch: bool = False) -> Any:
    """Shards the model with the options of ``kind``, with torch or with the implementation that is tested."""
    api, options = BOTH[kind]
    return (api.of_torch() if is_torch else api).shard(net, unit_classes=(Inner,), **options)


class Program:
    """A sharded model and a copy that is not sharded. Each method is a call in a sequence; `x` is the same everywhere.

    Attributes:
        counts: the number of all-gathers of each call.
    """

    def __init__(self, kind: str, calls: str, *, is_torch: bool = False) -> None:
        self.wrapper = (torch_fsdp if is_torch else subject).FullyShardedDataParallel
        self.plain: Any = Net().to(device())
        self.model = shard(kind, copy.deepcopy(self.plain), is_torch=is_torch)
        self.inner = self.model if kind in FULLY_SHARD else self.model.module
        self.units = [self.model, self.inner.first, self.inner.second]
        self.both = [(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (self.model, self.plain)]
        self.losses: list[Tensor] = []
        self.x = torch.ones(2, 8, device=device())
        self.counts = []
        for call in calls.split():
            with Wire() as wire:
                getattr(self, call)()
            self.counts.append(wire.kinds().count("AG"))

    def forward(self) -> None:
        self.losses = [one(self.x).square().mean() for one, _ in self.both]

    def backward(self) -> None:
        for loss in self.losses:
            loss.backward()

    def step(self) -> None:
        for _, optimizer in self.both:
            optimizer.step()
            optimizer.zero_grad()

    def train(self) -> None:
        self.forward()
        self.backward()
        self.step()

    def no_grad(self) -> None:
        with torch.no_grad():
            torch.testing.assert_close(self.model(self.x), self.plain(self.x))

    def inference(self) -> None:
        with torch.inference_mode():
            torch.testing.assert_close(self.model(self.x), self.plain(self.x))

    def part(self) -> None:
        """One unit is called on its own."""
        with torch.no_grad():
            torch.testing.assert_close(self.inner.first(self.x), self.plain.first(self.x))

    def scale(self) -> None:
        with torch.no_grad():
            for parameter in (*self.model.parameters(), *self.plain.parameters()):
                parameter.mul_(0.5)

    def unshard(self) -> None:
        for unit in self.units:
            unit.unshard()

    def unshard_root(self) -> None:
        self.model.unshard()

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    def keep(self) -> None:
        self.model.set_reshard_after_forward(False)

    def keep_inner(self) -> None:
        for unit in self.units[1:]:
            unit.set_reshard_after_forward(False, recurse=False)

    def free(self) -> None:
        self.model.set_reshard_after_forward(True)

    def free_root(self) -> None:
        self.model.set_reshard_after_forward(True, recurse=False)

    def without_reduction(self) -> None:
        with self.model.no_sync():
            self.forward()
            self.backward()

    def summon(self) -> None:
        with self.wrapper.summon_full_params(self.model, writeback=False):
            torch.testing.assert_close(list(self.model.parameters()), list(self.plain.parameters()))

    def summon_and_scale(self) -> None:
        with self.wrapper.summon_full_params(self.model):
            self.scale()


CALLS = [
    "train train",
    "train no_grad train train",
    "no_grad no_grad train train",
    "no_grad inference no_grad train",
    "train inference no_grad",
    "forward no_grad train",
    "forward no_grad backward step train",
    "forward forward no_grad",
    "train no_grad forward no_grad backward",
    "train part part train",
    "train part no_grad train part",
    "forward part backward step part",
]
UNSHARDED = [
    "unshard no_grad no_grad train",
    "unshard no_grad inference reshard no_grad",
    "unshard forward backward step train",
    "unshard forward unshard reshard backward",
    "unshard unshard no_grad",
    "unshard reshard no_grad unshard no_grad",
    "no_grad unshard no_grad",
    "unshard_root no_grad train",
    "unshard_root keep_inner no_grad no_grad no_grad train",
    "unshard keep_inner no_grad no_grad no_grad reshard free train",
    "keep_inner no_grad no_grad no_grad train",
    "keep no_grad no_grad train no_grad train",
    "keep train free train",
    "free no_grad no_grad train",
    "free_root no_grad no_grad train",
]
NO_SYNC = ["without_reduction without_reduction train", "without_reduction no_grad train", "no_grad without_reduction"]


ALL_CALLS = [
    *((kind, calls) for kind in BOTH for calls in CALLS),
    *((kind, calls) for kind in FULLY_SHARD for calls in UNSHARDED),
    *((kind, calls) for kind in WRAPPER for calls in NO_SYNC),
]


@pytest.mark.parametrize(("kind", "calls"), ALL_CALLS)
@ranks(2)
def test_a_call_all_gathers_as_often_as_with_torch(kind: str, calls: str) -> None:
    ours = Program(kind, calls).counts
    assert ours == Program(kind, calls, is_torch=True).counts


@pytest.mark.spec("FRESH-04")
@pytest.mark.parametrize("calls", ["no_grad step no_grad", "no_grad scale no_grad", "forward step no_grad"])
@pytest.mark.parametrize("kind", [kind for kind in BOTH if "NO_SHARD" not in kind])
@ranks(2)
def test_kept_units_are_all_gathered_again_after_a_change(kind: str, calls: str) -> None:
    # torch uses the values of before the step or the change.
    assert Program(kind, calls).counts == [3, 0, 3]


@pytest.mark.parametrize("kind", BOTH)
@ranks(2)
def test_a_model_trains_with_what_an_inference_has_all_gathered(kind: str) -> None:
    """torch raises an error, because the unsharded parameters are inference tensors."""
    ours = Program(kind, "inference train no_grad").counts
    assert ours == Program(kind, "no_grad train no_grad", is_torch=True).counts


@pytest.mark.spec("SUMMON-21")
@pytest.mark.parametrize("kind", [kind for kind in WRAPPER if "NO_SHARD" not in kind])
@ranks(2)
def test_summoning_always_all_gathers_each_unit_once_and_keeps_units_that_it_does_not_write(kind: str) -> None:
    keeps = "SHARD_GRAD_OP" in kind
    assert Program(kind, "no_grad summon no_grad").counts == [3, 3, 0 if keeps else 2]
    assert Program(kind, "no_grad summon_and_scale no_grad").counts == [3, 3, 3]
    assert Program(kind, "forward summon backward").counts == [3, 3, 0 if keeps else 2]


@pytest.mark.spec("SUMMON-21")
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", WRAPPER)
@ranks(2)
def test_backward_uses_the_values_that_were_written_while_summoned(kind: str, evaluates: bool) -> None:
    net = Linear().to(device())
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    model, x = shard(kind, net), torch.ones(2, 8, device=device())
    output = model(x)
    with subject.FullyShardedDataParallel.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data.mul_(2)
    if evaluates:
        with torch.no_grad():
            model(x)
    output.sum().backward()
    first = next(model.module.first.parameters())
    # Two samples, times the sum over 8 x 8 paths through two weights of 1.0. With the old values, it is 2 * 64 * 0.25.
    assert first.grad.unique().tolist() == [128.0]
