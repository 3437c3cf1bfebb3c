"""The configuration of a simulated step: the model, the ranks, and how the model is sharded and trained.

Worked example, a copy on each machine of 8 ranks, 16 machines, and units of two blocks::

    Setup("llama3-8b", num_ranks=128, strategy="HYBRID_SHARD", unit=2)

*In torch:* the arguments of ``FullyShardedDataParallel`` and ``fully_shard``.

Spec: SIMULATE-02, SIMULATE-04.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from minifsdp.engine.messages import message
from minifsdp_tools.simulate.shapes import SHAPES, Shape

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHOICES: dict[str, Collection[str | None]] = {
    "api": ("fsdp1", "fsdp2"),
    "strategy": STRATEGIES,
    "checkpointing": ("none", "full", "selective"),
    "param_dtype": DTYPES,
    "reduce_dtype": DTYPES,
    "optimizer": ("adamw", "sgd"),
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", None),
}


@dataclass(frozen=True)
class Setup:
    """A configuration to simulate.

    Args:
        model: a name of `SHAPES`, a `Shape`, or ``module:function``. The function gets this object and
            returns a `models.Model`.
        num_ranks: all ranks.
        ranks_per_machine: the ranks on each machine.
        api: ``fsdp1`` for the wrapper, ``fsdp2`` for ``fully_shard``.
        strategy: a sharding strategy. ``fully_shard`` takes ``SHARD_GRAD_OP`` as ``reshard_after_forward=False``.
        num_shards: ranks that share a copy, for hybrid strategies; by default those of one machine.
        reshard_after_forward: an integer for ``fully_shard``: 1/n of each unit is kept for backward.
        unit: the number of blocks in a unit.
        micro_batch, sequence: the number of sequences in a micro-batch, and of tokens in a sequence.
        accumulation: the number of micro-batches in a step.
        no_sync: whether only the last micro-batch reduces gradients.
        checkpointing: ``none``, ``full`` or ``selective``.
        param_dtype, reduce_dtype: names of `DTYPES`; the stored parameters are in float32.
        backward_prefetch: ``BACKWARD_PRE``, ``BACKWARD_POST`` or ``None``; the wrapper only.
        forward_prefetch, limit_all_gathers: options of the wrapper.
        optimizer: ``adamw`` with a fused kernel, or ``sgd``.
    """

    model: str | Shape
    num_ranks: int
    ranks_per_machine: int = 8
    api: str = "fsdp2"
    strategy: str = "FULL_SHARD"
    num_shards: int | None = None
    reshard_after_forward: int | None = None
    unit: int = 1
    micro_batch: int = 1
    sequence: int | None = None
    accumulation: int = 1
    no_sync: bool = False
    checkpointing: str = "none"
    param_dtype: str = "bf16"
    reduce_dtype: str = "fp32"
    backward_prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        checked = dict(_CHOICES)
        if isinstance(self.model, str) and ":" not in self.model:
            checked["model"] = SHAPES
        for name, choices in checked.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    message(
                        "simulate-choice",
                        name=name,
                        value=value,
                        choices=", ".join(map(str, choices)),
                    )
                )
        for name in (
            "num_ranks",
            "ranks_per_machine",
            "unit",
            "micro_batch",
            "accumulation",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    message("simulate-number", name=name, value=getattr(self, name))
                )
        if self.num_ranks % self.shards:
            raise ValueError(
                message("simulate-shards", num_ranks=self.num_ranks, shards=self.shards)
            )

    @property
    def shape(self) -> Shape:
        """The sizes of the model.

        Raises:
            ValueError: if the model is given by a function.
        """
        if isinstance(self.model, Shape):
            return self.model
        if self.model not in SHAPES:
            raise ValueError(message("simulate-search", model=self.model))
        return SHAPES[self.model]

    @property
    def shards(self) -> int:
        """The number of ranks that share a copy."""
        if self.strategy in HYBRID:
            return min(self.num_shards or self.ranks_per_machine, self.num_ranks)
        return 1 if self.strategy == "NO_SHARD" else self.num_ranks
