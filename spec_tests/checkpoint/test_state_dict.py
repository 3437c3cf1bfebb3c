"""The model's state dict in each form, and the configurations that choose the form."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from spec_tests import subject
from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import flat_or_original, set_form
from spec_tests.harness import device, ranks

FSDP = subject.FullyShardedDataParallel
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = subject.ShardingStrategy
FULL, SHARDED, LOCAL = checkpoints.CONFIGS


def plain_model(seed: int = 0) -> nn.Module:
    """A model with a buffer of two names and tied weights. Its five rows do not divide evenly between two ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[3].weight = model[2].weight
    model.to(device())
    model[1].register_buffer("running_again", model[1].running_mean)
    return model


def sharded(model: nn.Module, **options: Any) -> FSDP:
    """The batch norm is a nested unit."""
    return FSDP(model, auto_wrap_policy=subject.ModuleWrapPolicy({nn.BatchNorm1d}), **options)


# --- the forms ---

# The class of the saved parameters.
CLASSES = {"full": Tensor, "rank 0": Tensor, "sharded": ShardedTensor, "dtensor": DTensor, "local": ShardedTensor}
each_form = pytest.mark.parametrize("form", [form for form in CLASSES if form != "rank 0"])


@pytest.mark.spec("SD-FULL-01", "SD-FULL-03", "SD-FULL-04", "SD-CFG-17", "SD-CFG-18", "SD-SHARD-01", "SD-SHARD-02")
@pytest.mark.spec("SD-SHARD-06", "SD-SHARD-08", "SD-LOCAL-01", "SD-LOCAL-02", "SD-FULL-05", "SD-FULL-06")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("form", CLASSES)
@flat_or_original
@ranks(2)
def test_values_have_the_names_the_class_and_the_rows_of_the_form(keep: bool, form: str, offload: bool) -> None:
    model, expected = sharded(plain_model(), use_orig_params=keep), plain_model().state_dict()
    set_form(model, form, offload_to_cpu=offload)
    with subject.trace.record() as recorder:
        state = model.state_dict()
    # A save needs the unsharded parameters of one unit at a time.
    events = [event.split()[0] for event in recorder.order()]
    assert events == ([] if form == "local" else ["AG", "FREE", "AG", "FREE"])
    buffers = [name for name in expected if "running" in name or "num" in name]
    names = ["flat_param", "1.flat_param", *buffers] if form == "local" else [*expected]
    assert sorted(state) == ([] if form == "rank 0" and dist.get_rank() else sorted(names))
    rows = slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)
    for name, value in state.items():
        assert checkpoints.local_part(value).device == (torch.device("cpu") if offload else device())
        if name in buffers or form in ("full", "rank 0"):
            assert checkpoints.is_plain(value)
            assert torch.equal(value.cpu(), expected[name].cpu())
        else:
            assert isinstance(value, CLASSES[form])
            assert form == "local" or torch.equal(checkpoints.local_part(value).cpu(), expected[name][rows].cpu())


@pytest.mark.spec("SD-FULL-08", "SD-SHARD-03", "SD-LOCAL-02", "SD-LOCAL-03", "SD-LOCAL-06", "ORIG-09")
@pytest.mark.parametrize("has_mesh", [False, True])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@each_form
@flat_or_original
@ranks(2)
def test_a_state_dict_of_each_form_restores_another_model(keep: bool, form: str, strategy: Any, has_mesh: bool) -> None:
    """Also after a forward, which keeps parameters unsharded with one strategy."""
    options = {"use_orig_params": keep, "sharding_strategy": strategy}
    mesh = {"device_mesh": init_device_mesh(device().type, (2,))} if has_mesh else {}
    model, other = sharded(plain_model(), **options), sharded(plain_model(7), **mesh, **options)
    x = torch.ones(4, 3, device=device())
    other.eval()(x)
    for each in (model, other):
        set_form(each, form)
    # The name of the flat parameter in torch.
    state = {name.replace("1.flat_param", "1._flat_param"): value for name, value in model.state_dict().items()}
    with subject.trace.record() as recorder:
        assert other.load_state_dict(state) == ([], [])
    if form in ("full", "local"):
        assert recorder.events == []
    assert {type(value) for value in other.state_dict().values()} <= {type(value) for value in state.values()} | {
        DTensor
    }
    assert torch.equal(other(x), plain_model().eval()(x))
    if form == "local":
        with pytest.raises(RuntimeError, match=r"rank \d: flat_param has 2 elements"):
            model.load_state_dict({**state, "flat_param": torch.ones(2)})


class ReadLate:
    """Replaces a tensor in PyTorch's functions. Frameworks that load files value by value pass such objects."""

    def __init__(self, value: Tensor) -> None:
        self._value, self.shape, self.dtype = value, value.shape, value.dtype

    def size(self) -> torch.Size:
        return self.shape

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(arg._value if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


@pytest.mark.spec("SD-FULL-08", "SD-FULL-09", "LEGACY-11")
@flat_or_original
@ranks(2)
def test_values_that_are_read_late_are_loaded_or_refused(keep: bool) -> None:
    model, wanted = sharded(plain_model(), use_orig_params=keep), plain_model(7).state_dict()
    model.load_state_dict({name: ReadLate(value) for name, value in wanted.items()})
    checkpoints.assert_same_state(model.state_dict(), wanted)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**wanted, "0.weight": ReadLate(torch.ones(2, 2))})


