"""Embeddings with sparse gradients.

Their gradients have the layout ``torch.sparse_coo``, which a reduce-scatter cannot add::

    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    fully_shard(model)
    model(torch.arange(3)).sum().backward()

Without this case, the backward raises an error: the operator that packs gradients takes no sparse tensors. This module
sets ``sparse=False`` on the embeddings of a new unit, with a warning. The gradients then have zeros for the other rows,
and the values are the same.

*In torch:* the backward raises an error that an operator does not exist for sparse tensors, in FSDP1 and FSDP2.

Spec: PROG-53.
"""

from collections.abc import Mapping

from torch import nn

from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.messages import message, warn


def use_dense_gradients(found: Mapping[nn.Parameter, ParamInfo]) -> None:
    """Sets ``sparse=False`` on the embeddings of these parameters."""
    for first in found.values():
        for info in first.places:
            if (
                isinstance(info.module, nn.Embedding | nn.EmbeddingBag)
                and info.module.sparse
            ):
                info.module.sparse = False
                warn(message("sparse-gradients", parameter=info.path))
