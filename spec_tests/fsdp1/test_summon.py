"""``summon_full_params``: unsharded parameters in user code."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spec_tests.fsdp1.whole import by_name, group_of, whole
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import Watch, Wire, batch, iterate, loss_of
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    as_torch,
    wrapped,
)
from spec_tests.models.values import assert_same, flattened, full_values, mean_gradients, named, own_names
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

summon = FullyShardedDataParallel.summon_full_params
SHARDING = (FULL_SHARD, SHARD_GRAD_OP)
flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
sharding = pytest.mark.parametrize("strategy", SHARDING)
either = pytest.mark.parametrize("use_orig_params", [False, True])
# Strategies and parameter forms that behave differently from each other, instead of all combinations.
PAIRS = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, True), (NO_SHARD, False), (NO_SHARD, True)]
pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)
three = pytest.mark.parametrize(("strategy", "use_orig_params"), [PAIRS[0], PAIRS[2], PAIRS[4]])
sharding_pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS[:3])


def local(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are visible outside of the context: names, shapes and values."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def units(strategy: ShardingStrategy) -> tuple[int, int]:
    """The number of shards of a unit on the ranks of this test, and the index of this rank's shard."""
    if strategy is NO_SHARD:
        return 1, 0
    return (2, dist.get_rank() % 2) if strategy in HYBRID_STRATEGIES else (dist.get_world_size(), dist.get_rank())


# --- parameters inside the context ---


@pytest.mark.spec("SUMMON-01")
@pytest.mark.pure
def test_the_signature_is_that_of_torch() -> None:
    def expected(
        module, recurse=True, writeback=True, rank0_only=False, offload_to_cpu=False, with_grads=False
    ) -> None: ...

    def shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(summon) == shape(expected)
    assert shape(summon) == shape(torch_fsdp.FullyShardedDataParallel.summon_full_params)
    assert isinstance(inspect.getattr_static(FullyShardedDataParallel, "summon_full_params"), staticmethod)
    assert isinstance(summon(nn.Linear(1, 1)), contextlib.AbstractContextManager)


