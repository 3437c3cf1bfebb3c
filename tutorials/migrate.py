"""From ``FullyShardedDataParallel`` to ``fully_shard``: the migration table, with every row trained on both sides.

    torchrun --standalone --nproc-per-node 4 tutorials/migrate.py
    python tutorials/migrate.py

Output: for each row of the table, whether losses and events are equal, or the difference.

It takes some seconds on two CPU cores. The two hybrid rows need four ranks. With two ranks, all other rows run.

The wrapper (FSDP1) and the function (FSDP2) do the same in the same order, but have different arguments. The table
shows the replacement for each argument:

======================================  =============================================================================
``FullyShardedDataParallel(...)``       ``fully_shard(...)``
======================================  =============================================================================
``auto_wrap_policy=``                   a loop: each block, then the model
``FULL_SHARD``                          ``reshard_after_forward=True``
``SHARD_GRAD_OP``                       ``reshard_after_forward=False``
``HYBRID_SHARD``                        ``True`` with a mesh of two axes
``_HYBRID_SHARD_ZERO2``                 ``False`` with a mesh of two axes
``NO_SHARD``                            not available; use ``DistributedDataParallel``
``CPUOffload(True)``                    ``CPUOffloadPolicy()``
``BACKWARD_PRE``                        always on; ``BACKWARD_POST`` and ``None`` are not available
``MixedPrecision``                      ``MixedPrecisionPolicy``, without ``buffer_dtype``, with ``output_dtype``
``cast_(root_)forward_inputs``          ``cast_forward_inputs``, on by default
``device_id=``                          the device of the mesh
``sync_module_states=True``             ``set_model_state_dict`` with ``broadcast_from_rank0=True``
``forward_prefetch=True``               ``set_modules_to_forward_prefetch``, or a manual ``unshard()``
``limit_all_gathers=``                  not needed: the CPU never waits
``use_orig_params=True``                always
``no_sync()``                           ``set_requires_gradient_sync``
``ignored_modules``, ``_states``        ``ignored_params``, a set of parameters
``param_init_fn=``                      shard on meta, ``to_empty``, ``reset_parameters``
``model.clip_grad_norm_(...)``          ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``
full state dicts, optimizer's too       the same format: each API loads the files of the other
======================================  =============================================================================

Each function below implements one row with both APIs, first
``old`` and then ``new``. You can use it as a recipe. Each API gives a ``Run``: the losses, and all all-gathers,
computations, frees and reductions of a step, in order. Both runs must be equal. If the order intentionally differs, the
row describes the difference. ``sides.py`` contains the training loop and the comparison.

The function `translated` converts the simple arguments automatically, and raises an error for arguments without a
replacement.

Spec: MIG-01 to MIG-21.
"""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import nullcontext
from typing import Any

import torch
from common import Block, Place, on_ranks, say
from sides import (
    KINDS,
    NUM_STEPS,
    ROWS,
    WIDTH,
    Model,
    Run,
    batch,
    check,
    compare,
    grid,
    line,
    momentum,
    plain,
    row,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    trace,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.wrap import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({Block})


def sharded(model: Any, **options: Any) -> Any:
    """The loop that replaces a wrapping policy: inner modules first, the root last."""
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module, **options)
    return fully_shard(model, **options)


# --- automatic translation ---


def translated(place: Place, **old: Any) -> dict[str, Any]:
    """Converts the wrapper's arguments to those of ``fully_shard``.

    Raises:
        NotImplementedError: an argument has no translation.
    """
    strategy = old.get("sharding_strategy") or ShardingStrategy.FULL_SHARD
    if strategy is ShardingStrategy.NO_SHARD:
        raise NotImplementedError("fully_shard always shards; instead of NO_SHARD use DistributedDataParallel")
    if old.get("backward_prefetch", BackwardPrefetch.BACKWARD_PRE) is not BackwardPrefetch.BACKWARD_PRE:
        raise NotImplementedError(
            "fully_shard always prefetches like BACKWARD_PRE; BACKWARD_POST and None are not available"
        )
    is_hybrid = "HYBRID" in strategy.name
    new: dict[str, Any] = {
        "mesh": grid(place) if is_hybrid else line(place),
        "reshard_after_forward": strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
    }
    if (offload := old.get("cpu_offload")) is not None:
        # Pinned memory requires a GPU.
        pinned = place.device.type == "cuda"
        new["offload_policy"] = CPUOffloadPolicy(pinned) if offload.offload_params else OffloadPolicy()
    if (precision := old.get("mixed_precision")) is not None:
        new["mp_policy"] = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype)
    ignored = [p for module in old.get("ignored_modules") or () for p in module.parameters()]
    new["ignored_params"] = {*ignored, *(old.get("ignored_states") or ())}
    return new


