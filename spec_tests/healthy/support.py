"""Shared code of the healthy programs: the implementation, a small model, its batches, and plain training.

`Training` holds a sharded model and a plain copy. `Training.step` trains both on the same batches: the sharded model on
the batch of this rank, the plain model on the batches of all ranks. `Training.check` compares all parameters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# Programs import this module while other ranks already train, so it imports no other helpers.
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, StateDictType, fully_shard

WRAPPER_PARTS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")
WIDTH = 8


class Net(nn.Module):
    """Layers that run one after the other."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, num_layers: int | None = None) -> Tensor:
        for layer in list(self.layers)[:num_layers]:
            x = layer(x).tanh()
        return self.head(x)


def shard(api: str, model: Any, *, keep: bool = False, group: Any = None, **options: Any) -> Any:
    """Shards the layers of a `Net` and then the rest of it, with one of the two APIs.

    Args:
        api: ``"wrapper"`` or ``"fully_shard"``.
        model: the `Net`.
        keep: whether parameters stay unsharded after forward.
        group: the process group; the default group if it is missing.
        options: other options of the API.
    """
    if api == "wrapper":
        options.setdefault("sharding_strategy", ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD)
    else:
        options["reshard_after_forward"] = not keep
    for index, layer in enumerate(getattr(model, "layers", ())):
        model.layers[index] = unit(api, layer, group, **options)
    return unit(api, model, group, **options)


def unit(api: str, module: nn.Module, group: Any = None, **options: Any) -> Any:
    """Shards a module that becomes one unit."""
    if api == "wrapper":
        return FSDP(module, device_id=torch.device("cpu"), process_group=group, **options)
    if group is not None:
        options["mesh"] = DeviceMesh.from_group(group, "cpu")
    return fully_shard(module, **options)


def batch(of_rank: int, step: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + of_rank)
    return torch.randn(rows, WIDTH, generator=generator)


class Training:
    """A sharded model and a plain copy of it, both trained with SGD.

    Args:
        api: ``"wrapper"`` or ``"fully_shard"``.
        net: the plain model; a `Net` if it is missing.
        ranks: the ranks that train it; all if they are missing.
        options: see `shard`.
    """

    def __init__(
        self,
        api: str,
        net: Any = None,
        *,
        ranks: Iterable[int] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        net = Net() if net is None else net
        self.api, self.plain = api, copy.deepcopy(net)
        self.ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self.model = shard(api, net, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)

    def loss(self, step: int, rows: int = 4, **options: Any) -> Tensor:
        """The loss of the sharded model for the batch of this rank."""
        loss: Tensor = self.model(batch(dist.get_rank(), step, rows), **options).square().mean()
        return loss

    def plain_loss(self, of_rank: int, step: int, rows: int = 4, **options: Any) -> Tensor:
        """The same of the plain model, divided by the number of ranks, for the batch of any rank."""
        loss: Tensor = self.plain(batch(of_rank, step, rows), **options).square().mean() / len(self.ranks)
        return loss

    def plain_backward(self, step: int, rows: Callable[[int], int] = lambda _: 4, **options: Any) -> None:
        for of_rank in self.ranks:
            self.plain_loss(of_rank, step, rows(of_rank), **options).backward()

    def update(self) -> None:
        """Steps both optimizers, and clears the gradients of both models."""
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def step(self, step: int, rows: Callable[[int], int] = lambda _: 4, **options: Any) -> None:
        """One training step of both."""
        self.loss(step, rows(dist.get_rank()), **options).backward()
        self.plain_backward(step, rows, **options)
        self.update()

    def syncs(self, micro: int, count: int) -> Any:
        """Only the last of ``count`` micro-batches reduces gradients; the parameters stay unsharded until then."""
        is_last = micro == count - 1
        if self.api == "wrapper":
            return nullcontext() if is_last else self.model.no_sync()
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_reshard_after_backward(is_last)
        return nullcontext()

    def check(self) -> None:
        """Checks that the parameters of both are equal. All ranks that train the model must call this."""
        is_wrapped = any(isinstance(module, FSDP) for module in self.model.modules())
        with FSDP.summon_full_params(self.model, writeback=False) if is_wrapped else nullcontext():
            found, expected = (
                {WRAPPER_PARTS.sub("", name): full(parameter) for name, parameter in model.named_parameters()}
                for model in (self.model, self.plain)
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def num_sent(self, group: Any = None) -> int:
        """The number of collectives that torch has counted in a process group."""
        number: int = (group or dist.group.WORLD)._get_sequence_number_for_group()
        return number


def full(tensor: Any) -> Tensor:
    """The unsharded tensor of a `DTensor`. All its ranks must call this."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def state_dict_of(model: Any) -> dict[str, Any]:
    """A full state dict, on all ranks that call it."""
    if isinstance(model, FSDP):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return dict(model.state_dict())
    return {name: full(value) for name, value in model.state_dict().items()}
