"""The number of all-gathers of each call in a sequence of calls, compared with torch's FSDPs.

Ranks can only call a model different numbers of times if they know which calls communicate. The rule is torch's: a call
all-gathers the units that are sharded. Afterwards, a unit is sharded or stays unsharded as `reshard_after_forward` or
the strategy says, with and without grad mode.
"""

from __future__ import annotations

import copy
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models.running import Wire

pytestmark = [
    pytest.mark.spec("FRESH-09"),
    pytest.mark.not_simulated("the oracle is torch's own FSDP"),
]


class Net(nn.Module):
    """Two inner units, and a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        result: Tensor = self.head(torch.tanh(self.second(x)))
        return result


class Linear(Net):
    """The gradient of a layer only depends on the other two layers."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x)))
        return result


FULLY_SHARD = {f"fully_shard {keeps}": {"reshard_after_forward": keeps} for keeps in (None, True, False, 1)}
WRAPPER = {
    f"{strategy} {'original' if originals else 'flat'}": {"sharding_strategy": strategy, "use_orig_params": originals}
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for originals in (False, True)
}
BOTH = FULLY_SHARD | WRAPPER


def shard(library: Any, kind: str, net: Any) -> Any:
    """Shards the model with the options of ``kind``, with torch or with the implementation that is tested."""
    options: dict[str, Any] = dict(BOTH[kind])
    if kind in FULLY_SHARD:
        for unit in (net.first, net.second, net):
            library.fully_shard(unit, **options)
        return net
    options["sharding_strategy"] = library.ShardingStrategy[options["sharding_strategy"]]
    options["device_id"] = device()
    with warnings.catch_warnings():
        # torch calls NO_SHARD deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        net.first = library.FullyShardedDataParallel(net.first, **options)
        net.second = library.FullyShardedDataParallel(net.second, **options)
        return library.FullyShardedDataParallel(net, **options)


class Program:
    """A sharded model and a copy that is not sharded. Each method is a call in a sequence; `x` is the same everywhere.

    Attributes:
        counts: the number of all-gathers of each call.
    """

    def __init__(self, library: ModuleType, kind: str, calls: str) -> None:
        self.library: Any = library
        self.plain: Any = Net().to(device())
        self.model = shard(library, kind, copy.deepcopy(self.plain))
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
        wrapper = self.library.FullyShardedDataParallel
        with wrapper.summon_full_params(self.model, writeback=False):
            torch.testing.assert_close(list(self.model.parameters()), list(self.plain.parameters()))

    def summon_and_scale(self) -> None:
        with self.library.FullyShardedDataParallel.summon_full_params(self.model):
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
    ours = Program(subject, kind, calls).counts
    assert ours == Program(torch_fsdp, kind, calls).counts


@pytest.mark.spec("FRESH-04")
@pytest.mark.parametrize("calls", ["no_grad step no_grad", "no_grad scale no_grad", "forward step no_grad"])
@pytest.mark.parametrize("kind", [kind for kind in BOTH if "NO_SHARD" not in kind])
@ranks(2)
def test_kept_units_are_all_gathered_again_after_a_change(kind: str, calls: str) -> None:
    # torch uses the values of before the step or the change.
    assert Program(subject, kind, calls).counts == [3, 0, 3]


@pytest.mark.parametrize("kind", BOTH)
@ranks(2)
def test_a_model_trains_with_what_an_inference_has_all_gathered(kind: str) -> None:
    """torch raises an error, because the unsharded parameters are inference tensors."""
    ours = Program(subject, kind, "inference train no_grad").counts
    assert ours == Program(torch_fsdp, kind, "no_grad train no_grad").counts


@pytest.mark.spec("SUMMON-21")
@pytest.mark.parametrize("kind", [kind for kind in WRAPPER if "NO_SHARD" not in kind])
@ranks(2)
def test_summoning_always_all_gathers_each_unit_once_and_keeps_units_that_it_does_not_write(kind: str) -> None:
    keeps = "SHARD_GRAD_OP" in kind
    assert Program(subject, kind, "no_grad summon no_grad").counts == [3, 3, 0 if keeps else 2]
    assert Program(subject, kind, "no_grad summon_and_scale no_grad").counts == [3, 3, 3]
    assert Program(subject, kind, "forward summon backward").counts == [3, 3, 0 if keeps else 2]


@pytest.mark.spec("SUMMON-21")
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", WRAPPER)
@ranks(2)
def test_backward_uses_the_values_that_were_written_while_summoned(kind: str, evaluates: bool) -> None:
    net = Linear().to(device())
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    model, x = shard(subject, kind, net), torch.ones(2, 8, device=device())
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
