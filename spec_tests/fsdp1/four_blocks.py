"""Four equal blocks inside a root with parameters of its own: the model that most tests of the wrapper speak of.

The orders in these tests are written the way one would say them aloud: ``AG2`` is the gather of block 2, ``FREER`` is
the root being freed, and a bar stands between forward and backward::

    AGR AG0 F0 FREE0 AG1 F1 FREE1 | AG1 B1 AG0 FREE1 RS1 B0 FREE0 RS0 FREER RSR

The oracle is the same model, unwrapped, in the same process: it computes the batches of all ranks one after the other
and averages the gradients. Two ranks add two numbers, and a sum of two has no order, so there the comparison is bit by
bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_policies
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifsdp import FullyShardedDataParallel, ShardingStrategy, trace
from minifsdp.wrap import ModuleWrapPolicy
from spec_tests.harness import device, kept

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
FLAT_STRATEGIES = (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)
HYBRID_STRATEGIES = (HYBRID_SHARD, HYBRID_SHARD_ZERO2)
WIDTH = 6
UNITS = ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3")


class Block(nn.Module):
    """42 parameters with the usual width."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class WideBlock(Block):
    """A block of a size of its own, by which its collectives can be recognised."""

    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        super().__init__(width)
        self.linear, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.linear(x)))


class Stack(nn.Module):
    """Blocks between two layers of the root: 42 + 14 = 56 parameters of its own, used first and last."""

    def __init__(self, width: int = WIDTH, hidden: Iterable[int] = ()) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList([WideBlock(size, width) for size in hidden] or [Block(width) for _ in range(4)])
        self.leave = nn.Linear(width, 2)
        self.order: Iterable[int] = range(4)

    def forward(self, x: Tensor, order: Iterable[int] | None = None) -> Tensor:
        x = self.enter(x)
        for index in self.order if order is None else order:
            x = self.blocks[index](x)
        return self.leave(x)


def seeded(build: Callable[[], nn.Module] = Stack) -> nn.Module:
    """The same values in every process and in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return build().to(device())


def sharded(model: nn.Module | None = None, **options: Any) -> FullyShardedDataParallel:
    """Each block a unit, the rest the root's. A strategy that needs two groups gets those of a 2 x 2 `grid`."""
    if options.get("sharding_strategy") in HYBRID_STRATEGIES:
        options.setdefault("process_group", grid())
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    return FullyShardedDataParallel(seeded() if model is None else model, **options)


def grid() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Four ranks: 0 and 1 shard, 2 and 3 shard; 0 and 2 are replicas, 1 and 3 are replicas."""
    return kept("grid", _make_grid)


def _make_grid() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    rows, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    columns, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    all_connected()
    return rows, columns


def all_connected() -> None:
    """To be called after new groups were made: a rank whose test ends closes its groups, and if another one is still
    connecting to it at that time, that one fails.
    """
    dist.all_reduce(torch.zeros(1, device=device()))


def batch(step: int = 0, rank: int | None = None, width: int = WIDTH) -> Tensor:
    """One rank's part of a step's batch: three samples."""
    rank = dist.get_rank() if rank is None else rank
    dice = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, width, generator=dice).to(device())


def as_torch(model: nn.Module, **options: Any) -> torch_fsdp.FullyShardedDataParallel:
    """The other oracle: the same model in torch's own wrapper, with the same units."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = torch_policies.ModuleWrapPolicy({Block})
        return torch_fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device(), **options)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def iterate(model: nn.Module, step: int = 0, **arguments: Any) -> float:
    """Forward and backward of one batch; the loss."""
    loss = loss_of(model(batch(step), **arguments))
    loss.backward()
    return float(loss.detach())


# --- what was recorded, as one would say it ---


def said(events: Iterable[trace.Event], *, waits: bool = False) -> str:
    """The events as words. The forward and the backward of the root are left out: they surround everything.

    Where the limiter holds the CPU back depends on the pace of the device, and is told if ``waits`` asks for it.
    """
    words = [(event.kind, event.unit.removeprefix("blocks.") or "R") for event in events]
    left_out = [("F", "R"), ("B", "R")]
    return " ".join(kind + unit for kind, unit in words if (kind, unit) not in left_out and (kind != "WAIT" or waits))


def recorded_iteration(model: FullyShardedDataParallel, step: int = 0) -> str:
    """Forward and backward, in words, with a bar in between and ``keepR`` where the root stays gathered."""
    with trace.record() as forward:
        loss = loss_of(model(batch(step)))
    with trace.record() as backward:
        loss.backward()
    keeps = " keepR" if "AGR" in said(forward.events) and "FREER" not in said(forward.events) else ""
    return f"{said(forward.events)}{keeps} | {said(backward.events)}"


def of_unit(recorder: trace.Recorder, unit: str, *kinds: str) -> list[str]:
    """The kinds of one unit's events, in order; only the given ones, or all but those of the limiter (see `said`)."""
    kept = [event.kind for event in recorder.events if event.unit == unit]
    return [kind for kind in kept if (kind in kinds if kinds else kind != "WAIT")]


