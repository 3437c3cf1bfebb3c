"""Parameters that tensor parallelism has already sharded. Two ranks share each unit, and two share each layer.

The reference is the same model in a single process. Ranks 0 and 1 together run one copy of the model on one batch, and
ranks 2 and 3 another copy on another batch.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spec_tests import subject
from spec_tests.harness import device, kept, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import loss_of
from spec_tests.models.values import assert_same, full
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy

FLAT_STRATEGIES = FULL_SHARD, SHARD_GRAD_OP, _ = [*ShardingStrategy][:3]
WIDTH, HIDDEN = 4, 8
either = pytest.mark.parametrize("use_orig_params", [False, True])


class Layer(nn.Module):
    """A norm, which is not sharded, and two linear layers, which are sharded column-wise and row-wise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(WIDTH, WIDTH), nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.enter(x))


def meshes(*sizes: int) -> DeviceMesh:
    names = ("replicate", "shard", "cut")[-len(sizes) :]
    return kept(("cut", sizes), lambda: init_device_mesh(device().type, sizes, mesh_dim_names=names))


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        parallelize_module(layer, mesh["cut"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def built(mesh: DeviceMesh | None = None, **options: Any) -> FSDP:
    mesh = meshes(2, 2) if mesh is None else mesh
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Layer}))
    options.setdefault("device_mesh", mesh["shard"])
    return FSDP(cut(seeded(Tower), mesh), **options)


def batch(step: int, copy: int) -> Tensor:
    dice = torch.Generator().manual_seed(100 * step + copy)
    return torch.randn(6, WIDTH, generator=dice).to(device())


