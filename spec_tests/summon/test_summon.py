"""``summon_full_params``: the values and units inside the context, changes inside it, and the state after it."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models import apis, running
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.values import full_values
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision

summon = FullyShardedDataParallel.summon_full_params
batch, iterate, Wire = running.batch, running.iterate, running.Wire
SHARDED = apis.WRAPPER_SETTINGS[:3]
HYBRID = zip((apis.WRAPPED, apis.ORIGINALS), apis.HYBRID_STRATEGIES, strict=True)
sharded_settings = apis.settings_of(*SHARDED)
sharded_and_hybrid_settings = apis.settings_of(*SHARDED, *HYBRID)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that the model has now."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(found: Any, expected: Any) -> None:
    """Bit by bit."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


# --- affected units ---


@pytest.mark.spec("SUMMON-03")
@apis.wrapper_apis
@ranks(2)
def test_a_plain_module_summons_all_units_below_it_with_the_same_arguments(api: apis.Api) -> None:
    model = seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))
    expected = values(model)
    between = model[1].weight
    units = model[0], model[2] = api.unit(model[0]), api.unit(model[2])
    before = values(model)
    with summon(model, recurse=False):
        assert_equal(values(model), before)
    for writeback in (False, True):
        with summon(model, writeback=writeback), torch.no_grad():
            assert_equal([*values(model).values()], [*expected.values()])
            assert model[1].weight is between
            for unit in units:
                unit.module.weight.fill_(7.0)
        if not writeback:
            assert_equal(values(model), before)
    with summon(model, writeback=False, rank0_only=True):
        for unit in units:
            assert sum(parameter.numel() for parameter in unit.parameters()) == (42 if dist.get_rank() == 0 else 21)
    with summon(model, writeback=False):
        assert all((unit.module.weight == 7.0).all() for unit in units)


@pytest.mark.spec("SUMMON-04", "SUMMON-05")
@apis.wrapper_apis
@ranks(2)
def test_summon_gathers_only_the_units_below_and_without_recurse_only_one(api: apis.Api) -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    model = copy.deepcopy(plain)
    model[1][0] = api.unit(model[1][0])
    model[1] = inner = api.unit(model[1])
    model = api.unit(model)
    iterate(model)
    sharded = values(model)
    outside = [name for name in sharded if "1." not in name]
    with Wire() as wire, summon(inner):
        assert_equal(values(inner), values(plain[1]))
        assert_equal([values(model)[name] for name in outside], [sharded[name] for name in outside])
    assert sorted(wire.sent) == [("AG", 10), ("AG", 28)], "the parameters of the two inner layers"
    with Wire() as wire, summon(model, recurse=False):
        assert torch.equal(model.module[0].weight, plain[0].weight)
        assert_equal(values(inner), {name.partition("1.")[2]: value for name, value in sharded.items() if "1." in name})
    assert wire.sent == [("AG", 42)]


# --- leaving the context ---


