"""The older functions for optimizer states: their results, their communication, and their warnings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import ranks
from spec_tests.models import modules, sharding
from spec_tests.models.running import Wire
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, OptimStateKeyType, ShardedOptimStateDictConfig, StateDictType

OLD_AND_NEW = {
    "full_optim_state_dict": "optim_state_dict",
    "sharded_optim_state_dict": "optim_state_dict",
    "shard_full_optim_state_dict": "optim_state_dict_to_load",
    "scatter_full_optim_state_dict": "optim_state_dict_to_load",
    "flatten_sharded_optim_state_dict": "optim_state_dict_to_load",
}
NAME, NUMBER = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def old(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the old function. It must warn once, at the line of its caller, and name the current function."""
    with caught_warnings() as caught:
        result = getattr(FSDP, name)(*args, **kwargs)
    messages = [str(w.message) for w in caught if "optim_input" not in str(w.message)]
    assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)] * len(caught)
    (message,) = messages
    assert f".{name} " in message
    assert f".{OLD_AND_NEW[name]} instead" in message
    return result


@pytest.mark.spec("OSD-FULL-01", "OSD-FULL-02", "OSD-FULL-03", "OSD-FULL-04")
@pytest.mark.parametrize("strategy", [sharding.FULL_SHARD, sharding.NO_SHARD])
@checkpoints.flat_or_original
@ranks(2)
def test_full_optim_state_dict_equals_optim_state_dict_on_rank_0_or_all_ranks(keep: bool, strategy: Any) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep, sharding_strategy=strategy)
    expected = FSDP.optim_state_dict(model, optimizer)
    everywhere = old("full_optim_state_dict", model, optimizer, rank0_only=False)
    first = old("full_optim_state_dict", model, optimizer)
    # The dicts do not alias the states of the optimizer.
    checkpoints.train(model, optimizer, [2])
    for found in [everywhere, first] if dist.get_rank() == 0 else [everywhere]:
        assert found["param_groups"] == expected["param_groups"]
        checkpoints.assert_same_state(found["state"], expected["state"])
    assert dist.get_rank() == 0 or first == {}


@pytest.mark.spec("OSD-SHD-01", "OSD-FLAT-01", "NEW-01")
@pytest.mark.parametrize("use_dtensor", [None, False, True])
@pytest.mark.parametrize("strategy", [sharding.FULL_SHARD, sharding.HYBRID_SHARD])
@checkpoints.flat_or_original
@ranks(4)
def test_a_sharded_dict_with_a_mesh_has_sharded_tensors_unless_configured(
    keep: bool, strategy: Any, use_dtensor: bool | None
) -> None:
    """As in torch."""
    mesh = sharding.grid_mesh() if strategy is sharding.HYBRID_SHARD else sharding.grid_mesh()["shard"]
    model, optimizer = checkpoints.trained(use_orig_params=keep, sharding_strategy=strategy, device_mesh=mesh)
    if use_dtensor is not None:
        config = ShardedOptimStateDictConfig(_use_dtensor=use_dtensor)
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, None, config)
    state = old("sharded_optim_state_dict", model, optimizer)
    for entries in state["state"].values():
        assert isinstance(entries["exp_avg"], DTensor if use_dtensor else ShardedTensor)
    loadable = old("flatten_sharded_optim_state_dict", state, model, optimizer)
    checkpoints.assert_same_state(loadable["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-FULL-05", "LEGACY-12")
@pytest.mark.parametrize("optim_input", [[nn.Parameter(torch.ones(1))], [{"params": []}], ["nonsense"]])
@checkpoints.flat_or_original
@ranks(2)
def test_optim_input_warns_and_is_ignored_where_the_optimizer_is_given(keep: bool, optim_input: list[Any]) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    with caught_warnings() as caught:
        found = FSDP.full_optim_state_dict(model, optimizer, optim_input, False)
    assert any("`optim_input` argument is deprecated" in str(w.message) for w in caught)
    checkpoints.assert_same_state(found["state"], FSDP.optim_state_dict(model, optimizer)["state"])


@pytest.mark.spec("OSD-SHARD-01", "OSD-SCAT-01", "OSD-SCAT-02", "OSD-LOAD-05")
@pytest.mark.parametrize("nothing", [None, {"anything": 1}])
@pytest.mark.parametrize("strategy", [sharding.FULL_SHARD, sharding.NO_SHARD])
@checkpoints.flat_or_original
@ranks(2)
def test_a_full_dict_is_sharded_without_communication_or_scattered_from_rank_0(
    keep: bool, strategy: Any, nothing: Any
) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep, sharding_strategy=strategy)
    own, full = optimizer.state_dict(), FSDP.optim_state_dict(model, optimizer)
    with Wire() as wire:
        sharded = old("shard_full_optim_state_dict", full, model, optim=optimizer)
    assert wire.sent == []
    with Wire() as wire:
        given = full if dist.get_rank() == 0 else nothing
        scattered = old("scatter_full_optim_state_dict", given, model, optim=optimizer)
    if strategy is sharding.FULL_SHARD:
        # Rank 0 scatters two moments for each of three units. Rank 1 receives only its own shards.
        assert wire.kinds() == ["scatter_"] * 6
    for found in (sharded, scattered):
        assert found["param_groups"] == own["param_groups"]
        checkpoints.assert_same_state(found["state"], own["state"])
    optimizer.load_state_dict(sharded)