@pytest.mark.spec("SD-SHARD-07", "SD-LOCAL-02")
@pytest.mark.parametrize(("strategy", "form"), [(NO_SHARD, "full"), (NO_SHARD, "sharded"), (FULL_SHARD, "local")])
@ranks(2)
def test_one_rank_alone_saves_values_that_need_no_all_gather(strategy: Any, form: str) -> None:
    model = sharded(plain_model(), sharding_strategy=strategy)
    set_form(model, form)
    if dist.get_rank() == 0:
        state = model.state_dict()
        if strategy is NO_SHARD:
            assert state.keys() == plain_model().state_dict().keys()
            assert all(checkpoints.is_plain(value) for value in state.values())
    dist.barrier()


@pytest.mark.spec("MP-04", "MP-10", "SD-LOCAL-05")
@ranks(2)
def test_checkpoints_are_in_full_precision_except_buffers_of_local_ones() -> None:
    low = torch.bfloat16
    precision = subject.MixedPrecision(low, low, low, _module_classes_to_ignore=())
    model = FSDP(plain_model(), mixed_precision=precision)
    norm = model.module[1]
    # Defect: after a conversion, the next forward stored the dtype of mixed precision as that of the user's buffer.
    for _ in range(2):
        model(torch.ones(4, 3, device=device()))
        assert norm.running_mean.dtype is low
        for form, dtype in [("full", torch.float32), ("sharded", torch.float32), ("local", low)]:
            set_form(model, form)
            state = model.state_dict()
            assert state["1.running_mean"].dtype is dtype
            assert state["1.num_batches_tracked"].dtype is torch.int64
            assert state["flat_param" if form == "local" else "0.weight"].dtype is torch.float32
        expected = state["1.running_mean"].clone()
        norm.running_mean.zero_()
        model.load_state_dict({**state, "1.running_mean": expected})
        assert torch.equal(norm.running_mean, expected)
        model.to(device())


@pytest.mark.spec("SD-CFG-11", "IGN-08")
@each_form
@flat_or_original
@ranks(2)
def test_a_plain_module_and_ignored_parameters_are_saved_under_plain_names(keep: bool, form: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))).to(device())
    expected = copy.deepcopy(plain.state_dict())
    plain[1] = FSDP(plain[1], ignored_states=list(plain[1][1].parameters()), use_orig_params=keep)
    set_form(plain, form)
    state = plain.state_dict()
    assert form == "local" or list(state) == list(expected)
    for name in ("0.weight", "1.1.weight"):
        assert checkpoints.is_plain(state[name])
        assert torch.equal(state[name], expected[name])
        state[name] = expected[name] + 1
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, expected["0.weight"] + 1)
    assert torch.equal(plain[1].module[1].weight, expected["1.1.weight"] + 1)


# --- the settings ---


@pytest.mark.spec("SD-CFG-01", "SD-CFG-02", "SD-CFG-03", "SD-CFG-07", "SD-CFG-09", "SD-CFG-10")
@ranks(2)
def test_state_dict_type_is_set_for_tree() -> None:
    model = sharded(plain_model())
    before = FSDP.set_state_dict_type(model, SHARDED)
    assert before.state_dict_type is FULL
    assert isinstance(FSDP.get_state_dict_type(model).state_dict_config, subject.ShardedStateDictConfig)
    assert FSDP.get_state_dict_type(model.module[1]).state_dict_type is SHARDED
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
    with pytest.raises(KeyError, match="of the user"), FSDP.state_dict_type(model, LOCAL):
        assert FSDP.get_state_dict_type(model.module[1]).state_dict_type is LOCAL
        raise KeyError("an error of the user")
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED


@pytest.mark.spec("SD-CFG-06", "FS2-SD-13")
def test_module_without_units_has_no_settings_and_is_not_changed_by_the_context() -> None:
    with FSDP.state_dict_type(nn.Linear(2, 2), SHARDED):
        assert FSDP.get_state_dict_type(nn.Linear(2, 2)).state_dict_type is None


@pytest.mark.spec("SD-CFG-20")
@ranks(2)
def test_the_functions_that_choose_a_form_warn_once_that_they_are_deprecated() -> None:
    model = sharded(plain_model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP.set_state_dict_type(model, SHARDED)
        with FSDP.state_dict_type(model, FULL):
            model.state_dict()
            FSDP.get_state_dict_type(model)
    assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)] * 2
    assert all("FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated" in str(w.message) for w in caught)


# --- the configurations ---


@pytest.mark.spec("SD-CFG-04", "SD-CFG-05", "SD-CFG-12")
@pytest.mark.parametrize("kind", checkpoints.CONFIGS)
@ranks(1)
def test_a_type_has_default_configurations_and_refuses_those_of_other_types(kind: Any) -> None:
    model = sharded(plain_model())
    of_model, of_optimizer = checkpoints.CONFIGS[kind]
    FSDP.set_state_dict_type(model, kind)
    settings = subject.StateDictSettings(kind, of_model(), of_optimizer())
    assert FSDP.get_state_dict_type(model) == settings
    offloaded = of_model(offload_to_cpu=True)
    FSDP.set_state_dict_type(model, kind, offloaded)
    assert FSDP.get_state_dict_type(model) == dataclasses.replace(settings, state_dict_config=offloaded)
    wrong = subject.FullStateDictConfig if kind is LOCAL else subject.LocalStateDictConfig
    for other in (wrong, subject.StateDictConfig):
        named = rf"rank 0: Expected state_dict_config of type {of_model.__name__}.*{other.__name__}"
        with pytest.raises(RuntimeError, match=named):
            FSDP.set_state_dict_type(model, kind, other())
    with pytest.raises(RuntimeError, match=rf"rank 0: Expected optim_state_dict_config of .*{of_optimizer.__name__}"):
        FSDP.set_state_dict_type(model, kind, None, subject.OptimStateDictConfig())
