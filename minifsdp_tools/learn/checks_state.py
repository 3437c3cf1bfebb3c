"""Checks of the exercises about the unreduced gradients and the state dict of a unit.

Worked example, `adds_up`: two backwards without a reduction have the gradients 1 and 2. Each rank must keep 3.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from collections import OrderedDict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from minifsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from minifsdp.api import FullStateDictConfig, ShardedStateDictConfig, StateDictType
from minifsdp.checkpoint import state_dict
from minifsdp.engine.layout import Gradient
from minifsdp.fsdp2.fsdp_state import state_of
from minifsdp_tools.learn.checking import (
    CPU,
    expect,
    fully_sharded,
    recorded_collectives,
    small_model,
)

# --- 7: no_sync ---


def _layout(**options: Any) -> Any:
    """The layout of a unit with a weight of shape (3, 2) and a bias of shape (3,)."""
    state: Any = state_of(fully_shard(nn.Linear(2, 3), **options))
    return state.unit.layout


def _taken(layout: Any, *values: float | None, with_unreduced: bool) -> Any:
    """What ``take_gradient`` returns after autograd has set these gradients of the unsharded parameters."""
    for param, value in zip(layout.params, values, strict=True):
        param.leaf.grad = (
            None
            if value is None
            else torch.full(param.shape, value, dtype=param.leaf.dtype)
        )
    got = layout.take_gradient(with_unreduced=with_unreduced)
    expect({"left-in-leaf": all(param.leaf.grad is None for param in layout.params)})
    return got


def _numbers(gradient: Gradient) -> list[float]:
    return [part.float().mean().item() for part in gradient.parts]


def takes_gradients() -> None:
    """``take_gradient`` returns the gradients that exist, with their numbers, and removes them from the leaves."""
    layout = _layout()
    for given, right in (
        ((1.0, 2.0), ([1.0, 2.0], [0, 1])),
        ((None, 2.0), ([2.0], [1])),
    ):
        got = _taken(layout, *given, with_unreduced=True)
        expect({"no-gradient": isinstance(got, Gradient)}, got=type(got).__name__)
        expect(
            {"gradients": (_numbers(got), [*got.indices]) == right},
            given=given,
            got=_numbers(got),
            numbers=got.indices,
        )
    got = layout.take_gradient(with_unreduced=True)
    expect({"empty-gradient": got is None}, got=got)


def adds_up() -> None:
    """Backwards without a reduction add up; the next one with a reduction includes the sum, once."""
    layout = _layout()
    for value in (1.0, 2.0):
        layout.keep_unreduced(_taken(layout, value, value, with_unreduced=False))
    kept = [param.unreduced for param in layout.params]
    means = [None if one is None else one.mean().item() for one in kept]
    expect({"overwritten": means == [3.0, 3.0]}, got=means)
    got = _numbers(_taken(layout, 4.0, 4.0, with_unreduced=True))
    expect(
        {
            "not-included": got != [4.0, 4.0],
            "sum": got == [7.0, 7.0],
            "kept-after": all(param.unreduced is None for param in layout.params),
        },
        got=got,
    )


def unused_parameter() -> None:
    """A parameter without a gradient in the last micro-batch is still reduced."""
    layout = _layout()
    layout.keep_unreduced(_taken(layout, None, 1.0, with_unreduced=False))
    kept = [param.unreduced is not None for param in layout.params]
    expect({"ignores-numbers": kept == [False, True]})
    got = _taken(layout, 1.0, None, with_unreduced=False)
    expect(
        {"included-too-early": [*got.indices] == [0] and _numbers(got) == [1.0]},
        got=_numbers(got),
        numbers=got.indices,
    )
    layout.keep_unreduced(got)
    got = _taken(layout, None, 1.0, with_unreduced=True)
    expect(
        {"lost": [*got.indices] == [0, 1], "sum": _numbers(got) == [1.0, 2.0]},
        numbers=got.indices,
        got=_numbers(got),
    )


def sums_in_reduce_dtype() -> None:
    """Many micro-batches in bfloat16 add up in the reduce dtype."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    layout = _layout(mp_policy=policy)
    for value, right in ((256.0, 256.0), (1.0, 257.0)):
        layout.keep_unreduced(_taken(layout, value, value, with_unreduced=False))
        kept = layout.params[0].unreduced
        expect(
            {
                "reduce-dtype": kept.dtype is torch.float32,
                "rounded": kept.mean().item() == right,
            },
            dtype=kept.dtype,
            got=kept.mean().item(),
        )
    part = _taken(layout, 1.0, 1.0, with_unreduced=True).parts[0]
    expect(
        {"rounded-in-the-end": part.dtype is torch.float32 and part.mean() == 258.0},
        got=part.mean().item(),
        dtype=part.dtype,
    )