@pytest.mark.spec("SUMMON-02")
@either
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_summoned_parameters_have_names_shapes_and_values_on_every_rank(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        # The first iteration comes before any forward, when there is no root yet.
        with summon(model):
            assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
            assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
            assert_same(named(model), named(plain), bitwise=step == 0)
            # Also check the attributes that the model's own code uses.
            torch.testing.assert_close(model.module.blocks[1].module.linear.weight, plain.blocks[1].linear.weight)
        for name, gradient in mean_gradients(plain, [step]).items():
            plain.get_parameter(name).grad = gradient
        iterate(model, step)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.spec("SUMMON-02")
@sharding_pairs
@ranks(2)
def test_summoned_parameters_have_the_values_of_torch(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    ours = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    theirs = as_torch(
        seeded(), sharding_strategy=torch_fsdp.ShardingStrategy[strategy.name], use_orig_params=use_orig_params
    )
    seen = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        iterate(model)
        optimizer.step()
        with type(model).summon_full_params(model):
            seen.append(named(model))
    assert_same(seen[0], seen[1], bitwise=True)


@pytest.mark.spec("SUMMON-02")
@either
@ranks(2)
def test_summoned_model_is_readable_like_an_unwrapped_model(use_orig_params: bool) -> None:
    plain = seeded()
    model = wrapped(use_orig_params=use_orig_params)
    with summon(model):
        assert sum(parameter.numel() for parameter in model.parameters()) == sum(p.numel() for p in plain.parameters())
        norm = torch.stack([parameter.norm() for parameter in model.parameters()]).norm()
        torch.nn.functional.linear(batch(), model.module.enter.weight, model.module.enter.bias)
    assert norm == torch.stack([parameter.norm() for parameter in plain.parameters()]).norm()


# --- affected units ---


def islands(**options: Any) -> nn.Sequential:
    """Two independent wrapped layers around an unwrapped layer, in a module that is not wrapped."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))

    model = seeded(build)
    for index in (0, 2):
        model[index] = FullyShardedDataParallel(model[index], **options)
    return model


@pytest.mark.spec("SUMMON-03")
@either
@ranks(2)
def test_a_plain_module_summons_all_units_below_it(use_orig_params: bool) -> None:
    model = islands(use_orig_params=use_orig_params)
    expected = [layer.weight for layer in seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))]
    between = model[1].weight
    before = local(model)
    with summon(model):
        assert model[1].weight is between
        for layer, weight in zip((model[0].module, model[1], model[2].module), expected, strict=True):
            assert torch.equal(layer.weight, weight)
            assert isinstance(layer.weight, nn.Parameter)
    assert_same(local(model), before, bitwise=True)


@pytest.mark.spec("SUMMON-03")
@either
@ranks(2)
def test_plain_module_passes_its_arguments_to_every_unit(use_orig_params: bool) -> None:
    model = islands(use_orig_params=use_orig_params)
    before = local(model)
    with summon(model, writeback=False), torch.no_grad():
        for wrapper in (model[0], model[2]):
            wrapper.module.weight.fill_(7.0)
    assert_same(local(model), before, bitwise=True)
    with summon(model, writeback=False, rank0_only=True):
        for wrapper in (model[0], model[2]):
            numels = [parameter.numel() for parameter in wrapper.parameters()]
            assert sum(numels) == (42 if dist.get_rank() == 0 else 21)
    with summon(model, writeback=True), torch.no_grad():
        for wrapper in (model[0], model[2]):
            wrapper.module.weight.fill_(7.0)
    with summon(model, writeback=False):
        assert all((wrapper.module.weight == 7.0).all() for wrapper in (model[0], model[2]))
    with summon(model, recurse=False):
        assert {name: p.shape for name, p in model.named_parameters()} == {n: t.shape for n, t in before.items()}


@pytest.mark.spec("SUMMON-04")
@either
@ranks(2)
def test_an_inner_unit_is_summoned_alone(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    inner = model.module.blocks[1]
    others = {name: tensor.shape for name, tensor in local(model).items() if "blocks.1." not in name}
    iterate(model)
    with Wire() as wire, summon(inner):
        assert_same(named(inner), named(seeded().blocks[1]), bitwise=True)
        visible = {name: p.shape for name, p in model.named_parameters() if "blocks.1." not in name}
        assert visible == others
    assert wire.sent == [("AG", 42)], "no other unit was gathered"


@pytest.mark.spec("SUMMON-04")
@ranks(2)
def test_summon_of_an_inner_unit_includes_its_subtree() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))

    model = seeded(build)
    model[1][0] = FullyShardedDataParallel(model[1][0])
    model[1] = FullyShardedDataParallel(model[1])
    model = FullyShardedDataParallel(model)
    with summon(model.module[1]):
        assert_same(named(model.module[1]), named(seeded(build)[1]), bitwise=True)
        assert model.module[0].weight.shape == (6, 6)
        with pytest.raises(RuntimeError, match="sharded"):
            model.module[0].weight.sum()


@pytest.mark.spec("SUMMON-05")
@either
@ranks(2)
def test_without_recurse_nested_units_stay_sharded(use_orig_params: bool) -> None:
    plain = seeded()
    model = wrapped(use_orig_params=use_orig_params)
    before = local(model)
    with Wire() as wire, summon(model, recurse=False):
        visible = dict(model.named_parameters())
        for name in own_names(plain)[""]:
            assert torch.equal(visible.pop(name), plain.get_parameter(name))
        assert sorted(p.numel() for p in visible.values()) == sorted(
            tensor.numel() for name, tensor in before.items() if "blocks" in name
        )
    assert wire.sent == [("AG", 56)]


# --- leaving the context ---


@pytest.mark.spec("SUMMON-06")
@either
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_summon_restores_the_local_shards_on_exit(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    before, objects = local(model), list(model.parameters())
    for writeback in (True, False):
        with summon(model, writeback=writeback):
            pass
        assert_same(local(model), before, bitwise=True)
        assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))


@pytest.mark.spec("SUMMON-06")
@pytest.mark.parametrize("writeback", [True, False])
@sharding_pairs
@ranks(2)
def test_exit_frees_full_memory(strategy: ShardingStrategy, writeback: bool, use_orig_params: bool) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=use_orig_params)
    with summon(model, writeback=writeback):
        memories = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
        assert not any(memory.expired() for memory in memories)
    # Gloo's own thread may release its reference last.
    deadline = time.monotonic() + 5
    while not all(memory.expired() for memory in memories):
        assert time.monotonic() < deadline, "somebody still holds full parameters"
        time.sleep(0.001)
    iterate(model)
    with summon(model, writeback=writeback):
        pass
    assert watch.alive() == []
    for name, parameter in model.named_parameters():
        assert parameter.untyped_storage().nbytes() <= 4 * 28, f"{name} is not a slice of something large"


@pytest.mark.accelerator
@pytest.mark.spec("SUMMON-06")
@ranks(2)
def test_summon_restores_the_allocated_memory_on_exit() -> None:
    model = wrapped(seeded(lambda: Stack(1024)))
    accelerator = torch.get_device_module(device())
    before = accelerator.memory_allocated()
    with summon(model):
        assert accelerator.memory_allocated() > before + 4 * 1024 * 1024 * 4
    assert accelerator.memory_allocated() == before


# --- changes ---


def patchwork(strategy: ShardingStrategy) -> dict[str, Tensor]:
    """For each unit, the expected values if each rank fills all unsharded parameters with its own number."""
    plain = seeded()
    rows = flattened(plain, named(plain))
    num, _ = units(strategy)
    for row in rows.values():
        size = -(-row.numel() // num)
        for index in range(num):
            row[index * size : (index + 1) * size] = float(index)
    return rows


CHANGES: dict[str, Callable[[nn.Parameter, float], Any]] = {
    "in place": lambda parameter, value: parameter.fill_(value),
    "through data": lambda parameter, value: parameter.data.fill_(value),
    "other memory": lambda parameter, value: setattr(parameter, "data", torch.full_like(parameter, value)),
    "element by element": lambda parameter, value: [row.fill_(value) for row in parameter],
    "init": lambda parameter, value: nn.init.constant_(parameter, value),
}


@pytest.mark.spec("SUMMON-07")
@sharding_pairs
@ranks(4)
def test_each_rank_keeps_its_own_shard_of_changes(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    for change in CHANGES.values():
        with summon(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with summon(model), torch.no_grad():
            for parameter in model.parameters():
                change(parameter, float(dist.get_rank()))
        assert_same(flattened(seeded(), full_values(model)), patchwork(strategy), bitwise=True)
        # From the second iteration on, the units have already been all-gathered for a computation.
        iterate(model)


@pytest.mark.spec("SUMMON-07")
@sharding_pairs
@ranks(2)
def test_forward_uses_different_values_that_ranks_wrote_inside_summon(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    model(batch())
    with summon(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1 * dist.get_rank())
    with torch.no_grad():
        for unit, row in patchwork(strategy).items():
            names = own_names(plain)[unit]
            parts = row.split([plain.get_parameter(name).numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                plain.get_parameter(name).copy_(0.1 * part.view_as(plain.get_parameter(name)))
        assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.spec("SUMMON-07", "SUMMON-20")
@either
@ranks(2)
def test_low_precision_copy_is_updated_after_change(use_orig_params: bool) -> None:
    """Fails if a unit that is not sharded continues to use its old low-precision copy."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model, fresh = (
        wrapped(sharding_strategy=ShardingStrategy.NO_SHARD, mixed_precision=low, use_orig_params=use_orig_params)
        for _ in range(2)
    )
    # No backward follows, so the units keep their copies.
    model(batch())
    for each in (model, fresh):
        with summon(each), torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(3)
    assert torch.equal(model(batch()), fresh(batch()))


@pytest.mark.spec("SUMMON-07")
@ranks(2)
def test_different_values_written_by_ranks_inside_summon_persist_as_in_torch() -> None:
    seen = []
    for model in (wrapped(), as_torch(seeded())):
        with type(model).summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(float(dist.get_rank()))
        with type(model).summon_full_params(model, writeback=False):
            seen.append(named(model))
    assert_same(seen[0], seen[1], bitwise=True)
    assert not torch.equal(seen[0]["enter.weight"], seeded().enter.weight)


@pytest.mark.spec("SUMMON-07")
@either
@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@ranks(4)
def test_equal_change_on_all_ranks_persists_completely(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    with summon(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    assert_same(full_values(model), {name: 2.0 * value for name, value in named(seeded()).items()}, bitwise=True)


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
    before = local(model)
    for change in CHANGES.values():
        with summon(model, writeback=False), torch.no_grad():
            for parameter in model.parameters():
                change(parameter, 3.0)
        assert_same(local(model), before, bitwise=True)
    with torch.no_grad():
        assert torch.equal(model(batch()), seeded()(batch()))


@pytest.mark.spec("SUMMON-08")
@sharding_pairs
@ranks(2)
def test_without_writeback_nothing_is_copied_back(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    written = {}
    for writeback in (False, True):
        before = [parameter._version for parameter in model.parameters()]
        with summon(model, writeback=writeback):
            pass
        written[writeback] = [p._version > version for p, version in zip(model.parameters(), before, strict=True)]
    assert not any(written[False])
    assert all(written[True])


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


# --- on rank 0 only, on the CPU ---


def check_rank0_only(model: FullyShardedDataParallel, *, is_first: bool) -> None:
    before = local(model)
    shapes = sorted(tensor.shape for tensor in before.values())
    for offload_to_cpu in (False, True):
        with summon(model, writeback=False, rank0_only=True, offload_to_cpu=offload_to_cpu):
            if is_first:
                place = "cpu" if offload_to_cpu else device()
                assert_same(named(model), named(seeded().to(place)), bitwise=True)
            else:
                assert sorted(parameter.shape for parameter in model.parameters()) == shapes
                assert_same(dict(zip(before, model.parameters(), strict=True)), before, bitwise=True)
        assert_same(local(model), before, bitwise=True)


@pytest.mark.spec("SUMMON-10")
@sharding_pairs
@ranks(4)
def test_rank_0_only_gives_full_parameters_to_rank_0(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    check_rank0_only(model, is_first=dist.get_rank() == 0)
    check_it_still_trains(model, with_root)


@pytest.mark.spec("SUMMON-10")
@either
@ranks(4)
def test_rank0_only_gives_full_parameters_of_a_sub_group_to_its_first_rank(use_orig_params: bool) -> None:
    group = dist.new_group([2, 3])
    if dist.get_rank() >= 2:
        model = wrapped(process_group=group, use_orig_params=use_orig_params)
        check_rank0_only(model, is_first=dist.get_rank() == 2)


@pytest.mark.spec("SUMMON-10")
@either
@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@ranks(4)
def test_rank0_only_gives_full_parameters_of_a_hybrid_to_rank_0(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    check_rank0_only(model, is_first=dist.get_rank() == 0)


@pytest.mark.spec("SUMMON-11")
@pytest.mark.parametrize("options", [{"rank0_only": True}, {"rank0_only": True, "writeback": True}])
@ranks(2)
def test_rank0_only_cannot_write_back(options: dict[str, bool]) -> None:
    model = wrapped()
    before = local(model)
    with Wire() as wire, pytest.raises(NotImplementedError, match="writeback=False"), summon(model, **options):
        pass
    assert wire.sent == []
    assert_same(local(model), before, bitwise=True)


@pytest.mark.spec("SUMMON-12")
@sharding_pairs
@ranks(2)
def test_summoned_values_on_the_cpu_are_correct(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    iterate(model)
    with summon(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
            assert_same(named(model), named(seeded().cpu()), bitwise=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with summon(model, offload_to_cpu=True), torch.no_grad():
            for parameter in model.parameters():
                assert parameter.device.type == "cpu"
                parameter.add_(1.0)
    assert {parameter.device for parameter in model.parameters()} == {device()}
    assert_same(full_values(model), {name: value + 1.0 for name, value in named(seeded()).items()}, bitwise=True)
    iterate(model)


@pytest.mark.spec("SUMMON-13")
@ranks(2)
def test_offloading_on_all_ranks_warns_of_redundant_copies() -> None:
    model = wrapped()
    with pytest.warns(UserWarning, match="rank0_only=True") as caught, summon(model, offload_to_cpu=True):
        pass
    assert len(caught) == 1
    assert "CPU cop" in str(caught[0].message)
    assert caught[0].filename == __file__, "it points to the line that is to be changed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with summon(model, offload_to_cpu=True, rank0_only=True, writeback=False):
            pass


@pytest.mark.spec("SUMMON-14")
@either
@ranks(2)
def test_no_shard_params_are_not_offloaded(use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=NO_SHARD, use_orig_params=use_orig_params)
    memory = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with summon(model, offload_to_cpu=True, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            assert {parameter.device for parameter in model.parameters()} == {device()}
            assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} == memory
            assert_same(named(model), named(seeded()), bitwise=True)


# --- with gradients ---


@pytest.mark.spec("SUMMON-15")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_gradients_are_summoned_in_their_original_shapes(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    with summon(model, with_grads=True):
        assert all(parameter.grad is None for parameter in model.parameters())
    iterate(model)
    before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    for options in ({"writeback": False}, {}, {"writeback": False, "rank0_only": True}):
        with summon(model, with_grads=True, **options):
            if dist.get_rank() == 0 or "rank0_only" not in options:
                gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
                assert_same(gradients, mean_gradients(seeded()))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) is (before[name] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, before[name])


@pytest.mark.spec("SUMMON-15")
@ranks(2)
def test_gradients_of_another_dtype_are_summoned() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = wrapped(mixed_precision=precision, use_orig_params=True)
    iterate(model)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with summon(model, with_grads=True):
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert (parameter.dtype, parameter.grad.dtype) == (torch.float32, torch.bfloat16)
            assert parameter.grad.shape == parameter.shape
    after = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


@pytest.mark.spec("SUMMON-15", "NOSYNC-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_gradients_that_were_never_reduced_cannot_be_summoned(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    with model.no_sync():
        iterate(model)
    with pytest.raises(RuntimeError, match="never reduced"), summon(model, with_grads=True):
        raise AssertionError("not to be entered")
    iterate(model, 1)
    with summon(model, with_grads=True):
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_same(gradients, mean_gradients(seeded(), (0, 1)))


@pytest.mark.spec("SUMMON-15")
@flat_strategies
@ranks(2)
def test_a_parameter_without_a_gradient_has_none_when_summoned(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    model.module.blocks[1].requires_grad_(False)
    iterate(model)
    by_name(model)["leave.weight"].grad = None
    with summon(model, with_grads=True):
        without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"blocks.1.linear.weight", "blocks.1.linear.bias", "leave.weight"}


@pytest.mark.spec("SUMMON-15")
@pytest.mark.parametrize("writeback", [True, False])
@sharding
@ranks(2)
def test_gradient_changes_are_written_back_on_request(strategy: ShardingStrategy, writeback: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    theirs = as_torch(seeded(), sharding_strategy=torch_fsdp.ShardingStrategy[strategy.name], use_orig_params=True)
    for each in (model, theirs):
        iterate(each)
        with type(each).summon_full_params(each, with_grads=True, writeback=writeback):
            for parameter in each.parameters():
                parameter.grad.mul_(2.0)
    factor = 2.0 if writeback else 1.0
    gradients = whole(model)[1]
    assert_same(gradients, {name: factor * g for name, g in mean_gradients(seeded()).items()}, bitwise=True)
    assert_same(gradients, whole(theirs)[1], bitwise=True)


@pytest.mark.spec("SUMMON-15")
@pytest.mark.parametrize("writeback", [True, False])
@flat_strategies
@ranks(2)
def test_replaced_gradients_are_written_back_on_request(strategy: ShardingStrategy, writeback: bool) -> None:
    """A new tensor in ``.grad`` is a change like any other, as is new storage for a parameter."""
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    iterate(model)
    expected = mean_gradients(seeded())
    by_name(model)["leave.bias"].grad = None
    del expected["leave.bias"]
    with summon(model, with_grads=True, writeback=writeback):
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 2.0
        inside = by_name(model)
        inside["leave.weight"].grad = None
        inside["leave.bias"].grad = torch.full_like(inside["leave.bias"], 3.0)
        ones = torch.ones_like(inside["leave.bias"])
    # Without sharding, the user changes the gradients themselves, so the changes persist.
    if writeback or strategy is NO_SHARD:
        expected = {name: 2.0 * gradient for name, gradient in expected.items() if name != "leave.weight"}
        expected["leave.bias"] = 3.0 * ones
    with summon(model, with_grads=True):
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert_same(found, expected, bitwise=True)


@pytest.mark.spec("SUMMON-15")
@ranks(2)
def test_gradients_cannot_be_summoned_from_flat_parameters_or_to_the_cpu() -> None:
    flat, original = wrapped(), wrapped(use_orig_params=True)
    for model in (flat, original):
        iterate(model)
    before = [local(flat), local(original)]
    with Wire() as wire:
        with pytest.raises(NotImplementedError, match="use_orig_params=True"), summon(flat, with_grads=True):
            pass
        with (
            pytest.raises(NotImplementedError, match="offload_to_cpu"),
            summon(original, with_grads=True, offload_to_cpu=True),
        ):
            pass
    assert wire.sent == [], "refused before anybody waits for anybody"
    assert_same(local(flat), before[0], bitwise=True)
    assert_same(local(original), before[1], bitwise=True)
    with summon(flat, writeback=False):
        assert_same(named(flat), named(seeded()), bitwise=True)


# --- invalid calls ---


def rootless(**options: Any) -> FullyShardedDataParallel:
    """Two units inside a root without parameters. Between the two units there is a time when no unit computes."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    for index in (0, 2):
        model[index] = FullyShardedDataParallel(model[index], **options)
    return FullyShardedDataParallel(model, **options)


def with_root(**options: Any) -> FullyShardedDataParallel:
    return wrapped(**options)


models = pytest.mark.parametrize("build", [with_root, rootless])


def middle_of(model: FullyShardedDataParallel) -> nn.Module:
    """A module that runs in the middle of forward."""
    return model.module[1] if isinstance(model.module, nn.Sequential) else model.module.blocks[1].module.linear


def check_it_still_trains(model: FullyShardedDataParallel, build: Callable[..., Any]) -> None:
    """Checks that the next iteration gives the same result as the first one of a fresh model."""
    fresh = build(sharding_strategy=model.sharding_strategy, use_orig_params=model._use_orig_params)
    model.zero_grad()
    for each in (model, fresh):
        loss_of(each(batch())).backward()
    for (name, ours), (_, expected) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(ours, expected), name
        assert (ours.grad is None) is (expected.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, expected.grad), name


@pytest.mark.spec("SUMMON-16")
@models
@three
@ranks(2)
def test_summon_cannot_be_entered_during_forward_or_backward(
    strategy: ShardingStrategy, use_orig_params: bool, build: Callable[..., FullyShardedDataParallel]
) -> None:
    model = build(sharding_strategy=strategy, use_orig_params=use_orig_params)
    refused: list[str] = []

    def try_it(moment: str) -> None:
        with pytest.raises(RuntimeError, match=r"rank \d.*forward") as raised, summon(model, writeback=False):
            pass
        assert "backward" in str(raised.value)
        refused.append(moment)

    def in_forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        try_it("forward")
        if output.requires_grad:
            output.register_hook(lambda _: try_it("backward"))

    hook = middle_of(model).register_forward_hook(in_forward)
    loss_of(model(batch())).backward()
    assert refused == ["forward", "backward"]
    with torch.no_grad():
        model(batch())
    assert refused == ["forward", "backward", "forward"]
    hook.remove()
    check_it_still_trains(model, build)


@pytest.mark.spec("SUMMON-16")
@either
@ranks(2)
def test_unit_cannot_be_summoned_during_the_backward_of_another_unit(use_orig_params: bool) -> None:
    """Fails if a unit that is not computing counts as idle while the backward of its root still runs."""
    model = wrapped(use_orig_params=use_orig_params)
    refused: list[int] = []

    def in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        def try_others(_: Tensor) -> None:
            for index in (0, 3):
                with pytest.raises(RuntimeError, match="backward"), summon(model.module.blocks[index]):
                    pass
                refused.append(index)

        output.register_hook(try_others)

    hook = middle_of(model).register_forward_hook(in_backward)
    loss_of(model(batch())).backward()
    assert refused == [0, 3]
    hook.remove()
    check_it_still_trains(model, with_root)


@pytest.mark.spec("SUMMON-16")
@either
@ranks(2)
def test_summon_is_refused_in_a_backward_that_has_not_reached_the_model(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    refused: list[str] = []

    def try_it(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="backward"), summon(model):
            pass
        refused.append("loss")

    loss = loss_of(model(batch()))
    loss.register_hook(try_it)
    loss.backward()
    assert refused == ["loss"]
    check_it_still_trains(model, with_root)


@pytest.mark.spec("SUMMON-16")
@ranks(2)
def test_failed_summon_in_forward_leaves_a_usable_model() -> None:
    model = wrapped()

    def in_forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        with summon(model):
            pass

    hook = middle_of(model).register_forward_hook(in_forward)
    with pytest.raises(RuntimeError, match="during forward"):
        model(batch())
    hook.remove()
    with summon(model, writeback=False):
        assert_same(named(model), named(seeded()), bitwise=True)
    check_it_still_trains(model, with_root)


@pytest.mark.spec("SUMMON-17")
@models
@pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}])
@three
@ranks(2)
def test_inside_no_backward_can_be_started(
    strategy: ShardingStrategy,
    options: dict[str, bool],
    use_orig_params: bool,
    build: Callable[..., FullyShardedDataParallel],
) -> None:
    model = build(sharding_strategy=strategy, use_orig_params=use_orig_params)
    loss = loss_of(model(batch()))
    with summon(model, **options), Wire() as wire:
        with pytest.raises(RuntimeError, match=r"rank \d.*backward.*summon"):
            loss.backward()
        assert wire.sent == [], "at once"
    check_it_still_trains(model, build)


@pytest.mark.spec("SUMMON-18")
@pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}])
@three
@ranks(2)
def test_summon_cannot_be_entered_twice(
    strategy: ShardingStrategy, options: dict[str, bool], use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    block = model.module.blocks[2]
    for outer, inner in ((model, model), (model, block), (block, model), (block, block)):
        with summon(outer, **options):
            during = local(model)
            with Wire() as wire, pytest.raises(RuntimeError, match="already"), summon(inner, **options):
                pass
            assert wire.sent == []
            assert_same(local(model), during, bitwise=True)
    check_it_still_trains(model, with_root)


@pytest.mark.spec("SUMMON-18")
@ranks(2)
def test_different_units_can_be_summoned_one_inside_the_other() -> None:
    model = wrapped()
    first, second = model.module.blocks[0], model.module.blocks[1]
    with summon(first), summon(second), torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.add_(1.0)
    expected = {n: v + 1.0 if n.startswith(("blocks.0", "blocks.1")) else v for n, v in named(seeded()).items()}
    assert_same(full_values(model), expected, bitwise=True)


@pytest.mark.spec("SUMMON-19")
@pytest.mark.parametrize("writeback", [True, False])
@three
@ranks(2)
def test_after_an_exception_in_the_body_the_shards_are_restored(
    strategy: ShardingStrategy, writeback: bool, use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    before, objects = local(model), list(model.parameters())
    with pytest.raises(KeyError, match="the user's"), summon(model, writeback=writeback):
        raise KeyError("the user's")
    assert_same(local(model), before, bitwise=True)
    assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
    with summon(model, writeback=False):
        assert_same(named(model), named(seeded()), bitwise=True)
    check_it_still_trains(model, with_root)


# --- inspection ---


@pytest.mark.spec("SUMMON-20")
@either
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_summoning_at_any_time_does_not_change_training(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    results = []
    for looks in (False, True):
        model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def look(model: FullyShardedDataParallel = model, looks: bool = looks) -> None:
            for options in ({"writeback": False}, {}, {"writeback": False, "rank0_only": True}) if looks else ():
                with summon(model, **options):
                    seen.append(sum(float(p.sum()) for p in model.parameters()))

        seen: list[float] = []
        for step in range(3):
            optimizer.zero_grad()
            look()
            loss = loss_of(model(batch(step)))
            look()
            loss.backward()
            look()
            optimizer.step()
            look()
        results.append(full_values(model))
    assert len(seen) == 36
    assert_same(results[0], results[1], bitwise=True)


@pytest.mark.spec("SUMMON-20")
@sharding
@ranks(2)
def test_summoning_during_accumulation_keeps_gradients(strategy: ShardingStrategy) -> None:
    for use_orig_params in (False, True):
        model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
        with model.no_sync():
            iterate(model)
            with summon(model):
                pass
        iterate(model, 1)
        with summon(model):
            pass
        iterate(model, 2)
        expected = mean_gradients(seeded(), [0, 1, 2])
        assert_same(whole(model, group=group_of(strategy))[1], expected, bitwise=False)
