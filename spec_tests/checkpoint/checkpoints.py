"""A model to save and load, the forms of its state dicts, batches for it, and comparisons of the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spec_tests import subject
from spec_tests.harness import device
from spec_tests.models.modules import Uneven, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, StateDictType, fully_shard

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
CONFIGS = {
    FULL: (subject.FullStateDictConfig, subject.FullOptimStateDictConfig),
    SHARDED: (subject.ShardedStateDictConfig, subject.ShardedOptimStateDictConfig),
    LOCAL: (subject.LocalStateDictConfig, subject.LocalOptimStateDictConfig),
}
# By name of the form, the type of state dict and the options of both configurations.
FORMS: dict[str, tuple[StateDictType, dict[str, bool]]] = {
    "full": (FULL, {}),
    "rank 0": (FULL, {"rank0_only": True}),
    "sharded": (SHARDED, {}),
    "dtensor": (SHARDED, {"_use_dtensor": True}),
    "local": (LOCAL, {}),
}
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def set_form(model: nn.Module, form: str, **options: bool) -> None:
    """Chooses the form of the state dicts of the model and of its optimizer, with the same options for both."""
    kind, given = FORMS[form]
    of_model, of_optimizer = CONFIGS[kind]
    FullyShardedDataParallel.set_state_dict_type(
        model, kind, of_model(**given, **options), of_optimizer(**given, **options)
    )


def make(seed: int = 0) -> Uneven:
    """A model with the same values on every rank and in every call."""
    return seeded(Uneven, seed)


def wrapped(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """Wraps ``first``, ``second`` and the rest as three units."""
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({nn.Sequential}))
    return FullyShardedDataParallel(model, **options)


def sharded(api: str, seed: int = 0, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """The model with ``fully_shard`` on a mesh, or in the wrapper with "flat" or "original" parameters."""
    if api != "fully_shard":
        return wrapped(make(seed), use_orig_params=api == "original", **options)
    model = make(seed)
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Ignores torch's deprecation warnings, because the reference implementation may use deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(
    model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, numbers: Iterable[int], ranks: Iterable[int] = ()
) -> list[float]:
    """Trains with the batches of these steps, and returns the losses.

    Each rank uses its own batch, or the mean over the batches of ``ranks``: of all ranks, as a single process does, or
    of rank 0, so that the number of ranks does not change the mean.
    """
    found = []
    for number in numbers:
        optimizer.zero_grad()
        losses = [loss_of(model(batch(number, rank, width=3))) for rank in [*ranks] or [dist.get_rank()]]
        loss = sum(losses[1:], losses[0]) / len(losses)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def trained(
    kind: str = "adam", steps: int = 2, seed: int = 0, **options: Any
) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """A wrapped model and its optimizer after some training steps."""
    model = wrapped(make(seed), **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(steps))
    return model, optimizer


def is_plain(value: Any) -> bool:
    """Whether the value is a plain torch tensor, and not a parameter or a sharded tensor."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return type(value) is type(torch.empty(0, device=value.device))


def local_part(value: Any) -> Tensor:
    """This rank's shard of a sharded tensor; another tensor unchanged."""
    if isinstance(value, DTensor):
        return value.to_local()
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value


def gathered(value: Any) -> Tensor:
    """The full tensor of a plain or sharded value. Every rank must call it."""
    if isinstance(value, DTensor):
        # The value may be offloaded, but collectives need tensors on the device.
        return value.to(device()).full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    local_shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(local_shards, [(s.metadata.shard_offsets, s.tensor.cpu()) for s in value.local_shards()])
    rows = sorted((offsets, tensor) for of_rank in local_shards for offsets, tensor in of_rank)
    return torch.cat([tensor for _, tensor in rows])


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any], *, bitwise: bool = True) -> None:
    """Checks that states, on any device, have equal keys, shapes, dtypes and values; both are keyed by name."""
    # Without `bitwise`, the batches of the ranks were averaged in another order.
    tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {}
    torch.testing.assert_close(found, expected, check_device=False, **tolerance)
