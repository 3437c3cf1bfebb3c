"""Models and parts of training loops for the programs of ``programs.py``.

The blocks have 82 parameters each, with shapes that do not divide evenly, so that there is padding.

Spec: SIM-07.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from spec_tests.extensions.int8_shards import Int8Shards, extended
from spec_tests.harness.simulated.nccl import SimulatedNccl
from spec_tests.models.modules import MLP
from spec_tests.subject import BackwardPrefetch, ModuleWrapPolicy, fully_shard
from spec_tests.subject import FullyShardedDataParallel as FSDP

DEVICE = "sim:0"  # a string: on a machine without the simulation, torch does not support this device


def shown(model: nn.Module) -> list[Tensor]:
    """The local shards of all parameters and of all existing gradients."""
    stored = list(model.parameters())
    stored += [parameter.grad for parameter in stored if parameter.grad is not None]
    return [local(tensor.detach()) for tensor in stored]


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# --- models ---


class Checkpointed(MLP):
    """A block that is recomputed with its hooks in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(super().forward, x, use_reentrant=True, preserve_rng_state=False))


class Shortened(nn.Sequential):
    """Runs only the first ``num_blocks`` blocks."""

    def forward(self, x: Tensor, num_blocks: int = 3) -> Tensor:
        for part in [*self[: 1 + num_blocks], self[-1]]:
            x = part(x)
        return x


class Recomputed(nn.Module):
    """Blocks that are used ``num_uses`` times, and recomputed with their hooks in backward after each use."""

    def __init__(self, num_blocks: int, num_uses: int = 1) -> None:
        super().__init__()
        self.inner, self.num_uses = nn.Sequential(*[MLP(5, 7) for _ in range(num_blocks)]), num_uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_uses):
            x = torch.as_tensor(checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False))
        return x


def chain(kind: type[MLP] = MLP, num_blocks: int = 3) -> nn.Sequential:
    with torch.device(DEVICE):
        return nn.Sequential(nn.Linear(5, 5), *[kind(5, 7) for _ in range(num_blocks)], nn.Linear(5, 3))


def flat(model: nn.Module | None = None, **options: Any) -> FSDP:
    """Wraps the blocks and the model with FSDP1."""
    policy = ModuleWrapPolicy({MLP})
    return FSDP(model or chain(), device_id=torch.device(DEVICE), auto_wrap_policy=policy, **options)


def each(model: nn.Module | None = None, shape: tuple[int, ...] | None = None, **options: Any) -> Any:
    """Shards the blocks and the model with FSDP2."""
    model = model or chain()
    mesh = init_device_mesh("sim", shape or (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **{k: v for k, v in options.items() if k != "reshard_after_forward"})


def blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MLP)]


def recomputed(**options: Any) -> nn.Module:
    """Two recomputed blocks that are used twice."""
    with torch.device(DEVICE):
        model = nn.Sequential(nn.Linear(5, 5), Recomputed(2, num_uses=2))
    return flat(model, use_orig_params=True, backward_prefetch=BackwardPrefetch.BACKWARD_POST, **options)


def prefetching_in_vain(**options: Any) -> nn.Module:
    """A recomputed block prefetches a block whose backward is already over."""
    with torch.device(DEVICE):
        model: nn.Module = nn.Sequential(nn.Linear(5, 5), Recomputed(1), MLP(5, 7))
    again, last = blocks(each(model, **options))
    again.set_modules_to_forward_prefetch([last])
    return model


# --- parts of a training loop ---


def batch() -> Tensor:
    return torch.randn(6, 5, device=DEVICE)


def loss_of(model: nn.Module) -> Tensor:
    return torch.as_tensor(model(batch()).square().sum())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, num_steps: int = 2, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Trains ``num_steps`` steps and returns the optimizer."""
    optimizer = optimizer or sgd(model)
    for _ in range(num_steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def trained(model: Any, num_steps: int = 2) -> Any:
    train(model, num_steps)
    return model


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(batch()))


def accumulating(model: Any) -> Any:
    """The first step has two backwards."""
    optimizer = sgd(model)
    loss_of(model).backward()
    train(model, 2, optimizer)
    return model


def scaled(model: nn.Module, factor: float) -> Any:
    """Multiplies the parameters in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def assign_new_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 2


def with_new_data(model: nn.Module) -> nn.Module:
    """New data is assigned between two steps."""
    optimizer = train(model, 1)
    assign_new_data(model)
    train(model, 1, optimizer)
    return model


def with_kept_gradients(model: Any) -> list[Tensor]:
    """The program keeps the gradients of the first step while later steps make new ones."""
    loss_of(model).backward()
    kept = [local(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    train(model, 2)
    return [*shown(model), *kept]


def step_in_backward(model: nn.Module) -> nn.Module:
    """A hook of each parameter runs an optimizer step during backward."""

    def step(parameter: Tensor) -> None:
        torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loss_of(model).backward()
    return model


class Failure(Exception):
    """The error that programs raise on purpose."""


def fail_in_backward(model: nn.Module) -> None:
    def fail(_: Tensor) -> None:
        raise Failure

    def register_on_output(_: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hook = blocks(model)[0].register_forward_hook(register_on_output)
    loss = loss_of(model)
    hook.remove()
    with contextlib.suppress(Failure):
        loss.backward()


def use_threads() -> None:
    """Makes synchronous collectives run in threads and return a handle, like those of gloo."""
    SimulatedNccl.has_threads = True


# --- an all-gather extension ---


class ScaledInt8(Int8Shards):
    """Adds the rank's own scale after the all-gather; the scale is metadata, written before the all-gather."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        sent, shape = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return sent, (shape, sent[1].clone())

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        shape, scale = metadata
        made = super().fsdp_post_all_gather(gathered, shape, param_dtype, out=out)
        whole = out if made is None else made[0]
        assert whole is not None
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):
            whole.add_(scale)
        return made


def extended_chain(kind: Any = Int8Shards, bias: bool = True) -> nn.Module:
    """A chain whose layers can be split in two without padding, as `Int8Shards` requires."""
    with torch.device(DEVICE):
        return extended(nn.Sequential(nn.Linear(5, 6, bias), nn.Linear(6, 4, bias), nn.Linear(4, 2, bias)), kind)


def trained_extended(model: nn.Module, num_steps: int = 2, **options: Any) -> list[Tensor]:
    for part in [*model.children(), model]:
        fully_shard(part, mesh=init_device_mesh("sim", (dist.get_world_size(),)), **options)
    train(model, num_steps, torch.optim.SGD(model.parameters(), lr=0.01, foreach=False))
    return [tensor.inner if isinstance(tensor, Int8Shards) else tensor for tensor in shown(model)]
