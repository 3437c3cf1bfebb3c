"""Hybrid sharding: shard within a machine, and replicate between machines.

    torchrun --standalone --nproc-per-node 4 tutorials/hybrid.py

Output: for each strategy, the bytes that a rank stores, and the bytes within machines, between machines and on every
link.

It takes some seconds on two CPU cores. Four ranks simulate two machines with two GPUs each::

                    near: shard
                   -------------->
    machine 0        rank 0  rank 1        |
    machine 1        rank 2  rank 3        v   far: replicate

Links between GPUs of one machine carry hundreds of gigabytes per second; the network between machines carries a tenth
of that. ``FULL_SHARD`` does not distinguish the two. Its all-gathers and reductions use all links, so the network is
the bottleneck: three times the model crosses it in each step. ``HYBRID_SHARD`` shards within a machine, a *row* of the
picture, and keeps one replica in each row. Its all-gathers then stay inside the machine. Only gradients cross the
network, once for each step, and each rank only sends its own shard of them.

The table shows the bytes for each rank and a model of M bytes. There are N = 4 ranks in rows of G = 2, and collectives
are rings:

=====================  ============  =============================  ======================
strategy               stored        sent, to the next in the row   sent, across
=====================  ============  =============================  ======================
``FULL_SHARD``         M / 4         3 * (3 / 4) M, over each link  the same: it is a ring
``HYBRID_SHARD``       M / 2         3 * (1 / 2) M                  2 * (1 / 2) * (M / 2)
``_HYBRID_..._ZERO2``  M / 2         2 * (1 / 2) M                  2 * (1 / 2) * (M / 2)
``NO_SHARD``           M             2 * (3 / 4) M, over each link  the same: it is a ring
=====================  ============  =============================  ======================

So hybrid sharding reduces network traffic and needs more memory: a rank stores a half of the model instead of a
quarter. Choose it if the model fits into the GPUs of one machine together. It saves more in larger clusters. The ZeRO-2
form also saves the all-gathers in backward, but keeps unsharded parameters in memory from forward to backward. If
replicas span machines, try ``NCCL_CROSS_NIC=1``. NCCL reads this variable; minifsdp does not.

The losses of all four strategies are the same, because the mean over rows and then over columns is the mean over all
ranks.

Spec: HYB-01 to HYB-06, HYB-09, HYB-11, HYB-12, COST-06.
"""

from __future__ import annotations

from collections import Counter

import torch
from common import Block, Place, from_all_ranks, mean_over_ranks, on_ranks, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, trace
from minifsdp.trace import Event
from minifsdp.wrap import ModuleWrapPolicy

NUM_BLOCKS, WIDTH, NUM_STEPS, PER_MACHINE = 3, 32, 4, 2
HYBRIDS = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
Link = tuple[int, int]


def shard(strategy: ShardingStrategy, place: Place) -> FSDP:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(WIDTH) for _ in range(NUM_BLOCKS)]).to(place.device)
    mesh = None
    if strategy in HYBRIDS:
        # Dimension 0 replicates and dimension 1 shards, in this order. Every rank must create the whole mesh.
        shape = (place.num_ranks // PER_MACHINE, PER_MACHINE)
        mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        device_mesh=mesh,
        device_id=place.device,
    )


def train(model: FSDP, place: Place) -> tuple[list[float], list[Event]]:
    """The losses, and the events of the last step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, events = [], []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step * place.num_ranks + place.rank)
        x = torch.randn(16, WIDTH, generator=generator).to(place.device)
        with trace.record() as recorder:
            loss = nn.functional.mse_loss(model(x), x + x.roll(1, dims=1))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        events = recorder.events
        losses.append(mean_over_ranks(loss))
    return losses, events


def sent_by(rank: int, events: list[Event]) -> Counter[Link]:
    """The bytes that a rank sends on each link, if each collective is a ring through its group in rank order."""
    sent: Counter[Link] = Counter()
    for event in events:
        if event.kind in ("AG", "RS", "AR"):
            size = len(event.ranks)
            following = event.ranks[(event.ranks.index(rank) + 1) % size]
            # An all-reduce is a reduce-scatter followed by an all-gather.
            times = 2 if event.kind == "AR" else 1
            sent[rank, following] += times * event.num_bytes * (size - 1) // size
    return sent


def links_of(place: Place, events: list[Event]) -> Counter[Link]:
    """The bytes on all links, summed over all ranks. Every rank must call it."""
    together: Counter[Link] = Counter()
    for sent in from_all_ranks(sent_by(place.rank, events)):
        together += sent
    return together


def is_far(link: Link) -> bool:
    return link[0] // PER_MACHINE != link[1] // PER_MACHINE


def lesson(place: Place) -> None:
    if place.num_ranks % PER_MACHINE:
        raise SystemExit(f"the number of ranks must be a multiple of {PER_MACHINE}, got {place.num_ranks}; start 4")
    whole = 4 * sum(p.numel() for block in [Block(WIDTH)] * NUM_BLOCKS for p in block.parameters())
    say(place, f"a model of {whole:,} bytes; machine 0 is ranks 0 and 1, machine 1 is ranks 2 and 3")
    say(place, f"\n{'bytes':<21}{'stored':>10}{'near, in all':>14}{'far, in all':>14}   last loss   each link")
    losses, stored, far = {}, {}, {}
    strategies = (ShardingStrategy.FULL_SHARD, *HYBRIDS, ShardingStrategy.NO_SHARD)
    for strategy in strategies:
        model = shard(strategy, place)
        losses[strategy], events = train(model, place)
        links = links_of(place, events)
        stored[strategy] = 4 * sum(p.numel() for p in model.parameters())
        far[strategy] = sum(num_bytes for link, num_bytes in links.items() if is_far(link))
        near = sum(links.values()) - far[strategy]
        shown = " ".join(f"{a}>{b}:{num_bytes:,}" for (a, b), num_bytes in sorted(links.items()))
        numbers = f"{stored[strategy]:>10,}{near:>14,}{far[strategy]:>14,}{losses[strategy][-1]:>12.5f}"
        say(place, f"{strategy.name:<21}{numbers}   {shown}")
        if strategy in HYBRIDS:
            local_shards = from_all_ranks([p.detach().cpu() for p in model.parameters()])
            same = [all(map(torch.equal, local_shards[0], local_shards[rank])) for rank in range(place.num_ranks)]
            # Ranks in the same column have the same shard, ranks in the same row have different ones.
            assert same == [rank % PER_MACHINE == 0 for rank in range(place.num_ranks)]

    full, hybrid, zero2, none = strategies
    num_ranks, size = place.num_ranks, PER_MACHINE
    for one in strategies:
        assert all(abs(a - b) < 1e-5 * b for a, b in zip(losses[one], losses[none], strict=True)), one
    assert [stored[one] for one in strategies] == [whole // num_ranks, whole // size, whole // size, whole]
    # The ring through all ranks has two far links. With hybrid sharding, every rank has a far link for its shard.
    assert far[full] == num_ranks // size * 3 * whole * (num_ranks - 1) // num_ranks
    num_rows = num_ranks // size
    assert far[hybrid] == far[zero2] == num_ranks * 2 * (whole // size) * (num_rows - 1) // num_rows
    assert far[hybrid] < far[full] / 2
    say(
        place,
        f"\nacross the network: {far[hybrid] / whole:g} times the model; with FULL_SHARD {far[full] / whole:g} times",
    )


if __name__ == "__main__":
    on_ranks(lesson, num_ranks=4, at_least=4)
