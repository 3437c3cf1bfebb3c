"""Copies tensors that a saved dict would otherwise share with the model.

Buffers and ignored parameters belong to no unit, and ``nn.Module.state_dict()`` puts the model's own tensors into the
dict. A dict must not change when training continues, so the dict gets copies of these tensors. The model keeps its own
memory, because a module may hold views of a buffer, and another process may read a table in shared memory::

    saved = model.state_dict()      saved["norm.running_mean"] -----> 1.0
    model(batch)                    model.norm.running_mean --------> 1.1

Cost: the bytes of these tensors for as long as the dict exists. If two keys refer to the same tensor, they share one
copy, and an expanded tensor is copied before it is expanded.

*In torch:* the dict shares them with the model, so running statistics in it change with the next forward.

Spec: SD-FULL-07, SAVE-01.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from minifsdp.checkpoint.chunks import on_this_rank
from minifsdp.checkpoint.names import keys_below


def _memory_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's storage; ``None`` for tensors without one, such as sparse tensors."""
    try:
        return on_this_rank(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def keep_apart(
    state: MutableMapping[str, Any], prefix: str, own: Iterable[torch.Tensor], before: Mapping[str, Any]
) -> None:
    """Copies every tensor below ``prefix`` that uses the model's memory, including tensors in a list or a dict.

    Args:
        state: the dict; all or some of its keys begin with ``prefix``.
        prefix: the beginning of the keys to check.
        own: tensors of the model.
        before: entries that the dict had before the model was saved; they stay unchanged.
    """
    # The address of a storage without elements is 0.
    memory = {_memory_of(tensor) for tensor in own} - {0}
    copies: dict[Any, torch.Tensor] = {}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        where = _memory_of(tensor)
        if where not in memory:
            return tensor
        if where is None or on_this_rank(tensor) is not tensor:
            return tensor.detach().clone()
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if same not in copies:
            once = tensor.detach()[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]
            copies[same] = once.clone().expand(tensor.shape)
        return copies[same]

    for key in keys_below(state, prefix):
        if state[key] is not before.get(key):
            state[key] = tree_map_only(torch.Tensor, apart, state[key])