@pytest.mark.spec("OSD-SHD-01", "OSD-FLAT-01", "OSD-SHD-02")
@checkpoints.flat_or_original
@ranks(2)
def test_a_sharded_dict_is_refused_by_an_optimizer_until_it_is_flattened_with_all_gathers(keep: bool) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)["state"]
    rows = old("sharded_optim_state_dict", model, optimizer)
    for name, entries in rows["state"].items():
        for key, value in entries.items():
            assert isinstance(value, ShardedTensor) is (key != "step")
            assert torch.equal(checkpoints.gathered(value), full[name][key])
    if not keep:
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            optimizer.load_state_dict(rows)
    with Wire() as wire:
        found = old("flatten_sharded_optim_state_dict", rows, model, optimizer)
    assert wire.kinds() == ["AG"] * 14, "seven parameters with two moments each"
    checkpoints.assert_same_state(found["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-SHARD-02", "LEGACY-12")
@checkpoints.flat_or_original
@ranks(2)
def test_optim_input_or_the_model_determines_parameter_numbers_without_an_optimizer(keep: bool) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    full, own = FSDP.optim_state_dict(model, optimizer), optimizer.state_dict()["state"]
    parameters = list(model.parameters())
    for optim_input in (None, parameters, iter(parameters), [{"params": parameters}]):
        checkpoints.assert_same_state(old("shard_full_optim_state_dict", full, model, optim_input)["state"], own)
    backwards = old("shard_full_optim_state_dict", full, model, list(reversed(parameters)))["state"]
    checkpoints.assert_same_state({len(parameters) - 1 - key: value for key, value in backwards.items()}, own)
    for function in (FSDP.shard_full_optim_state_dict, FSDP.scatter_full_optim_state_dict):
        with checkpoints.quiet(), pytest.raises(ValueError, match=r"rank \d: optim_input and optim both"):
            function(full, model, parameters, optimizer)


@pytest.mark.spec("OSD-REKEY-01", "OSD-REKEY-04")
@ranks(1)
def test_rekey_keeps_a_dict_with_the_requested_keys_and_refuses_an_invalid_one() -> None:
    plain = checkpoints.make()
    optimizer = adam(plain)
    checkpoints.train(plain, optimizer, [0, 1])
    numbered = optimizer.state_dict()
    named = FSDP.rekey_optim_state_dict({**numbered, "epoch": 3}, NAME, plain, optim=optimizer)
    assert named.pop("epoch") == 3
    for given, key_type in ((numbered, NUMBER), (named, NAME)):
        again = FSDP.rekey_optim_state_dict(given, key_type, plain, optim=optimizer)
        assert again["param_groups"] == given["param_groups"]
        checkpoints.assert_same_state(again["state"], given["state"])
    with pytest.raises(AssertionError, match=r"rank 0: optim_state_key_type must be one of OptimStateKeyType.PARAM_N"):
        FSDP.rekey_optim_state_dict(named, "PARAM_ID", plain)
    with pytest.raises(ValueError, match=r"rank 0: .*has the keys \['scale'"):
        FSDP.rekey_optim_state_dict(named, NUMBER, nn.Linear(2, 2))


@pytest.mark.spec("OSD-SHARD-01", "OSD-SCAT-01")
@checkpoints.flat_or_original
@ranks(2)
def test_invalid_dict_is_refused_by_each_function_that_reads_its_states(keep: bool) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)
    full["state"]["head.weight"]["exp_avg"] = torch.ones(5, 2)
    refused = rf"rank {dist.get_rank()}: the state dict is refused{{}}, and nothing(.|\n)*'exp_avg' of 'head.weight'"
    # The first call does not communicate, so each rank checks its own dict.
    with checkpoints.quiet(), pytest.raises(ValueError, match=refused.format("")):
        FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)
    with checkpoints.quiet(), pytest.raises(ValueError, match=refused.format(" on every rank")):
        FSDP.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model, optim=optimizer)