@pytest.mark.spec("SUMMON-06", "SUMMON-19")
@pytest.mark.parametrize("strategy", [*apis.FLAT_STRATEGIES, *apis.HYBRID_STRATEGIES])
@apis.wrapper_apis
@ranks(4)
def test_summon_restores_the_local_shards_on_exit_and_after_an_exception(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    before, objects = values(model), list(model.parameters())
    for writeback in (True, False):
        with summon(model, writeback=writeback):
            pass
        assert_equal(values(model), before)
        with pytest.raises(KeyError, match="of the user"), summon(model, writeback=writeback):
            raise KeyError("an error of the user")
        assert_equal(values(model), before)
    assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
    assert_trains_like(model)


@pytest.mark.spec("SUMMON-19")
@ranks(2)
def test_a_summon_that_fails_at_a_later_unit_restores_the_earlier_units() -> None:
    model = apis.ORIGINALS.shard()
    before = values(model)
    weight = next(model.module.blocks[3].parameters())
    shard = weight.data
    weight.data = shard.new_zeros(99)
    # The program keeps the error, so the garbage collector does not end the contexts of the earlier units.
    with pytest.raises(RuntimeError, match="99") as error, summon(model):
        pass
    weight.data = shard
    assert_equal(values(model), before)
    assert_trains_like(model)
    del error


# --- changes ---


CHANGES: dict[str, Callable[[nn.Parameter, float], Any]] = {
    "in place": lambda parameter, value: parameter.fill_(value),
    "through data": lambda parameter, value: parameter.data.fill_(value),
    "other memory": lambda parameter, value: setattr(parameter, "data", torch.full_like(parameter, value)),
    "element by element": lambda parameter, value: [row.fill_(value) for row in parameter],
    "init": lambda parameter, value: nn.init.constant_(parameter, value),
}


@torch.no_grad()
def set_all(model: nn.Module, value: float, change: str = "in place") -> None:
    for parameter in model.parameters():
        CHANGES[change](parameter, value)


def patchwork(num_shards: int) -> nn.Module:
    """The expected model after each rank filled all unsharded parameters with the index of its local shard."""
    plain: Any = seeded()
    for unit in ([plain.enter, plain.leave], *([block] for block in plain.blocks)):
        parameters = [parameter for module in unit for parameter in module.parameters()]
        row = nn.utils.parameters_to_vector(parameters).detach()
        for index, local_shard in enumerate(row.split(-(-row.numel() // num_shards))):
            local_shard.fill_(float(index))
        nn.utils.vector_to_parameters(row, parameters)
    return plain


@pytest.mark.spec("SUMMON-07")
@sharded_and_hybrid_settings
@ranks(4)
def test_each_rank_keeps_its_own_shard_of_changes(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    num_shards = model.process_group.size()
    expected = patchwork(num_shards)
    for change in CHANGES:
        with summon(model):
            set_all(model, 0.0)
        with summon(model):
            set_all(model, float(dist.get_rank() % num_shards), change)
        # No backward follows, so the next change finds units that are still unsharded.
        assert torch.equal(model(batch()), expected(batch()))
        assert_equal(api.values(model), values(expected))


@pytest.mark.spec("SUMMON-07", "SUMMON-09")
@apis.wrapper_settings
@ranks(2)
def test_weight_that_is_transposed_inside_summon_stays_transposed(api: apis.Api, strategy: Any) -> None:
    """Defect: the transposed weight has the memory of the weight, so it seems to be the same."""
    model, plain = api.shard(strategy=strategy), seeded()
    with summon(model):
        for inside in (model.module, plain):
            inside.enter.weight.data = inside.enter.weight.data.t()
    assert_equal(full_values(model), values(plain))


@pytest.mark.spec("SUMMON-07")
@pytest.mark.parametrize("is_replaced", [True, False])
@apis.wrapper_apis
@ranks(2)
def test_parameter_replaced_inside_summon_raises(api: apis.Api, is_replaced: bool) -> None:
    model = api.shard()
    with pytest.raises(RuntimeError, match=r"enter\.weight"), summon(model):
        weight = model.module.enter.weight
        del model.module.enter.weight
        if is_replaced:
            model.module.enter.weight = nn.Parameter(torch.ones_like(weight))


@pytest.mark.spec("SUMMON-08")
@sharded_settings
@ranks(2)
def test_without_writeback_changes_are_dropped(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    before = values(model)
    for change in CHANGES:
        with summon(model, writeback=False):
            set_all(model, 3.0, change)
        assert_equal(values(model), before)
        with torch.no_grad():
            assert torch.equal(model(batch()), seeded()(batch()))
    versions = [parameter._version for parameter in model.parameters()]
    with summon(model, writeback=False):
        pass
    assert [parameter._version for parameter in model.parameters()] == versions, "nothing is copied back"


@pytest.mark.spec("SUMMON-09")
@pytest.mark.parametrize("case", ["NO_SHARD", "a group of one rank", "NO_SHARD in bfloat16"])
@pytest.mark.parametrize("writeback", [True, False])
@apis.wrapper_apis
@ranks(2)
def test_changes_of_unsharded_units_always_persist(api: apis.Api, writeback: bool, case: str) -> None:
    options: dict[str, Any] = {"strategy": apis.NO_SHARD}
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    if "bfloat16" in case:
        options["mixed_precision"] = MixedPrecision(param_dtype=dtype)
    if case == "a group of one rank":
        options = {"process_group": dist.new_subgroups(group_size=1)[0]}
    model, expected = api.shard(**options), seeded()
    for value, change in enumerate(CHANGES, start=3):
        # Run a forward without a backward. Later computations must not reuse its parameters.
        model(batch())
        with summon(model, writeback=writeback):
            set_all(model, float(value), change)
        set_all(expected, float(value))
        with torch.no_grad():
            assert_equal(full_values(model), values(expected))
            assert torch.equal(model(batch()), copy.deepcopy(expected).to(dtype)(batch().to(dtype)))


def pickled(layer: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.spec("SUMMON-02")
@apis.wrapper_settings
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@ranks(2)
def test_a_copy_of_a_layer_is_a_plain_layer_afterwards(copied: Any, api: apis.Api, strategy: Any) -> None:
    """Defect: the copy still belongs to the unit of the original, so its state dict is refused."""
    plain: Any = seeded()
    model = api.shard(strategy=strategy)
    iterate(model)
    with summon(model):
        layers = [copied(model.module.enter), copied(model.module.blocks[1].module.linear)]
    for layer, expected in zip(layers, (plain.enter, plain.blocks[1].linear), strict=True):
        assert torch.equal(layer(batch()), expected(batch()))
        assert_equal(layer.state_dict(), expected.state_dict())
        layer.load_state_dict({name: value + 1 for name, value in layer.state_dict().items()})
    assert torch.equal(model(batch()), plain(batch()))


# --- on rank 0 only, on the CPU ---


@pytest.mark.spec("SUMMON-10")
@pytest.mark.parametrize("offload_to_cpu", [False, True])
@sharded_and_hybrid_settings
@ranks(4)
def test_rank0_only_gives_full_parameters_to_the_first_rank(api: apis.Api, strategy: Any, offload_to_cpu: bool) -> None:
    groups: list[Any] = [None]
    if strategy not in apis.HYBRID_STRATEGIES:
        groups.append([dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2])
    for group in groups:
        model = api.shard(strategy=strategy, **({"process_group": group} if group else {}))
        before, expected = values(model), values(seeded())
        with summon(model, writeback=False, rank0_only=True, offload_to_cpu=offload_to_cpu):
            if dist.get_rank() == (dist.get_global_rank(group, 0) if group else 0):
                assert {parameter.is_cpu for parameter in model.parameters()} == {offload_to_cpu or batch().is_cpu}
                torch.testing.assert_close(values(model), expected, rtol=0.0, atol=0.0, check_device=False)
            else:
                assert_equal([*values(model).values()], [*before.values()])
        assert_equal(values(model), before)


@pytest.mark.spec("SUMMON-11")
@ranks(2)
def test_rank0_only_cannot_write_back() -> None:
    model = apis.WRAPPED.shard()
    before = values(model)
    with Wire() as wire, pytest.raises(NotImplementedError, match="writeback=False"), summon(model, rank0_only=True):
        pass
    assert wire.sent == []
    assert_equal(values(model), before)


@pytest.mark.spec("SUMMON-12", "SUMMON-13")
@sharded_settings
@ranks(2)
def test_offloading_on_all_ranks_warns_of_redundant_copies_and_keeps_changes(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    iterate(model)
    devices = {parameter.device for parameter in model.parameters()}
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"CPU cop.*rank0_only=True") as caught:
            stack.enter_context(summon(model, offload_to_cpu=True))
        assert_equal(values(model), values(seeded().cpu()))
        set_all(model, 2.0)
    assert [warning.filename for warning in caught] == [__file__], "the line that must be changed"
    assert {parameter.device for parameter in model.parameters()} == devices
    assert all((value == 2.0).all() for value in api.values(model).values())
    iterate(model)


@pytest.mark.spec("SUMMON-14")
@apis.wrapper_apis
@ranks(2)
def test_no_shard_params_are_not_offloaded(api: apis.Api) -> None:
    model = api.shard(strategy=apis.NO_SHARD)
    memory = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with summon(model, offload_to_cpu=True, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} == memory
            assert_equal(values(model), values(seeded()))
