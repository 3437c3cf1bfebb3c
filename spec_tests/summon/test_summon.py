"""``summon_full_params``: the values and units inside the context, changes inside it, and the state after it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import Wire, batch, iterate
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    wrapped,
)
from spec_tests.models.values import assert_same, full_values, named, own_names
from spec_tests.models.whole import assert_a_step_uses_the_mean_gradient_alone, by_name, memory_of
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

summon = FullyShardedDataParallel.summon_full_params
either = pytest.mark.parametrize("use_orig_params", [False, True])
# Strategies and parameter forms that behave differently from each other, instead of all combinations.
PAIRS = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, True), (NO_SHARD, False), (NO_SHARD, True)]
sharding_pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS[:3])
HYBRID_PAIRS = [(HYBRID_SHARD, False), (HYBRID_SHARD_ZERO2, True)]
sharding_and_hybrid_pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), [*PAIRS[:3], *HYBRID_PAIRS])


# --- parameters inside the context ---


@pytest.mark.spec("SUMMON-01")
@pytest.mark.pure
def test_the_signature_is_that_of_torch() -> None:
    ours, theirs = (
        [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in inspect.signature(each).parameters.values()
        ]
        for each in (summon, torch_fsdp.FullyShardedDataParallel.summon_full_params)
    )
    assert ours == theirs
    assert isinstance(inspect.getattr_static(FullyShardedDataParallel, "summon_full_params"), staticmethod)
    assert isinstance(summon(nn.Linear(1, 1)), contextlib.AbstractContextManager)


# --- affected units ---


@pytest.mark.spec("SUMMON-03")
@either
@ranks(2)
def test_a_plain_module_summons_all_units_below_it_with_the_same_arguments(use_orig_params: bool) -> None:
    # Two independent units around an unwrapped layer, in a module that is not wrapped.
    model = seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
    expected, between = named(model), model[1].weight
    units = [FullyShardedDataParallel(model[index], use_orig_params=use_orig_params) for index in (0, 2)]
    model[0], model[2] = units
    before = named(model)
    with summon(model, recurse=False):
        assert [parameter.shape for parameter in model.parameters()] == [value.shape for value in before.values()]
    for writeback in (False, True):
        with summon(model, writeback=writeback), torch.no_grad():
            assert_same(by_name(model), expected, bitwise=True)
            assert model[1].weight is between
            for unit in units:
                unit.module.weight.fill_(7.0)
        if not writeback:
            assert_same(named(model), before, bitwise=True)
    with summon(model, writeback=False, rank0_only=True):
        for unit in units:
            assert sum(parameter.numel() for parameter in unit.parameters()) == (42 if dist.get_rank() == 0 else 21)
    with summon(model, writeback=False):
        assert all((unit.module.weight == 7.0).all() for unit in units)


@pytest.mark.spec("SUMMON-04", "SUMMON-05")
@either
@ranks(2)
def test_summon_gathers_only_the_units_below_and_without_recurse_only_one(use_orig_params: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))

    model = seeded(build)
    model[1][0] = FullyShardedDataParallel(model[1][0], use_orig_params=use_orig_params)
    model[1] = FullyShardedDataParallel(model[1], use_orig_params=use_orig_params)
    model = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    iterate(model)
    inner = model.module[1]
    others = {name: tensor.shape for name, tensor in named(model).items() if "1." not in name}
    with Wire() as wire, summon(inner):
        assert_same(named(inner), named(seeded(build)[1]), bitwise=True)
        assert {name: p.shape for name, p in model.named_parameters() if "1." not in name} == others
    assert sorted(wire.sent) == [("AG", 10), ("AG", 28)]
    # Without recurse, nested units stay sharded.
    nested = {name: tensor.shape for name, tensor in named(model).items() if "1." in name}
    with Wire() as wire, summon(model, recurse=False):
        assert torch.equal(model.module[0].weight, seeded(build)[0].weight)
        assert sorted(p.shape for name, p in model.named_parameters() if "1." in name) == sorted(nested.values())
    assert wire.sent == [("AG", 42)]


# --- leaving the context ---


@pytest.mark.spec("SUMMON-06", "SUMMON-19")
@either
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_summon_restores_the_local_shards_on_exit_and_after_an_exception(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    before, objects = named(model), list(model.parameters())
    for writeback, fails in itertools.product((True, False), (False, True)):
        with contextlib.suppress(KeyError), summon(model, writeback=writeback):
            if fails:
                raise KeyError("an error of the user")
        assert_same(named(model), before, bitwise=True)
        assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
    assert_same(full_values(model), named(seeded()), bitwise=True)
    assert_a_step_uses_the_mean_gradient_alone(model, seeded())


@pytest.mark.spec("SUMMON-19")
@ranks(2)
def test_a_summon_that_fails_at_a_later_unit_restores_the_earlier_units() -> None:
    model = wrapped(use_orig_params=True)
    before = named(model)
    weight = next(model.module.blocks[3].parameters())
    shard, weight.data = weight.data, torch.zeros(99, device=device())
    # The program keeps the error, so the garbage collector does not end the contexts of the earlier units.
    with pytest.raises(RuntimeError) as error, summon(model):
        pass
    weight.data = shard
    assert_same(named(model), before, bitwise=True)
    assert "99" in str(error.value)
    assert_a_step_uses_the_mean_gradient_alone(model, seeded())


# --- changes ---


CHANGES: dict[str, Callable[[nn.Parameter, float], Any]] = {
    "in place": lambda parameter, value: parameter.fill_(value),
    "through data": lambda parameter, value: parameter.data.fill_(value),
    "other memory": lambda parameter, value: setattr(parameter, "data", torch.full_like(parameter, value)),
    "element by element": lambda parameter, value: [row.fill_(value) for row in parameter],
    "init": lambda parameter, value: nn.init.constant_(parameter, value),
}


def patchwork(num_shards: int) -> nn.Module:
    """The expected model after each rank filled all unsharded parameters with the index of its local shard."""
    plain = seeded()
    for names in own_names(plain).values():
        parameters = [plain.get_parameter(name) for name in names]
        row = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        for index, local_shard in enumerate(row.split(-(-row.numel() // num_shards))):
            local_shard.fill_(float(index))
        nn.utils.vector_to_parameters(row, parameters)
    return plain


@pytest.mark.spec("SUMMON-07")
@sharding_and_hybrid_pairs
@ranks(4)
def test_each_rank_keeps_its_own_shard_of_changes(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    num_shards = 2 if strategy in HYBRID_STRATEGIES else 4
    expected = patchwork(num_shards)
    for change in CHANGES.values():
        with summon(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with summon(model), torch.no_grad():
            for parameter in model.parameters():
                change(parameter, float(dist.get_rank() % num_shards))
        # No backward follows, so the next change finds units that are still unsharded.
        assert torch.equal(model(batch()), expected(batch()))
        assert_same(full_values(model), named(expected), bitwise=True)


@pytest.mark.spec("SUMMON-07", "SUMMON-09")
@pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)
@ranks(2)
def test_weight_that_is_transposed_inside_summon_stays_transposed(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Defect: the transposed weight has the memory of the weight, so it seems to be the same."""
    model, plain = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params), seeded()
    with summon(model):
        for inside in (model.module, plain):
            inside.enter.weight.data = inside.enter.weight.data.t()
    assert_same(full_values(model), named(plain), bitwise=True)


