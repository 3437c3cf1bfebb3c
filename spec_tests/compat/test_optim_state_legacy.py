"""The older functions for optimizer states: their results, their communication, and their warnings."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import minifsdp
from spec_tests.checkpoint.checkpoints import assert_same_state, flat_or_original, gathered, make, quiet, step, wrapped
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import device, ranks
from spec_tests.models.running import Wire
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, OptimStateKeyType, trace

OLD_AND_NEW = {
    "full_optim_state_dict": "optim_state_dict",
    "sharded_optim_state_dict": "optim_state_dict",
    "shard_full_optim_state_dict": "optim_state_dict_to_load",
    "scatter_full_optim_state_dict": "optim_state_dict_to_load",
    "flatten_sharded_optim_state_dict": "optim_state_dict_to_load",
}
NAME, NUMBER = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def trained(keep: bool = False, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(make(), use_orig_params=keep, **options)
    optimizer = adam(model.parameters())
    for number in (0, 1):
        step(model, optimizer, number)
    return model, optimizer


def plain_trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    optimizer = adam(model.parameters())
    for number in (0, 1):
        step(model, optimizer, number, all_ranks=True)
    return model, optimizer


def old(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the old function. It must warn once, at the line of its caller, and name the current function."""
    with caught_warnings() as caught:
        result = getattr(FSDP, name)(*args, **kwargs)
    messages = [str(w.message) for w in caught if "optim_input" not in str(w.message)]
    assert [w.category for w in caught] == [FutureWarning] * len(caught)
    assert all(w.filename == __file__ for w in caught)
    if name in OLD_AND_NEW:
        assert len(messages) == 1
        assert f".{name} " in messages[0]
        assert f".{OLD_AND_NEW[name]} instead" in messages[0]
    return result


@pytest.mark.spec("OSD-FULL-01", "OSD-SHARD-01", "OSD-SCAT-01", "OSD-SHD-01", "OSD-FLAT-01", "OSD-REKEY-01")
@pytest.mark.parametrize("name", [*OLD_AND_NEW, "rekey_optim_state_dict"])
def test_the_signatures_are_those_of_torch(name: str) -> None:
    ours = inspect.signature(getattr(FSDP, name)).parameters
    theirs = inspect.signature(getattr(torch_fsdp.FullyShardedDataParallel, name)).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.spec("OSD-FULL-01", "OSD-FULL-02", "OSD-FULL-03", "OSD-FULL-04")
@flat_or_original
@ranks(2)
def test_legacy_full_optim_state_dict_equals_optim_state_dict_on_rank_0_or_all_ranks(keep: bool) -> None:
    model, optimizer = trained(keep)
    expected = FSDP.optim_state_dict(model, optimizer)
    everywhere = old("full_optim_state_dict", model, optimizer, rank0_only=False)
    assert sorted(everywhere) == ["param_groups", "state"]
    assert everywhere["param_groups"] == expected["param_groups"]
    assert_same_state(everywhere["state"], expected["state"])
    first = old("full_optim_state_dict", model, optimizer)
    assert bool(first) is (dist.get_rank() == 0)
    if first:
        stored = io.BytesIO()
        torch.save(first, stored)
        stored.seek(0)
        assert_same_state(torch.load(stored)["state"], expected["state"])
    kept = copy.deepcopy(everywhere["state"])
    step(model, optimizer, 2)
    assert_same_state(everywhere["state"], kept)


@pytest.mark.spec("OSD-FULL-01", "OSD-FULL-03")
@ranks(2)
def test_legacy_full_optim_state_dict_equals_that_of_torch() -> None:
    found = old("full_optim_state_dict", *trained(), rank0_only=False)
    with quiet():
        wrapper = torch_fsdp.FullyShardedDataParallel
        policy = torch_fsdp.wrap.ModuleWrapPolicy({nn.Sequential})
        other = wrapper(make(), auto_wrap_policy=policy, device_id=device())
        theirs = adam(other.parameters())
        for number in (0, 1):
            step(other, theirs, number)
        expected = wrapper.full_optim_state_dict(other, theirs, rank0_only=False)
    assert found["param_groups"] == expected["param_groups"]
    assert_same_state(found["state"], expected["state"])


