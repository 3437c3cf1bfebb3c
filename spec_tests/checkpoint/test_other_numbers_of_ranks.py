"""A training that other numbers of ranks continue again and again, compared with a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spec_tests.checkpoint.checkpoints import fully_sharded, make, quiet, train, wrapped
from spec_tests.harness import device, ranks
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import ShardingStrategy, get_state_dict, set_state_dict

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
APIS = ("flat", "original", "fully_shard")
CHANGING_SIZE = pytest.mark.spec("PROG-90", "FS2-SD-11", "SD-SHARD-04", "OSD-LOAD-08")
WITH_REPLICAS = pytest.mark.spec("PROG-91", "HYB-10")
MANY_RANKS = pytest.mark.spec("SCALE-06")


def sharded(api: str, group: dist.ProcessGroup, hybrid: str, mesh: DeviceMesh | None, seed: int) -> nn.Module:
    """The model on the ranks of ``group``; with ``mesh``, as replicas."""
    model = make(seed)
    if api == "fully_shard":
        return fully_sharded(model, mesh or DeviceMesh.from_group(group, device().type))
    options: dict[str, Any] = {"process_group": group}
    if mesh is not None:
        groups = mesh.get_group("shard"), mesh.get_group("replicate")
        options = {"device_mesh": mesh} if hybrid == "mesh" else {"process_group": groups}
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    return wrapped(model, use_orig_params=api == "original", **options)


def save(model: nn.Module, optimizer: Any, form: str, path: Path, group: dist.ProcessGroup) -> None:
    options = StateDictOptions(full_state_dict=form == "full", cpu_offload=form == "full")
    weights, states = get_state_dict(model, optimizer, options=options)
    both = {"model": weights, "optimizer": states}
    if form == "distributed":
        dcp.save(both, checkpoint_id=path, process_group=group)
    elif dist.get_rank() == 0:
        torch.save(both, path)


def load(model: nn.Module, optimizer: Any, form: str, path: Path, group: dist.ProcessGroup) -> None:
    if form == "distributed":
        weights, states = get_state_dict(model, optimizer)
        both = {"model": weights, "optimizer": states}
        dcp.load(both, checkpoint_id=path, process_group=group)
    else:
        both = torch.load(path, weights_only=True)
    options = StateDictOptions(full_state_dict=form == "full")
    set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"], options=options
    )


def all_values(model: nn.Module, optimizer: Any) -> list[Any]:
    """The full parameters and states of the optimizer. All ranks of the model must call it."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    values = (weights | states).items()
    return [(name, value.tolist()) for name, value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(
    ("api", "form", "hybrid", "sizes"),
    [
        *(pytest.param(api, "full", "", (4, 2, 3, 4), marks=CHANGING_SIZE) for api in APIS),
        # From 8 ranks to 2, to 4, to 3, and back to 8.
        *(pytest.param(api, "distributed", "", (8, 2, 4, 3, 8), marks=(CHANGING_SIZE, MANY_RANKS)) for api in APIS),
        *(pytest.param(api, "distributed", "mesh", (4, 3, 4), marks=WITH_REPLICAS) for api in APIS),
        pytest.param("original", "distributed", "", (4, 1, 4), marks=CHANGING_SIZE),
        pytest.param("flat", "full", "groups", (4, 2, 4), marks=WITH_REPLICAS),
        pytest.param("flat", "distributed", "groups", (4, 2, 4), marks=WITH_REPLICAS),
    ],
)
@ranks(8, timeout=150.0)
def test_checkpoints_go_from_one_number_of_ranks_to_another(
    api: str, form: str, hybrid: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    plain = make().to(device())
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.01)
    before: list[Any] = []
    # With replicas, four ranks have two copies, and fewer ranks have one.
    for turn, size in enumerate(sizes):
        group = dist.new_group(list(range(size)))
        mesh = None
        if hybrid and size == 4:
            mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        if dist.get_rank() < size:
            model = sharded(api, group, hybrid, mesh, seed=turn)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if turn == 0 else 1.0)
            if turn:
                with quiet():
                    load(model, optimizer, form, tmp_path / str(turn - 1), group)
                    assert all_values(model, optimizer) == before
            train(model, optimizer, [2 * turn, 2 * turn + 1], ranks=[0])
        train(plain, oracle, [2 * turn, 2 * turn + 1], ranks=[0])
        if dist.get_rank() < size:
            assert_same(full_values(model), dict(plain.named_parameters()))
            with quiet():
                save(model, optimizer, form, tmp_path / str(turn), group)
                before = all_values(model, optimizer)
        box = [before]
        dist.broadcast_object_list(box)
        before = box[0]
