"""The root, units inside units, and changes of a wrapped module that bypass its wrapper."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models import kinds
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.probes import probes
from spec_tests.models.running import batch
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import MixedPrecision, ShardingStrategy, trace

FLAT_STRATEGIES = [*ShardingStrategy][:3]
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- the root ---


@pytest.mark.spec("CTOR-10")
@ranks(2)
def test_unit_names_start_at_root_that_ran_forward() -> None:
    root = FSDP(nn.Sequential(wrapped(), nn.Linear(2, 2).to(device())))
    with trace.record() as recorder:
        root(batch()).sum().backward()
    assert recorder.order("F") == ["F", "F 0", *(f"F 0.blocks.{index}" for index in range(4))]
    # Only the root stays unsharded between its forward and its backward.
    order = recorder.order("FREE", "B")
    assert order.index("FREE 0") < order.index("B") < order.index("FREE")
    assert FSDP.fsdp_modules(root, root_only=True) == [root]


@ranks(2)
def test_two_trees_in_one_loss_train_both() -> None:
    model, plain = nn.ModuleList([wrapped(), wrapped()]), nn.ModuleList([seeded(), seeded()])
    assert_trains_like(model, plain, range(2), loss=lambda both, x: (both[0](x) * both[1](2 * x)).mean())


RAN_ALONE: dict[str, Callable[[nn.Module], Any]] = {
    "trained": lambda part: part(batch(3)).sum().backward(),
    "ran forward": lambda part: part(batch(3)),
    "was evaluated": torch.no_grad()(lambda part: part(batch(3))),
    "broke off": lambda part: part(batch(width=17)),
}


@pytest.mark.spec("CTOR-11")
@pytest.mark.parametrize("before", RAN_ALONE)
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_root_takes_over_submodule_that_ran_alone(strategy: ShardingStrategy, keep: bool, before: str) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    part = model.blocks[0]
    fails = pytest.raises(RuntimeError, match="cannot be multiplied")
    with fails if before == "broke off" else contextlib.nullcontext():
        RAN_ALONE[before](part)
    model.zero_grad()
    with trace.record() as recorder:
        assert_trains_like(model)
    assert [event.kind for event in recorder.events].count("AR" if strategy is ShardingStrategy.NO_SHARD else "RS") == 5
    if strategy is ShardingStrategy.FULL_SHARD:
        assert recorder.order("FREE").count("FREE blocks.0") == 2, "only the root stays unsharded after forward"
    assert part._root_state is model._root_state


@pytest.mark.spec("CTOR-11")
@pytest.mark.parametrize("trains", [False, True])
@ranks(2)
def test_units_that_ran_alone_join_a_larger_tree_in_the_order_of_its_forward(trains: bool) -> None:
    model = wrapped()
    for index in (2, 0):
        output = model.blocks[index](batch(5))
        if trains:
            output.sum().backward()
    model.zero_grad()
    with trace.record() as recorder:
        model(batch()).sum().backward()
    assert recorder.order("AG")[:5] == ["AG", *(f"AG blocks.{index}" for index in range(4))]


# --- units inside units ---


@pytest.mark.spec("CTOR-15", "WRAP-01")
@pytest.mark.parametrize("parts", [2, 1])
@ranks(2)
def test_outer_instance_manages_the_parameters_of_no_inner_instance(parts: int) -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4)]  # 72, 36 and 20 elements
    options: Any = {"sharding_strategy": ShardingStrategy["FULL_SHARD" if parts == 2 else "NO_SHARD"]}
    inner = FSDP(layers[1].to(device()), **options)
    middle = FSDP(nn.Sequential(layers[0], inner).to(device()), **options)
    model = FSDP(nn.Sequential(middle, layers[2]).to(device()), **options)
    assert sorted(parameter.numel() * parts for parameter in model.parameters()) == [20, 36, 72]
    assert FSDP.fsdp_modules(model) == [model, middle, inner]
    with trace.record() as recorder:
        model(torch.ones(2, 8, device=device())).sum().backward()
    reduced = {event.unit: event.num_bytes for event in recorder.events if event.kind in ("RS", "AR")}
    assert reduced == {"": 4 * 20, "0": 4 * 72, "0.1": 4 * 36}, "each gradient is reduced once"


@pytest.mark.spec("CTOR-13")
@flat_or_original
@ranks(2)
def test_printing_shows_every_unit_as_a_layer(keep: bool) -> None:
    model = FSDP(nn.Sequential(wrapped(use_orig_params=keep), FSDP(nn.Linear(2, 2, device=device()))))
    for each in (model, model[0], model[1]):
        # A list of equal layers is printed once, with their number in front.
        found = re.findall(r"(?:(\d+) x )?FullyShardedDataParallel\(", repr(each))
        assert sum(int(number or 1) for number in found) == len(FSDP.fsdp_modules(each))
        assert str(each) == repr(each)
    assert "  (enter): Linear(" in repr(model[0]), "a module that is not a unit stays a layer"


# --- changing the wrapped module without the wrapper ---


def rename(layer: nn.Module) -> None:
    layer.kernel = layer.weight
    del layer.weight


def replace_by_a_tensor(layer: nn.Module) -> None:
    layer._parameters.pop("weight", None)  # nn.Module does not allow a tensor to replace a parameter
    layer.weight = torch.ones(6, 6, device=device())


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "remove": lambda layer: delattr(layer, "weight"),
    "rename": rename,
    "replace by a parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(6, 6, device=device()))),
    "replace by a tensor": replace_by_a_tensor,
    "replace by nothing": lambda layer: setattr(layer, "weight", None),
}
MARKS_VIEWS = pytest.mark.not_simulated("it marks parameters, and the package keeps marks on views")


@pytest.mark.spec("CTOR-12", "FWD-05")
@pytest.mark.parametrize("is_in_backward", [False, True])
@pytest.mark.parametrize("change", [*sorted(set(CHANGES) - {"rename"}), pytest.param("rename", marks=MARKS_VIEWS)])
@flat_or_original
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_deleted_or_replaced_name_raises_at_the_next_forward_or_backward(
    change: str, keep: bool, strategy: ShardingStrategy, is_in_backward: bool
) -> None:
    model = FSDP(seeded(), sharding_strategy=strategy, use_orig_params=keep)
    loss = model(batch()).sum()
    if not is_in_backward:
        loss.backward()
    CHANGES[change](model.module.blocks[1].linear)
    with refused(RuntimeError, "'blocks.1.linear.weight'", "Linear", "summon_full_params"):
        loss.backward() if is_in_backward else model(batch())


@pytest.mark.spec("CTOR-12")
@pytest.mark.parametrize("keep", [pytest.param(False, marks=MARKS_VIEWS), True], ids=["flat", "original"])
@ranks(2)
def test_parameter_replaced_before_the_first_forward_raises_and_can_be_restored(keep: bool) -> None:
    model = FSDP(seeded(), use_orig_params=keep)
    layer = model.module.leave
    before = layer.bias
    layer.bias = nn.Parameter(torch.zeros(2, device=device()))
    with pytest.raises(RuntimeError, match=r"leave\.bias"):
        model(batch())
    del layer.bias
    layer.bias = before
    assert_trains_like(model)


# --- two models with a common unit ---


class Headed(nn.Module):
    """An encoder that another model may contain as well, and a head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(6, 1, device=device())

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.encoder(x)))