@pytest.mark.spec("OSD-SHD-01", "OSD-FLAT-01", "NEW-01")
@pytest.mark.parametrize("configured", [None, False, True], ids=["default", "_use_dtensor=False", "_use_dtensor=True"])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["1-D", "2-D"])
@flat_or_original
@ranks(4)
def test_legacy_sharded_optim_state_dict_with_a_mesh_has_the_types_of_torch(
    keep: bool, sizes: tuple[int, ...], configured: bool | None
) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"use_orig_params": keep, "device_mesh": mesh if len(sizes) == 2 else mesh["shard"]}
    kinds, states = [], []
    for library in (minifsdp, torch_fsdp):
        wrapper: Any = library.FullyShardedDataParallel
        strategy = library.ShardingStrategy["HYBRID_SHARD" if len(sizes) == 2 else "FULL_SHARD"]
        model = wrapper(make(), sharding_strategy=strategy, device_id=device(), **options)
        optimizer = adam(model.parameters())
        step(model, optimizer, 0)
        with quiet():
            if configured is not None:
                config = library.ShardedOptimStateDictConfig(_use_dtensor=configured)
                wrapper.set_state_dict_type(model, library.StateDictType.SHARDED_STATE_DICT, None, config)
            states.append(wrapper.sharded_optim_state_dict(model, optimizer)["state"])
            if library is minifsdp:
                loadable = wrapper.flatten_sharded_optim_state_dict({"state": states[0]}, model, optimizer)
                assert_same_state(loadable["state"], optimizer.state_dict()["state"])
        kinds.append({name: {key: type(value) for key, value in of.items()} for name, of in states[-1].items()})
    assert kinds[0] == kinds[1]
    sharded = DTensor if configured else ShardedTensor
    assert kinds[0]["head.weight"]["exp_avg"] is sharded


@pytest.mark.spec("OSD-FULL-04")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@flat_or_original
@ranks(2)
def test_legacy_full_optim_state_dict_never_aliases_the_optimizer(keep: bool, strategy: Any) -> None:
    model, optimizer = trained(keep, sharding_strategy=strategy)
    state = old("full_optim_state_dict", model, optimizer, rank0_only=False)["state"]
    before = copy.deepcopy(state)
    step(model, optimizer, 2)
    assert_same_state(state, before)


@pytest.mark.spec("OSD-FULL-05", "LEGACY-12")
@flat_or_original
@ranks(2)
def test_optim_input_warns_and_is_ignored_where_the_optimizer_is_given(keep: bool) -> None:
    model, optimizer = trained(keep)
    expected = old("full_optim_state_dict", model, optimizer, rank0_only=False)
    for optim_input in (list(model.parameters()), [{"params": list(model.parameters())}], ["nonsense"]):
        with caught_warnings() as caught:
            found = FSDP.full_optim_state_dict(model, optimizer, optim_input, False)
        assert any("`optim_input` argument is deprecated" in str(w.message) for w in caught)
        assert_same_state(found["state"], expected["state"])


@pytest.mark.spec("OSD-SHARD-01", "OSD-SCAT-02")
@flat_or_original
@ranks(2)
def test_full_dict_is_sharded_without_communication_into_the_dict_of_the_optimizer(keep: bool) -> None:
    model, optimizer = trained(keep)
    full = old("full_optim_state_dict", model, optimizer, rank0_only=False)
    with Wire() as wire, trace.record() as r:
        found = old("shard_full_optim_state_dict", full, model, optim=optimizer)
    assert wire.sent == []
    assert r.events == []
    own = optimizer.state_dict()
    assert found["param_groups"] == own["param_groups"]
    assert_same_state(found["state"], own["state"])
    fresh = adam(model.parameters())
    fresh.load_state_dict(found)
    assert_same_state(fresh.state_dict()["state"], own["state"])


