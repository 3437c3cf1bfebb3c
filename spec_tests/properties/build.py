"""Builds a model from a description, and shards it.

The modules here are `Piece`s. Each maps a row of features and a row of token numbers to features of the same width, so
they can be combined freely. Each kind covers a difficulty:

=============  =================================================  ======================================================
kind           computes                                           difficulty
=============  =================================================  ======================================================
``linear``     ``x + tanh(linear(x))``                            with a bias or without: odd numbers of elements
``mlp``        ``x + down(tanh(up(x)))``                          two parameters of unequal size
``embedding``  ``x + rows[tokens]``                               its gradient needs no input gradient
``norm``       a layer norm                                       small, and different under low precision
``own``        ``x * (1 + sum(p) / 8)``                           a parameter of any shape, also 0-D or without elements
``idle``       ``tanh(x)``                                        has no parameters, so its unit is empty
``unused``     ``x``                                              its parameter gets no gradient; it returns its input
``one_sided``  ``x + a``, and ``+ b`` depending on the tokens     ``b`` has a gradient on some ranks only
``chain``      its parts, one after the other
``sum``        half of ``x`` and of all its parts applied to x    several branches end in one autograd node
``detach``     ``x`` and its parts, which get no gradient         a recorded forward without a backward
``blind``      the same, its parts run without grad               an unrecorded forward inside a recorded one
=============  =================================================  ======================================================

A *front end* (``api``) is an API that shards: ``fsdp1`` and ``fully_shard`` are minifsdp's. ``torch_fsdp1`` and
``torch_fully_shard`` are torch's and show whether torch also fails. ``careless`` has a defect that the hunt must find.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import device
from spec_tests.oracles.gathering import clean_name
from spec_tests.properties.description import LEAVES, OWN_SHAPES, Description, Node

__all__ = [
    "APIS",
    "PRECISIONS",
    "Bang",
    "Clock",
    "Groups",
    "Piece",
    "batch",
    "batch_on_cpu",
    "plain_model",
    "units_of",
]

LOW = torch.bfloat16
# By name: the arguments of `MixedPrecision`.
PRECISIONS: dict[str, dict[str, torch.dtype]] = {
    "full": {},
    "low": {"param_dtype": LOW},
    "low_summed_full": {"param_dtype": LOW, "reduce_dtype": torch.float32},
    "full_summed_low": {"reduce_dtype": LOW},
}

Groups = dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]]


class Bang(Exception):
    """The error that a piece raises intentionally."""


class Clock:
    """State that all pieces of a model read.

    Attributes:
        step: number of the current step.
        bomb: where to raise an error: ``("forward", 3)`` is the forward of the third leaf.
    """

    def __init__(self) -> None:
        self.step = 0
        self.bomb: tuple[str, int] | None = None

    def tick(self, number: int, y: Tensor) -> None:
        """Each leaf calls this with its number and its result.

        Raises:
            Bang: here, or in a backward hook, if ``bomb`` names this leaf.
        """
        if self.bomb == ("forward", number):
            raise Bang
        if self.bomb == ("backward", number) and y.requires_grad:
            y.register_hook(_bang)


def _bang(_: Tensor) -> None:
    raise Bang


def _halve_inputs(_: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    x, tokens = of_inputs
    return None if x is None else x / 2, tokens


class Piece(nn.Module):
    """The module of a node; see the table above."""

    def __init__(self, node: Node, width: int, clock: Clock, leaves: list[Piece]) -> None:
        super().__init__()
        self.node, self.clock, self.number = node, clock, len(leaves)
        if node.kind in LEAVES:
            self._make_parameters(node, width)
            leaves.append(self)
        self.parts = nn.ModuleList()
        for child in node.children:
            if child.same_as >= 0:
                leaves.append(leaves[child.same_as])
                self.parts.append(leaves[-1])
            else:
                self.parts.append(Piece(child, width, clock, leaves))

    def _make_parameters(self, node: Node, width: int) -> None:
        size = node.size
        if node.kind == "linear":
            self.linear = nn.Linear(width, width, bias=size % 2 == 1)
        elif node.kind == "mlp":
            self.up, self.down = nn.Linear(width, max(size, 1)), nn.Linear(max(size, 1), width, bias=False)
        elif node.kind == "embedding":
            self.rows = nn.Embedding(max(size, 1), width)
        elif node.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif node.kind in ("own", "unused"):
            self.p = nn.Parameter(torch.randn(OWN_SHAPES[size % len(OWN_SHAPES)]) / 4)
        elif node.kind == "one_sided":
            self.a, self.b = nn.Parameter(torch.randn(width) / 4), nn.Parameter(torch.randn(width) / 4)
        for parameter in self.parameters():
            parameter.requires_grad_(not node.frozen)

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        y = self._compute(x, tokens)
        if self.node.kind in LEAVES:
            self.clock.tick(self.number, y)
        return _PACKED[self.node.returns](y)

    def _compute(self, x: Tensor, tokens: Tensor) -> Tensor:
        kind = self.node.kind
        if kind == "linear":
            return x + torch.tanh(self.linear(x))
        if kind == "mlp":
            return x + self.down(torch.tanh(self.up(x)))
        if kind == "embedding":
            return x + self.rows(tokens % self.rows.num_embeddings)
        if kind == "norm":
            return self.norm(x)
        if kind == "own":
            return x * (1 + self.p.sum() / 8)
        if kind == "idle":
            return torch.tanh(x)
        if kind == "one_sided":
            return x + self.a + self.b if int(tokens.sum()) % 2 else x + self.a
        return self._compute_parts(x, tokens)

    def _compute_parts(self, x: Tensor, tokens: Tensor) -> Tensor:
        kind = self.node.kind
        with torch.set_grad_enabled(torch.is_grad_enabled() and kind != "blind"):
            entered, added = x, x
            for part, child in zip(self.parts, self.node.children, strict=True):
                if self.clock.step % child.every:
                    continue
                for _ in range(child.times):
                    y = _call(part, child, x if kind == "chain" else entered, tokens)
                    x, added = y, added + (y.detach() if kind == "detach" else y)
        return x if kind in ("chain", *LEAVES) else added / 2


_PACKED: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, 1),
    "dict": lambda y: {"y": y},
    "nested": lambda y: [{"y": (None, y)}],
}
_UNPACKED: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: y[0],
    "dict": lambda y: y["y"],
    "nested": lambda y: y[0]["y"][1],
}


def _call(part: nn.Module, node: Node, x: Tensor, tokens: Tensor) -> Tensor:
    def run(x: Tensor, tokens: Tensor) -> Tensor:
        return unpacked(part(x=x, tokens=tokens) if node.keywords else part(x, tokens))

    unpacked = _UNPACKED[node.returns]
    if not node.checkpoint:
        return run(x, tokens)
    return checkpoint(run, x, tokens, use_reentrant=node.checkpoint == "reentrant", preserve_rng_state=False)


def plain_model(description: Description) -> Piece:
    """The unsharded model on this rank's device; equal descriptions give equal values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(description.seed)
        leaves: list[Piece] = []
        model = Piece(description.model, description.width, Clock(), leaves)
    if description.hook == "backward":
        for leaf in dict.fromkeys(leaves):
            leaf.register_full_backward_hook(_halve_inputs)
    for first, second in description.ties:
        (module, name), (other, other_name) = (_first_slot(leaves[number]) for number in (first, second))
        setattr(other, other_name, getattr(module, name))
    return model.to(device())