@pytest.mark.spec("CTOR-11", "FS2-09")
@kinds.every_kind
@pytest.mark.parametrize("order", ["one backward", "two backwards", "in turn"])
@ranks(2)
def test_two_models_with_a_common_unit_run_forward_before_both_run_backward(kind: str, order: str) -> None:
    """Defect: the second forward makes its model the root of the unit, and the first head gets no gradient."""
    encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device())
    plain = nn.ModuleList([Headed(encoder), Headed(encoder)])
    model = copy.deepcopy(plain)
    common = kinds.shard(kind, model[0].encoder)
    for number, one in enumerate(model):
        one.encoder = common
        model[number] = kinds.shard(kind, one)
    for models in (plain, model):
        optimizer = torch.optim.SGD(list(dict.fromkeys(models.parameters())), lr=0.1)
        for step in range(3):
            losses = []
            for number, one in enumerate(models):
                losses.append(one(batch(step, rank=0) + number).square().mean())
                if order == "in turn":
                    losses.pop().backward()
            for loss in [sum(losses)] if order == "one backward" else losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for expected, found in zip(plain, model, strict=True):
        assert_close(found(batch(rank=0)), expected(batch(rank=0)))


# --- a program calls an inner unit directly ---


@pytest.mark.spec("MP-13", "MP-16")
@pytest.mark.parametrize(("on_root", "elsewhere"), [(True, False), (False, True)])
@flat_or_original
@ranks(2)
def test_its_own_setting_decides_whether_it_casts_its_inputs(on_root: bool, elsewhere: bool, keep: bool) -> None:
    """Defect: the unit that the program calls counts as the root."""
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, cast_root_forward_inputs=on_root, cast_forward_inputs=elsewhere
    )
    (probe,) = probes(1)
    inner = FSDP(probe, mixed_precision=precision, use_orig_params=keep)
    outer = nn.Sequential(nn.Linear(6, 6), inner).to(device())
    model = FSDP(outer, use_orig_params=keep)
    for call in (model, inner, model, inner):
        call(batch()).sum().backward()
        assert probe.seen["x"] is (torch.bfloat16 if elsewhere else torch.float32)


@pytest.mark.spec("PROG-01", "SUMMON-10")
@flat_or_original
@ranks(2)
def test_it_runs_while_another_unit_is_summoned_on_the_first_rank(keep: bool) -> None:
    """Defect: the forward of a unit is refused because of a unit that it does not use."""
    plain, model = seeded(), wrapped(use_orig_params=keep)
    blocks = model.module.blocks
    with torch.no_grad():
        model(batch())
        with FSDP.summon_full_params(blocks[0], rank0_only=True, writeback=False):
            assert torch.equal(blocks[1](batch()), plain.blocks[1](batch()))
