"""``ShardedGradScaler``: all ranks skip the step, or none does.

Gradients in float16 can underflow, so the scaler multiplies the loss before backward and divides the gradients after
it. If the scale is too large and a gradient becomes infinite, the scaler skips the step and reduces the scale. With
sharded gradients, only the rank with that shard finds the infinity. If only this rank skipped the step, the optimizers
would update all shards of the model except this one::

    rank 0 finds no inf, steps             with one all-reduce of the maximum of the two flags
    rank 1 finds inf, skips                both find inf, both skip, both reduce their scale

*In torch:* ``sharded_grad_scaler.py``, 377 lines. Many of these lines unscale gradients on the CPU, which the base
class now does itself.

Spec: MP-29.
"""

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from minifsdp.engine.exchange import call
from minifsdp.engine.mesh import Group, default_group


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks agree on whether to step. All ranks must call its methods.

    Args:
        device: device type of the gradients.
        init_scale: initial scale of the loss.
        backoff_factor: factor for the scale after an infinity or NaN.
        growth_factor: factor for the scale after ``growth_interval`` steps without infinities.
        growth_interval: number of steps between increases of the scale.
        enabled: whether the loss and the gradients are scaled.
        process_group: the ranks that must agree; ``None`` means the default group.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # By name, because libraries replace the constructor of the base class by one that sets the device.
        super().__init__(
            device=device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        flag = found_inf
        if any(
            parameter.grad is not None and parameter.grad.device.type == "cpu"
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            # The base class would copy both to the CPU asynchronously and use them before the copies have finished.
            inv_scale = inv_scale.cpu()
            flag = found_inf.cpu()
        # Allow float16 gradients: with keep_low_precision_grads, an optimizer can get gradients in low precision.
        flags: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, flag, True
        )
        # Without gradients, the flag of this rank is 0.
        local_flags = [one.to(found_inf.device) for one in flags.values()]
        any_inf = torch.stack(local_flags or [found_inf]).amax(dim=0)
        ranks = Group.of(self.process_group or default_group())
        call(dist.all_reduce, ranks, any_inf, dist.ReduceOp.MAX)
        return {device: any_inf.to(device) for device in flags or [any_inf.device]}
