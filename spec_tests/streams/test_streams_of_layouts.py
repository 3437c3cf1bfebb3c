"""The waits, copies and alignment of layouts, and gradients and inputs across devices, on simulated streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp.cases.containers import move
from minifsdp.cases.replaced_parameters import accept_changes
from minifsdp.engine.bucket import Bucket
from minifsdp.engine.comm_streams import CommStream, CommStreams
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_params import assign_gradient
from minifsdp.engine.layout import owned_parameters
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import reads_gradient
from minifsdp.engine.sharded_param import Options
from minifsdp.engine.shards import shard_of
from minifsdp.fsdp1.training import clip_gradients
from spec_tests.harness import device, ranks
from spec_tests.models import buckets, small
from spec_tests.models.modules import chain
from spec_tests.models.stand_in import StandIn, machine
from spec_tests.subject import fully_shard

# Stand-ins replace streams and groups. On an accelerator, the tests in spec_tests/streams use real ones.
pytestmark = pytest.mark.cpu

__all__ = ["machine"]

ANYTHING: Any = None
PAIR = Group(ANYTHING, 2, 0, (0, 1))
F32, BF16 = torch.float32, torch.bfloat16


# --- layouts ---


def flat(*, keeps: bool = False, **options: Any) -> FlatLayout:
    module, precision = nn.Linear(3, 2), Precision(keep_reduce_dtype=keeps)
    parameters = owned_parameters([("", module)], set())
    return FlatLayout(module, parameters, MeshGroups(None, None), torch.device("cpu"), precision, **options)


@pytest.mark.pure
@pytest.mark.spec("STREAM-11")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradient_is_read_if_there_is_one_or_a_post_accumulate_hook(use_orig_params: bool) -> None:
    layout = flat(use_orig_params=use_orig_params)
    assert not reads_gradient(layout)
    parameter = layout.local_parameters[0]
    parameter.grad = torch.zeros_like(parameter)
    assert reads_gradient(layout)
    parameter.grad = None
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert reads_gradient(layout)


@pytest.mark.pure
@pytest.mark.spec("STREAM-10")
@pytest.mark.parametrize(("keeps", "dtype"), [(False, F32), (True, BF16)])
def test_gradient_is_copied_to_cpu_in_stored_dtype(keeps: bool, dtype: torch.dtype) -> None:
    layout = flat(offload=True, keeps=keeps)
    assert layout.copy_to_host(torch.ones(8, dtype=BF16)).dtype is dtype


@pytest.mark.spec("STREAM-10")
@ranks(2)
def test_unit_of_several_dtypes_or_without_pinned_memory_makes_no_early_host_copy() -> None:
    layer = nn.Linear(4, 4, device=device())
    layer.bias = nn.Parameter(layer.bias.to(BF16))
    mixed, plain = units_of_two(layer), units_of_two(nn.Linear(4, 4, device=device()))
    local_shard = torch.ones(10, dtype=BF16, device=device())
    mixed._pins = plain._pins = True
    assert mixed.copy_to_host(local_shard) is local_shard
    assert plain.copy_to_host(local_shard).dtype is F32
    plain._pins = False
    assert plain.copy_to_host(local_shard) is local_shard


def units_of_two(layer: nn.Module) -> Any:
    """The layout of a layer that is sharded in place."""
    from minifsdp.fsdp2.fsdp_state import state_of

    state = state_of(fully_shard(layer))
    assert state is not None
    assert state.unit is not None
    return state.unit.layout


class Following(CommStream):
    """A communication stream that counts the calls of `wait_compute`."""

    num = 0

    def wait_compute(self, event: Any = None) -> None:
        self.num += 1


def num_follows(layout: Any) -> int:
    comm_streams = CommStreams(device())
    comm_streams.all_gather = comm_stream = Following("gather", device())
    handle, num = layout.all_gather(comm_streams), comm_stream.num
    handle.wait()
    layout.free()
    return num


@pytest.mark.spec("STREAM-05")
@ranks(2)
def test_all_gather_waits_only_for_copy_made_for_it() -> None:
    model = small.shard_each(chain(1), use_orig_params=True)
    layout = small.units_of(model)[-1].layout
    assert num_follows(layout) == 0
    for parameter in layout.local_parameters:
        parameter.data = parameter.data * 2
    assert num_follows(layout) == 1
    assert num_follows(layout) == 0


@pytest.mark.spec("STREAM-05")
@ranks(2)
def test_all_gather_waits_for_copy_of_replaced_tensor() -> None:
    layer = nn.Linear(4, 4, device=device())
    layout = units_of_two(layer)
    assert num_follows(layout) == 0
    layer.load_state_dict({name: value * 2 for name, value in layer.state_dict().items()}, assign=True)
    accept_changes(layout)
    assert num_follows(layout) == 1
    assert num_follows(layout) == 0


@pytest.mark.pure
@pytest.mark.spec("STREAM-04")
@pytest.mark.proof("order only")
def test_all_gather_of_one_rank_is_awaited(machine: StandIn) -> None:
    params, value = [buckets.param(torch.Size([4, 2]), 0, None)], torch.ones(4, 2)
    layout = buckets.OneBucket(Bucket(params, [value], Options(torch.device("cpu"), Precision(BF16))))
    layout.all_gather(machine.comm_streams())
    layout.wait()
    assert machine.log == ["compute waits for gather"]


def aligned(group: Group | None, dtype: torch.dtype | None) -> Bucket:
    meta = torch.device("meta")
    shapes = [torch.Size([3, 1]), torch.Size([5]), torch.Size([1, 7])]
    values = [torch.empty(shape, device=meta) for shape in shapes]
    local_shards = [shard_of(value, 0, 1 if group is None else group.size, 0) for value in values]
    return Bucket([buckets.param(shape, 0, group) for shape in shapes], local_shards, Options(meta, Precision(dtype)))


@pytest.mark.pure
@pytest.mark.spec("STREAM-12")
@pytest.mark.parametrize("group", [None, PAIR], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("dtype", [None, BF16, torch.uint8], ids=str)
def test_leaves_begin_at_multiples_of_16_bytes_and_sent_data_has_no_gaps(
    group: Group | None, dtype: torch.dtype | None
) -> None:
    bucket = aligned(group, dtype)
    assert [leaf.storage_offset() * leaf.itemsize % 16 for leaf in bucket.leaves] == [0, 0, 0]
    assert [leaf.numel() for leaf in bucket.leaves] == [3, 5, 7]
    if group is not None:
        assert bucket.local.numel() == 2 + 3 + 7
    assert bucket.num_bytes == (3 + 5 + 7 if group is None else 4 + 6 + 14) * bucket.dtype.itemsize


@pytest.mark.pure
@pytest.mark.spec("STREAM-12")
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_gaps_between_leaves_of_one_rank_keep_their_positions_under_a_cast(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(Bucket, "_aligned", lambda self, numel: -(-numel // 16) * 16)
    values = [torch.arange(3.0), torch.arange(3.0, 8.0).view(5, 1)]
    params = [buckets.param(value.shape, 0, None) for value in values]
    bucket = Bucket(params, values, Options(torch.device("cpu"), Precision(dtype)))
    layout = buckets.OneBucket(bucket)
    layout.all_gather(CommStreams(torch.device("cpu")))
    layout.wait()
    for leaf, value in zip(bucket.leaves, values, strict=True):
        assert torch.equal(leaf, value.to(leaf.dtype))


# --- gradients and inputs across devices ---


class Strict(SimpleNamespace):
    """A parameter that rejects a gradient on another device than its data, like torch's parameters."""

    def __setattr__(self, name: str, value: Tensor) -> None:
        assert name == "data" or value.device == self.data.device
        super().__setattr__(name, value)


