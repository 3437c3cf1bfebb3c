"""Buffers in another dtype than they are stored in (``MixedPrecision(buffer_dtype=...)``).

A module computes its parameters with a buffer. If mixed precision casts the parameters and not the buffer, the result
has the wider dtype of the two::

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.linspace(0.1, 1, 8))
        def forward(self, x):
            return self.linear(x) * self.scale          # bfloat16 * float32 -> float32

    low = torch.bfloat16
    model = FSDP(Scaled(), mixed_precision=MixedPrecision(param_dtype=low, buffer_dtype=low))

Without this case, the output has the dtype float32. `cast_buffers` casts the floating-point buffers of a wrapper when
its root state is created. It notes the stored dtype of each buffer, because full and sharded state dicts contain
buffers in this dtype. Buffers that modules share stay shared. With full precision in evaluation mode, each outermost
forward calls it again.

*In torch:* ``_cast_buffers_to_dtype_and_device`` in ``_runtime_utils.py``.

Spec: MP-09, MP-10, FRESH-08.
"""

from typing import Any


def cast_buffers(wrapper: Any) -> None:
    """Casts the floating-point buffers of a wrapper, in place, to the ``buffer_dtype`` of its mixed precision."""
    dtype = wrapper.mixed_precision.buffer_dtype
    if dtype is None:
        return
    is_full = wrapper._full_precision_in_eval and not wrapper.module.training
    for _, owner in wrapper._own_modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if not buffer.is_floating_point():
                continue
            if not is_full and buffer.dtype is not dtype:
                buffer._stored_dtype = buffer.dtype
            # Another module may have cast the buffer.
            before = wrapper._buffer_dtypes.get((owner, name), buffer.dtype)
            stored = wrapper._buffer_dtypes[owner, name] = getattr(
                buffer, "_stored_dtype", before
            )
            cast = buffer.to(stored if is_full else dtype)
            if wrapper._full_precision_in_eval:
                # A pending backward may have saved the buffer.
                setattr(owner, name, cast)
            else:
                # Modules that share the buffer still share it.
                buffer.data = cast
