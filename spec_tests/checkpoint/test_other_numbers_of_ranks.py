"""A training that other numbers of ranks continue again and again, compared with a plain model."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import make, quiet, wrapped
from spec_tests.harness import device, ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import grid
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
APIS = ("flat", "original", "fully_shard")
SIZES = (4, 2, 3, 4)


def directory() -> str:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return str(box[0])


def sharded(api: str, group: dist.ProcessGroup, hybrid: str, seed: int) -> nn.Module:
    """The model on the ranks of ``group``, with replicas if ``hybrid`` is not empty."""
    model = make(seed)
    names = ("replicate", "shard")
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=names) if hybrid == "mesh" else None
    if api == "fully_shard":
        mesh = DeviceMesh.from_group(group, device().type) if mesh is None else mesh
        for part in (model.first, model.second, model):
            subject.fully_shard(part, mesh=mesh)
        return model
    options: dict[str, Any] = {"process_group": group}
    if hybrid:
        options = {"device_mesh": mesh} if hybrid == "mesh" else {"process_group": grid()}
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    return wrapped(model, use_orig_params=api == "original", **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for number in range(first, first + 2):
        optimizer.zero_grad()
        # All ranks have the same batch, so the number of ranks does not change the mean.
        model(batch(number, 0, width=3)).square().mean().backward()
        optimizer.step()


def move(model: nn.Module, optimizer: Any, form: str, path: str, group: dist.ProcessGroup, *, loads: bool) -> None:
    """Saves to or loads from ``path``."""
    with quiet():
        if form == "distributed":
            weights, states = subject.get_state_dict(model, optimizer)
            both = {"model": weights, "optimizer": states}
            if not loads:
                dcp.save(both, checkpoint_id=path, process_group=group)
                return
            dcp.load(both, checkpoint_id=path, process_group=group)
            options = StateDictOptions()
        elif not loads:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights, states = subject.get_state_dict(model, optimizer, options=options)
            both = {"model": weights, "optimizer": states}
            if dist.get_rank() == 0:
                torch.save(both, path)
            return
        else:
            both = torch.load(path, weights_only=True)
            options = StateDictOptions(full_state_dict=True)
        subject.set_state_dict(
            model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"], options=options
        )


@ranks(4)
def check_chain(api: str, form: str, hybrid: str) -> None:
    plain = make().to(device())
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.01)
    path = directory()
    # With replicas, four ranks have two copies, and fewer ranks have one.
    for turn, size in enumerate(SIZES):
        group = dist.new_group(list(range(size)))
        with_replicas = hybrid if size == 4 else ""
        if with_replicas == "groups":
            grid()
        if dist.get_rank() < size:
            model = sharded(api, group, with_replicas, seed=turn)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if turn == 0 else 1.0)
            if turn:
                move(model, optimizer, form, f"{path}/{turn - 1}", group, loads=True)
                assert_same(full_values(model), dict(plain.named_parameters()))
            train(model, optimizer, 2 * turn)
        train(plain, oracle, 2 * turn)
        if dist.get_rank() < size:
            assert_same(full_values(model), dict(plain.named_parameters()))
            move(model, optimizer, form, f"{path}/{turn}", group, loads=False)
        dist.barrier()


@pytest.mark.parametrize("form", ["full", "distributed"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.spec("PROG-90")
def test_checkpoints_go_from_four_ranks_to_two_to_three_and_back(api: str, form: str) -> None:
    check_chain(api=api, form=form, hybrid="")


@pytest.mark.parametrize(
    ("api", "hybrid", "form"),
    [*((api, "mesh", "distributed") for api in APIS), ("flat", "groups", "full")],
)
@pytest.mark.spec("PROG-91")
def test_checkpoints_go_from_replicas_to_one_copy_and_back(api: str, hybrid: str, form: str) -> None:
    check_chain(api=api, form=form, hybrid=hybrid)