def accumulation_trains() -> None:
    """Two micro-batches, the first one without a reduction, have the gradients of one process."""
    plain = small_model()
    model = fully_sharded(small_model())
    batch = torch.linspace(-1, 1, 24).view(8, 3)
    plain(batch).square().mean().backward()
    for number, part in enumerate(batch.chunk(2)[dist.get_rank()].chunk(2)):
        model.set_requires_gradient_sync(number == 1)  # type: ignore[operator]
        (model(part).square().mean() / 2).backward()
    trained: dict[str, Any] = dict(model.named_parameters())
    for name, right in plain.named_parameters():
        off = (trained[name].grad.full_tensor() - right.grad).abs().max().item()
        expect({"accumulated": off < 1e-5}, name=name, off=f"{off:.2g}")


# --- 9: the state dict of a unit ---


def _tied() -> nn.Module:
    """A model with a weight that has two names."""
    torch.manual_seed(1)
    embed = nn.Embedding(4, 3)
    head = nn.Linear(3, 4)
    head.weight = embed.weight
    return nn.Sequential(OrderedDict(embed=embed, head=head))


def _pair(**options: Any) -> tuple[nn.Module, FullyShardedDataParallel]:
    model = small_model()
    model[0] = FullyShardedDataParallel(model[0], device_id=CPU, **options)
    return small_model(), FullyShardedDataParallel(model, device_id=CPU, **options)


def _compare(got: dict[str, Any], right: dict[str, Any]) -> None:
    expect(
        {
            "flat-key": not any("_flat_param" in name for name in got),
            "keys": got.keys() == right.keys(),
        },
        names=[*got],
        right=[*right],
    )
    for name, value in right.items():
        expect(
            {
                "empty": got[name].numel() or not value.numel(),
                "shape": got[name].shape == value.shape,
                "value": torch.equal(got[name], value),
            },
            name=name,
            got=tuple(got[name].shape),
            right=tuple(value.shape),
        )


def full_state_dict() -> None:
    """Names, shapes and values are those of the plain model."""
    for use_orig_params in (False, True):
        plain, model = _pair(use_orig_params=use_orig_params)
        _compare(model.state_dict(), plain.state_dict())


def every_rank_gathers() -> None:
    """With ``rank0_only``, every rank takes part in the all-gather, but only rank 0 gets entries."""
    plain, model = _pair()
    write = state_dict._write_unit

    def checked(codec: Any, form: Any, state: Any) -> None:
        with recorded_collectives() as (calls, _):
            write(codec, form, state)
        # The placeholders are empty.
        names = [key for key in codec.keys if key in state and state[key].numel()]
        names = [name.replace("_fsdp_wrapped_module.", "") for name in names]
        expect(
            {
                "not-collective": calls == ["all_gather"],
                "all-ranks": codec.mesh.is_first or not names,
            },
            calls=calls,
            names=names,
        )

    with (
        mock.patch.object(state_dict, "_write_unit", checked),
        FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ),
    ):
        got = model.state_dict()
    if dist.get_rank() == 0:
        _compare(got, plain.state_dict())


def values_are_copies() -> None:
    """Each value has memory of its own."""
    _, model = _pair()
    for name, value in model.state_dict().items():
        num_bytes = value.untyped_storage().nbytes()
        expect(
            {"keeps-memory": num_bytes == value.nbytes},
            name=name,
            size=value.nbytes,
            got=num_bytes,
        )


def tied_names() -> None:
    """A weight with two names has two entries."""
    _compare(
        FullyShardedDataParallel(_tied(), device_id=CPU).state_dict(),
        _tied().state_dict(),
    )


def sharded_state_dict() -> None:
    """In a sharded state dict, each rank has its rows."""
    plain, model = _pair(device_mesh=init_device_mesh("cpu", (2,)))
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
    ):
        got = model.state_dict()
    for name, value in got.items():
        expect(
            {"no-rows": isinstance(value, DTensor)},
            name=name,
            got=type(value).__name__,
        )
        got[name] = value.full_tensor()
    _compare(got, plain.state_dict())