def both_sides(place: Place, **old: Any) -> tuple[Run, Run]:
    """Trains with the wrapper's arguments, and with their translation."""
    groups = {}
    if "HYBRID" in getattr(old.get("sharding_strategy"), "name", ""):
        groups = {"device_mesh": grid(place)}
    first = train(FSDP(plain(place), auto_wrap_policy=POLICY, device_id=place.device, **groups, **old), place)
    return first, train(sharded(plain(place), **translated(place, **old)), place)


# --- the table ---


@row("MIG-01", "MIG-21", old="FSDP(model, auto_wrap_policy=...)", new="fully_shard on each block, then on the model")
def units(place: Place) -> tuple[Run, Run]:
    old = FSDP(plain(place), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=place.device)

    new = plain(place)
    for module in new.modules():
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(new)

    assert isinstance(new, FSDPModule)
    return train(old, place), train(new, place)


ROOT_IS_FREED = "the root, too, is freed after forward, and gathered again in backward; with None it is kept"


@row("MIG-02", old="FULL_SHARD", new="reshard_after_forward=True", differs=ROOT_IS_FREED)
def full_shard(place: Place) -> tuple[Run, Run]:
    old, new = both_sides(place, sharding_strategy=ShardingStrategy.FULL_SHARD)
    assert new.events.count("AG") == old.events.count("AG") + 1 == 2
    return old, new


@row("MIG-03", old="SHARD_GRAD_OP", new="reshard_after_forward=False")
def shard_grad_op(place: Place) -> tuple[Run, Run]:
    return both_sides(place, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@row("MIG-04", old="HYBRID_SHARD", new="True, mesh of two axes", num_ranks=4, differs=ROOT_IS_FREED)
def hybrid_shard(place: Place) -> tuple[Run, Run]:
    old, new = both_sides(place, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    all_reduces = [[event for event in run.events if event.startswith("AR")] for run in (old, new)]
    assert all_reduces[0] == all_reduces[1] != []
    return old, new


@row("MIG-05", old="_HYBRID_SHARD_ZERO2", new="False, mesh of two axes", num_ranks=4)
def hybrid_shard_zero2(place: Place) -> tuple[Run, Run]:
    return both_sides(place, sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)


@row("MIG-06", "MIG-08", old="NO_SHARD; BACKWARD_POST, None", new="not available", differs=ROOT_IS_FREED)
def what_is_gone(place: Place) -> tuple[Run, Run]:
    for gone in (
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"backward_prefetch": None},
    ):
        try:
            translated(place, **gone)
        except NotImplementedError:
            continue
        raise AssertionError(f"{gone} has no translation")
    return both_sides(place, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)


@row("MIG-07", old="CPUOffload(True)", new="CPUOffloadPolicy()", differs=ROOT_IS_FREED)
def offload(place: Place) -> tuple[Run, Run]:
    for offload_params in (False, True):
        old, new = both_sides(place, cpu_offload=CPUOffload(offload_params))
        compare(old, new, exact=place.num_ranks == 2)
    return old, new


# The last bit of bfloat16 is a relative difference of 0.4 %.
@row(
    "MIG-09",
    old="MixedPrecision(param, reduce)",
    new="MixedPrecisionPolicy(param, reduce)",
    differs=ROOT_IS_FREED,
    rounding=1e-2,
)
def precision(place: Place) -> tuple[Run, Run]:
    return both_sides(place, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))


