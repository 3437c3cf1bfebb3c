"""A policy that chooses the compute dtype of each parameter (``param_dtype_override_fn``).

The weights of a normalization stay in float32, although the other parameters of the unit compute in bfloat16::

    def keep_vectors(parameter):
        return torch.float32 if parameter.ndim == 1 else None

    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=keep_vectors)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)

Without this case, all parameters of a unit compute in ``param_dtype``, and such a module needs a unit of its own. The
parameters that keep their dtype are in a bucket of their own, because a bucket has one dtype. So the unit issues one
more all-gather. The gradients are reduced together, in a dtype that can represent them all.

*In torch:* the same field of the policy, since 2.15. All parameters of a group share one all-gather of bytes.

Spec: NEW-30.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from minifsdp.engine.bucket import Bucket
from minifsdp.engine.messages import message
from minifsdp.engine.sharded_param import Options, ShardedParam


class ParameterDtypes:
    """Which parameters keep their dtype, and their bucket; see note 6 of ``engine/bucket.py``.

    The function of the policy is called once for each parameter. A result that is neither ``None`` nor ``param_dtype``
    nor the dtype of the parameter raises a ValueError.

    Args:
        policy: the mixed-precision policy of the unit. Policies of torch before 2.15 do not have the field.
    """

    def __init__(self, policy: Any) -> None:
        self._dtype = policy.param_dtype
        self._choose: Any = getattr(policy, "param_dtype_override_fn", None)
        self._is_kept = functools.cache(self._ask)

    def takes(self, param: ShardedParam, local_shard: torch.Tensor) -> bool:
        """Whether the parameter computes in its own dtype."""
        return self._choose is not None and self._is_kept(param)

    def _ask(self, param: ShardedParam) -> bool:
        own = param.parameter.dtype
        chosen = self._choose(param.parameter)
        if chosen not in (None, self._dtype, own):
            raise ValueError(
                message(
                    "dtype-override",
                    path=param.info.path,
                    own=own,
                    default=self._dtype,
                    chosen=chosen,
                )
            )
        return chosen is own and self._dtype not in (None, own)

    def place(self, param: ShardedParam) -> object:
        """One bucket stores all of them."""
        return None

    def create(
        self,
        params: list[ShardedParam],
        local_shards: Sequence[torch.Tensor],
        options: Options,
    ) -> Bucket:
        """Creates a bucket that computes in the stored dtype."""
        precision = replace(options.precision, compute=None)
        return Bucket(params, local_shards, replace(options, precision=precision))
