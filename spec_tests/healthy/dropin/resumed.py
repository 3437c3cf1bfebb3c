"""A model is built on the meta device, sharded on a 2-D mesh, saved as a distributed checkpoint, and resumed."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spec_tests.healthy.dropin.model import Transformer, loss_of


class Training(Stateful):
    """The state to save: model and optimizer, through torch's state-dict functions."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def build(mesh, device):
    with torch.device("meta"):
        model = Transformer(checkpoint_wrapper)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    return model


def initialise(model):
    """Rank 0 draws the values and distributes them to all ranks."""
    values = {}
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        values = Transformer().state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)


def train(model, optimizer, steps, device):
    losses = []
    for step in steps:
        loss = loss_of(model, step, dist.get_rank(), device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main(device):
    mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    folder = os.path.join(os.environ.get("CHECKPOINTS", "."), "transformer")

    model = build(mesh, device)
    initialise(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, range(3), device)
    dcp.save({"training": Training(model, optimizer)}, checkpoint_id=folder)
    uninterrupted = train(model, optimizer, range(3, 6), device)

    again = build(mesh, device)
    optimizer = torch.optim.Adam(again.parameters(), lr=1e-2)
    dcp.load({"training": Training(again, optimizer)}, checkpoint_id=folder)
    resumed = train(again, optimizer, range(3, 6), device)
    moments = sum(state["exp_avg_sq"].full_tensor().sum().item() for state in optimizer.state.values())
    return {"losses": losses, "uninterrupted": uninterrupted, "resumed": resumed, "moments": moments}