@pytest.mark.spec("OSD-SHARD-02", "LEGACY-12")
@flat_or_original
@ranks(2)
def test_optim_input_or_the_model_determines_parameter_numbers_without_an_optimizer(keep: bool) -> None:
    model, optimizer = trained(keep)
    full = old("full_optim_state_dict", model, optimizer, rank0_only=False)
    own = optimizer.state_dict()["state"]
    parameters = list(model.parameters())
    assert_same_state(old("shard_full_optim_state_dict", full, model)["state"], own)
    for optim_input in (parameters, iter(parameters), [{"params": parameters}]):
        assert_same_state(old("shard_full_optim_state_dict", full, model, optim_input)["state"], own)
    backwards = old("shard_full_optim_state_dict", full, model, list(reversed(parameters)))["state"]
    assert_same_state({len(parameters) - 1 - key: value for key, value in backwards.items()}, own)
    for call in (
        lambda: FSDP.shard_full_optim_state_dict(full, model, parameters, optimizer),
        lambda: FSDP.scatter_full_optim_state_dict(full, model, parameters, optimizer),
    ):
        with quiet(), pytest.raises(ValueError, match=r"rank \d: optim_input and optim both"):
            call()


@pytest.mark.spec("OSD-SHARD-03", "OSD-LOAD-08")
@flat_or_original
@ranks(4)
def test_a_full_dict_fits_another_number_of_ranks_and_another_wrapping(keep: bool) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.barrier()
    full = old("full_optim_state_dict", *trained(keep), rank0_only=False)
    options = {"process_group": pairs[dist.get_rank() // 2], "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    other = wrapped(make(), use_orig_params=not keep, **options)
    optimizer = adam(other.parameters())
    optimizer.load_state_dict(old("shard_full_optim_state_dict", full, other, optim=optimizer))
    assert_same_state(old("full_optim_state_dict", other, optimizer, rank0_only=False)["state"], full["state"])
    dist.barrier()


@pytest.mark.spec("OSD-SCAT-01", "OSD-SCAT-02")
@flat_or_original
@ranks(2)
def test_scatter_reads_dict_of_rank_0_and_sends_shards(keep: bool) -> None:
    model, optimizer = trained(keep)
    full = old("full_optim_state_dict", model, optimizer)
    given = full if dist.get_rank() == 0 else None
    with Wire() as wire:
        found = old("scatter_full_optim_state_dict", given, model, optim=optimizer)
    own = optimizer.state_dict()
    assert found["param_groups"] == own["param_groups"]
    assert_same_state(found["state"], own["state"])
    # Rank 0 scatters two moments for each of three units. Rank 1 receives only its own shards.
    assert wire.kinds() == ["scatter_"] * 6
    wrong = {"anything": 1} if dist.get_rank() == 1 else full
    again = old("scatter_full_optim_state_dict", wrong, model)
    assert_same_state(again["state"], own["state"])


@pytest.mark.spec("OSD-SHD-01", "OSD-FLAT-01")
@flat_or_original
@ranks(2)
def test_legacy_sharded_state_is_flattened_with_all_gathers(keep: bool) -> None:
    model, optimizer = trained(keep)
    full = FSDP.optim_state_dict(model, optimizer)["state"]
    rows = old("sharded_optim_state_dict", model, optimizer)
    for name, entries in rows["state"].items():
        for key, value in entries.items():
            assert isinstance(value, ShardedTensor) is (key != "step")
            assert torch.equal(gathered(value), full[name][key])
    with Wire() as wire:
        found = old("flatten_sharded_optim_state_dict", rows, model, optimizer)
    assert wire.kinds() == ["AG"] * 14, "seven parameters with two moments each"
    assert_same_state(found["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-SHD-02")
@ranks(2)
def test_legacy_sharded_dict_is_refused_by_an_optimizer() -> None:
    model, optimizer = trained()
    rows = old("sharded_optim_state_dict", model, optimizer)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(rows)


@pytest.mark.spec("OSD-REKEY-01", "OSD-REKEY-02")
@flat_or_original
@ranks(2)
def test_dict_keyed_by_numbers_loads_into_the_optimizer_of_a_plain_model(keep: bool) -> None:
    model, optimizer = trained(keep)
    full = old("full_optim_state_dict", model, optimizer, rank0_only=False)
    plain = make(7)
    plain.load_state_dict(model.state_dict())
    restored = adam(plain.parameters())
    for arguments in ({"optim": restored}, {"optim_input": list(plain.parameters())}, {}):
        numbered = old("rekey_optim_state_dict", full, NUMBER, plain, **arguments)
        assert sorted(numbered["state"]) == numbered["param_groups"][0]["params"] == list(range(7))
    restored.load_state_dict(numbered)
    for number in (2, 3):
        step(model, optimizer, number)
        step(plain, restored, number, all_ranks=True)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())


@pytest.mark.spec("OSD-REKEY-01", "OSD-REKEY-03")
@flat_or_original
@ranks(2)
def test_with_names_a_plain_optimizers_dict_loads_into_that_of_the_wrapped_model(keep: bool) -> None:
    plain, optimizer = plain_trained()
    named = old("rekey_optim_state_dict", optimizer.state_dict(), NAME, plain, optim=optimizer)
    assert list(named["state"]) == [name for name, _ in plain.named_parameters()]
    model = wrapped(make(7), use_orig_params=keep)
    model.load_state_dict(plain.state_dict())
    restored = adam(model.parameters())
    restored.load_state_dict(old("shard_full_optim_state_dict", named, model, optim=restored))
    for number in (2, 3):
        step(model, restored, number)
        step(plain, optimizer, number, all_ranks=True)
    found = model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())


@pytest.mark.spec("OSD-REKEY-01", "OSD-REKEY-04")
@ranks(1)
def test_rekey_keeps_a_dict_with_the_requested_keys_and_refuses_an_invalid_one() -> None:
    plain, optimizer = plain_trained()
    numbered = optimizer.state_dict()
    named = FSDP.rekey_optim_state_dict({**numbered, "epoch": 3}, NAME, plain, optim=optimizer)
    assert named.pop("epoch") == 3
    for given, key_type in ((numbered, NUMBER), (named, NAME)):
        again = FSDP.rekey_optim_state_dict(given, key_type, plain, optim=optimizer)
        assert again["param_groups"] == given["param_groups"]
        assert_same_state(again["state"], given["state"])
    with pytest.raises(
        AssertionError, match=r"rank 0: optim_state_key_type must be one of OptimStateKeyType.PARAM_NAME"
    ):
        FSDP.rekey_optim_state_dict(named, "PARAM_ID", plain)
    with pytest.raises(ValueError, match=r"rank 0: .*has the keys \['scale'"):
        FSDP.rekey_optim_state_dict(named, NUMBER, nn.Linear(2, 2))


@pytest.mark.spec("OSD-SHARD-01", "OSD-SCAT-01")
@flat_or_original
@ranks(2)
def test_invalid_dict_is_refused_by_each_function_that_reads_its_states(keep: bool) -> None:
    model, optimizer = trained(keep)
    full = old("full_optim_state_dict", model, optimizer, rank0_only=False)
    full["state"]["head.weight"]["exp_avg"] = torch.ones(5, 2)

    def refused(call: Callable[[], Any], where: str) -> None:
        with quiet(), pytest.raises(ValueError, match=r"'exp_avg' of 'head.weight': expected shape") as caught:
            call()
        assert f"rank {dist.get_rank()}: the state dict is refused{where}, and nothing" in str(caught.value)

    # This call does not communicate, so each rank checks its own dict.
    refused(lambda: FSDP.shard_full_optim_state_dict(full, model, optim=optimizer), "")
    given = full if dist.get_rank() == 0 else None
    refused(lambda: FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer), " on every rank")


@pytest.mark.spec("OSD-SHARD-01", "OSD-08")
@flat_or_original
@ranks(2)
def test_parameters_outside_of_all_units_may_be_missing(keep: bool) -> None:
    """Other code is responsible for these parameters and adds their states."""
    model, optimizer = trained(keep)
    full = old("full_optim_state_dict", model, optimizer, rank0_only=False)

    more = make()
    extra = nn.Parameter(torch.ones(3, device=device()))
    more.register_parameter("extra", extra)
    other = wrapped(more, ignored_states=[extra], use_orig_params=keep)
    restored = adam(other.parameters())
    found = old("shard_full_optim_state_dict", full, other, optim=restored)
    position = next(n for n, p in enumerate(other.parameters()) if p is extra)
    assert position not in found["state"]
    assert position not in found["param_groups"][0]["params"]
    with quiet(), pytest.raises(RuntimeError, match="key 'extra': expected in a parameter group, found in none"):
        FSDP.optim_state_dict_to_load(other, restored, full)