@pytest.mark.pure
@pytest.mark.spec("STREAM-08")
def test_a_gradient_of_the_same_shape_on_another_device_is_assigned() -> None:
    data = torch.ones(3)
    parameter: Any = Strict(data=data, shape=data.shape, dtype=data.dtype, device=data.device)
    gradient = torch.empty(3, device="meta")
    assign_gradient(parameter, gradient)
    assert parameter.grad is gradient
    assert parameter.data is data


class Copies(TorchDispatchMode):
    """Records the target device of each copy between devices, and counts the asynchronous copies."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[str] = []
        self.num_asynchronous = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.to.append(result.device.type)
            self.num_asynchronous += bool((kwargs or {}).get("non_blocking"))
        return result


@pytest.mark.pure
@pytest.mark.spec("STREAM-13")
def test_inputs_have_been_read_when_their_copy_returns() -> None:
    with Copies() as copies:
        move(torch.device("meta"), (torch.ones(2), [torch.ones(3)]))
    assert copies.to == ["meta", "meta"]
    assert copies.num_asynchronous == 0


@pytest.mark.pure
@pytest.mark.spec("STREAM-14")
def test_clipping_offloaded_gradients_takes_one_copy_to_the_device_and_one_back() -> None:
    with FakeTensorMode(), Copies() as copies:
        gradients = [torch.ones(3), torch.ones(2, dtype=BF16), torch.ones(4), torch.ones(4, device="cuda")]
        copies.to.clear()
        clip_gradients([((), gradient) for gradient in gradients], 1.0, 2.0, torch.device("cuda", 0))
    assert copies.to.count("cuda") == 1
    assert copies.to.count("cpu") == 2, "the factor, once for each dtype"