@row("MIG-10", old="cast_forward_inputs=True in each unit", new="cast_forward_inputs is on", rounding=1e-2)
def casting(place: Place) -> tuple[Run, Run]:
    low = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    old = plain(place)
    for index, block in enumerate(old.blocks):
        old.blocks[index] = FSDP(block, mixed_precision=low, device_id=place.device)
    old = FSDP(old, device_id=place.device)

    new = plain(place)
    for block in new.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(new)
    return train(old, place), train(new, place)


@row("MIG-11", old="device_id=device", new="mesh=init_device_mesh(device.type, ...)")
def device(place: Place) -> tuple[Run, Run]:
    torch.manual_seed(0)
    old = FSDP(Model(), auto_wrap_policy=POLICY, device_id=place.device)

    torch.manual_seed(0)
    new = sharded(Model(), mesh=init_device_mesh(place.device.type, (place.num_ranks,)))
    assert {p.device for p in old.parameters()} == {p.device for p in new.parameters()} == {place.device}
    return train(old, place), train(new, place)


@row("MIG-12", old="sync_module_states=True", new="set_model_state_dict, broadcast_from_rank0=True")
def same_start(place: Place) -> tuple[Run, Run]:
    old = FSDP(plain(place, seed=place.rank), auto_wrap_policy=POLICY, device_id=place.device, sync_module_states=True)

    new = plain(place, seed=place.rank)
    values = copy.deepcopy(new.state_dict()) if place.rank == 0 else {}
    sharded(new)
    set_model_state_dict(new, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return train(old, place), train(new, place)


@row("MIG-13", old="forward_prefetch=True", new="set_modules_to_forward_prefetch")
def prefetch(place: Place) -> tuple[Run, Run]:
    old = FSDP(plain(place), auto_wrap_policy=POLICY, device_id=place.device, forward_prefetch=True)

    new = sharded(plain(place))
    chain = [new, *new.blocks]
    for module, following in itertools.pairwise(chain):
        module.set_modules_to_forward_prefetch([following])
    return train(old, place), train(new, place)


@row("MIG-14", old="limit_all_gathers=True", new="-")
def limiter(place: Place) -> tuple[Run, Run]:
    old = FSDP(plain(place), auto_wrap_policy=POLICY, device_id=place.device, limit_all_gathers=True)
    new = sharded(plain(place))
    runs = train(old, place), train(new, place)
    assert runs[1].held_back == 0
    return runs


@row("MIG-15", old="use_orig_params=True", new="-")
def original_parameters(place: Place) -> tuple[Run, Run]:
    old = FSDP(plain(place), auto_wrap_policy=POLICY, device_id=place.device, use_orig_params=True)
    new = sharded(plain(place))
    names = [name for name, _ in plain(place).named_parameters()]
    assert [name for name, _ in new.named_parameters()] == names
    assert [name.replace("_fsdp_wrapped_module.", "") for name, _ in old.named_parameters()] == names
    return train(old, place), train(new, place)


@row("MIG-16", old="with model.no_sync()", new="model.set_requires_gradient_sync(False)")
def accumulation(place: Place) -> tuple[Run, Run]:
    def accumulate(model: Any, *, is_new: bool) -> Run:
        optimizer, run = momentum(model), Run()
        for step in range(2 * NUM_STEPS):
            is_last = step % 2 == 1
            if is_new:
                model.set_requires_gradient_sync(is_last)
            x, target = batch(step, place)
            with trace.record() as recorder, nullcontext() if is_new or is_last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), target)
                loss.backward()
            assert ("RS" in recorder.order("RS")) == is_last
            run.losses.append(loss.item())
            run.events += recorder.order(*KINDS)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        return run

    old = FSDP(plain(place), auto_wrap_policy=POLICY, device_id=place.device)
    new = sharded(plain(place))
    return accumulate(old, is_new=False), accumulate(new, is_new=True)


@row("MIG-17", old="ignored_modules, ignored_states", new="ignored_params, a set")
def ignored(place: Place) -> tuple[Run, Run]:
    old = plain(place)
    old = FSDP(old, auto_wrap_policy=POLICY, device_id=place.device, ignored_states=[old.leave.bias])
    new = plain(place)
    sharded(new, ignored_params={new.leave.bias})
    compare(train(old, place), train(new, place), exact=place.num_ranks == 2)

    # A module is passed as the set of its parameters.
    old = plain(place)
    old = FSDP(old, auto_wrap_policy=POLICY, device_id=place.device, ignored_modules=[old.leave])
    new = plain(place)
    sharded(new, ignored_params=set(new.leave.parameters()))
    return train(old, place), train(new, place)


@row("MIG-18", old="param_init_fn=", new="shard on meta, to_empty, reset_parameters")
def late_values(place: Place) -> tuple[Run, Run]:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=place.device, recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(0.5 / WIDTH)

    with torch.device("meta"):
        old, new = Model(), Model()
    old = FSDP(old, auto_wrap_policy=POLICY, device_id=place.device, param_init_fn=fill)

    sharded(new, mesh=line(place))
    assert all(tensor.is_meta for tensor in (*new.parameters(), *new.buffers()))
    new.to_empty(device=place.device)
    new.reset_parameters()
    return train(old, place), train(new, place)


# The norm is a sum of squares, and flat shards sum the squares in a different order.
@row(
    "MIG-19",
    old="model.clip_grad_norm_(max_norm)",
    new="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    exact=False,
)
def clipping(place: Place) -> tuple[Run, Run]:
    old = FSDP(plain(place), auto_wrap_policy=POLICY, device_id=place.device)
    new = sharded(plain(place))
    norms: list[float] = []
    runs = (
        train(old, place, clip=lambda: norms.append(old.clip_grad_norm_(0.1).item())),
        train(
            new,
            place,
            clip=lambda: norms.append(nn.utils.clip_grad_norm_(new.parameters(), 0.1).full_tensor().item()),  # type: ignore[attr-defined]
        ),
    )
    assert min(norms) > 0.1, "the gradients are clipped"
    assert all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(norms, norms[NUM_STEPS:], strict=False))
    return runs


@row("MIG-20", old="FULL_STATE_DICT, optim_state_dict", new="get_... and set_..., full_state_dict=True")
def checkpoints(place: Place) -> tuple[Run, Run]:
    whole, later = StateDictOptions(full_state_dict=True), range(NUM_STEPS, 2 * NUM_STEPS)
    adam = torch.optim.Adam

    def wrapped(seed: int = 0) -> Any:
        return FSDP(plain(place, seed), auto_wrap_policy=POLICY, device_id=place.device, use_orig_params=True)

    # 1. From the wrapper to the function.
    old = wrapped()
    optimizer = adam(old.parameters())
    train(old, place, optimizer=optimizer)
    with FSDP.state_dict_type(old, StateDictType.FULL_STATE_DICT):
        model_state, optimizer_state = old.state_dict(), FSDP.optim_state_dict(old, optimizer)
    new = sharded(plain(place, seed=1))
    fresh = adam(new.parameters())
    set_model_state_dict(new, copy.deepcopy(model_state), options=whole)
    set_optimizer_state_dict(new, fresh, copy.deepcopy(optimizer_state), options=whole)
    runs = train(old, place, optimizer=optimizer, steps=later), train(new, place, optimizer=fresh, steps=later)
    compare(*runs, exact=place.num_ranks == 2)

    # 2. And back.
    model_state = copy.deepcopy(get_model_state_dict(new, options=whole))
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(new, fresh, options=whole))
    again = wrapped(seed=2)
    last = adam(again.parameters())
    with FSDP.state_dict_type(again, StateDictType.FULL_STATE_DICT):
        again.load_state_dict(model_state)
        last.load_state_dict(FSDP.optim_state_dict_to_load(again, last, optimizer_state))
    return train(again, place, optimizer=last, steps=later), train(new, place, optimizer=fresh, steps=later)


def lesson(place: Place) -> None:
    for name, entry in ROWS.items():
        if place.num_ranks < entry.num_ranks:
            say(place, f"{', '.join(entry.ids):<15} {entry.old}: needs {entry.num_ranks} ranks, not run")
            continue
        say(place, check(name, place))


if __name__ == "__main__":
    on_ranks(lesson, num_ranks=4)
