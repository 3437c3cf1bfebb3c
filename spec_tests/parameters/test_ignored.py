"""Ignored modules and parameters, and the arguments that select them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, Block, seeded
from spec_tests.models.running import Wire, iterate
from spec_tests.models.sharding import FLAT_STRATEGIES
from spec_tests.models.values import assert_same, local_gradients, mean_gradients, named
from spec_tests.subject import (
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    size_based_auto_wrap_policy,
    trace,
)

FSDP = FullyShardedDataParallel


def spelled(spelling: str, modules: Iterable[nn.Module]) -> dict[str, Any]:
    """The argument that ignores ``modules``, in each of the three ways to write it."""
    modules = list(modules)
    if spelling == "parameters":
        return {"ignored_states": [parameter for module in modules for parameter in module.parameters()]}
    return {"ignored_modules" if spelling == "ignored_modules" else "ignored_states": modules}


spellings = pytest.mark.parametrize("spelling", ["ignored_modules", "modules", "parameters"])
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- the effect ---


@pytest.mark.spec("IGN-01", "IGN-04", "IGN-07", "IGN-11")
@spellings
@flat_or_original
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_ignored_parameters_are_neither_flattened_nor_sharded_nor_reduced(
    spelling: str, keep: bool, strategy: ShardingStrategy
) -> None:
    plain = seeded()
    left_alone = [plain.leave, plain.blocks[1]]
    before = {id(parameter): parameter.detach().clone() for module in left_alone for parameter in module.parameters()}
    others = sum(p.numel() for p in plain.parameters()) - sum(value.numel() for value in before.values())
    # The argument can be any iterable, such as a tuple or a generator. A warning would be an error.
    options = {name: tuple(given) for name, given in spelled(spelling, left_alone).items()}
    model = FSDP(plain, sharding_strategy=strategy, use_orig_params=keep, **options)
    for step in range(2):
        after = [parameter for module in left_alone for parameter in module.parameters()]
        assert [id(parameter) for parameter in after] == list(before), "the same objects"
        assert all(torch.equal(parameter, before[id(parameter)]) for parameter in after)
        mine = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in before)
        assert mine == (others if strategy is ShardingStrategy.NO_SHARD else others // 2)
        model.zero_grad()
        with trace.record() as recorder:
            iterate(model, step)
        reduced = [event.num_bytes for event in recorder.events if event.kind in ("RS", "AR")]
        assert reduced == [4 * others]
        # Each rank has the gradient of its own batch.
        expected = local_gradients(seeded(), [step], dist.get_rank())
        assert torch.equal(plain.leave.weight.grad, expected["leave.weight"])
        assert torch.equal(plain.blocks[1].linear.bias.grad, expected["blocks.1.linear.bias"])


@pytest.mark.spec("IGN-04")
@ranks(2)
def test_a_single_parameter_of_a_layer_can_be_ignored() -> None:
    plain = seeded()
    bias = plain.enter.bias
    # An iterator can be read only once.
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_states=iter([bias]))
    assert model.enter.bias is bias
    assert dict(plain.enter.named_parameters()).keys() == {"bias"}
    reference = seeded()
    iterate(model)
    assert torch.equal(bias.grad, local_gradients(reference, [0], dist.get_rank())["enter.bias"])
    with FSDP.summon_full_params(model):
        assert_same(named(model), named(reference), bitwise=True)


class Shift(nn.Module):
    """Adds a parameter and a buffer to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("fixed", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.learned + self.fixed.to(x.dtype)


class Shifted(Block):
    """A block around a module that can be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(Shift())

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(super().forward(x))


@pytest.mark.spec("IGN-01")
@pytest.mark.parametrize("many", [False, True], ids=["one unit", "many units"])
@pytest.mark.parametrize("spelling", ["ignored_modules", "modules"])
@ranks(2)
def test_buffers_below_an_ignored_module_are_not_changed(spelling: str, many: bool) -> None:
    plain = seeded(lambda: nn.Sequential(Shift(), Shifted(), Shifted()))
    for tensor in (*plain.parameters(), *plain.buffers()):
        tensor.data.fill_(dist.get_rank())
    left_alone, others = plain[1].inside, [plain[0], plain[2].inside[0]]
    buffer = left_alone[0].fixed
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({Block}) if many else None,
        sync_module_states=True,
        mixed_precision=MixedPrecision(buffer_dtype=torch.float64),
        **spelled(spelling, [left_alone]),
    )
    assert all((other.fixed == 0).all() for other in others), "the other values come from rank 0"
    assert (left_alone[0].learned == dist.get_rank()).all()
    assert (buffer == dist.get_rank()).all(), "no rank has sent it"
    iterate(model)
    assert all(other.fixed.dtype is torch.float64 for other in others), "the others were cast in the first forward"
    assert left_alone[0].fixed is buffer
    assert buffer.dtype is torch.float32, "it was not cast"


@pytest.mark.spec("IGN-01")
@pytest.mark.accelerator
@ranks(2)
def test_ignored_module_stays_on_its_own_device() -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH, device=device()), nn.Linear(WIDTH, WIDTH))
    model = FSDP(plain, ignored_modules=[plain[1]])
    assert model.compute_device == device()
    assert plain[1].weight.device.type == "cpu"


@pytest.mark.spec("IGN-03")
@flat_or_original
@ranks(2)
def test_a_unit_below_an_ignored_module_keeps_sharding(keep: bool) -> None:
    plain, reference = seeded(), seeded()
    for index, block in enumerate(plain.blocks):
        plain.blocks[index] = FSDP(block, use_orig_params=keep)
    model = FSDP(plain, ignored_modules=[plain.blocks, plain.leave], use_orig_params=keep)
    assert FSDP.fsdp_modules(model) == [model, *plain.blocks]
    assert plain.leave.weight.shape == (2, WIDTH)
    with trace.record() as recorder:
        iterate(model)
    assert sorted(recorder.order("RS")) == ["RS", *(f"RS blocks.{index}" for index in range(4))]
    mean = mean_gradients(reference)
    row = torch.cat([mean[f"blocks.1.linear.{name}"].reshape(-1) for name in ("weight", "bias")])
    found = torch.cat([p.grad for p in plain.blocks[1].parameters() if p.grad is not None])
    assert torch.equal(found, row.chunk(2)[dist.get_rank()])


# --- with a policy ---


@pytest.mark.spec("IGN-10")
@ranks(2)
def test_a_block_that_is_too_small_without_its_ignored_part_stays_in_the_outer_unit() -> None:
    def at_least_40(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=40)

    plain = nn.Sequential(Block(), Block()).to(device())
    bias = plain[1].linear.bias
    model = FSDP(plain, auto_wrap_policy=at_least_40, ignored_states=[bias])
    assert [type(unit.module) for unit in FSDP.fsdp_modules(model)] == [nn.Sequential, nn.Linear]
    assert model[1].linear.bias is bias


@pytest.mark.spec("IGN-01", "IGN-04", "IGN-10", "ORIG-16")
@flat_or_original
@ranks(2)
def test_an_ignored_parameter_may_be_tied_between_units(keep: bool) -> None:
    plain, reference = seeded(), seeded()
    for model in (plain, reference):
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
    shared = plain.blocks[0].linear.weight
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_states=[shared], use_orig_params=keep)
    iterate(model)
    assert [block.linear.weight is shared for block in plain.blocks] == [True, True, False, False]
    mine = local_gradients(reference, [0], dist.get_rank())
    torch.testing.assert_close(shared.grad, mine["blocks.0.linear.weight"])


# --- invalid arguments ---


@pytest.mark.spec("IGN-02")
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
@ranks(2)
def test_a_wrapper_cannot_be_ignored(argument: str) -> None:
    plain = seeded()
    plain.blocks[0] = FSDP(plain.blocks[0])
    with refused(ValueError, "FullyShardedDataParallel", "remove it from the list"):
        FSDP(plain, sync_module_states=True, **{argument: [plain.blocks[0]]})
    assert isinstance(plain.leave.weight, nn.Parameter), "no value was changed"


@pytest.mark.spec("IGN-05")
@ranks(2)
def test_parameters_and_modules_cannot_be_mixed() -> None:
    plain = seeded()
    for mixed in ([plain.enter.weight, plain.leave], [plain.leave, plain.enter.weight]):
        with refused(ValueError, "ignored_states", "nn.Parameter", "nn.Module", "Linear"):
            FSDP(plain, sync_module_states=True, ignored_states=mixed)


@pytest.mark.spec("IGN-06")
@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize("states", [True, False])
@ranks(2)
def test_both_spellings_at_once_are_refused_even_if_they_are_empty(modules: bool, states: bool) -> None:
    plain = seeded()
    with refused(ValueError, "ignored_modules", "ignored_states"):
        FSDP(
            plain,
            sync_module_states=True,
            ignored_modules=[plain.enter] if modules else [],
            ignored_states=[plain.leave] if states else [],
        )


@pytest.mark.spec("IGN-09")
@ranks(2)
def test_ignored_modules_must_be_iterable_of_modules() -> None:
    layer = nn.Linear(2, 2)
    plain = seeded()
    for no_iterable in (layer, 3, True, "leave", {"leave": layer}):
        with refused(TypeError, "ignored_modules"):
            FSDP(plain, sync_module_states=True, ignored_modules=no_iterable)
    for no_module in (nn.Parameter(torch.ones(2)), "leave", nn.Linear, None, 3):
        with refused(TypeError, "ignored_modules"):
            FSDP(plain, sync_module_states=True, ignored_modules=[layer, no_module])
        with refused(TypeError, "ignored_modules"):
            FSDP(plain, sync_module_states=True, ignored_modules=[no_module])
    assert_same(named(plain), named(seeded()), bitwise=True)
    FSDP(plain, ignored_modules=[])
    FSDP(seeded(), ignored_states=[])


@pytest.mark.spec("IGN-12")
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
@ranks(2)
def test_ignoring_the_wrapped_module_itself_warns_and_leaves_nothing_to_shard(argument: str) -> None:
    plain = seeded()
    parameters = list(plain.parameters())
    with pytest.warns(UserWarning, match=rf"rank {dist.get_rank()}.*ignore.*Stack") as caught:
        model = FSDP(plain, **{argument: [plain]})
    assert len(caught) == 1
    assert all(mine is before for mine, before in zip(model.parameters(), parameters, strict=True))
    with trace.record() as recorder, Wire() as wire:
        iterate(model)
    assert (recorder.events, wire.sent) == ([], [])
    mine = local_gradients(seeded(), [0], dist.get_rank())
    assert_same({name: p.grad for name, p in plain.named_parameters()}, mine, bitwise=True)
