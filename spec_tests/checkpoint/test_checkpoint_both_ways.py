"""Checkpoints move from torch's training methods to minifsdp and back, and training continues unchanged.

In each test, one library trains for two steps. The other one loads its checkpoint into a model with different values,
and both continue training. With two ranks the losses are bitwise equal, since a mean of two numbers has no order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from spec_tests.checkpoint.checkpoints import (
    FULL,
    LOCAL,
    SHARDED,
    flat_or_original,
    full_or_sharded,
    gathered,
    in_torch,
    make,
    quiet,
    step,
    wrapped,
)
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardedOptimStateDictConfig, ShardedStateDictConfig, ShardingStrategy, StateDictType

Weights = dict[str, Any]
States = dict[str, Any]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Library:
    """A training method, with its own functions for saving and loading.

    Attributes:
        build: wraps a model.
        write: returns weights and optimizer states by original names, in the given form of state dict.
        read: loads weights and optimizer states.
        all_ranks: whether a single process computes the batches of all ranks.
    """

    build: Callable[[nn.Module], nn.Module]
    write: Callable[[Any, Any, StateDictType], tuple[Weights, States]]
    read: Callable[[Any, Any, Weights, States, StateDictType], None]
    all_ranks: bool = False


def torch_wrapper(use_orig_params: bool) -> Library:
    wrapper = torch_fsdp.FullyShardedDataParallel

    def build(model: nn.Module) -> nn.Module:
        return in_torch(model, use_orig_params=use_orig_params)

    def chosen(model: Any, form: StateDictType) -> Any:
        return wrapper.state_dict_type(model, torch_fsdp.StateDictType[form.name])

    def write(model: Any, optimizer: Any, form: StateDictType) -> tuple[Weights, States]:
        with chosen(model, form):
            return model.state_dict(), wrapper.optim_state_dict(model, optimizer)

    def read(model: Any, optimizer: Any, weights: Weights, states: States, form: StateDictType) -> None:
        with chosen(model, form):
            model.load_state_dict(weights)
            optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, states))

    return Library(build, write, read)


def build_in_place(model: nn.Module) -> nn.Module:
    for part in (model.first, model.second, model):
        torch_fsdp.fully_shard(part)
    return model


def write_by_helpers(model: Any, optimizer: Any, form: StateDictType) -> tuple[Weights, States]:
    options = StateDictOptions(full_state_dict=form is FULL)
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)


def read_by_helpers(model: Any, optimizer: Any, weights: Weights, states: States, form: StateDictType) -> None:
    options = StateDictOptions(full_state_dict=form is FULL)
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, states, options=options)


LIBRARIES = {
    "fsdp1-flat": torch_wrapper(use_orig_params=False),
    "fsdp1-original": torch_wrapper(use_orig_params=True),
    "fully_shard": Library(build_in_place, write_by_helpers, read_by_helpers),
    "ddp": Library(DistributedDataParallel, write_by_helpers, read_by_helpers),
    "plain": Library(lambda model: model, write_by_helpers, read_by_helpers, all_ranks=True),
}
# Full dicts of torch's wrapper with original parameters are omitted: on the CPU all states of a parameter share one
# buffer there and have the values of the last state (seen with torch 2.13).
WRITERS = [
    *((name, FULL) for name in ("fsdp1-flat", "fully_shard", "ddp", "plain")),
    *((name, SHARDED) for name in ("fsdp1-flat", "fsdp1-original", "fully_shard")),
]
READERS = [*((name, FULL) for name in LIBRARIES), *WRITERS[4:]]


def mine(keep: bool, seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(make(seed), use_orig_params=keep)
    return model, adam(model.parameters())


def go_on(ours: Any, theirs: Any, library: Library) -> None:
    for number in (2, 3, 4):
        # A single process only computes the mean loss over all ranks.
        loss = step(*ours, number)
        with quiet():
            expected = step(*theirs, number, all_ranks=library.all_ranks)
        if not library.all_ranks:
            assert loss == expected, f"step {number}"
    with FSDP.state_dict_type(ours[0], FULL), quiet():
        weights = ours[0].state_dict()
        expected_weights = library.write(*theirs, FULL)[0]
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


@pytest.mark.spec("SD-FULL-08", "SD-SHARD-03", "OSD-LOAD-01", "OSD-LOAD-03")
@pytest.mark.parametrize(("name", "form"), WRITERS, ids=lambda part: getattr(part, "name", part))
@flat_or_original
@ranks(2)
def test_checkpoint_of_torch_is_read(keep: bool, name: str, form: StateDictType) -> None:
    library = LIBRARIES[name]
    with quiet():
        model = library.build(make())
        optimizer = adam(model.parameters())
        for number in (0, 1):
            step(model, optimizer, number, all_ranks=library.all_ranks)
        weights, states = library.write(model, optimizer, form)
    ours, restored = mine(keep, seed=7)
    with FSDP.state_dict_type(ours, form):
        ours.load_state_dict(weights)
        FSDP.optim_state_dict_to_load(ours, restored, states, load_directly=True)
    go_on((ours, restored), (model, optimizer), library)


@pytest.mark.spec("SD-SHARD-03")
@ranks(2)
def test_sharded_bfloat16_checkpoint_of_torch_is_read_although_a_rank_has_no_row_of_a_parameter() -> None:
    library = LIBRARIES["fsdp1-flat"]
    with quiet():
        model = library.build(make().bfloat16())
        weights, _ = library.write(model, adam(model.parameters()), SHARDED)
    ours = wrapped(make(7).bfloat16())
    with FSDP.state_dict_type(ours, SHARDED):
        ours.load_state_dict(weights)
    assert_same(full_values(ours), dict(make().bfloat16().named_parameters()), bitwise=True)


@pytest.mark.spec("SD-FULL-02", "SD-SHARD-01", "OSD-03", "OSD-04", "OSD-06")
@pytest.mark.parametrize(("name", "form"), READERS, ids=lambda part: getattr(part, "name", part))
@flat_or_original
@ranks(2)
def test_torch_reads_our_checkpoint(keep: bool, name: str, form: StateDictType) -> None:
    library = LIBRARIES[name]
    ours, optimizer = mine(keep, seed=0)
    for number in (0, 1):
        step(ours, optimizer, number)
    use_dtensor = name == "fully_shard"
    sharded = ShardedStateDictConfig(_use_dtensor=use_dtensor), ShardedOptimStateDictConfig(_use_dtensor=use_dtensor)
    with FSDP.state_dict_type(ours, form, *(sharded if form is SHARDED else ())):
        weights, states = ours.state_dict(), FSDP.optim_state_dict(ours, optimizer)
    with quiet():
        model = library.build(make(7))
        restored = adam(model.parameters())
        library.read(model, restored, weights, states, form)
    go_on((ours, optimizer), (model, restored), library)


# --- memory formats ---


def columns(seed: int = 0) -> nn.Module:
    """A model with matrices in column-major order."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    return model


