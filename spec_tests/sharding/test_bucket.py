"""Large parameters of the per-parameter layout: all-gathered directly into their memory, or sorted afterwards."""

from __future__ import annotations

import pytest
import torch

from minifsdp.checks.collective_log import log
from minifsdp.engine.bucket import Bucket
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.mesh import Group, default_group
from minifsdp.engine.precision import Precision
from minifsdp.engine.sharded_param import Options
from minifsdp.engine.shards import shard_of
from spec_tests.harness import ranks
from spec_tests.models.buckets import OneBucket, param
from tutorials.gpt.counting import CollectiveCounter


def gathered(bucket: Bucket) -> None:
    comm_streams = CommStreams(bucket.device)
    comm_streams.all_gather.wait_compute()  # a root does this once per iteration
    layout = OneBucket(bucket)
    layout.all_gather(comm_streams)
    layout.wait()


def world() -> Group:
    return Group.of(default_group())


LARGE = [torch.Size([1000, 600]), torch.Size([3]), torch.Size([0, 4]), torch.Size([999, 701])]


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
@ranks(2)
def test_large_parameters_are_all_gathered_directly_into_their_memory(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIFSDP_TRANSPORT", "messages")
    bucket, wholes = large_bucket(dtype)
    sequence = log.sequence_of(world())
    sequence.begin_epoch()
    gathered(bucket)  # in the first call, all ranks check that their sizes are equal
    bucket.free()
    for _ in range(2):
        sequence.begin_epoch()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            gathered(bucket)
        names = {event.name for event in profiler.events() or ()}
        assert not names & {"aten::empty", "aten::split_with_sizes_copy"}, "no buffer is allocated or sorted"
        with CollectiveCounter() as counter:
            gathered(bucket)
        assert counter.num_calls == {"all-gather": 1}
        whole = bucket.leaves[0].untyped_storage().nbytes()
        assert counter.peak_gathered == whole, "dispatch modes see the memory of the gathered values"
        for leaf, whole in zip(bucket.leaves, wholes, strict=True):
            assert torch.equal(leaf, whole.to(leaf.dtype))
        bucket.free()


@pytest.mark.cpu  # the transport of gloo
@pytest.mark.spec("FS2-08", "WIRE-07", "WIRE-10")
@pytest.mark.parametrize(("first_dim", "transport"), [(1, "messages"), (0, "collectives")])
@ranks(2)
def test_large_parameters_of_another_dim_are_sorted_and_gloo_sends_them_on_request(
    first_dim: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIFSDP_TRANSPORT", transport)
    bucket, wholes = large_bucket(first_dim=first_dim)
    gathered(bucket)
    assert all(torch.equal(leaf, whole) for leaf, whole in zip(bucket.leaves, wholes, strict=True))
