"""Ranks whose models, options or calls differ raise errors that name the difference."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.checks.collective_log import CollectiveLog, CollectiveSequence
from minifsdp.engine.mesh import Group
from minifsdp.watchdog import process
from minifsdp.watchdog.report import IN_ORDER, Findings, different_ranks
from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import MixedPrecision, MixedPrecisionPolicy, StateDictType, fully_shard

LAYOUTS = ("flat", "original", "fully_shard")
HALF = (torch.float16, torch.bfloat16)


class Net(nn.Module):
    """Two layers of its own, and two equal blocks."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(rows, 2))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, *, reverse: bool = False) -> Tensor:
        x = self.second(self.first(x)) + self.table.sum()
        for block in reversed(self.blocks) if reverse else self.blocks:
            x = block(x)
        return x


def unit(layout: str, module: nn.Module, **dtypes: Any) -> Any:
    module = module.to(device())
    if layout == "fully_shard":
        return fully_shard(module, mp_policy=MixedPrecisionPolicy(**dtypes))
    precision = MixedPrecision(**dtypes)
    return FSDP(module, device_id=device(), use_orig_params=layout == "original", mixed_precision=precision)


def shard(layout: str, model: Any, **dtypes: Any) -> Any:
    """The model with a unit for each block, and one for the rest."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = unit(layout, block, **dtypes)
    return unit(layout, model, **dtypes)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(3, 4, dtype=dtype, device=device())


def train(model: Any, dtype: torch.dtype = torch.float32) -> None:
    model(batch(dtype)).float().sum().backward()


def refused(*parts: str) -> Any:
    return pytest.raises(RuntimeError, match="(?s)" + ".*".join([f"rank {dist.get_rank()}: ", *parts]))


# --- two models ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.spec("AGREE-02")
@ranks(2)
def test_a_model_that_only_one_rank_constructed_first(layout: str) -> None:
    def make() -> Any:
        # Its parameters are unlike those of the other tests, which use the same process group.
        return unit(layout, nn.Sequential(nn.LayerNorm(4)))

    if dist.get_rank() == 0:
        make()
    model = make()
    for _ in range(2):
        train(model)


# --- collectives that differ ---


def other_size(layout: str) -> Any:
    """A unit of another size than a block."""
    return unit(layout, nn.Linear(4, 4, bias=False))


def first_step(model: Any) -> None:
    train(model, dtype=next(model.parameters()).dtype)


def convert(layout: str, rank: int) -> None:
    model = shard(layout, Net())
    train(model)
    model.zero_grad()
    model.to(HALF[rank])
    model(batch(HALF[rank]))


def evaluate(layout: str, rank: int) -> None:
    model = shard(layout, Net())
    model.blocks.append(other_size(layout))
    with torch.no_grad():
        model(batch(), reverse=rank == 1)


def unshard(layout: str, rank: int) -> None:
    chosen = (other_size(layout), shard(layout, Net()).blocks[0])[rank]
    if layout == "fully_shard":
        chosen.unshard()
    else:
        with FSDP.summon_full_params(chosen):
            pass


DIFFERENT: dict[str, Callable[[str, int], None]] = {
    "a larger layer": lambda layout, rank: first_step(shard(layout, Net(rows=8 + 2 * rank))),
    "dtype": lambda layout, rank: first_step(shard(layout, Net().to(HALF[rank]))),
    "compute dtype": lambda layout, rank: first_step(shard(layout, Net(), param_dtype=HALF[rank])),
    "reduce dtype": lambda layout, rank: first_step(shard(layout, Net(), reduce_dtype=HALF[rank])),
    "conversion to dtypes of one size": convert,
    "evaluation in another order": evaluate,
    "manual all-gathers in another order": unshard,
}


@pytest.mark.cpu
@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.spec("AGREE-03", "AGREE-04", "AGREE-05")
@ranks(2)
def test_collectives_that_differ_raise_before_values_are_used(layout: str, kind: str) -> None:
    with refused("are about to issue different collectives"):
        DIFFERENT[kind](layout, dist.get_rank())


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*a unit has frozen parameters")
@pytest.mark.spec("AGREE-03")
@ranks(2)
def test_a_layer_that_one_rank_has_frozen_raises() -> None:
    net = Net()
    net.first.requires_grad_(dist.get_rank() == 0)
    with refused("are about to issue different collectives"):
        train(shard("fully_shard", net))


@pytest.mark.cpu
@pytest.mark.parametrize("layout", ["flat", "original"])
@pytest.mark.spec("AGREE-06")
@ranks(2)
def test_two_models_of_different_sizes_saved_in_another_order(layout: str) -> None:
    models = [shard(layout, Net()), other_size(layout)]
    with refused("different collectives"):
        models[dist.get_rank()].state_dict()


@pytest.mark.cpu
@pytest.mark.parametrize("layout", ["flat", "original"])
@pytest.mark.spec("AGREE-07")
@ranks(2)
def test_another_norm(layout: str) -> None:
    model = shard(layout, Net())
    train(model)
    with refused("different collectives"):
        model.clip_grad_norm_(1.0, (2.0, torch.inf)[dist.get_rank()])


@pytest.mark.parametrize("layout", ["flat", "original"])
@pytest.mark.spec("AGREE-06")
@ranks(2)
def test_another_type_of_state_dict(layout: str) -> None:
    model = shard(layout, Net())
    kinds = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)
    same = r"same call of state_dict\(\)"
    with FSDP.state_dict_type(model, kinds[dist.get_rank()]), refused(same, "_STATE_DICT", "_STATE_DICT"):
        model.state_dict()
    assert model.state_dict()


# --- the rest ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.spec("AGREE-08")
@ranks(1)
def test_second_thread(layout: str) -> None:
    model, is_inside, may_end = shard(layout, Net()), Event(), Event()
    hook = model.blocks[0].register_forward_hook(lambda *_: (is_inside.set(), may_end.wait(30), None)[2])
    thread = Thread(target=train, args=(model,))
    thread.start()
    assert is_inside.wait(30)
    with pytest.raises(RuntimeError, match="another thread is running a forward"):
        model(batch())
    may_end.set()
    thread.join()
    hook.remove()
    train(model)


@pytest.mark.spec("AGREE-09", "LEDGER-12")
def test_collective_of_a_destroyed_group() -> None:
    log, group, store = CollectiveLog(), Event(), Event()
    sequence = log.sequence_of(Group(group, 2, 0, (0, 1)))
    sequence.store = weakref.ref(store)
    log.record(sequence, "all-gather", 8, None, (), None)
    log.fatal_error = "a collective was aborted"
    del store
    log.clear()
    assert log.fatal_error == ""
    assert not sequence.entries and not log.sequences
    with pytest.raises(RuntimeError, match="process group of this model was destroyed"):
        log.record(sequence, "all-gather", 8, None, (), None)


OTHER_RANKS: dict[str, dict[str, Any]] = {
    "waits in two groups": {"ended": "", "waits": "all-gather of 'a'", "waits_at": ["two#1", [0, 1], [0, 0]]},
    "has ended in order": {"ended": IN_ORDER},
}


@pytest.mark.parametrize(("number", "is_certain"), [(0, True), (1, False)])
@pytest.mark.parametrize("state", OTHER_RANKS)
@pytest.mark.spec("AGREE-10", "LEDGER-03")
def test_a_hang_is_certain_only_if_the_other_rank_has_not_sent_the_collective(
    state: str, number: int, is_certain: bool
) -> None:
    sequence = CollectiveSequence("one#1", Group(group := Event(), 2, 0, (0, 1)))
    del group
    mine = {"rank": 0, "ended": "", "sequences": {"one#1": [[0, 1, 5], [-1, 0, 0]]}}
    positions = {"one#1": [[0, number, 5], [-1, 0, 0]], "two#1": [[0, 1, 5], [-1, 0, 0]]}
    theirs = {"rank": 1, "sequences": positions, **OTHER_RANKS[state]}
    assert Findings({0: mine, 1: theirs}).prove_a_hang((sequence, 0, 0), on_cpu=True) is is_certain


@pytest.mark.spec("LEDGER-02")
def test_ranks_in_different_epochs_are_compared_in_the_epoch_of_the_last_rank() -> None:
    sequence = CollectiveSequence("one#1", Group(group := Event(), 3, 0, (0, 1, 2)))
    del group
    # The epoch, the number of collectives and their digest: now, and at the end of the epoch before.
    positions = ([[5, 1, 7], [4, 9, 3]], [[4, 8, 2], [3, 9, 1]], [[5, 2, 6], [4, 9, 3]])
    states: Any = {rank: {"sequences": {"one#1": position}} for rank, position in enumerate(positions)}
    assert different_ranks(sequence, 5, states) == (4, [0, 1])
    states[1] = None
    assert different_ranks(sequence, 5, states) == (5, [0, 2])


@pytest.mark.spec("AGREE-11")
def test_long_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    of_rank: Any = SimpleNamespace(leave=ends.append, failed_at="", last=None)
    monkeypatch.setattr(sys, "last_value", ValueError("x" * 1_000_000), raising=False)
    monkeypatch.setattr(sys, "last_traceback", None, raising=False)
    process._leave_exit_record(of_rank)
    assert ends == ["by ValueError: " + "x" * 10_000]
