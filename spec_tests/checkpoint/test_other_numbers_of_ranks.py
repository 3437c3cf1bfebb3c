"""A training that other numbers of ranks continue again and again, compared with a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spec_tests import subject
from spec_tests.checkpoint import checkpoints
from spec_tests.harness import device, ranks

FULL = StateDictOptions(full_state_dict=True)
# Each number of ranks loads what the one before it saved. Both kinds of checkpoints go to more and to fewer ranks.
CHAIN = [(8, ""), (2, "distributed"), (4, "distributed"), (3, "full"), (1, "distributed"), (8, "full")]


def sharded_on(group: Any, api: str, seed: int, mesh: DeviceMesh | None) -> Any:
    """The model on the ranks of ``group``; with ``mesh``, as two copies."""
    if api == "fully_shard":
        return checkpoints.sharded(api, seed, mesh or DeviceMesh.from_group(group, device().type))
    if mesh is None:
        return checkpoints.sharded(api, seed, process_group=group)
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    options: dict[str, Any] = {"process_group": groups} if api == "flat" else {"device_mesh": mesh}
    return checkpoints.sharded(api, seed, sharding_strategy=subject.ShardingStrategy.HYBRID_SHARD, **options)


def states_of(model: Any, optimizer: Any, options: StateDictOptions | None = None) -> dict[str, Any]:
    weights, states = subject.get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": states}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("PROG-90", "PROG-91", "HYB-10", "FS2-SD-11", "SD-SHARD-04", "OSD-LOAD-08", "SCALE-06")
@pytest.mark.parametrize("api", ["flat", "original", "fully_shard"])
@ranks(8, timeout=150.0)
def test_checkpoints_go_from_one_number_of_ranks_to_another(api: str, tmp_path: Path) -> None:
    plain = checkpoints.make().to(device())
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for turn, (size, form) in enumerate(CHAIN):
        steps, full, distributed = range(2 * turn, 2 * turn + 2), tmp_path / f"{turn}.pt", tmp_path / str(turn)
        checkpoints.train(plain, oracle, steps, ranks=[0])
        group = dist.new_group(list(range(size)))
        mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard")) if size == 4 else None
        if dist.get_rank() < size:
            model = sharded_on(group, api, turn, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if turn == 0 else 1.0)
            if turn:
                load = torch.load(tmp_path / f"{turn - 1}.pt", weights_only=True)
                options = FULL
                if form == "distributed":
                    load, options = states_of(model, optimizer), StateDictOptions()
                    dcp.load(load, checkpoint_id=tmp_path / str(turn - 1), process_group=group)
                weights, states = load["model"], load["optimizer"]
                subject.set_state_dict(
                    model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options
                )
                found, saved = states_of(model, optimizer, FULL), torch.load(tmp_path / f"{turn - 1}.pt")
                checkpoints.assert_same_state(found["model"], saved["model"])
                checkpoints.assert_same_state(found["optimizer"]["state"], saved["optimizer"]["state"])
            checkpoints.train(model, optimizer, steps, ranks=[0])
            dcp.save(states_of(model, optimizer), checkpoint_id=distributed, process_group=group)
            trained = states_of(model, optimizer, FULL)
            # A sum over another number of ranks rounds differently.
            checkpoints.assert_same_state(trained["model"], plain.state_dict(), bitwise=False)
            if dist.get_rank() == 0:
                torch.save(trained, full)
        dist.barrier()