@pytest.mark.spec("OSD-SHARD-01", "OSD-08")
@checkpoints.flat_or_original
@ranks(2)
def test_parameters_outside_of_all_units_may_be_missing(keep: bool) -> None:
    """Other code is responsible for these parameters and adds their states."""
    full = FSDP.optim_state_dict(*checkpoints.trained(use_orig_params=keep))
    more = checkpoints.make()
    more.extra = nn.Parameter(torch.ones(3, device=more.scale.device))
    other = checkpoints.wrapped(more, ignored_states=[more.extra], use_orig_params=keep)
    restored = adam(other)
    found = old("shard_full_optim_state_dict", full, other, optim=restored)
    position = next(n for n, p in enumerate(other.parameters()) if p is more.extra)
    assert position not in found["state"]
    assert position not in found["param_groups"][0]["params"]
    with pytest.raises(RuntimeError, match="key 'extra': expected in a parameter group, found in none"):
        FSDP.optim_state_dict_to_load(other, restored, full)


# By name, each way to load a full dict of a model into another one.
WAYS: dict[str, Any] = {
    "shard": lambda full, model, optimizer: FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
    "scatter": lambda full, model, optimizer: FSDP.scatter_full_optim_state_dict(
        full if dist.get_rank() == 0 else None, model, optim=optimizer
    ),
    "current": lambda full, model, optimizer: FSDP.optim_state_dict_to_load(model, optimizer, full),
    "numbers": lambda full, model, optimizer: FSDP.rekey_optim_state_dict(full, NUMBER, model),
}


@pytest.mark.parametrize("way", [*WAYS, "flatten", "names"])
@pytest.mark.parametrize("hybrid", [False, True])
@checkpoints.flat_or_original
@pytest.mark.spec("PROG-94", "OSD-REKEY-02", "OSD-REKEY-03")
@ranks(4)
def test_older_functions_agree_with_a_plain_optimizer_of_tied_parameters(keep: bool, hybrid: bool, way: str) -> None:
    plain, tied, other = (modules.seeded(lambda: modules.Tied(3), seed) for seed in (0, 0, 1))
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({modules.Block}), "use_orig_params": keep}
    if hybrid:
        options |= {"device_mesh": sharding.grid_mesh(), "sharding_strategy": sharding.HYBRID_SHARD}
    model = checkpoints.wrapped(tied, **options)
    oracle, optimizer = adam(plain), adam(model)
    checkpoints.train(plain, oracle, [0, 1], ranks=[0])
    checkpoints.train(model, optimizer, [0, 1], ranks=[0])
    weights = model.state_dict()
    if way != "numbers":
        other = checkpoints.wrapped(other, **options)
    fresh = adam(other)
    other.load_state_dict(weights)
    with checkpoints.quiet():
        if way == "flatten":
            rows = FSDP.sharded_optim_state_dict(model, optimizer)
            loadable = FSDP.flatten_sharded_optim_state_dict(rows, other, fresh)
        elif way == "names":
            named = FSDP.rekey_optim_state_dict(copy.deepcopy(oracle.state_dict()), NAME, plain)
            loadable = WAYS["shard"](named, other, fresh)
        else:
            loadable = WAYS[way](FSDP.full_optim_state_dict(model, optimizer, rank0_only=False), other, fresh)
    fresh.load_state_dict(loadable)
    checkpoints.train(plain, oracle, [2, 3], ranks=[0])
    checkpoints.train(other, fresh, [2, 3], ranks=[0])
    checkpoints.assert_same_state(other.state_dict(), plain.state_dict(), bitwise=False)
