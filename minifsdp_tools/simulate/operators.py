"""A dispatch mode that writes operators and memory on a tape.

`OperatorMode` receives every operator after autograd. It appends a kernel with the number of floating-point operations
of PyTorch's counter, and with the bytes of all tensors that the operator reads and writes. It appends no kernel for a
view or for uninitialized memory. A collective is appended instead of executed.

`replaced_functions` replaces three functions during the recording. ``record_stream`` has no meta kernel.
``scaled_dot_product_attention`` would create the matrix of attention scores on the meta device; on a card, a fused
kernel does not. The engine allocates and releases memory by ``resize_`` of a storage, which no dispatch mode receives.

A block of memory is the storage of an operator's result. A weak reference shows when it is released.

Worked example, ``x @ w`` with shapes (2, 3) and (3, 4) in float32: 2 * 2 * 3 * 4 = 48 operations, and 4 * (6 + 12 + 8)
= 104 bytes.

*In torch:* ``FlopCounterMode`` and ``torch.distributed._tools``; they record no streams.

Spec: SIMULATE-01, SIMULATE-03.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minifsdp.engine.precision import tensors_in
from minifsdp_tools.simulate.tape import Allocate, Collective, Free, Kernel, Tape, UseOn

aten = torch.ops.aten

# The kinds of the collectives that are used.
_COLLECTIVES = {
    "c10d::_allgather_base_": "AG",
    "c10d::_reduce_scatter_base_": "RS",
    "c10d::allreduce_": "AR",
    "c10d::broadcast_": "BCAST",
}
# These read only the rows that an index selects, as many as they write.
_SELECTS = {"aten::embedding", "aten::index_select", "aten::index"}
# These write to their first argument and do not read it.
_OVERWRITES = {"aten::copy_", "aten::zero_", "aten::fill_"}
# These allocate memory and write nothing.
_ALLOCATES = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}
# These return another view of their input.
_VIEWS = {
    "aten::_unsafe_view",
    "aten::lift_fresh",
    "aten::_reshape_alias",
    "aten::set_",
    "aten::alias",
    "aten::detach",
}


class OperatorMode(TorchDispatchMode):
    """Writes operators, collectives and memory on a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._numbers = count()
        # The number of each block, its size, and the reference that reports its end; by the address of the storage.
        self._blocks: dict[int, tuple[int, int, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called for each operator."""
        if any(issubclass(kind, DTensor) for kind in types):
            # The operators on the local tensors follow.
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("c10d::"):
            return self._communicate(func, args)
        # The optimizer's fused kernel has no implementation for the meta device.
        result = None if name == "aten::_fused_adamw_" else func(*args, **kwargs)
        outputs = list(tensors_in(result))
        for tensor in outputs:
            self.note(tensor)
        if not (func.is_view or name in _ALLOCATES or name in _VIEWS):
            self._append(func, name, args, kwargs, result, outputs)
        return result

    def _append(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        result: Any,
        outputs: list[torch.Tensor],
    ) -> None:
        inputs = list(tensors_in(args))
        given = _by_name(func, args, kwargs)
        changed = [
            given.get(one.name)
            for one in func._schema.arguments
            if one.alias_info and one.alias_info.is_write
        ]
        known = {id(tensor) for tensor in inputs}
        written = [
            *tensors_in(changed),
            *(tensor for tensor in outputs if id(tensor) not in known),
        ]
        overwritten = (
            {id(tensor) for tensor in written}
            if name in _OVERWRITES or "out" in kwargs
            else set()
        )
        read = (
            outputs
            if name in _SELECTS
            else [tensor for tensor in inputs if id(tensor) not in overwritten]
        )
        if not any(tensor.is_meta for tensor in (*outputs, *inputs)):
            return
        counter = flop_registry.get(func._overloadpacket)
        flops = (
            0.0 if counter is None else float(counter(*args, **kwargs, out_val=result))
        )
        self._tape.items.append(
            Kernel(
                self._tape.stream,
                name,
                flops=flops / 2 if given.get("is_causal") else flops,
                num_bytes=sum(map(_size, (*read, *written))),
                dtype=outputs[0].dtype if outputs else None,
                phase=self._tape.phase,
                nominal_flops=flops,
            )
        )

    def _communicate(self, func: Any, args: Any) -> Any:
        group = dist.ProcessGroup.unbox(_by_name(func, args, {})["process_group"])
        self._tape.items.append(
            Collective(
                self._tape.stream,
                _COLLECTIVES[func._schema.name],
                ranks=tuple(dist.get_process_group_ranks(group)),
                num_bytes=max(tensor.nbytes for tensor in tensors_in(args)),
            )
        )
        return args[0], FakeWork().boxed()

    # --- memory ---

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(size for _, size, _ in self._blocks.values())

    def note(self, tensor: torch.Tensor) -> None:
        """Notes the memory of a tensor on the meta device, if it is new."""
        if tensor.is_meta and tensor.untyped_storage()._cdata not in self._blocks:
            self._add(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Called after ``storage.resize_``."""
        self._drop(storage._cdata)
        self._add(storage)

    def used_on(self, tensor: torch.Tensor, stream: int) -> None:
        """Called for ``tensor.record_stream``."""
        address = tensor.untyped_storage()._cdata
        if address in self._blocks:
            self._tape.items.append(UseOn(self._blocks[address][0], stream))

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if size := storage.nbytes():
            number = next(self._numbers)
            self._blocks[address] = (
                number,
                size,
                weakref.ref(storage, lambda _: self._drop(address)),
            )
            self._tape.items.append(Allocate(number, size))

    def _drop(self, address: int) -> None:
        if address in self._blocks:
            number, size, _ = self._blocks.pop(address)
            self._tape.items.append(Free(number, size))


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by their names."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _size(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; an expanded tensor has no more than its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


@contextmanager
def replaced_functions(mode: OperatorMode) -> Iterator[None]:
    """Replaces functions that no dispatch mode receives, or that behave differently on the meta device, in a block.

    A ``TorchFunctionMode`` would be an alternative, but autograd disables it while hooks run in backward.
    """
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def noted_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if storage.device.type == "meta":
            mode.resized(storage)
        return result

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", noted_resize),
        mock.patch.object(
            torch.Tensor,
            "record_stream",
            lambda tensor, on: mode.used_on(tensor, on.number),
        ),
        mock.patch.object(
            torch.nn.functional, "scaled_dot_product_attention", fused_attention
        ),
    ):
        yield


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that a card uses: FlashAttention, or the memory-efficient kernel if there is a mask."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        # Models of PyTorch repeat the heads of keys and values in memory.
        times = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(times, -3) for tensor in (key, value))
    if attn_mask is None:
        result = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
    else:
        bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal
        )
    return result[0]  # type: ignore[no-any-return]
