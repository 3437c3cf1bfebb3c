"""All parameters of a unit share one step count in the full optimizer state dict.

This happens with flat parameters. torch stores one step count for each flat parameter. The full dict has an entry for
each original parameter, but all these entries contain the same tensor. ``load_state_dict`` of Adam does not copy it,
and ``torch.save`` and ``torch.load`` keep it shared. So if a plain Adam resumes from this dict, one step adds 1 for
each parameter of the unit. Its bias correction is then wrong, and so are the weights. Here the unit has four
parameters. With original parameters, the count is correct.

With torch 2.13.0::

    loaded 1, 1, 1, 1, after one step 5, 5, 5, 5

With minifsdp::

    loaded 1, 1, 1, 1, after one step 2, 2, 2, 2

Spec: OSD-REKEY-02, PROG-94.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType


def main() -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = FSDP(module, device_id=torch.device("cpu"))
    adam = torch.optim.Adam(model.parameters())
    train(model, adam)
    saved = FSDP.optim_state_dict(model, adam)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    resumed = torch.optim.Adam(plain.parameters())
    resumed.load_state_dict(FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, plain))
    loaded = counts(resumed)
    train(plain, resumed)
    return f"loaded {loaded}, after one step {counts(resumed)}"


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def counts(optimizer: torch.optim.Optimizer) -> str:
    return ", ".join(f"{state['step']:.0f}" for state in optimizer.state.values())
