"""The state of an optimizer with two dtypes cannot be saved.

Some optimizers store one of the moments in low precision. With original parameters, torch asserts that all states of a
parameter have the same dtype. With flat parameters, torch saves such states.

With torch 2.13.0::

    AssertionError: Expected dtype == info.dtype, got torch.bfloat16 != torch.float32

With minifsdp::

    first torch.bfloat16, second torch.float32

Spec: OSD-04, OSD-08.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Optimizer(torch.optim.Optimizer):
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"first": p.grad.bfloat16(), "second": p.grad**2}


def main() -> str:
    model = FSDP(nn.Linear(4, 4, bias=False), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = Optimizer(model.parameters(), {})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    found = FSDP.optim_state_dict(model, optimizer)["state"]["weight"]
    return ", ".join(f"{name} {value.dtype}" for name, value in found.items())
