"""The buffers of the per-parameter layout: their contents, their order, and their memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp.engine.bucket import AnyBucket, Bucket
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.mesh import Group, default_group
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.precision import Precision
from minifsdp.engine.sharded_param import Options
from minifsdp.engine.shards import shard_of
from minifsdp.fsdp2.fsdp_state import state_of
from spec_tests.engine.buckets import OneBucket, param
from spec_tests.harness import device, ranks
from spec_tests.subject import MixedPrecisionPolicy, fully_shard
from tutorials.gpt.counting import CollectiveCounter

SHAPES = [torch.Size([3, 2]), torch.Size([5]), torch.Size([1, 4])]


def values() -> list[torch.Tensor]:
    """Values that are equal on all ranks. Every element is different."""
    numbers = torch.arange(sum(shape.numel() for shape in SHAPES), dtype=torch.float32, device=device())
    return [part.view(shape) for part, shape in zip(numbers.split([s.numel() for s in SHAPES]), SHAPES, strict=True)]


def bucket_of(group: Group | None, dims: tuple[int, ...] = (0, 0, 0), dtype: torch.dtype | None = None) -> Bucket:
    num, index = (1, 0) if group is None else (group.size, group.rank)
    local_shards = [shard_of(value, dim, num, index) for value, dim in zip(values(), dims, strict=True)]
    params = [param(shape, dim, group) for shape, dim in zip(SHAPES, dims, strict=True)]
    return Bucket(params, local_shards, Options(device(), Precision(dtype)))


def gathered(bucket: AnyBucket) -> None:
    comm_streams = CommStreams(bucket.device)
    comm_streams.all_gather.wait_compute()  # a root does this once per iteration
    layout = OneBucket(bucket)
    layout.all_gather(comm_streams)
    layout.wait()


def world() -> Group:
    return Group.of(default_group())


def check_whole(bucket: Bucket) -> None:
    for _ in range(2):
        gathered(bucket)
        for leaf, value in zip(bucket.leaves, values(), strict=True):
            assert torch.equal(leaf, value.to(leaf.dtype))
        bucket.free()


@pytest.mark.spec("FS2-05", "FS2-06", "FS2-08", "FS2-MP-02")
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(2)
def test_two_ranks_unshard_every_parameter_in_the_compute_dtype(dtype: torch.dtype, dims: tuple[int, ...]) -> None:
    bucket = bucket_of(world(), dims, dtype)
    assert torch.equal(bucket.local_shards[0], values()[0].chunk(2, dim=dims[0])[dist.get_rank()])
    assert {leaf.dtype for leaf in bucket.leaves} == {dtype}
    assert {local_shard.dtype for local_shard in bucket.local_shards} == {torch.float32}
    check_whole(bucket)


@pytest.mark.spec("FS2-26")
@ranks(2)
def test_leaves_have_memory_from_copy_out_to_free_and_remain_the_same_tensors() -> None:
    bucket = bucket_of(world())
    leaves, storage = list(bucket.leaves), bucket.leaves[0].untyped_storage()
    for _ in range(2):
        assert storage.size() == 0
        gathered(bucket)
        # 22 elements; on an accelerator each parameter begins at a multiple of 16 elements.
        assert storage.size() == (bucket.num_bytes if device().type == "cpu" else 3 * 16 * 4)
        assert all(mine is before for mine, before in zip(bucket.leaves, leaves, strict=True))
        bucket.free()


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 0, 1)])
@ranks(4)
def test_a_bucket_on_a_smaller_mesh_is_all_gathered_by_fewer_ranks(dims: tuple[int, ...]) -> None:
    bucket = bucket_of(world(), dims)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = Group.of(pairs[dist.get_rank() // 2])
    gathered(bucket)
    bucket.reshard_to_smaller_mesh(pair)
    bucket.free()
    assert bucket.group is pair
    gathered(bucket)
    for leaf, value in zip(bucket.leaves, values(), strict=True):
        assert torch.equal(leaf, value)
    bucket.free()
    bucket.unshard_from_full_mesh()
    bucket.local_shards[0].add_(1)
    gathered(bucket)
    assert torch.equal(bucket.leaves[0], values()[0] + 1), "from the shards again"


def unit_of_two_layers() -> tuple[nn.Sequential, PerParameterLayout]:
    """Two layers that form one unit, computed in bfloat16."""
    layers = nn.Sequential(nn.Linear(4, 4, device=device()), nn.Linear(4, 4, device=device()))
    fully_shard(layers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    state = state_of(layers)
    assert state is not None
    assert state.unit is not None
    assert isinstance(state.unit.layout, PerParameterLayout)
    return layers, state.unit.layout


@ranks(2)
def test_new_values_of_another_dtype_have_new_leaves() -> None:
    layers, layout = unit_of_two_layers()
    (before,) = layout.buckets
    local_shards = [local_shard.double() for local_shard in before.local_shards]
    layers.double()
    layout.accept_replacements()
    (bucket,) = layout.buckets
    assert bucket.leaves[0] is not before.leaves[0]
    assert bucket.local_shards[0].dtype is torch.float64
    assert all(
        torch.equal(local_shard, former) for local_shard, former in zip(bucket.local_shards, local_shards, strict=True)
    )


@pytest.mark.spec("FS2-08", "NEW-16")
@ranks(2)
def test_a_single_parameter_sharded_along_another_dim_is_concatenated_along_it() -> None:
    group, value = world(), values()[0]
    bucket = Bucket([param(value.shape, 1, group)], [shard_of(value, 1, 2, group.rank)], Options(device()))
    gathered(bucket)
    assert torch.equal(bucket.leaves[0], value)


@pytest.mark.spec("FS2-28")
@ranks(2)
def test_parameters_stored_in_another_dtype_have_their_own_bucket_and_the_compute_dtype() -> None:
    layers, layout = unit_of_two_layers()
    weight = layers[1].weight.full_tensor().detach()
    layers[1].double()
    layout.accept_replacements()
    rest, part = layout.buckets
    gathered(part)
    assert (rest.local.dtype, rest.leaves[0].dtype) == (torch.float32, torch.bfloat16)
    assert (part.local.dtype, part.leaves[0].dtype) == (torch.float64, torch.bfloat16)
    assert torch.equal(part.leaves[0], weight.bfloat16())


LARGE = [torch.Size([1200, 900]), torch.Size([3]), torch.Size([0, 4]), torch.Size([1999, 701])]


def large_bucket(dtype: torch.dtype | None = None, first_dim: int = 0) -> tuple[Bucket, list[torch.Tensor]]:
    """A bucket and its unsharded values. Shards are larger than 256 KiB on average; one is uneven, and one is empty."""
    group = world()
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(LARGE)]
    params = [param(shape, dim, group) for shape, dim in zip(LARGE, (first_dim, 0, 0, 0), strict=True)]
    local_shards = [shard_of(whole, p.dim, group.size, group.rank) for whole, p in zip(wholes, params, strict=True)]
    return Bucket(params, local_shards, Options(torch.device("cpu"), Precision(dtype))), wholes


@pytest.mark.cpu  # the transport of gloo
@pytest.mark.spec("WIRE-10")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@ranks(4)
def test_large_parameters_are_all_gathered_directly_into_their_memory(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIFSDP_TRANSPORT", "messages")
    bucket, wholes = large_bucket(dtype)
    sequence = world().sequence
    sequence.begin_epoch()
    gathered(bucket)  # in the first call, all ranks check that their sizes are equal
    bucket.free()
    for _ in range(2):
        sequence.begin_epoch()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            gathered(bucket)
        names = {event.name for event in profiler.events() or ()}
        assert not names & {"aten::empty", "aten::split_with_sizes_copy"}, "no buffer, and nothing to sort"
        with CollectiveCounter() as counter:
            gathered(bucket)
        assert counter.num_calls == {"all-gather": 1}
        whole = bucket.leaves[0].untyped_storage().nbytes()
        assert counter.peak_gathered == whole, "modes are shown the memory that was gathered into"
        for leaf, whole in zip(bucket.leaves, wholes, strict=True):
            assert torch.equal(leaf, whole.to(leaf.dtype))
        bucket.free()


@pytest.mark.cpu  # the transport of gloo
@pytest.mark.spec("FS2-08", "WIRE-10")
@ranks(2)
def test_large_parameters_sharded_along_another_dim_are_sorted() -> None:
    bucket, wholes = large_bucket(first_dim=1)
    gathered(bucket)
    assert all(torch.equal(leaf, whole) for leaf, whole in zip(bucket.leaves, wholes, strict=True))


@pytest.mark.cpu  # the transport of gloo
@pytest.mark.spec("WIRE-07", "WIRE-10")
@ranks(2)
def test_the_environment_variable_leaves_large_parameters_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIFSDP_TRANSPORT", "collectives")
    bucket, wholes = large_bucket()
    gathered(bucket)
    assert all(torch.equal(leaf, whole) for leaf, whole in zip(bucket.leaves, wholes, strict=True))
