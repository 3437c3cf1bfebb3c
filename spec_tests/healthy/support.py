"""Shared code of the healthy programs: the implementation, a small model, its batches, and plain training.

`Training` holds a sharded model and a plain copy. `Training.step` trains both on the same batches: the sharded model on
the batch of this rank, the plain model on the batches of all ranks. `Training.check` compares all parameters.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, StateDictType, fully_shard

wrap: Callable[..., Any] = partial(FSDP, device_id=torch.device("cpu"))
WRAPPER_PARTS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")
WIDTH = 8


def rank() -> int:
    return dist.get_rank()


def late(seconds: float, on: int = 1) -> None:
    """One rank does something else for some seconds."""
    if rank() == on:
        time.sleep(seconds)


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
    names = list(dict(getattr(model, "layers", nn.ModuleList()).named_children()))
    if api == "wrapper":
        options = {
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD,
            **options,
        }
        for name in names:
            model.layers[int(name)] = wrap(model.layers[int(name)], process_group=group, **options)
        return wrap(model, process_group=group, **options)
    if group is not None:
        options["mesh"] = mesh_of(group)
    for name in names:
        fully_shard(model.layers[int(name)], reshard_after_forward=not keep, **options)
    return fully_shard(model, reshard_after_forward=not keep, **options)


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def batch(of_rank: int, step: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + of_rank)
    return torch.randn(rows, WIDTH, generator=generator)


def full_parameters(model: Any) -> dict[str, Tensor]:
    """The unsharded parameters of a model, by their names in the plain model. All ranks must call this."""
    if any(isinstance(module, FSDP) for module in model.modules()):
        with FSDP.summon_full_params(model, writeback=False):
            found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    else:
        found = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in model.named_parameters()
        }
    return {WRAPPER_PARTS.sub("", name): value for name, value in found.items()}


def assert_same(model: Any, plain: nn.Module) -> None:
    """Checks that a sharded model has the parameters of a plain one."""
    expected = {WRAPPER_PARTS.sub("", name): value.detach() for name, value in plain.named_parameters()}
    torch.testing.assert_close(full_parameters(model), expected, rtol=1e-4, atol=1e-5)


class Training:
    """A sharded model and a plain copy of it, both trained with SGD.

    Args:
        api: ``"wrapper"`` or ``"fully_shard"``.
        net: the plain model; a `Net` if it is missing.
        ranks: the ranks that train it; all if they are missing.
        change: called with the model before it is sharded.
        options: see `shard`.
    """

    def __init__(
        self,
        api: str,
        net: Any = None,
        *,
        ranks: Iterable[int] | None = None,
        change: Callable[[Any], object] = lambda model: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        net = Net() if net is None else net
        self.api, self.plain = api, copy.deepcopy(net)
        self.ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        change(net)
        self.model = shard(api, net, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)

    def loss(self, step: int, rows: int = 4, **options: Any) -> Tensor:
        """The loss of the sharded model for the batch of this rank."""
        loss: Tensor = self.model(batch(rank(), step, rows), **options).square().mean()
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
        self.loss(step, rows(rank()), **options).backward()
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
        """Checks that the parameters of both are equal."""
        assert_same(self.model, self.plain)


def num_sent(group: Any) -> int:
    """The number of collectives that torch has counted in a process group."""
    number: int = group._get_sequence_number_for_group()
    return number


def state_dict_of(model: Any) -> dict[str, Any]:
    """A full state dict, on all ranks that call it."""
    if isinstance(model, FSDP):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state: dict[str, Any] = model.state_dict()
            return state
    return {name: value.full_tensor() for name, value in model.state_dict().items()}
