"""Claims about names and arguments, and about saving and loading."""

from __future__ import annotations

import inspect
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minifsdp.engine import collectives
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.subject import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    trace,
)

FULL = StateDictType.FULL_STATE_DICT
FSDP: Any = FullyShardedDataParallel


@pytest.mark.spec("MYTH-02")
@ranks(2)
def test_a_strategy_is_a_member_of_the_enum_and_not_a_string() -> None:
    with pytest.raises(TypeError, match="sharding_strategy must be one of"):
        wrapped(sharding_strategy="FULL_SHARD")
    model = wrapped(sharding_strategy=ShardingStrategy.FULL_SHARD)
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD


@pytest.mark.spec("MYTH-04")
def test_the_types_of_state_dicts_are_not_attributes_of_the_class() -> None:
    assert not hasattr(FullyShardedDataParallel, "StateDictType")
    assert not hasattr(FullyShardedDataParallel, "FULL_STATE_DICT")


@pytest.mark.spec("MYTH-30")
def test_the_keyword_of_the_scaler_is_device() -> None:
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        with pytest.raises(TypeError, match="device_type"):
            scaler(device_type="cuda")  # type: ignore[call-arg]


@pytest.mark.spec("MYTH-34", "MYTH-46", "MYTH-50")
def test_arguments_named_by_the_myths_do_not_exist() -> None:
    with pytest.raises(TypeError, match="rank0_only"):
        ShardedStateDictConfig(rank0_only=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="offload_gradients"):
        CPUOffload(offload_gradients=True)  # type: ignore[call-arg]
    assert "flatten_parameters" not in inspect.signature(FullyShardedDataParallel).parameters


@pytest.mark.spec("MYTH-65")
def test_wrapper_has_no_arguments_for_shard_dim_and_checkpointing() -> None:
    names = " ".join(inspect.signature(FullyShardedDataParallel).parameters)
    assert "dim" not in names
    assert "checkpoint" not in names
    assert "shard_placement_fn" in inspect.signature(fully_shard).parameters


@pytest.mark.spec("MYTH-36")
@pytest.mark.proof("arithmetic")
@ranks(2)
def test_broadcasting_objects_returns_nothing_and_fills_the_list() -> None:
    box = [{"epoch": 3} if dist.get_rank() == 0 else None]
    assert dist.broadcast_object_list(box, src=0) is None
    assert box == [{"epoch": 3}]


@pytest.mark.spec("MYTH-39")
@ranks(2)
def test_state_dict_takes_no_type_as_an_argument() -> None:
    with pytest.raises(TypeError, match="state_dict_type"):
        wrapped().state_dict(state_dict_type=FULL)


@pytest.mark.spec("MYTH-35")
@ranks(2)
def test_sharded_dict_of_rank_has_only_its_row_shard() -> None:
    weight = sharded().state_dict()["blocks.0.linear.weight"]
    assert tuple(weight.shape) == (6, 6)
    assert weight.to_local().numel() == 18


@pytest.mark.spec("MYTH-38")
@ranks(2)
def test_a_full_dict_is_built_unit_by_unit() -> None:
    model = wrapped()
    sizes = []
    all_gather = collectives.all_gather

    def note(group: Any, output: torch.Tensor, *rest: Any) -> Any:
        sizes.append(output.numel())
        return all_gather(group, output, *rest)

    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, FULL, config), mock.patch.object(collectives, "all_gather", note):
        state = model.state_dict()
    # Five all-gathers, one for each unit, and none of the whole model.
    assert sorted(sizes) == [42, 42, 42, 42, 56]
    assert len(state) == (12 if dist.get_rank() == 0 else 0)


@pytest.mark.spec("MYTH-41", "MYTH-47")
@ranks(2)
def test_a_bare_state_dict_is_full_on_all_ranks() -> None:
    state = wrapped().state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in seeded().state_dict().items()
    }


@pytest.mark.spec("MYTH-43")
@ranks(2)
def test_loading_its_own_state_dict_does_not_change_a_model() -> None:
    model = wrapped()
    saved = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
    model.load_state_dict(model.state_dict())
    assert not any(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    model.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.spec("MYTH-48")
@ranks(2)
def test_all_ranks_need_the_dict_to_load_it() -> None:
    model = wrapped()
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        state = model.state_dict()
        if dist.get_rank() == 1:
            assert state == {}
        with pytest.raises(RuntimeError, match="rank 1: Missing key"):
            # The error is raised on every rank, including the one with the complete dict.
            model.load_state_dict(state)


@pytest.mark.spec("MYTH-68")
@ranks(2)
def test_unit_by_unit_gives_one_full_dict() -> None:
    model = wrapped()
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        state = model.state_dict()
    if dist.get_rank() == 0:
        assert tuple(state["blocks.0.linear.weight"].shape) == (6, 6)
        assert all(value.device.type == "cpu" for value in state.values())


@pytest.mark.spec("MYTH-60")
@ranks(2)
def test_clipping_sends_norms_and_no_gradients() -> None:
    model = sharded()
    iterate(model)
    with trace.record() as recorder:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert recorder.count("AG") == recorder.count("RS") == 0


@pytest.mark.spec("MYTH-75")
@ranks(2)
def test_bfloat16_computes_on_this_machine_without_an_ampere_gpu() -> None:
    computed_in = []
    model = wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    model.module.register_forward_hook(lambda module, args, output: computed_in.append(output.dtype))
    model(batch()).float().sum().backward()
    assert computed_in == [torch.bfloat16]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.spec("MYTH-69")
@ranks(2)
def test_clipping_before_unscaling_clips_the_wrong_number() -> None:
    scale, limit = 1024.0, 0.5
    norms = {}
    for unscales_first in (True, False):
        model = wrapped()
        scaler = ShardedGradScaler(device().type, init_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(batch()).sum()).backward()
        if unscales_first:
            scaler.unscale_(optimizer)
        model.clip_grad_norm_(limit)
        if not unscales_first:
            scaler.unscale_(optimizer)
        norms[unscales_first] = model.clip_grad_norm_(math.inf).item()
    assert norms[True] == pytest.approx(limit, rel=1e-4)
    assert norms[False] == pytest.approx(limit / scale, rel=1e-4)


@pytest.mark.spec("MYTH-78")
@ranks(2)
def test_evaluation_all_gathers_on_all_ranks() -> None:
    model = wrapped().eval()
    with trace.record() as recorder, torch.no_grad():
        model(batch())
    assert {event.ranks for event in recorder.events if event.kind == "AG"} == {(0, 1)}
