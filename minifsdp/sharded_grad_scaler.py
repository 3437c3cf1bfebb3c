"""``minifsdp.sharded_grad_scaler``: same import path as ``torch.distributed.fsdp.sharded_grad_scaler``."""

from minifsdp.fsdp1.grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