@pytest.mark.spec("SUMMON-07")
@either
@ranks(2)
def test_parameter_replaced_inside_summon_raises(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    with pytest.raises(RuntimeError, match=r"enter\.weight"), summon(model):
        model.module.enter.weight = nn.Parameter(torch.ones(6, 6, device=device()))
    model = wrapped(use_orig_params=use_orig_params)
    with pytest.raises(RuntimeError, match=r"enter\.weight"), summon(model):
        del model.module.enter.weight


@pytest.mark.spec("SUMMON-08")
@sharding_pairs
@ranks(2)
def test_without_writeback_changes_are_dropped(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    before = named(model)
    for change in CHANGES.values():
        with summon(model, writeback=False), torch.no_grad():
            for parameter in model.parameters():
                change(parameter, 3.0)
        assert_same(named(model), before, bitwise=True)
        with torch.no_grad():
            assert torch.equal(model(batch()), seeded()(batch()))
    versions = [parameter._version for parameter in model.parameters()]
    with summon(model, writeback=False):
        pass
    assert [parameter._version for parameter in model.parameters()] == versions, "nothing is copied back"


@pytest.mark.spec("SUMMON-09")
@either
@pytest.mark.parametrize("writeback", [True, False])
@ranks(2)
def test_changes_of_unsharded_units_always_persist(writeback: bool, use_orig_params: bool) -> None:
    own_group, _ = dist.new_subgroups(group_size=1)
    low = MixedPrecision(param_dtype=torch.bfloat16)
    for options, dtype in (
        ({"sharding_strategy": NO_SHARD}, torch.float32),
        ({"process_group": own_group}, torch.float32),
        ({"sharding_strategy": NO_SHARD, "mixed_precision": low}, torch.bfloat16),
    ):
        model = wrapped(use_orig_params=use_orig_params, **options)
        expected = seeded()
        for value, change in enumerate(CHANGES.values(), start=3):
            # Run a forward without a backward. Later computations must not reuse its parameters.
            model(batch())
            with summon(model, writeback=writeback), torch.no_grad():
                for parameter in model.parameters():
                    change(parameter, float(value))
            with torch.no_grad():
                for parameter in expected.parameters():
                    parameter.fill_(float(value))
                assert_same(full_values(model), named(expected), bitwise=True)
                copy_of_expected = copy.deepcopy(expected).to(dtype)
                assert torch.equal(model(batch()), copy_of_expected(batch().to(dtype)))


def pickled(layer: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.spec("SUMMON-02")
@pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@ranks(2)
def test_a_copy_of_a_layer_is_a_plain_layer_afterwards(
    copied: Callable[[nn.Module], nn.Module], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Defect: the copy still belongs to the unit of the original, so its state dict is refused."""
    plain, model = seeded(), wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    iterate(model)
    with summon(model):
        layers = [copied(model.module.enter), copied(model.module.blocks[1].module.linear)]
    for layer, expected in zip(layers, (plain.enter, plain.blocks[1].linear), strict=True):
        assert torch.equal(layer(batch()), expected(batch()))
        assert_same(layer.state_dict(), named(expected), bitwise=True)
        layer.load_state_dict({name: value + 1 for name, value in layer.state_dict().items()})
    assert torch.equal(model(batch()), plain(batch()))


# --- on rank 0 only, on the CPU ---


@pytest.mark.spec("SUMMON-10")
@pytest.mark.parametrize("offload_to_cpu", [False, True])
@pytest.mark.parametrize("has_group", [False, True])
@sharding_and_hybrid_pairs
@ranks(4)
def test_rank0_only_gives_full_parameters_to_the_first_rank(
    strategy: ShardingStrategy, use_orig_params: bool, has_group: bool, offload_to_cpu: bool
) -> None:
    first, options = 0, {}
    if has_group and strategy not in HYBRID_STRATEGIES:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        first = dist.get_rank() // 2 * 2
        options["process_group"] = pairs[dist.get_rank() // 2]
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, **options)
    before = named(model)
    with summon(model, writeback=False, rank0_only=True, offload_to_cpu=offload_to_cpu):
        if dist.get_rank() == first:
            assert_same(named(model), named(seeded().to("cpu" if offload_to_cpu else device())), bitwise=True)
        else:
            assert_same(dict(zip(before, model.parameters(), strict=True)), before, bitwise=True)
    assert_same(named(model), before, bitwise=True)


@pytest.mark.spec("SUMMON-11")
@ranks(2)
def test_rank0_only_cannot_write_back() -> None:
    model = wrapped()
    before = named(model)
    with Wire() as wire, pytest.raises(NotImplementedError, match="writeback=False"), summon(model, rank0_only=True):
        pass
    assert wire.sent == []
    assert_same(named(model), before, bitwise=True)


@pytest.mark.spec("SUMMON-12", "SUMMON-13")
@sharding_pairs
@ranks(2)
def test_offloading_on_all_ranks_warns_of_redundant_copies_and_keeps_changes(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    iterate(model)
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"CPU cop.*rank0_only=True") as caught:
            stack.enter_context(summon(model, offload_to_cpu=True))
        assert_same(named(model), named(seeded().cpu()), bitwise=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    assert [warning.filename for warning in caught] == [__file__], "the line that must be changed"
    assert {parameter.device for parameter in model.parameters()} == {device()}
    assert_same(full_values(model), {name: value + 1.0 for name, value in named(seeded()).items()}, bitwise=True)
    iterate(model)


@pytest.mark.spec("SUMMON-14")
@either
@ranks(2)
def test_no_shard_params_are_not_offloaded(use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=NO_SHARD, use_orig_params=use_orig_params)
    memory = set(map(memory_of, model.parameters()))
    with summon(model, offload_to_cpu=True, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            assert set(map(memory_of, model.parameters())) == memory
            assert_same(named(model), named(seeded()), bitwise=True)
