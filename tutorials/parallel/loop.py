"""The training loop of the programs in this folder: steps, clipping, and checkpoints for other numbers of ranks.

Each program builds a model on a mesh, and trains it to predict the next byte of a source file of Python. The global
batch of a step does not depend on the number of ranks, so the losses do not either. A training continues on another
number of ranks::

    torchrun --standalone --nproc-per-node 4 tutorials/parallel/together.py --save FOLDER
    torchrun --standalone --nproc-per-node 2 tutorials/parallel/together.py --load FOLDER
"""

import argparse
import inspect
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

BATCH, LENGTH = 8, 32
Backward = Callable[[Tensor, Tensor], Tensor]


def train(build: Callable[[], tuple[nn.Module, Sequence[list[nn.Parameter]], Backward]]) -> None:
    """Joins the ranks, builds the model, and trains it.

    Args:
        build: returns the model, its parameters in one list for each mesh, and a function. The function gets inputs and
            targets, each of shape (`BATCH`, `LENGTH`), computes the gradients and returns this rank's part of the loss.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="how many steps to train")
    parser.add_argument("--load", help="folder of a checkpoint, of any number of ranks")
    parser.add_argument("--save", help="folder for a checkpoint")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # The same initial weights on every rank.
    model, groups, backward = build()
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.5)
    state = {"model": model.state_dict(), "step": 0}
    if args.load:
        dcp.load(state, checkpoint_id=args.load)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    for step in range(state["step"], state["step"] + args.steps):
        part = text[step * BATCH * LENGTH :][: BATCH * LENGTH + 1]
        loss = backward(part[:-1].view(BATCH, LENGTH), part[1:].view(BATCH, LENGTH)).detach()
        # Operators of DTensor need tensors of one mesh, and each mesh counts once in the norm of all gradients.
        norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
        square = sum(norm.full_tensor() ** 2 / norm.device_mesh.size() for norm in norms)
        dist.all_reduce(square)
        norm = square.sqrt()
        for group in groups:
            clip_grads_with_norm_(group, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step}   loss {loss:.5f}   norm {norm:.5f}", flush=True)
        state["step"] += 1
    if args.save:
        dcp.save(state, checkpoint_id=args.save)
    dist.destroy_process_group()