# torch refuses to save these matrices in sharded form.
@pytest.mark.spec("SD-FULL-08", "SD-LOCAL-01", "SD-LOCAL-03")
@pytest.mark.parametrize("form", [FULL, LOCAL], ids=["full", "local"])
@flat_or_original
@ranks(2)
def test_column_major_weights_of_torch_are_read(keep: bool, form: StateDictType) -> None:
    with quiet():
        theirs, ours = in_torch(columns()), wrapped(columns(7), use_orig_params=keep)
        with torch_fsdp.FullyShardedDataParallel.state_dict_type(theirs, torch_fsdp.StateDictType[form.name]):
            weights = theirs.state_dict()
    with FSDP.state_dict_type(ours, form):
        ours.load_state_dict(weights)
    assert_same(full_values(ours), dict(columns().named_parameters()), bitwise=True)


@pytest.mark.spec("SD-FULL-02", "SD-SHARD-01", "SD-LOCAL-01")
@pytest.mark.parametrize("form", [FULL, SHARDED, LOCAL], ids=["full", "sharded", "local"])
@flat_or_original
@ranks(2)
def test_torch_reads_our_column_major_weights(keep: bool, form: StateDictType) -> None:
    with quiet():
        theirs, ours = in_torch(columns(7)), wrapped(columns(), use_orig_params=keep)
        with FSDP.state_dict_type(ours, form):
            weights = {name.replace("flat_param", "_flat_param"): value for name, value in ours.state_dict().items()}
        with torch_fsdp.FullyShardedDataParallel.state_dict_type(theirs, torch_fsdp.StateDictType[form.name]):
            theirs.load_state_dict(weights)
        with torch_fsdp.FullyShardedDataParallel.summon_full_params(theirs):
            assert_same(dict(theirs.named_parameters()), dict(columns().named_parameters()), bitwise=True)


@pytest.mark.spec("OSD-04", "OSD-06", "OSD-LOAD-03")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@full_or_sharded
@flat_or_original
@ranks(2)
def test_optimizer_states_of_column_major_weights_are_saved_and_loaded(
    keep: bool, form: StateDictType, strategy: ShardingStrategy
) -> None:
    plain = columns().to(device())
    ours, later = (wrapped(columns(), sharding_strategy=strategy, use_orig_params=keep) for _ in range(2))
    # A fused optimizer uses the elements in the order of their memory.
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01, fused=True) for model in (plain, ours, later)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 12, device=device()).view(3, 4)).square().sum().backward()
        optimizer.step()

    for _ in range(2):
        train(plain, optimizers[0])
        train(ours, optimizers[1])
    with FSDP.state_dict_type(ours, form):
        weights, states = ours.state_dict(), FSDP.optim_state_dict(ours, optimizers[1])
    for name, parameter in plain.named_parameters():
        for key, value in optimizers[0].state[parameter].items():
            torch.testing.assert_close(gathered(states["state"][name][key]), value, check_device=False)
    if strategy is NO_SHARD or form is FULL:
        # As in a checkpoint of a model with row-major matrices.
        for of_parameter in states["state"].values():
            of_parameter.update({key: value.contiguous() for key, value in of_parameter.items()})
    with FSDP.state_dict_type(later, form):
        later.load_state_dict(weights)
        FSDP.optim_state_dict_to_load(later, optimizers[2], states, load_directly=True)
    train(plain, optimizers[0])
    train(later, optimizers[2])
    for name, value in full_values(later).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())