def _first_slot(leaf: Piece) -> tuple[nn.Module, str]:
    name = next(iter(dict(leaf.named_parameters())))
    owner, _, last = name.rpartition(".")
    return leaf.get_submodule(owner), last


def output_of(node: Node, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """The output of the model, sharded or not, for a batch; cast to full precision for the loss."""
    return _UNPACKED[node.returns](model(*inputs)).to(torch.get_default_dtype())


def batch(description: Description, step: int, index: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a rank in the forward ``index`` of a step."""
    x, tokens = batch_on_cpu(description, step, index, rank)
    return x.to(device()), tokens.to(device())


def batch_on_cpu(description: Description, step: int, index: int, rank: int) -> tuple[Tensor, Tensor]:
    """The same batch before it is moved to the device."""
    dice = torch.Generator().manual_seed(description.seed + 1000 * step + 100 * index + rank + 1)
    x = torch.randn(description.samples, description.width, generator=dice)
    return x, torch.randint(0, 9, (description.samples,), generator=dice)


def units_of(model: Piece) -> dict[str, tuple[Node, list[str]]]:
    """Path, node and parameter names of each unit of a plain model; the names are in the order of the flat layout.

    The result includes units without parameters.
    """
    paths = {path: m.node for path, m in model.named_modules() if isinstance(m, Piece) and (m.node.unit or not path)}
    units: dict[str, tuple[Node, list[str]]] = {path: (node, []) for path, node in paths.items()}
    for name, _ in model.named_parameters():
        around = (path for path in paths if not path or name.startswith(path + "."))
        units[max(around, key=len)][1].append(name)
    return units


# --- front ends ---


def _wrap_all(model: Piece, wrap: Callable[[Piece], Any]) -> Any:
    """Calls ``wrap(unit)`` once for each unit, inner ones first; the result replaces the unit."""
    done: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            assert child is not None
            if child not in done:
                visit(child)
                done[child] = wrap(child) if isinstance(child, Piece) and child.node.unit else child
            module._modules[name] = done[child]

    visit(model)
    return wrap(model)


def _fsdp1(library: Any, policies: Any, d: Description, model: Piece, groups: Groups, **others: Any) -> nn.Module:
    def strategy(name: str) -> Any:
        return library.ShardingStrategy[name or d.strategy]

    options: dict[str, Any] = {
        "process_group": pair_of_groups(d, groups) if d.is_hybrid else None,
        "sharding_strategy": strategy(""),
        "cpu_offload": library.CPUOffload(offload_params=True) if d.offload else None,
        "backward_prefetch": library.BackwardPrefetch[d.backward_prefetch] if d.backward_prefetch else None,
        "mixed_precision": library.MixedPrecision(**PRECISIONS[d.precision]) if PRECISIONS[d.precision] else None,
        "device_id": device(),
        "forward_prefetch": d.forward_prefetch,
        "limit_all_gathers": d.limits,
        "use_orig_params": d.originals,
        **others,
    }
    fsdp = library.FullyShardedDataParallel

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        is_unit = isinstance(module, Piece) and module.node.unit
        return {"sharding_strategy": strategy(module.node.strategy)} if is_unit else False

    if d.by_policy:
        return fsdp(model, auto_wrap_policy=policies.CustomPolicy(choose), **options)
    return _wrap_all(model, lambda m: fsdp(m, **{**options, "sharding_strategy": strategy(m.node.strategy)}))


def pair_of_groups(d: Description, groups: Groups) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's (shard group, replicate group). All ranks must call it in the same order."""
    if d.num_replicas not in groups:
        size = d.num_ranks // d.num_replicas
        rows = [list(range(start, start + size)) for start in range(0, d.num_ranks, size)]
        row, _ = dist.new_subgroups_by_enumeration(rows)
        column, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*rows, strict=True)])
        groups[d.num_replicas] = (row, column)
    return groups[d.num_replicas]