class Wire(TorchDispatchMode):
    """Sees every collective that PyTorch executes, whoever asked for it: a second witness beside the tracer.

    Attributes:
        sent: of every collective the kind, and how many elements were gathered or reduced: the larger of what goes in
            and what comes out.
        values: those among them that carried parameters or gradients. The others carry integers: before the first
            gather of a unit, ranks make sure that all of them mean the same one (NEW-19).
    """

    # On the CPU torch's own wrapper gathers into a list of tensors.
    KINDS = {"_allgather_base_": "AG", "allgather_": "AG", "_reduce_scatter_base_": "RS", "allreduce_": "AR"}

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.values: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        tensors = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
        seen = self.KINDS.get(name, name), max(sum(tensor.numel() for tensor in several) for several in tensors)
        self.sent.append(seen)
        if any(tensor.is_floating_point() for several in tensors for tensor in several):
            self.values.append(seen)

    def kinds(self) -> list[str]:
        """The kinds of those that carried values."""
        return [kind for kind, _ in self.values]


class Watch:
    """Looks over the shoulder of each unit's layer while it computes. To be made before wrapping.

    It keeps the *storage* of the weight that the layer computes with, and can therefore say later whether that memory
    is still there. It sees the middle of a unit's forward, and of its backward: the moment when the gradient of the
    layer's output is known and that of its weight is not.

    Attributes:
        storages: by unit, the storage of what was computed with last.
        computed: by unit, the sizes of the weights seen in forward.
        in_forward: called with the unit's name in the middle of its forward.
        in_backward: the same in the middle of its backward.
    """

    def __init__(self, model: Stack) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.in_forward: Callable[[str], None] = lambda unit: None
        self.in_backward: Callable[[str], None] = lambda unit: None
        self._lay(model.enter, "")
        for index, block in enumerate(model.blocks):
            self._lay(block.linear, f"blocks.{index}")

    def _lay(self, layer: nn.Module, unit: str) -> None:
        def seen(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.storages[unit] = module.weight.untyped_storage()
            self.in_forward(unit)
            if output.requires_grad:
                output.register_hook(lambda _: self.in_backward(unit))

        layer.register_forward_hook(seen)

    def alive(self) -> list[str]:
        """The units, the root's included, whose unsharded memory is there now."""
        return sorted(unit for unit, storage in self.storages.items() if storage.nbytes() > 0)

    def alive_blocks(self) -> list[str]:
        return [unit for unit in self.alive() if unit]


# --- the oracle ---


def own_names(model: nn.Module) -> dict[str, list[str]]:
    """Parameter names of the unwrapped model by unit, in the order in which a unit lays them out."""
    units: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        units.setdefault(unit, []).append(name)
    return units


def mean_gradients(model: nn.Module, steps: Iterable[int] = (0,), num_ranks: int | None = None) -> dict[str, Tensor]:
    """The gradients, by name, of the sum over ``steps`` and the mean over all ranks; ``model.grad`` stays empty."""
    num_ranks = dist.get_world_size() if num_ranks is None else num_ranks
    total: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        of_rank = local_gradients(model, steps, rank)
        total = {name: total[name] + of_rank[name] for name in total} if total else of_rank
    return {name: gradient / num_ranks for name, gradient in total.items()}


def local_gradients(model: nn.Module, steps: Iterable[int], rank: int) -> dict[str, Tensor]:
    """The gradients of the sum over ``steps``, by name, of one rank's batches."""
    model.zero_grad()
    for step in steps:
        loss_of(model(batch(step, rank))).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return gradients


def flattened(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By unit: the unit's tensors, end to end. A unit that is not among ``tensors`` is left out."""
    units = {unit: names for unit, names in own_names(model).items() if names[0] in tensors}
    return {unit: torch.cat([tensors[name].detach().reshape(-1) for name in names]) for unit, names in units.items()}


def chunked(model: nn.Module, tensors: Mapping[str, Tensor], num: int, index: int) -> dict[str, Tensor]:
    """By unit: the ``index``-th of ``num`` equal pieces of the unit's tensors, filled up with zeros at the end."""
    pieces = {}
    for unit, row in flattened(model, tensors).items():
        size = -(-row.numel() // num)
        padded = torch.cat([row, row.new_zeros(num * size - row.numel())])
        pieces[unit] = padded[index * size : (index + 1) * size]
    return pieces


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- the wrapped model ---


def flat_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By unit: what the optimizer owns. For our wrapper and for torch's."""
    found = {}
    for name, parameter in model.named_parameters():
        unit = name.replace("_fsdp_wrapped_module.", "").removesuffix("_flat_param").removesuffix(".")
        found[unit] = parameter
    return found


def flat_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By unit, what the optimizer will find; a unit without a gradient is left out."""
    return {unit: p.grad for unit, p in flat_parameters(model).items() if p.grad is not None}


def full_values(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """The whole parameters by name. Every rank must call it."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return named(model)


def assert_same(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, bitwise: bool | None = None) -> None:
    """Equal names, shapes, dtypes and values; bit by bit on two ranks, within float tolerance elsewhere."""
    bitwise = dist.get_world_size() == 2 if bitwise is None else bitwise
    assert sorted(ours) == sorted(expected)
    for name, tensor in expected.items():
        tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(
            ours[name].detach(), tensor, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )
