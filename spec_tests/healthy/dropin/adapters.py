"""Adapters for a frozen, column-sharded model, a head that runs outside forward, generation, and an averaged copy."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

WIDTH, RANK, CLASSES = 8, 2, 6


class Adapted(nn.Module):
    """A frozen layer plus a trained low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.frozen(x)) + self.up(self.down(x)) / math.sqrt(RANK)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Adapted() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.temperature = nn.Parameter(torch.ones(1))

    def features(self, x):
        return self.norm(self.layers(x))

    def forward(self, x):
        return self.head(self.features(x)) / self.temperature

    @torch.no_grad()
    def generate(self, x, length):
        chosen = []
        for _ in range(length):
            scores = self.head(self.features(x)) / self.temperature
            chosen.append(scores.argmax(-1))
            x = x + scores.mean(-1, keepdim=True)
        return torch.stack(chosen, dim=1)


def by_columns(parameter):
    even = parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if even and not parameter.requires_grad else None


def shard(model, device):
    offload = CPUOffloadPolicy(pin_memory=False) if device.type == "cpu" else OffloadPolicy()
    ignored = {model.temperature}
    for layer in model.layers:
        fully_shard(layer, shard_placement_fn=by_columns, offload_policy=offload, ignored_params=ignored)
    fully_shard([model.norm, model.head], reshard_after_forward=False, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    register_fsdp_forward_method(model, "generate")
    return model


def batch(step, device):
    dice = torch.Generator().manual_seed(13 * step + dist.get_rank())
    x = torch.randn(4, WIDTH, generator=dice)
    return x.to(device), torch.randint(CLASSES, (4,), generator=dice).to(device)


def main(device):
    torch.manual_seed(0)
    model = shard(Model().to(device), device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.9)
    average = [parameter.detach().clone() for parameter in trained]

    losses = []
    for step in range(5):
        handle = model.layers[0].unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        x, target = batch(step, device)
        handle.wait()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        # FSDP does not average the gradients of ignored parameters.
        dist.all_reduce(model.temperature.grad)
        model.temperature.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            for mine, parameter in zip(average, trained, strict=True):
                mine.lerp_(parameter, 0.1)

    model.eval()
    model.set_reshard_after_forward(False)
    generated = model.generate(batch(99, device)[0], 3).tolist()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(model, optimizer, moments, options=StateDictOptions(full_state_dict=True))
    averages = [getattr(mine, "full_tensor", lambda mine=mine: mine)().double().sum().item() for mine in average]
    sums = {name: value.double().sum().item() for name, value in state.items()}
    kept = sorted(moments["state"])
    return {"losses": losses, "generated": generated, "sums": sums, "averages": averages, "kept": kept}
