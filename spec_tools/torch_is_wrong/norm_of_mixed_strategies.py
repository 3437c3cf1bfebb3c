"""If strategies are mixed, the gradient norm is wrong, and ranks can clip by different norms.

``clip_grad_norm_`` sums the squares of all sharded gradients over the shard group of the root. This is correct only if
all units are sharded over the same ranks. If a unit has replicas, its elements are counted once for each replica. If
the root has replicas, shards outside its group are not counted. In the second case ranks get different norms, scale
their shards by different factors, and the replicas diverge.

Four ranks form two replicas of two shards. All ranks have the same batch, so all three norms must be equal.

With torch 2.13.0::

    sharded in sharded: 14.97 on all ranks
    hybrid in sharded: 19.6 on all ranks
    sharded in hybrid: 9.798, 9.798, 13.86, 13.86

With minifsdp::

    sharded in sharded: 14.97 on all ranks
    hybrid in sharded: 14.97 on all ranks
    sharded in hybrid: 14.97 on all ranks

Spec: CLIP-02, CLIP-08. Ranks: 4.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


def main() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    sharded = {"sharding_strategy": ShardingStrategy.FULL_SHARD, "device_id": torch.device("cpu")}
    hybrid = {**sharded, "sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups}
    return "\n".join(
        [
            f"sharded in sharded: {norms(sharded, sharded)}",
            f"hybrid in sharded: {norms(sharded, hybrid)}",
            f"sharded in hybrid: {norms(hybrid, sharded)}",
        ]
    )


def norms(of_root: dict, of_inner: dict) -> str:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.constant_(layer.weight, 0.5)
    # Larger gradients for one half of the first layer.
    layers[1].weight.data[:, 2:] = 1.0
    model = FSDP(nn.Sequential(FSDP(layers[0], **of_inner), layers[1]), **of_root)
    model(torch.ones(1, 4)).sum().backward()
    found: list = [None] * 4
    dist.all_gather_object(found, f"{float(model.clip_grad_norm_(100.0)):.4g}")
    return f"{found[0]} on all ranks" if len(set(found)) == 1 else ", ".join(found)
