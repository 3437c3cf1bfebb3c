"""Mistakes that ``fully_shard`` and a sharded module refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Scale, Tied, seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded
from spec_tests.subject import fully_shard


@pytest.mark.spec("FS2-08")
@ranks(2)
def test_fully_shard_refuses_uneven_other_dim() -> None:
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        fully_shard(nn.Linear(3, 4, bias=False), shard_placement_fn=lambda parameter: Shard(1))


@pytest.mark.spec("FS2-18")
@ranks(2)
def test_mesh_with_three_dimensions_is_refused() -> None:
    mesh = init_device_mesh(device().type, (1, 1, 2))
    with pytest.raises(ValueError, match=r"(?i)3|dim|mesh"):
        fully_shard(seeded(), mesh=mesh)


@pytest.mark.spec("FS2-24")
@ranks(2)
def test_a_parameter_tied_across_groups_is_refused() -> None:
    model = seeded(Tied)
    with pytest.raises(ValueError, match=r"weight.*|shared|tied"):
        fully_shard(model.first)
        fully_shard(model)
        model(batch())


@pytest.mark.spec("FS2-25")
@ranks(2)
def test_scalars_and_containers_without_forward_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight.* is a scalar and has no dim"):
        fully_shard(Scale())
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match=type(container).__name__):
            fully_shard(container)


@pytest.mark.spec("FS2-10")
@ranks(2)
def test_the_root_before_its_submodules_is_refused() -> None:
    model = fully_shard(seeded())
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)inner|submodule|inside|bottom"):
        fully_shard(model.blocks[0])
        model(batch())


@pytest.mark.spec("FS2-11")
@ranks(2)
def test_the_same_module_twice_is_refused() -> None:
    model = sharded()
    for module in (model, model.blocks[0]):
        with pytest.raises((ValueError, RuntimeError, AssertionError), match=r"(?i)already|twice|once"):
            fully_shard(module)
    iterate(model)


@pytest.mark.spec("FS2-12")
@ranks(2)
def test_two_apis_cannot_be_nested() -> None:
    model = seeded()
    fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="fully_shard"):
        subject.FullyShardedDataParallel(model)
    model = seeded()
    model.blocks[0] = subject.FullyShardedDataParallel(model.blocks[0])
    with pytest.raises(ValueError, match="FullyShardedDataParallel"):
        fully_shard(model)
    with pytest.raises(ValueError, match="FullyShardedDataParallel"):
        fully_shard(subject.FullyShardedDataParallel(seeded()))


@pytest.mark.spec("FS2-01")
@ranks(2)
def test_fully_shard_refuses_invalid_module_and_mesh() -> None:
    for wrong in ("model", None, 3, torch.ones(2)):
        with pytest.raises((TypeError, ValueError), match="fully_shard expects a module or a list of modules"):
            fully_shard(wrong)
    with pytest.raises(TypeError, match="sharding_strategy"):
        fully_shard(seeded(), sharding_strategy=None)


@pytest.mark.spec("FS2-27")
@pytest.mark.parametrize(
    "name", ["no_sync", "clip_grad_norm_", "state_dict_type", "summon_full_params", "register_comm_hook"]
)
@ranks(2)
def test_methods_of_the_wrapper_are_absent(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(sharded(), name)


@pytest.mark.spec("FS2-14")
@ranks(2)
def test_calling_forward_directly_is_an_error() -> None:
    model = sharded()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.forward(batch())
    iterate(model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.forward(batch())


@pytest.mark.spec("FS2-04")
@ranks(2)
def test_a_dtensor_of_other_placements_is_refused_in_place_of_a_shard() -> None:
    """Defect: shape and mesh are compared but placements are not, so an unsharded value is accepted as a shard."""
    model = sharded()
    weight = model.blocks[1].linear.weight
    whole = weight.detach().redistribute(placements=[Replicate()])
    model.blocks[1].linear.weight = nn.Parameter(whole)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.linear\.weight.*removed or replaced"):
        model(batch())
