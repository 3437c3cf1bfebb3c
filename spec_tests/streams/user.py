"""Actions of a scenario's user other than forward and backward: optimizers, hooks, edits, switches, state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifsdp
from spec_tests.harness import device
from spec_tests.properties.build import Piece, is_per_parameter
from spec_tests.streams.scenario import Scenario

__all__ = ["HOOKS", "edit", "optimizer_for", "set_switches", "state_of"]

# --- optimizers ---


def optimizer_for(s: Scenario, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer of the scenario; ``None`` if there are no trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return None
    if s.optimizer == "in_backward":
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_stepper(parameter))
    if s.optimizer == "adam":
        return torch.optim.AdamW(parameters, lr=1 / 32)
    return torch.optim.SGD(parameters, lr=1 / 32, momentum=0.5 if s.run.momentum else 0.0)


def _stepper(parameter: Tensor) -> Callable[[Tensor], None]:
    optimizer = torch.optim.SGD([parameter], lr=1 / 32)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- communication hooks of FSDP1 ---


def _plain(_: Any, grad: Tensor, local_shard: Tensor | None = None) -> None:
    if local_shard is None:
        dist.all_reduce(grad)
    else:
        dist.reduce_scatter_tensor(local_shard, grad)


def _async(_: Any, grad: Tensor, local_shard: Tensor | None = None) -> None:
    if local_shard is None:
        work = dist.all_reduce(grad, async_op=True)
    else:
        work = dist.reduce_scatter_tensor(local_shard, grad, async_op=True)
    work.wait()


def _low(state: Any, grad: Tensor, local_shard: Tensor | None = None) -> None:
    low = grad.to(torch.bfloat16)
    if local_shard is None:
        dist.all_reduce(low)
        grad.copy_(low)
    else:
        low_piece = torch.empty_like(local_shard, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(low_piece, low)
        local_shard.copy_(low_piece)


HOOKS = {"plain": _plain, "async": _async, "low": _low}

# --- between steps ---


@torch.no_grad()
def edit(s: Scenario, model: Any, units: list[Any], see: Callable[..., None]) -> None:
    """Does the action of `Scenario.edits`."""
    if not s.edits:
        return
    if is_per_parameter(s.run):
        for unit in units:
            # After a forward without a backward, the unsharded parameters may still be registered.
            unit.reshard()
        if s.edits in ("in_place", "data", "write"):
            _change(model, s.edits == "data")
        else:
            see(*(whole(parameter) for parameter in model.parameters()))
    elif s.edits in ("in_place", "data"):
        _change(model, s.edits == "data")
    else:
        options = {"offload_to_cpu": s.edits == "read_on_cpu", "with_grads": s.edits == "gradients"}
        with model.summon_full_params(model, writeback=s.edits == "write", **options):
            if s.edits == "write":
                _change(model, is_replaced=False)
            see(*model.parameters())


def whole(parameter: Any) -> Tensor:
    """The full tensor, on the device, because NCCL only supports device tensors."""
    full: Tensor = parameter.detach().to(device()).full_tensor()
    return full


def _change(model: nn.Module, is_replaced: bool) -> None:
    for parameter in model.parameters():
        if is_replaced:
            parameter.data = parameter.data * 0.5
        else:
            parameter.mul_(0.5)


def state_of(s: Scenario, model: Any) -> Iterable[Tensor]:
    """Takes a state dict and returns its tensors."""
    if is_per_parameter(s.run):
        values = model.state_dict().values()
        return [whole(value) if s.state == "full" else value.to_local() for value in values]
    if s.state == "full":
        kind = minifsdp.StateDictType.FULL_STATE_DICT
        config: Any = minifsdp.FullStateDictConfig(offload_to_cpu=s.run.seed % 2 == 1)
    else:
        kind = minifsdp.StateDictType.SHARDED_STATE_DICT
        config = minifsdp.ShardedStateDictConfig(offload_to_cpu=s.run.seed % 2 == 1)
    with model.state_dict_type(model, kind, config):
        values = model.state_dict().values()
    shards = [value.local_shards() if hasattr(value, "local_shards") else [value] for value in values]
    return [shard.tensor if hasattr(shard, "tensor") else shard for row in shards for shard in row]


# --- switches of FSDPModule ---


def set_switches(s: Scenario, model: Any, units: list[Any]) -> None:
    """Sets the switches of the scenario."""
    if "keep_after_backward" in s.switches:
        model.set_reshard_after_backward(False)
    if "keep_after_forward" in s.switches:
        model.set_reshard_after_forward(False)
    if "free_after_forward" in s.switches:
        model.set_reshard_after_forward(True)
    if "unused" in s.switches:
        model.set_reduce_scatter_unused_params(True)
    for unit in units:
        if "divide" in s.switches:
            unit.set_gradient_divide_factor(3.0)
        if "no_gather" in s.switches and isinstance(unit, Piece) and unit.node.kind == "embedding":
            # The backward of an embedding needs the indices of the rows, but not their values.
            unit.set_unshard_in_backward(False)
