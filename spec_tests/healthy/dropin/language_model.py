"""A small language model in bfloat16 with accumulation, explicit prefetching, clipping, a schedule and evaluation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, LENGTH, LAYERS = 23, 16, 7, 4
STEPS, MICRO_BATCHES = 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (width // 2) ** 0.5 + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(self.norm(x))


def prefetch(model, ahead):
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])


def batches(rank, step, device):
    dice = torch.Generator().manual_seed(97 * step + rank)
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=dice).to(device)
        yield tokens[:, :-1], tokens[:, 1:]


def main(device):
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)

    model = Model().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    root_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=root_policy)
    prefetch(model, 2)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        model.unshard()
        for i, (inputs, targets) in enumerate(batches(rank, step, device)):
            is_last = i == MICRO_BATCHES - 1
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        inputs, targets = next(batches(rank, 1000, device))
        evaluated = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    sums = {name: parameter.full_tensor().double().sum().item() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "sums": sums}
