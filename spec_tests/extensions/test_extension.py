"""Tensor subclasses that define their own all-gather. The example is ``int8_shards.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.extensions import int8_shards
from spec_tests.extensions.int8_shards import Int8Shards, local
from spec_tests.harness import ranks
from spec_tests.models import modules, running, sharding
from spec_tests.oracles import count_collectives
from spec_tests.subject import MixedPrecisionPolicy, fully_shard

WIDTH, batch = modules.WIDTH, running.batch


def bare(rows: int = 4) -> nn.Module:
    return modules.seeded(lambda: nn.Linear(WIDTH, rows, bias=False))


def layer_of(kind: type[int8_shards.Holds], **options: Any) -> Any:
    return fully_shard(int8_shards.extended(bare(), kind), **options)


def sharded(kind: type[int8_shards.Holds], **options: Any) -> Any:
    """A `Stack` whose weights are of ``kind``."""
    return sharding.sharded(int8_shards.extended(modules.seeded(), kind), **options)


def assert_same_steps(model: Any, usual: Any) -> None:
    """Three steps of both models have bitwise equal losses and gradients."""
    for step in range(3):
        assert running.iterate(model, step) == running.iterate(usual, step)
        for (name, mine), other in zip(model.named_parameters(), usual.parameters(), strict=True):
            assert torch.equal(local(mine.grad), local(other.grad)), name
        int8_shards.step_by_hand(model, usual)


# --- the tensors sent and the tensors used for compute ---


@pytest.mark.spec("FS2-EXT-01")
@ranks(2)
def test_layer_computes_with_weights_rebuilt_from_int8_and_the_shard_keeps_its_precision() -> None:
    layer, plain = layer_of(Int8Shards), bare()
    shards = plain.weight.detach().clone().chunk(2)
    with torch.no_grad():
        for row, shard in zip(plain.weight.chunk(2), shards, strict=True):
            step = shard.abs().max() / 127
            row.copy_((shard / step).round() * step)
    for number in range(2):
        torch.testing.assert_close(layer(batch(number)), plain(batch(number)))
    layer(batch()).sum().backward()
    assert isinstance(layer.weight.grad, DTensor)
    expected = sum(batch(0, rank).sum(0) for rank in range(2)) / 2
    torch.testing.assert_close(local(layer.weight.grad), expected.expand(4, WIDTH).chunk(2)[dist.get_rank()])
    layer.unshard()
    torch.testing.assert_close(layer.weight.data, plain.weight.data, msg="a tensor of floats")
    layer.reshard()
    assert isinstance(layer.weight.to_local(), Int8Shards)
    assert torch.equal(local(layer.weight), shards[dist.get_rank()])


@pytest.mark.spec("FS2-EXT-01")
@ranks(2)
def test_a_quarter_of_the_bytes_is_sent() -> None:
    layer = layer_of(Int8Shards)
    layer(batch())
    layer.reshard()
    with count_collectives() as counts:
        layer(batch())
    num_elements = 4 * WIDTH
    assert counts.num_bytes["all_gather"] == num_elements + 2 * 4, "and one scale for each of two ranks"


@pytest.mark.spec("FS2-EXT-04")
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@ranks(2)
def test_an_extension_that_changes_nothing_changes_no_bit(reshard_after_forward: bool | None) -> None:
    options = {"reshard_after_forward": reshard_after_forward}
    assert_same_steps(sharded(int8_shards.Plain, **options), sharding.sharded(**options))


# --- the two methods ---


class Notes(int8_shards.Plain):
    """Records its arguments."""

    given: list[Any] = []

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        Notes.given.append((mesh, size, stride, module, policy))
        return (self.inner,), "metadata"

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        Notes.given.append(([t.shape for t in gathered], metadata, dtype, out is None))
        return super().fsdp_post_all_gather(gathered, metadata, dtype, out=out)


@pytest.mark.spec("FS2-EXT-02")
@ranks(4)
def test_extension_methods_get_shard_mesh_full_shape_module_and_policy() -> None:
    Notes.given.clear()
    mesh, policy = sharding.grid_mesh(), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layer = layer_of(Notes, mesh=mesh, mp_policy=policy)
    layer(batch())
    layer.reshard()
    layer(batch())
    (given_mesh, *arguments), first, _, second = Notes.given
    assert given_mesh == mesh["shard"]
    assert (given_mesh.ndim, given_mesh.get_group()) == (1, mesh.get_group("shard"))
    assert arguments == [(4, WIDTH), (WIDTH, 1), layer, policy]
    assert first == ([(4, WIDTH)], "metadata", torch.float32, True)
    assert second == ([(4, WIDTH)], "metadata", torch.float32, False), "the second time there is a tensor"


@pytest.mark.spec("FS2-EXT-02")
@ranks(2)
def test_rebuilt_tensor_is_freed_and_all_gathered_again() -> None:
    layer = layer_of(Int8Shards)
    layer.unshard()
    storage = layer.weight.untyped_storage()
    assert storage.nbytes() == 4 * WIDTH * 4
    layer.reshard()
    assert storage.nbytes() == 0
    layer(batch()).sum().backward()
    assert storage.nbytes() == 0


class Released(Int8Shards):
    """Computes with a copy, so that the gathered tensors are not needed after the second method."""

    gathered: list[Tensor] = []

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        Released.gathered.extend(gathered)
        return super().fsdp_post_all_gather(gathered, metadata, dtype, out=out)


@pytest.mark.spec("FS2-EXT-07")
@ranks(2)
def test_gathered_tensors_that_an_extension_releases_have_no_memory_in_forward() -> None:
    Released.gathered.clear()
    model = sharded(Released)
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.extend(t.untyped_storage().nbytes() for t in Released.gathered))
    assert_same_steps(model, sharded(Int8Shards))
    assert len(seen) > len(Released.gathered) > 0
    assert set(seen) == {0}


# --- errors ---


class OnlyBefore(int8_shards.Holds):
    """Defines only the first of the two methods, by mistake."""

    fsdp_pre_all_gather = int8_shards.Plain.fsdp_pre_all_gather


class OnlyReleases(int8_shards.Holds):
    """Defines only the optional method, by mistake."""

    fsdp_should_release_all_gather_outputs_after_post_all_gather = (
        Released.fsdp_should_release_all_gather_outputs_after_post_all_gather
    )


@pytest.mark.spec("FS2-EXT-03", "FS2-EXT-07")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OnlyBefore, "fsdp_post_all_gather"),
        (OnlyReleases, r"fsdp_should_release_all_gather\w+ but not fsdp_pre_all_gather"),
    ],
)
@ranks(2)
def test_class_with_only_one_extension_method_is_refused(kind: type[int8_shards.Holds], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        layer_of(kind)(batch())