def _fully_shard(library: Any, d: Description, model: Piece, groups: Groups, **others: Any) -> nn.Module:
    low = PRECISIONS[d.precision]
    options: dict[str, Any] = {
        "reshard_after_forward": {"FULL_SHARD": True, "SHARD_GRAD_OP": False}.get(d.strategy),
        "mp_policy": library.MixedPrecisionPolicy(**low),
        "offload_policy": library.CPUOffloadPolicy(pin_memory=False) if d.offload else library.OffloadPolicy(),
        "mesh": _mesh(d, groups),
        **others,
    }
    return _wrap_all(model, lambda module: library.fully_shard(module, **options))


def _mesh(d: Description, groups: Groups) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if not d.is_hybrid:
        return dist.init_device_mesh(device().type, (d.num_ranks,))
    row, column = pair_of_groups(d, groups)
    table = torch.arange(d.num_ranks).view(d.num_replicas, -1)
    return DeviceMesh.from_group([column, row], device().type, mesh=table, mesh_dim_names=("replicate", "shard"))


def _ours(d: Description, model: Piece, groups: Groups, **others: Any) -> nn.Module:
    import minifsdp
    import minifsdp.wrap

    return _fsdp1(minifsdp, minifsdp.wrap, d, model, groups, **others)


def _torchs(d: Description, model: Piece, groups: Groups) -> nn.Module:
    import torch.distributed.fsdp
    import torch.distributed.fsdp.wrap

    return _fsdp1(torch.distributed.fsdp, torch.distributed.fsdp.wrap, d, model, groups)


