"""``ShardedGradScaler``: all ranks skip the step, or none does.

Gradients in float16 underflow, so the loss is scaled up before backward and the gradients down after it; if the scale
was too large and some gradient became infinite, the step is skipped and the scale reduced. With sharded gradients the
infinity is found on *one* rank, the one that holds that shard. If only that rank skipped, its shard of the model would
stay behind while all others move on::

    rank 0 finds nothing, steps            with one all-reduce of the maximum of the two flags
    rank 1 finds inf, skips                both find inf, both skip, both reduce their scale

*In torch:* ``sharded_grad_scaler.py``, 377 lines, a good part of them for gradients on the CPU, which the base class
has learnt to unscale since.

Spec: MP-29.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group, default_group


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks agree on whether to step. All ranks must call its methods.

    Args:
        device: type of the device that the gradients are on.
        init_scale: factor of the loss at first.
        backoff_factor: what it is multiplied by after an infinity.
        growth_factor: what it is multiplied by after ``growth_interval`` steps without one.
        growth_interval: steps.
        enabled: if not, nothing is scaled.
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
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # float16 gradients are allowed: keep_low_precision_grads leaves them to an optimizer that can take them.
        wanted, none_found = inv_scale, found_inf
        if _has_gradients_on_the_cpu(optimizer):
            # The base class would send both there without waiting for the copies, and use them at once.
            wanted, none_found = inv_scale.cpu(), found_inf.cpu()
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(optimizer, wanted, none_found, True)
        return self._agreed(found, found_inf)

    def _agreed(self, found: dict[torch.device, torch.Tensor], none_found: torch.Tensor) -> dict[torch.device, Any]:
        """Every rank's answer, on every device of this rank; a rank without gradients has found nothing."""
        flags = [flag.to(none_found.device) for flag in found.values()] or [none_found]
        anywhere = torch.stack(flags).amax(dim=0)
        group = Group.of(self.process_group or default_group())
        collectives.call(dist.all_reduce, group, anywhere, dist.ReduceOp.MAX)
        return {device: anywhere.to(device) for device in found} or {anywhere.device: anywhere}


def _has_gradients_on_the_cpu(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return any(gradient is not None and gradient.device.type == "cpu" for gradient in gradients)