def mine(step: int) -> Tensor:
    return batch(step, dist.get_rank() // 2)


def train(model: nn.Module, copies: list[int], num_steps: int = 3) -> torch.optim.Optimizer:
    """Trains with the mean loss of the batches of some copies. Returns the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(num_steps):
        optimizer.zero_grad()
        for copy in copies:
            (loss_of(model(batch(step, copy))) / len(copies)).backward()
        optimizer.step()
    return optimizer


def full_values(model: FSDP) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {
            name.replace("_checkpoint_wrapped_module.", ""): full(parameter.detach()).clone()
            for name, parameter in model.named_parameters()
        }


def expect(model: FSDP, other: nn.Module) -> None:
    assert_same(full_values(model), {name: value.detach() for name, value in other.named_parameters()})


# A strategy, the number of units, and a kind of activation checkpointing.
WAYS_TO_TRAIN = [
    (FULL_SHARD, 1, None),
    *((strategy, 3, None) for strategy in FLAT_STRATEGIES),
    *((FULL_SHARD, 3, impl) for impl in checkpoints.CheckpointImpl),
]


@pytest.mark.spec("NEW-01", "PAR-01", "PAR-07")
@pytest.mark.parametrize(("strategy", "num_units", "impl"), WAYS_TO_TRAIN)
@either
@ranks(4)
def test_tensor_parallel_model_trains_like_one_process(
    strategy: ShardingStrategy, num_units: int, impl: Any, use_orig_params: bool
) -> None:
    policy = None if num_units == 1 else ModuleWrapPolicy({Layer})
    model = built(sharding_strategy=strategy, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert len(FSDP.fsdp_modules(model)) == num_units
    if impl is not None:
        wrap = functools.partial(checkpoints.checkpoint_wrapper, checkpoint_impl=impl)
        checkpoints.apply_activation_checkpointing(model, wrap, lambda module: isinstance(module, Layer))
    plain = seeded(Tower)
    train(model, [dist.get_rank() // 2])
    train(plain, [0, 1])
    expect(model, plain)


@pytest.mark.spec("NEW-01", "MP-02")
@either
@ranks(4)
def test_modules_compute_in_low_precision_with_tensor_parallel_weights(use_orig_params: bool) -> None:
    seen: list[Any] = []
    mesh = meshes(2, 2)
    plain = cut(seeded(Tower), mesh)
    plain.layers[0].up.register_forward_hook(lambda module, *_: seen.append(module.weight))
    precision = subject.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(plain, device_mesh=mesh["shard"], mixed_precision=precision, use_orig_params=use_orig_params)
    loss_of(model(mine(0))).backward()
    (weight,) = seen
    assert isinstance(weight, DTensor)
    assert weight.dtype is torch.bfloat16
    assert (weight.shape, weight.placements, weight.device_mesh) == ((HIDDEN, WIDTH), (Shard(0),), mesh["cut"])


@pytest.mark.spec("NEW-01", "NOSYNC-02")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(4)
def test_gradients_accumulate_and_can_be_summoned(strategy: ShardingStrategy) -> None:
    model, plain = built(use_orig_params=True, sharding_strategy=strategy), seeded(Tower)
    with model.no_sync():
        loss_of(model(mine(0))).backward()
    loss_of(model(mine(1))).backward()
    for step in range(2):
        for copy in range(2):
            (loss_of(plain(batch(step, copy))) / 2).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        seen = {name: full(parameter.grad).clone() for name, parameter in model.named_parameters()}
    assert_same(seen, {name: parameter.grad for name, parameter in plain.named_parameters()})


@pytest.mark.spec("NEW-01", "SUMMON-02", "SUMMON-07")
@either
@ranks(4)
def test_summoned_parameters_are_those_of_tensor_parallelism_and_changes_persist(use_orig_params: bool) -> None:
    plain = cut(seeded(Tower), meshes(2, 2))
    shapes = {name: (type(p.data), p.shape) for name, p in plain.named_parameters()}
    model = built(use_orig_params=use_orig_params)
    before = full_values(model)
    with FSDP.summon_full_params(model), torch.no_grad():
        assert {name: (type(p.data), p.shape) for name, p in model.named_parameters()} == shapes
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.mul_(2)
    assert_same(full_values(model), {name: 2 * value for name, value in before.items()}, bitwise=True)
    other = seeded(Tower)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(model(mine(0)), other(mine(0)))


@pytest.mark.spec("CTOR-05")
@ranks(4)
def test_step_of_an_optimizer_with_replaced_parameters_of_tensor_parallelism_causes_a_warning() -> None:
    model: nn.Module = cut(seeded(Tower), meshes(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = FSDP(model, device_mesh=meshes(2, 2)["shard"], use_orig_params=True)
    loss_of(model(mine(0))).backward()
    with pytest.warns(UserWarning, match="8 of 14 parameters of this SGD were replaced"):
        optimizer.step()


@pytest.mark.spec("NEW-01", "CLIP-02", "CLIP-03")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
@either
@ranks(4)
def test_norm_counts_every_element_of_all_tensor_parallel_shards_once(norm_type: Any, use_orig_params: bool) -> None:
    plain = seeded(Tower)
    for copy in range(2):
        (loss_of(plain(batch(0, copy))) / 2).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, float(norm_type))
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    model = built(use_orig_params=use_orig_params)
    loss_of(model(mine(0))).backward()
    torch.testing.assert_close(model.clip_grad_norm_(0.1, norm_type), expected)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    expect(model, plain)


@pytest.mark.spec("NEW-01", "SYNC-02")
@ranks(4)
def test_sync_module_states_sends_the_values_of_the_first_rank_of_each_shard_group() -> None:
    mesh = meshes(2, 2)
    plain = seeded(Tower)
    if dist.get_rank() >= 2:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
    model = FSDP(cut(plain, mesh), device_mesh=mesh["shard"], sync_module_states=True)
    expect(model, seeded(Tower))


# --- checkpoints ---


@pytest.mark.spec("NEW-01", "SD-FULL-01", "SD-FULL-08")
@either
@ranks(4)
def test_a_full_dict_has_the_parameters_of_tensor_parallelism_and_that_of_the_plain_model_can_be_loaded(
    use_orig_params: bool,
) -> None:
    model, plain = built(use_orig_params=use_orig_params), seeded(Tower)
    state = model.state_dict()
    assert_same({name: full(value) for name, value in state.items()}, plain.state_dict(), bitwise=True)
    assert isinstance(state["layers.0.up.weight"], DTensor)
    zero(model)
    model.load_state_dict(plain.state_dict())
    expect(model, plain)


@pytest.mark.spec("NEW-01", "SD-SHARD-01", "SD-SHARD-03")
@either
@ranks(4)
def test_sharded_state_dict_has_both_meshes_and_loads_again(use_orig_params: bool) -> None:
    model, plain = built(use_orig_params=use_orig_params), seeded(Tower)
    FSDP.set_state_dict_type(model, subject.StateDictType.SHARDED_STATE_DICT)
    state = model.state_dict()
    weight = state["layers.0.up.weight"]
    assert (weight.device_mesh.mesh_dim_names, weight.to_local().shape) == (("shard", "cut"), (HIDDEN // 4, WIDTH))
    assert state["layers.0.norm.weight"].to_local().shape == (WIDTH // 2,)
    assert_same({name: full(value) for name, value in state.items()}, plain.state_dict(), bitwise=True)
    zero(model)
    model.load_state_dict(state)
    expect(model, plain)


def trained(use_orig_params: bool, strategy: ShardingStrategy) -> tuple[FSDP, torch.optim.Optimizer]:
    """A model with an ignored layer that tensor parallelism has sharded, and its optimizer after two steps."""
    plain = cut(seeded(Tower), meshes(2, 2))
    ignored = list(plain.layers[1].up.parameters())
    options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy, "ignored_states": ignored}
    model = FSDP(plain, device_mesh=meshes(2, 2)["shard"], auto_wrap_policy=ModuleWrapPolicy({Layer}), **options)
    return model, train(model, [0], 2)


def zero(model: FSDP) -> None:
    with FSDP.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


every_strategy = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)


# The options for saving and for loading.
FULL, ROWS = StateDictOptions(full_state_dict=True), StateDictOptions()
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@pytest.mark.spec("NEW-01", "PROG-106")
@every_strategy
@pytest.mark.parametrize(("saving", "loading"), [(FULL, FULL), (ON_RANK_0, FROM_RANK_0), (ROWS, ROWS)])
@either
@ranks(4)
def test_training_resumes_from_the_states_of_both(
    use_orig_params: bool, saving: StateDictOptions, loading: StateDictOptions, strategy: ShardingStrategy
) -> None:
    model, optimizer = trained(use_orig_params, strategy)
    weights, states = subject.get_state_dict(model, optimizer, options=saving)
    plain = seeded(Tower)
    expected = train(plain, [0], 2).state_dict()["state"]
    if saving == ON_RANK_0 and dist.get_rank() > 0:
        assert (weights, states) == ({}, {})
    elif saving != ROWS:
        assert_same({name: value.to(device()) for name, value in weights.items()}, plain.state_dict())
        for number, name in enumerate(plain.state_dict()):
            found = states["state"][name]
            assert not any(isinstance(value, (DTensor, ShardedTensor)) for value in found.values())
            assert_same({k: v.cpu() for k, v in found.items()}, {k: v.cpu() for k, v in expected[number].items()})
    other, fresh = trained(use_orig_params, strategy)
    zero(other)
    fresh.state.clear()
    subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=loading)
    fresh.zero_grad()
    loss_of(other(batch(2, 0))).backward()
    fresh.step()
    resumed = seeded(Tower)
    train(resumed, [0], 3)
    assert_same(subject.get_model_state_dict(other, options=FULL), resumed.state_dict())


FORMS: dict[str, tuple[Any, ...]] = {
    "full": (subject.StateDictType.FULL_STATE_DICT,),
    "rank0": (subject.StateDictType.FULL_STATE_DICT, None, subject.FullOptimStateDictConfig(rank0_only=True)),
    "sharded": (subject.StateDictType.SHARDED_STATE_DICT,),
}


@pytest.mark.spec("NEW-01", "SD-FULL-08", "OSD-LOAD-01", "OSD-06", "PROG-106")
@every_strategy
@pytest.mark.parametrize("form", FORMS)
@either
@ranks(4)
def test_each_form_of_both_loads_again(use_orig_params: bool, form: str, strategy: ShardingStrategy) -> None:
    """Full states of these methods are the DTensors of tensor parallelism, as in torch."""
    model, optimizer = trained(use_orig_params, strategy)
    other, fresh = trained(use_orig_params, strategy)
    for one in (model, other):
        FSDP.set_state_dict_type(one, *FORMS[form])
    states = FSDP.optim_state_dict(model, optimizer)
    assert states == {} or isinstance(states["state"]["layers.0.up.weight"]["exp_avg"], DTensor)
    for entries in fresh.state.values():
        entries["exp_avg"].zero_()
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, states))
    own, found = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert found.keys() == own.keys()
    for number, entries in own.items():
        assert {key: type(value) for key, value in found[number].items()} == {k: type(v) for k, v in entries.items()}
        assert_same({k: full(v) for k, v in found[number].items()}, {k: full(v) for k, v in entries.items()})
    zero(other)
    other.load_state_dict(model.state_dict())
    plain = seeded(Tower)
    train(plain, [0], 2)
    expect(other, plain)
