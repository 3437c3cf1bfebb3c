"""The common part of both APIs: the calls of a training loop, and the comparison of this rank's shards.

Shards are compared locally. From the reference model's full tensors, each rank computes its expected shard with
independent arithmetic. Nothing is all-gathered, so an error that cancels out in splitting and joining is found.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spec_tests.fuzz import net as nets
from spec_tests.fuzz.case import Call, to_be_loaded
from spec_tests.fuzz.twin import Twin, chosen
from spec_tests.harness import kept

__all__ = ["Pieces", "Side"]

# By name: the shard of this rank, and the expected shard.
Pieces = dict[str, tuple[Tensor | None, Tensor | None]]


class Side:
    """The sharded model. Its methods have the names of the calls, like those of `Twin`.

    Args:
        options: of the case.
        group: the ranks that shard the model.
    """

    model: Any

    def __init__(self, options: dict[str, Any], group: dist.ProcessGroup) -> None:
        self.options, self.group, self.rank = options, group, group.rank()
        self.pending: list[Tensor] = []
        self.used: Tensor | None = None
        self.saved: list[tuple[str, dict[str, Any]]] = []
        self.saved_optimizer: list[tuple[str, dict[str, Any]]] = []
        self.contexts: list[tuple[Call, contextlib.ExitStack]] = []
        self.shard(nets.made(options))
        self.optimizer = nets.optimizer_over(self.model.parameters(), options)
        self.kept: list[nets.Kept] = []
        self.dtype = options.get("begins", "double")
        # Whether a recorded forward or the user has left units unsharded. Then `model.parameters()` can be unsharded.
        self.is_left_unsharded = self.keeps_after_backward = False

    # --- for each API ---

    def shard(self, net: nets.Net) -> None:
        """Shards ``net`` and sets `model`."""
        raise NotImplementedError

    @property
    def net(self) -> Any:
        """The module that has ``blocks``."""
        raise NotImplementedError

    def parameters_against(self, twin: Twin) -> Pieces:
        """The parameters of this rank's optimizer, with their expected values."""
        raise NotImplementedError

    def gradients_against(self, twin: Twin) -> Pieces:
        """The same for gradients, of the units without unreduced gradients."""
        raise NotImplementedError

    def joined(self, name: str, shards: list[Tensor], twin: Twin) -> dict[str, Tensor]:
        """The parameters in an entry of `parameters_against`, from all ranks' local shards of it."""
        raise NotImplementedError

    def reshard_all(self) -> None:
        """Makes `model.parameters()` the sharded parameters, after a forward that no backward has followed."""
        self.is_left_unsharded = False

    def has_to_load(self, call: Call) -> bool:
        """Whether the state dict to be loaded has entries on this rank. A full one can be on rank 0 only."""
        return bool(self.saved) and bool(to_be_loaded(self.saved, call)[1])

    def saved_against(self, form: str, state: dict[str, Any], expected: dict[str, Tensor]) -> Pieces:
        """The same for a state dict."""
        raise NotImplementedError

    @property
    def is_summoned(self) -> bool:
        return any(call["what"] == "summon" for call, _ in self.contexts)

    @property
    def keeps_edits(self) -> bool:
        """Whether a user's edit of `model.parameters()` is kept now."""
        # With one shard nothing is sharded: the wrapper treats such a hybrid like `NO_SHARD`.
        if self.options.get("strategy") == "NO_SHARD" or self.options.get("replicas") == 2:
            return True
        return all(call.get("writeback", True) for call, _ in self.contexts if call["what"] == "summon")

    @property
    def hides_from_some(self) -> bool:
        """Whether only the first rank has full parameters."""
        return any(call.get("rank0_only", False) for call, _ in self.contexts)

    @property
    def local_shard(self) -> tuple[int, int]:
        """The index of this rank's shard and the number of shards. With two replicas, each rank has all elements."""
        return (0, 1) if self.options.get("replicas") == 2 else (self.rank, 2)

    def mesh(self) -> DeviceMesh:
        """The mesh of the two ranks; with replicas, one replica in two shards, or two replicas in one shard each."""

        def make() -> DeviceMesh:
            if replicas is None:
                return DeviceMesh.from_group(self.group, "cpu")
            alone = [dist.new_group([rank]) for rank in range(2)][self.rank]
            groups = [alone, self.group] if replicas == 1 else [self.group, alone]
            ranks = torch.arange(2).view(replicas, -1)
            return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("replicas", "pieces"))

        replicas = self.options.get("replicas")
        # DTensor computes the communication of each operator again for each mesh.
        return kept(f"fuzz {replicas}", make) if self.group is dist.group.WORLD else make()

    def at(self, part: int | None) -> Any:
        """The whole model, or one of its blocks."""
        return self.model if part is None else self.net.blocks[part]

    # --- training ---

    def forward(self, call: Call) -> Tensor:
        self.is_left_unsharded = True
        kept = nets.Kept()
        output = self._output(call, kept)
        self.pending.append(nets.loss_of(output))
        self.kept.append(kept)
        return output

    @torch.no_grad()
    def evaluate(self, call: Call) -> Tensor:
        if "bang" in call:
            self.is_left_unsharded = True
        return self._output(call)

    def _output(self, call: Call, kept: nets.Kept | None = None) -> Tensor:
        call = {**call, "dtype": self.dtype}
        return nets.output_of(self.model, self.at(call.get("part")), call, self.rank, kept)

    def strange_input(self, call: Call) -> Any:
        return self.model(call["input"])

    def backward(self, call: Call) -> None:
        losses = chosen(self.pending, call["which"])
        if losses:
            self.used = torch.stack(losses).sum()
            self.used.backward(retain_graph=False)
            self.is_left_unsharded = self.keeps_after_backward or (bool(self.pending) and self.is_left_unsharded)

    def backward_again(self, call: Call) -> None:
        if self.used is not None:
            self.used.backward()

    def step(self, call: Call) -> None:
        self.optimizer.step()
        self.changed()

    def zero_grad(self, call: Call) -> None:
        # Gradients are hidden while full parameters are summoned, so an optimizer cannot find them.
        if not self.is_summoned:
            (self.model if call["of_model"] else self.optimizer).zero_grad(set_to_none=call["to_none"])

    def new_optimizer(self, call: Call) -> None:
        if self.is_summoned:
            # An optimizer over unsharded parameters is an error of the program.
            return
        if self.is_left_unsharded:
            self.reshard_all()
        self.optimizer = nets.optimizer_over(self.model.parameters(), self.options)

    def edited(self, parameters: list[Any], how: str) -> None:
        """Halves parameters, in one of the ways that users do it."""
        with torch.no_grad():
            if how == "foreach":
                torch._foreach_mul_(parameters, 0.5)
            for parameter in parameters if how != "foreach" else []:
                (parameter.data if how == "data" else parameter).mul_(0.5)

    def mode(self, call: Call) -> None:
        self.model.train(call["train"])

    def changed(self) -> None:
        """The parameters have changed: drops losses that were computed from the old ones."""
        self.pending.clear()
        self.used = None

    def nothing(self, call: Call) -> None:
        pass

    def copy(self, call: Call) -> None:
        copy.deepcopy(self.model)

    # --- contexts ---

    def leave(self, call: Call) -> None:
        if self.contexts:
            _, stack = self.contexts.pop()
            stack.close()

    def entered(self, call: Call, context: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(context)
        self.contexts.append((call, stack))


def halve(module: nn.Module) -> None:
    """A user's function for ``apply``, which changes each module."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.mul_(0.5)


def grown(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A missing gradient counts as zeros."""
    return torch.zeros_like(like) if gradient is None else gradient