def _careless(d: Description, model: Piece, groups: Groups) -> nn.Module:
    """minifsdp with a defect: a unit around an embedding gets half of its gradient if it is called twice."""
    wrapped = _ours(d, model, groups)
    for module in wrapped.modules():
        unit = getattr(module, "_unit", None)
        inside = getattr(module, "_fsdp_wrapped_module", None)
        if unit is not None and isinstance(inside, Piece) and (inside.node.kind, inside.node.times) == ("embedding", 2):
            unit.plan.scaling = dataclasses.replace(unit.plan.scaling, after=2 * unit.plan.scaling.after)
    return wrapped


def _our_function(d: Description, model: Piece, groups: Groups, **others: Any) -> nn.Module:
    import minifsdp

    return _fully_shard(minifsdp, d, model, groups, **others)


def _torchs_function(d: Description, model: Piece, groups: Groups) -> nn.Module:
    import torch.distributed.fsdp

    return _fully_shard(torch.distributed.fsdp, d, model, groups)


APIS: dict[str, Callable[..., nn.Module]] = {
    "fsdp1": _ours,
    "fully_shard": _our_function,
    "torch_fsdp1": _torchs,
    "torch_fully_shard": _torchs_function,
    "careless": _careless,
}


def is_per_parameter(description: Description) -> bool:
    """Whether the front end shards each parameter separately."""
    return "fully_shard" in description.api


def sharded(description: Description, model: Piece, groups: Groups, **others: Any) -> nn.Module:
    """Shards the plain model. Every rank must call it. The sharded model uses the clock of the plain model.

    Args:
        description, model, groups: the run, its plain model and this rank's process groups.
        others: options of the front end that are not part of a description.
    """
    with warnings.catch_warnings():
        # Expected: frozen next to trained parameters, a root without parameters, and torch's deprecated strategies.
        warnings.simplefilter("ignore")
        wrapped = APIS[description.api](description, model, groups, **others)
    _lay_hook(description.hook, wrapped)
    return wrapped


def _lay_hook(kind: str, model: Any) -> None:
    if kind == "communication" and hasattr(model, "register_comm_hook"):
        model.register_comm_hook(None, _combine_and_halve)
    elif kind == "communication":
        for unit in model.modules():
            if hasattr(unit, "set_all_reduce_hook"):
                unit.set_all_reduce_hook(lambda reduced: reduced.div_(2))
    elif kind == "accumulated":
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.div_(2))


# Its name since torch 2.13, in which the old name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _combine_and_halve(_: Any, gradient: Tensor, local_shard: Tensor | None = None) -> None:
    if local_shard is None:
        dist.all_reduce(gradient)
    else:
        _reduce_scatter(local_shard, gradient)
    (gradient if local_shard is None else local_shard).div_(2 * dist.get_world_size())


def parameters_here(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters, by the plain name of the parameter, or of the unit if it has a flat one."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter
