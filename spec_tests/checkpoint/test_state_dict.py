"""State dicts in their three forms, on a model with a nested unit, a buffer and tied weights."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import api as torch_api
from torch.distributed.tensor import DTensor

from spec_tests.checkpoint.checkpoints import FULL, LOCAL, SHARDED, flat_or_original, is_plain
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import grid
from spec_tests.subject import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    trace,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP


def plain_model(seed: int = 0) -> nn.Module:
    """Has five rows, which do not divide evenly between two ranks, a batch norm with buffers, and a shared weight."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[3].weight = model[2].weight
    return model.to(device())


def sharded(model: nn.Module, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.BatchNorm1d}), **options)


@pytest.mark.spec("SD-FULL-01", "SD-FULL-02", "SD-FULL-04", "SD-CFG-01")
@flat_or_original
@ranks(2)
def test_default_state_dict_equals_that_of_the_plain_module(keep: bool) -> None:
    plain = plain_model()
    state = sharded(copy.deepcopy(plain), use_orig_params=keep).state_dict()
    expected = plain.state_dict()
    assert list(state) == list(expected)
    assert all(is_plain(value) and torch.equal(value, expected[key]) for key, value in state.items())
    fresh = plain_model(1)
    fresh.load_state_dict(state, strict=True)
    fresh.eval(), plain.eval()
    assert torch.equal(fresh(torch.ones(2, 3, device=device())), plain(torch.ones(2, 3, device=device())))


@pytest.mark.spec("SD-FULL-08", "SD-SHARD-03", "ORIG-09")
@flat_or_original
@pytest.mark.parametrize("form", [FULL, SHARDED])
@ranks(2)
def test_model_can_be_loaded_after_a_forward_that_keeps_its_parameters(keep: bool, form: StateDictType) -> None:
    model = sharded(plain_model(1), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=keep)
    other = sharded(plain_model(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=keep)
    x = torch.ones(2, 3, device=device())
    # Run a forward with gradients enabled, without a backward.
    model.eval()(x)
    with FSDP.state_dict_type(model, form), FSDP.state_dict_type(other, form):
        assert model.load_state_dict(other.state_dict()) == ([], [])
    assert torch.equal(model(x), other.eval()(x))


@pytest.mark.spec("SD-FULL-03", "SD-FULL-05", "SD-FULL-06")
@pytest.mark.parametrize("rank0_only", [False, True])
@ranks(2)
def test_state_dict_unshards_one_unit_at_a_time_on_all_ranks(rank0_only: bool) -> None:
    model = sharded(plain_model())
    config = FullStateDictConfig(rank0_only=rank0_only, offload_to_cpu=rank0_only)
    with FSDP.state_dict_type(model, FULL, config), trace.record() as r:
        state = model.state_dict()
    assert [word.split()[0] for word in r.order()] == ["AG", "FREE", "AG", "FREE"]
    has_entries = dist.get_rank() == 0 or not rank0_only
    assert list(state) == (list(plain_model().state_dict()) if has_entries else [])


class ReadLate:
    """Replaces a tensor in PyTorch's functions. Frameworks that load files value by value pass such objects."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self.shape, self.dtype = value, value.shape, value.dtype

    def size(self) -> torch.Size:
        return self.shape

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(arg._value if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


@pytest.mark.spec("SD-FULL-08", "SD-FULL-09", "LEGACY-11")
@pytest.mark.parametrize("lazily", [False, True])
@flat_or_original
@ranks(2)
def test_full_dict_loads_without_all_gather(keep: bool, lazily: bool) -> None:
    read: Any = ReadLate if lazily else torch.clone
    model = sharded(plain_model(), use_orig_params=keep)
    wanted = plain_model(7).state_dict()
    with trace.record() as r:
        model.load_state_dict({key: read(value) for key, value in wanted.items()})
    assert r.events == []
    state = model.state_dict()
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**wanted, "0.weight": read(torch.ones(2, 2))})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


@pytest.mark.spec("SD-SHARD-01", "SD-SHARD-02", "SD-SHARD-03", "SD-SHARD-06", "SD-CFG-18")
@pytest.mark.parametrize("use_dtensor", [False, True])
@flat_or_original
@ranks(2)
def test_sharded_dict_has_rows_and_loads_again(keep: bool, use_dtensor: bool) -> None:
    model = sharded(plain_model(), use_orig_params=keep)
    expected = plain_model().state_dict()
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(_use_dtensor=use_dtensor)):
        state = model.state_dict()
        rows = slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)
        for key, value in state.items():
            if "running" in key or "num" in key:
                assert is_plain(value)
                continue
            assert isinstance(value, DTensor if use_dtensor else ShardedTensor)
            local = value.to_local() if isinstance(value, DTensor) else value.local_shards()[0].tensor
            assert torch.equal(local, expected[key][rows])
        with FSDP.state_dict_type(model, FULL):
            model.load_state_dict(plain_model(7).state_dict())
        model.load_state_dict(state)
    again = model.state_dict()
    assert all(torch.equal(again[key], expected[key]) for key in expected if "running" not in key)


@pytest.mark.spec("SD-LOCAL-01", "SD-LOCAL-02", "SD-LOCAL-03", "SD-LOCAL-04")
@flat_or_original
@ranks(2)
def test_local_dict_has_one_shard_per_unit_without_all_gather(keep: bool) -> None:
    model = sharded(plain_model(), use_orig_params=keep)
    before = model.state_dict()
    with FSDP.state_dict_type(model, LOCAL, LocalStateDictConfig()), trace.record() as r:
        state = model.state_dict()
        assert r.events == []
        assert {key for key in state if "flat_param" in key} == {"flat_param", "1.flat_param"}
        FSDP.set_state_dict_type(model, FULL)
        model.load_state_dict(plain_model(7).state_dict())
        FSDP.set_state_dict_type(model, LOCAL)
        model.load_state_dict({key.replace("1.flat_param", "1._flat_param"): v for key, v in state.items()})
        with pytest.raises(RuntimeError, match=r"rank \d: flat_param has 2 elements"):
            model.load_state_dict({**state, "flat_param": torch.ones(2)})
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before if "running" not in key)


@pytest.mark.spec("SD-SHARD-07")
@ranks(2)
def test_units_that_are_not_sharded_give_plain_tensors_on_one_rank_alone() -> None:
    model = sharded(plain_model(), sharding_strategy=ShardingStrategy.NO_SHARD)
    for form in (FULL, SHARDED):
        FSDP.set_state_dict_type(model, form)
        if dist.get_rank() == 0:
            state = model.state_dict()
            assert state.keys() == plain_model().state_dict().keys()
            assert all(is_plain(value) for value in state.values())
    dist.barrier()


@pytest.mark.spec("SD-LOCAL-06")
@flat_or_original
@ranks(2)
def test_local_state_dict_with_a_device_mesh_equals_that_with_a_group(keep: bool) -> None:
    mesh = init_device_mesh(device().type, (2,))
    model, other = (sharded(plain_model(seed), use_orig_params=keep, device_mesh=mesh) for seed in (0, 7))
    usual = sharded(plain_model(0), use_orig_params=keep)
    states = []
    for either in (model, usual):
        with FSDP.state_dict_type(either, LOCAL):
            states.append(either.state_dict())
    kinds = [{key: type(value) for key, value in state.items()} for state in states]
    assert kinds[0] == kinds[1]
    for state in states:
        with FSDP.state_dict_type(other, LOCAL):
            other.load_state_dict(state)
        for mine, expected in zip(other.parameters(), usual.parameters(), strict=True):
            assert torch.equal(mine, expected)
        other.load_state_dict(plain_model(7).state_dict())


@pytest.mark.spec("MP-04", "MP-10", "SD-LOCAL-05")
@ranks(2)
def test_checkpoints_are_in_full_precision_except_buffers_of_local_ones() -> None:
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16, _module_classes_to_ignore=())
    model = FSDP(plain_model(), mixed_precision=precision)
    norm = model.module[1]
    # Defect: after a conversion, the next forward stored the dtype of mixed precision as that of the user's buffer.
    for _ in range(2):
        model(torch.ones(4, 3, device=device()))
        assert norm.running_mean.dtype is torch.bfloat16
        for form, dtype in [(FULL, torch.float32), (SHARDED, torch.float32), (LOCAL, torch.bfloat16)]:
            with FSDP.state_dict_type(model, form):
                state = model.state_dict()
            assert state["1.running_mean"].dtype is dtype
            assert state["1.num_batches_tracked"].dtype is torch.int64
            assert state["flat_param" if form is LOCAL else "0.weight"].dtype is torch.float32
        expected = state["1.running_mean"].clone()
        norm.running_mean.zero_()
        with FSDP.state_dict_type(model, LOCAL):
            model.load_state_dict({**state, "1.running_mean": expected})
        assert torch.equal(norm.running_mean, expected)
        model.to(device())


class TwoNames(nn.Linear):
    """A layer that has one buffer under two names."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        shared = torch.ones(3)
        self.register_buffer("first", shared)
        self.register_buffer("second", shared)


@pytest.mark.spec("SD-CFG-17")
@pytest.mark.accelerator
@ranks(2)
def test_a_buffer_with_two_names_is_offloaded_under_both() -> None:
    model = FSDP(TwoNames(), device_id=device())
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
        state = model.state_dict()
    assert {key: value.device.type for key, value in state.items()} == dict.fromkeys(state, "cpu")


@pytest.mark.spec("SD-CFG-02", "SD-CFG-03", "SD-CFG-05", "SD-CFG-07", "SD-CFG-09", "SD-CFG-10")
@ranks(2)
def test_state_dict_type_is_set_for_tree() -> None:
    model = sharded(plain_model())
    before = FSDP.set_state_dict_type(model, SHARDED)
    assert before.state_dict_type is FULL
    assert isinstance(FSDP.get_state_dict_type(model).state_dict_config, ShardedStateDictConfig)
    assert FSDP.get_state_dict_type(model.module[1]).state_dict_type is SHARDED
    with pytest.raises(RuntimeError, match=r"FullStateDictConfig.*LocalStateDictConfig"):
        FSDP.set_state_dict_type(model, FULL, LocalStateDictConfig())
    FSDP.set_state_dict_type(model.module[1], FULL)
    with pytest.raises(AssertionError, match=r"same state.dict"):
        FSDP.get_state_dict_type(model)
    with pytest.raises(AssertionError, match=r"same state.dict"):
        FSDP.set_state_dict_type(model, SHARDED)


@pytest.mark.spec("SD-CFG-08")
@ranks(2)
def test_context_restores_the_state_dict_type_also_after_an_exception() -> None:
    model = sharded(plain_model())
    FSDP.set_state_dict_type(model, SHARDED)
    with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(model, LOCAL):
        assert FSDP.get_state_dict_type(model.module[1]).state_dict_type is LOCAL
        _ = 1 / 0
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED


@pytest.mark.spec("SD-CFG-06", "FS2-SD-13")
def test_module_without_units_has_no_settings_and_is_not_changed_by_the_context() -> None:
    with FSDP.state_dict_type(nn.Linear(2, 2), SHARDED):
        assert FSDP.get_state_dict_type(nn.Linear(2, 2)).state_dict_type is None


@pytest.mark.spec("SD-CFG-19")
@ranks(2)
def test_state_dict_takes_no_type() -> None:
    with pytest.raises(TypeError, match="state_dict_type"):
        sharded(plain_model()).state_dict(state_dict_type=FULL)


@pytest.mark.spec("SD-CFG-11", "IGN-08")
@pytest.mark.parametrize("form", [FULL, SHARDED, LOCAL])
@flat_or_original
@ranks(2)
def test_a_plain_module_and_ignored_parameters_are_saved_under_plain_names(keep: bool, form: StateDictType) -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))).to(device())
    expected = copy.deepcopy(plain).state_dict()
    plain[1] = FSDP(plain[1], ignored_states=list(plain[1][1].parameters()), use_orig_params=keep)
    FSDP.set_state_dict_type(plain, form)
    state = plain.state_dict()
    if form is not LOCAL:
        assert list(state) == list(expected)
    for name in ("0.weight", "1.1.weight"):
        assert is_plain(state[name])
        assert torch.equal(state[name], expected[name])
        state[name] = expected[name] + 1
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, expected["0.weight"] + 1)
    assert torch.equal(plain[1].module[1].weight, expected["1.1.weight"] + 1)


@pytest.mark.spec("HYB-10")
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
@ranks(4)
def test_hybrid_state_dict_is_equal_and_sharded_in_group(
    strategy: ShardingStrategy,
) -> None:
    model = sharded(plain_model(), sharding_strategy=strategy, process_group=grid())
    dist.barrier()
    expected = plain_model().state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    with FSDP.state_dict_type(model, SHARDED):
        rows = model.state_dict()["0.weight"].local_shards()[0].tensor
    assert torch.equal(rows, expected["0.weight"][slice(0, 3) if dist.get_rank() % 2 == 0 else slice(3, 5)])


# --- the configurations ---


@pytest.mark.spec("SD-CFG-04")
@pytest.mark.parametrize("form", [FULL, SHARDED, LOCAL])
@ranks(1)
def test_omitted_config_is_the_default_config_of_the_state_dict_type(form: StateDictType) -> None:
    model = sharded(plain_model())
    FSDP.set_state_dict_type(model, form)
    settings = FSDP.get_state_dict_type(model)
    of_model, of_optimizer = CONFIGS[form]
    assert settings == StateDictSettings(form, of_model(), of_optimizer())
    FSDP.set_state_dict_type(model, form, of_model(offload_to_cpu=True))
    assert FSDP.get_state_dict_type(model) == StateDictSettings(form, of_model(offload_to_cpu=True), of_optimizer())


CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
CLASSES = [StateDictConfig, OptimStateDictConfig, *(config for pair in CONFIGS.values() for config in pair)]


@pytest.mark.spec("SD-CFG-12", "SD-CFG-13", "SD-CFG-14", "SD-CFG-15", "SD-CFG-16")
@pytest.mark.parametrize("cls", [*CLASSES, StateDictSettings], ids=lambda cls: cls.__name__)
def test_a_configuration_has_the_fields_positions_defaults_and_base_classes_of_torch(cls: Any) -> None:
    theirs = getattr(torch_api, cls.__name__)
    for of in (dataclasses.fields, lambda one: inspect.signature(one).parameters.values()):
        assert [(f.name, f.default) for f in of(cls)] == [(f.name, f.default) for f in of(theirs)]
    assert [base.__name__ for base in cls.__mro__] == [base.__name__ for base in theirs.__mro__]
    assert [dataclasses.is_dataclass(c) and "__init__" in vars(c) for c in cls.__mro__] == [
        dataclasses.is_dataclass(c) and "__init__" in vars(c) for c in theirs.__mro__
    ]


@pytest.mark.spec("SD-CFG-12", "SD-CFG-13", "SD-CFG-14", "SD-CFG-15", "SD-CFG-18")
@pytest.mark.parametrize("number", range(4), ids=lambda number: f"{number} positional")
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_positional_arguments_of_a_configuration_mean_the_same_as_in_torch(cls: Any, number: int) -> None:
    theirs = getattr(torch_api, cls.__name__)
    for values in itertools.product([True, False], repeat=number):
        assert made_with(cls, *values) == made_with(theirs, *values)
    for name in ("rank0_only", "use_dtensor", "_use_dtensor", "offload_to_cpu"):
        assert made_with(cls, **{name: True}) == made_with(theirs, **{name: True})


