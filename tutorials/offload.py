"""CPU offload: shards are stored in CPU memory, and copied to the GPU only for computation.

    torchrun --standalone --nproc-per-node 2 tutorials/offload.py

Output: the bytes in CPU memory, the copies to the device and back, and the losses compared to those without offload.

It takes a few seconds on two CPU cores.

Sharding divides the stored bytes by the number of ranks. If the result still does not fit,
``CPUOffload(offload_params=True)`` moves the shards of a rank, their gradients and the state of the optimizer to CPU
memory, the *host*::

    host      shard                                          gradient of the shard, optimizer, step
                |  H2D                                            ^  D2H
    GPU         +-> shard -> all-gather -> compute -> reduce-scatter

What you learn:

1. **What is copied.** Before each all-gather, the shard is copied to the GPU
   (``H2D``). After each reduction, the gradient is copied to the host (``D2H``). So in each step a shard is copied to
   the GPU twice, in forward and in backward, and its gradient is copied back once. The root is not all-gathered again
   in backward, so it is copied to the GPU only once. The bus to the host transfers some tens of gigabytes per second.
   So offload is only efficient with much computation for each parameter, that is, with large batches.
2. **The optimizer runs on the CPU.** The parameters of the optimizer are on the host, so its step runs on the CPU, for
   1/N of the parameters. This is noticeably slower than on a GPU.
3. **Nothing else changes.** Losses, checkpoints and clipping stay the same.
4. **Accumulation.** The gradient of the second of two batches must be *added* to that of the first, which is already on
   the host. According to its documentation, torch's FullyShardedDataParallel replaces it instead, so torch requires
   ``no_sync`` with offload. minifsdp is correct with and without ``no_sync``. Inside ``no_sync``, unsharded gradients
   stay on the GPU, and only their reduced sum is copied to the host, once.

Without a GPU, host and device share the same memory, so nothing is copied. The events show where the copies would be.

Spec: OFF-01 to OFF-07.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from common import Block, Place, from_all_ranks, mean_over_ranks, on_ranks, say
from torch import Tensor, nn

from minifsdp import CPUOffload, trace
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.trace import Recorder
from minifsdp.wrap import ModuleWrapPolicy

NUM_BLOCKS, WIDTH, NUM_STEPS = 3, 64, 5
CPU = torch.device("cpu")


def build(place: Place, *, offload: bool) -> FSDP:
    torch.manual_seed(0)
    # The model is on the CPU. Each unit is moved to the device and sharded, and its shard is moved back.
    model = nn.Sequential(*[Block(WIDTH) for _ in range(NUM_BLOCKS)], nn.Linear(WIDTH, WIDTH))
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        cpu_offload=CPUOffload(offload_params=offload),
        device_id=place.device,
    )


def loss_of(model: FSDP, step: int, place: Place) -> Tensor:
    generator = torch.Generator().manual_seed(step * place.num_ranks + place.rank)
    x = torch.randn(16, WIDTH, generator=generator).to(place.device)
    return nn.functional.mse_loss(model(x), x + x.roll(1, dims=1))


def train(model: FSDP, place: Place) -> tuple[list[float], Recorder, torch.optim.Optimizer]:
    """The losses, the events of the last step, and the optimizer with its state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with trace.record() as recorder:
            loss = loss_of(model, step, place)
            loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses, recorder, optimizer


def accumulated(model: FSDP, place: Place, *, without_sync: bool) -> tuple[list[Tensor], int]:
    """The accumulated gradients of two batches, and the number of copies of a gradient to the host."""
    model.zero_grad()
    with trace.record() as recorder:
        with model.no_sync() if without_sync else nullcontext():
            loss_of(model, 0, place).backward()
        loss_of(model, 1, place).backward()
    return [p.grad.cpu() for p in model.parameters()], recorder.count("D2H")


def bytes_of(recorder: Recorder, kind: str) -> int:
    return sum(event.num_bytes for event in recorder.events if event.kind == kind)


def lesson(place: Place) -> None:
    plain, offloaded = build(place, offload=False), build(place, offload=True)
    losses, recorder, _ = train(plain, place)
    theirs, events, optimizer = train(offloaded, place)
    slices = sum(p.numel() * p.element_size() for p in offloaded.parameters())
    root = slices - sum(p.numel() * p.element_size() for b in offloaded.module[:NUM_BLOCKS] for p in b.parameters())
    up, down = bytes_of(events, "H2D"), events.count("D2H")
    order = [word for word in events.order("H2D", "AG", "RS", "D2H") if word.split(" ")[1:] == ["1"]]

    say(place, f"losses {' '.join(f'{loss:.5f}' for loss in theirs)}; without offload the last is {losses[-1]:.5f}")
    say(place, f"each rank stores shards of {slices:,} bytes on {next(offloaded.parameters()).device}")
    say(place, f"in a step it copies {up:,} bytes to the device, and {down} gradients back; without offload none")
    say(place, f"block 1 in one step: {' '.join(order)}")
    assert all(abs(one - other) <= 1e-6 * other for one, other in zip(theirs, losses, strict=True))
    assert losses[-1] < losses[0]
    assert all(p.device == CPU and p.grad.device == CPU for p in offloaded.parameters())
    assert all(value.device == CPU for state in optimizer.state.values() for value in state.values())
    assert order == ["H2D 1", "AG 1", "H2D 1", "AG 1", "RS 1", "D2H 1"]
    assert up == 2 * (slices - root) + root
    assert down == NUM_BLOCKS + 1
    assert recorder.count("H2D") == recorder.count("D2H") == 0
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(offloaded.state_dict()[name].cpu(), value.cpu())

    added, copies = accumulated(offloaded, place, without_sync=False)
    once, copies_once = accumulated(offloaded, place, without_sync=True)
    expected, _ = accumulated(plain, place, without_sync=False)
    say(place, f"two batches: {copies} gradients to the host, {copies_once} with no_sync, and the same sum")
    assert (copies, copies_once) == (2 * (NUM_BLOCKS + 1), NUM_BLOCKS + 1)
    for one, other, plainly in zip(added, once, expected, strict=True):
        torch.testing.assert_close(one, plainly)
        torch.testing.assert_close(other, plainly)
    norms = from_all_ranks(offloaded.clip_grad_norm_(1.0).item())
    assert len(set(norms)) == 1


if __name__ == "__main__":
    on_ranks(lesson)
