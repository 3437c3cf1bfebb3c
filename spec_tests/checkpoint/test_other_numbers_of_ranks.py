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

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import fully_sharded, make, quiet, train_alike, wrapped
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import grid
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
APIS = ("flat", "original", "fully_shard")
SIZES = (4, 2, 3, 4)
CHANGING_SIZE, WITH_REPLICAS = pytest.mark.spec("PROG-90"), pytest.mark.spec("PROG-91")


def sharded(api: str, group: dist.ProcessGroup, hybrid: str, seed: int) -> nn.Module:
    """The model on the ranks of ``group``, with replicas if ``hybrid`` is not empty."""
    model = make(seed)
    names = ("replicate", "shard")
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=names) if hybrid == "mesh" else None
    if api == "fully_shard":
        mesh = DeviceMesh.from_group(group, device().type) if mesh is None else mesh
        return fully_sharded(model, mesh)
    options: dict[str, Any] = {"process_group": group}
    if hybrid:
        options = {"device_mesh": mesh} if hybrid == "mesh" else {"process_group": grid()}
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    return wrapped(model, use_orig_params=api == "original", **options)


def move(model: nn.Module, optimizer: Any, form: str, path: Path, group: dist.ProcessGroup, *, loads: bool) -> None:
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


@pytest.mark.parametrize(
    ("api", "form", "hybrid"),
    [
        *(pytest.param(api, form, "", marks=CHANGING_SIZE) for api in APIS for form in ("full", "distributed")),
        *(pytest.param(api, "distributed", "mesh", marks=WITH_REPLICAS) for api in APIS),
        pytest.param("flat", "full", "groups", marks=WITH_REPLICAS),
    ],
)
@ranks(4)
def test_checkpoints_go_from_four_ranks_to_two_to_three_and_back(
    api: str, form: str, hybrid: str, tmp_path: Path
) -> None:
    plain = make().to(device())
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.01)
    # With replicas, four ranks have two copies, and fewer ranks have one.
    for turn, size in enumerate(SIZES):
        group = dist.new_group(list(range(size)))
        with_replicas, steps = hybrid if size == 4 else "", range(2 * turn, 2 * turn + 2)
        if with_replicas == "groups":
            grid()
        if dist.get_rank() < size:
            model = sharded(api, group, with_replicas, seed=turn)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if turn == 0 else 1.0)
            if turn:
                move(model, optimizer, form, tmp_path / str(turn - 1), group, loads=True)
                assert_same(full_values(model), dict(plain.named_parameters()))
            train_alike(model, optimizer, steps)
        train_alike(plain, oracle, steps)
        if dist.get_rank() < size:
            assert_same(full_values(model), dict(plain.named_parameters()))
            move(model, optimizer, form, tmp_path / str(turn), group, loads=False)
        dist.barrier()
