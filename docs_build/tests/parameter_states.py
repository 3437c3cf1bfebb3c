"""Observes the parameters of a sharded model at each moment of a training step, in the words of the page about them.

The model has a unit with a ``Linear(4, 3)``, and the root unit with a ``Linear(3, 2)``. On two ranks, the shards have
different sizes: the flat parameter of the unit has 15 elements, and its weight has three rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import minifsdp
from docs_build.recording.written_optimizers import local
from minifsdp.engine.placeholder import PlaceholderParameter

FSDP = minifsdp.FullyShardedDataParallel
IN_FORWARD, IN_BACKWARD = "inside the unit's forward", "inside the unit's backward"


class Block(nn.Module):
    """One unit. Calls `observe` in the middle of its forward, and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.observe: Callable[[str], None] = lambda moment: None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.linear(inputs)
        if hidden.requires_grad:
            self.observe(IN_FORWARD)
            hidden.register_hook(lambda gradient: self.observe(IN_BACKWARD))
        return torch.tanh(hidden)


class Model(nn.Module):
    """A unit and a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.block(inputs))


def sharded(model: Any, form: str, *, reshard_after_forward: bool) -> Any:
    """Shards the block and the model; ``form`` is ``flat``, ``original`` or ``fully_shard``."""
    if form == "fully_shard":
        policy = minifsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in (model.block, model):
            minifsdp.fully_shard(module, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        return model
    strategies = minifsdp.ShardingStrategy
    options: dict[str, Any] = {
        "use_orig_params": form == "original",
        "sharding_strategy": strategies.FULL_SHARD if reshard_after_forward else strategies.SHARD_GRAD_OP,
        "mixed_precision": minifsdp.MixedPrecision(param_dtype=torch.bfloat16),
    }
    model.block = FSDP(model.block, **options)
    return FSDP(model, **options)


class Observer:
    """Describes the first parameter of the block at named moments, in the words of the page.

    Attributes:
        model: the model, which is replaced by its wrapper.
        held: the parameters of the optimizer.
        rows: the cells of the page's table, by moment.
        names: the name of the parameter, and the number of parameters.
        allocated: the units that have unsharded memory.
        saved: the parameter in the state dict.
    """

    def __init__(self) -> None:
        self.model: Any = Model()
        self.held: list[Tensor] = []
        self.rows: dict[str, list[str]] = {}
        self.names: dict[str, tuple[str, int]] = {}
        self.allocated: dict[str, str] = {}
        self.saved: list[str] = []
        # The modules stay the same objects when the model is sharded.
        self._modules: dict[str, Any] = {"block": self.model.block.linear, "root": self.model.head}
        self._num_elements = {part: module.weight.numel() for part, module in self._modules.items()}
        # The memory of each weight in the last forward.
        self._storages: dict[str, torch.UntypedStorage] = {}

    def note(self, moment: str) -> None:
        """Describes the first parameter of the block, and whether unsharded memory is allocated."""
        if moment == IN_FORWARD:
            # The root computes after the block, but it is all-gathered before.
            self._storages = {part: module.weight.untyped_storage() for part, module in self._modules.items()}
        parameters = dict(self.model.named_parameters())
        name = next(name for name in parameters if "block" in name)
        kind, *facts = described(parameters[name])
        of_gradient = described(parameters[name].grad)[1:]
        weight = described(self._modules["block"].weight)
        allocated = [part for part in self._modules if self._is_allocated(part)]
        self.rows.pop(moment, None)
        self.rows[moment] = [
            kind,
            *facts,
            "as `p`" if of_gradient == facts else ", ".join(of_gradient) or "`None`",
            "as `p`" if weight == [kind, *facts] else f"{weight[0]} {weight[1]}, {weight[3]}",
            "yes" if any(parameters[name] is one for one in self.held) else "no",
            "yes" if "block" in allocated else "no",
        ]
        self.names[moment] = name, len(parameters)
        self.allocated[moment] = " and ".join(allocated) or "none"

    def _is_allocated(self, part: str) -> bool:
        storage = self._storages.get(part)
        is_kept = storage is not None and storage.nbytes() > 0
        return is_kept or _num_stored(self._modules[part].weight) >= self._num_elements[part]


def described(tensor: Tensor | None) -> list[str]:
    """Class, shape, shape on this rank and dtype of a tensor; empty for ``None``."""
    if tensor is None:
        return []
    kinds = {DTensor: "DTensor", PlaceholderParameter: "placeholder", nn.Parameter: "Parameter", Tensor: "Tensor"}
    kind = next(words for kind, words in kinds.items() if isinstance(tensor, kind))
    shapes = [f"`{tuple(one.shape)}`" for one in (tensor, local(tensor))]
    return [kind, *shapes, str(tensor.dtype).removeprefix("torch.")]


def _num_stored(tensor: Tensor) -> int:
    """The number of elements that fit into the memory of a tensor. A placeholder has no memory."""
    if isinstance(tensor, PlaceholderParameter):
        return 0
    part = local(tensor)
    return part.untyped_storage().nbytes() // part.element_size()


def observe(form: str, *, reshard_after_forward: bool) -> Observer:
    """Trains the model for one step, and describes its parameters at each moment. All ranks must call it."""
    # `.grad` of a view of an unsharded parameter.
    warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)
    observer = Observer()
    block, inputs = observer.model.block, torch.randn(2, 4)
    observer.note("before sharding")
    model = observer.model = sharded(observer.model, form, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.Adam(model.parameters())
    observer.held = optimizer.param_groups[0]["params"]
    observer.note("after sharding")
    block.observe = observer.note
    # The first forward allocates memory. The moments of the second one replace those of the first.
    model(inputs).sum().backward()
    optimizer.zero_grad()
    with torch.no_grad():
        model.eval()(inputs)
    observer.note("after a forward in `torch.no_grad()`")
    loss = model.train()(inputs).sum()
    observer.note("after forward")
    loss.backward()
    observer.note("after backward")
    optimizer.step()
    observer.note("after `optimizer.step()`")
    if form == "fully_shard":
        for module in (model, block):
            module.unshard()
        observer.note("after `unshard()`")
        for module in (model, block):
            module.reshard()
        observer.note("after `reshard()`")
    else:
        with FSDP.summon_full_params(model, with_grads=form == "original"):
            observer.note("inside `summon_full_params()`")
        observer.note("after `summon_full_params()`")
    observer.saved = described(model.state_dict()["block.linear.weight"])
    observer.note("after `state_dict()`")
    optimizer.zero_grad()
    observer.note("after `optimizer.zero_grad()`")
    return observer
