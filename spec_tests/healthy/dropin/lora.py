"""Fine-tuning with low-rank adapters: most parameters are frozen, and each adapter is a unit."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy

WIDTH, RANK, STEPS = 12, 2, 4


class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_down = nn.Linear(width, RANK, bias=False)
        self.lora_up = nn.Linear(RANK, width, bias=False)
        nn.init.normal_(self.lora_up.weight, std=0.02)

    def forward(self, x):
        return self.base(x) + self.lora_up(self.lora_down(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.project = Adapted(WIDTH)

    def forward(self, x):
        return x + torch.relu(self.project(self.norm(x)))


def wrapping_policy():
    def is_trained_leaf(module):
        return (
            not list(module.named_children())
            and getattr(module, "weight", None) is not None
            and (module.weight.requires_grad)
        )

    leaves = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_trained_leaf)
    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    return functools.partial(_or_policy, policies=[leaves, layers])


def main(device):
    torch.manual_seed(0)

    model = nn.Sequential(nn.Embedding(9, WIDTH).requires_grad_(False), Layer(), Layer())
    model = FSDP(
        model,
        auto_wrap_policy=wrapping_policy(),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=device,
        limit_all_gathers=True,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    report = {"units": len(FSDP.fsdp_modules(model)), "losses": [], "norms": []}
    dice = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        tokens = torch.randint(9, (4, 5), generator=dice).to(device)
        loss = model(tokens).square().mean()
        loss.backward()
        report["norms"].append(model.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        report["losses"].append(loss.item())

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state = model.state_dict()
    report["adapters"] = {name: value.double().sum().item() for name, value in state.items() if "lora_" in name}
    report["frozen"] = sum(value.double().sum().item() for name, value in state.items() if "lora_" not in name)
    return report