def made_with(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The fields of a new configuration; the type of the error if it cannot be made."""
    try:
        return dataclasses.asdict(cls(*args, **kwargs))
    except TypeError as error:
        return type(error)


@pytest.mark.spec("SD-CFG-13")
@ranks(2)
def test_rank0_only_by_position_gives_the_dict_to_rank_0_alone() -> None:
    model = sharded(plain_model())
    optimizer = torch.optim.Adam(model.parameters())
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(True, True), FullOptimStateDictConfig(True, True))
    assert bool(model.state_dict()) == bool(FSDP.optim_state_dict(model, optimizer)) == (dist.get_rank() == 0)


@pytest.mark.spec("SD-CFG-20")
@ranks(2)
def test_the_functions_that_choose_a_form_warn_once_that_they_are_deprecated() -> None:
    model = sharded(plain_model())
    with caught_warnings() as caught:
        FSDP.set_state_dict_type(model, SHARDED)
        with FSDP.state_dict_type(model, FULL):
            model.state_dict()
            FSDP.get_state_dict_type(model)
    assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)] * 2
    assert all("FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated" in str(w.message) for w in caught)


@pytest.mark.spec("SD-CFG-19")
def test_state_dict_names_its_arguments_as_a_plain_module_does() -> None:
    ours, theirs = (inspect.signature(cls.state_dict).parameters.values() for cls in (FSDP, nn.Module))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
    with pytest.raises(TypeError, match="state_dict_type"):
        FSDP.state_dict(nn.Linear(1, 1), state_dict_type=FULL)


@pytest.mark.spec("SD-CFG-12")
@ranks(1)
def test_set_state_dict_type_refuses_base_class_of_config() -> None:
    model = sharded(plain_model())
    for form in (FULL, SHARDED, LOCAL):
        with pytest.raises(RuntimeError, match=r"rank 0: Expected state_dict_config of type \w+Config"):
            FSDP.set_state_dict_type(model, form, StateDictConfig())
        with pytest.raises(RuntimeError, match=r"rank 0: Expected optim_state_dict_config of type \w+Config"):
            FSDP.set_state_dict_type(model, form, None, OptimStateDictConfig())


@pytest.mark.spec("SD-CFG-16")
def test_settings_are_a_plain_record() -> None:
    names = ["state_dict_type", "state_dict_config", "optim_state_dict_config"]
    assert [field.name for field in dataclasses.fields(StateDictSettings)] == names
    settings = StateDictSettings(SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    assert (settings.state_dict_type, settings.state_dict_config) == (SHARDED, ShardedStateDictConfig())


@pytest.mark.spec("SD-CFG-17")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        pytest.param(FULL, {}, id="full"),
        pytest.param(SHARDED, {}, id="sharded", marks=pytest.mark.spec("SD-SHARD-08")),
        pytest.param(SHARDED, {"_use_dtensor": True}, id="dtensor", marks=pytest.mark.spec("SD-CFG-18")),
        pytest.param(LOCAL, {}, id="local"),
    ],
)
@flat_or_original
@ranks(2)
def test_state_dict_values_are_on_the_cpu_only_on_request(
    keep: bool, form: StateDictType, kind: dict[str, bool], offload: bool
) -> None:
    model = sharded(plain_model(), use_orig_params=keep)
    of_model, of_optimizer = CONFIGS[form]
    expected = {name: local_part(value).cpu() for name, value in written(model, form).items()}
    options = {"offload_to_cpu": offload, **kind}
    FSDP.set_state_dict_type(model, form, of_model(**options), of_optimizer(**options))
    where = torch.device("cpu") if offload else device()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert local_part(value).device == where, name
        assert torch.equal(local_part(value).cpu(), expected[name])
        assert isinstance(value, DTensor) is bool(kind) or is_plain(value)
    if form is not LOCAL:
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4, 3, device=device())).sum().backward()
        optimizer.step()
        for entries in FSDP.optim_state_dict(model, optimizer)["state"].values():
            assert local_part(entries["exp_avg"]).device == where
            assert isinstance(entries["exp_avg"], DTensor) is bool(kind)


def written(model: FSDP, form: StateDictType) -> dict[str, Any]:
    with FSDP.state_dict_type(model, form):
        return model.state_dict()


def local_part(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.to_local()
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
