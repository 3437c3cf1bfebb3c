"""DeepSpeed's ZeRO-3 as a contender, if DeepSpeed is installed. The project does not depend on it.

Its defaults are for models a thousand times as large: parameters of less than 100 000 elements are never sharded, and
parameters that are used again within 1 000 000 000 elements are not freed. So it is configured to shard and free all
parameters, to have at most two unsharded units, and to reduce one unit at a time, like the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch.distributed as dist
from torch import nn

from spec_tools.benchmarks.workloads import Workload, adamw

__all__ = ["can", "engine_of"]


def can(workload: Workload) -> bool:
    """Whether it is installed and supports the workload.

    It does not support unsynchronized gradients of sharded parameters. In bfloat16 it computes differently.
    """
    plain = workload.strategy == "FULL_SHARD" and workload.accumulate == 1
    usual = workload.backward_prefetch and not workload.prefetch
    return plain and usual and not workload.bf16 and importlib.util.find_spec("deepspeed") is not None


def engine_of(model: nn.Module, workload: Workload) -> Any:
    """The engine that trains the model; it has the methods of a model and those of an optimizer."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num_ranks, LOCAL_SIZE=num_ranks, DS_ACCELERATOR="cpu")
    deepspeed: Any = importlib.import_module("deepspeed")
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 2 * workload.largest_unit,
        "stage3_prefetch_bucket_size": workload.largest_unit,
        "reduce_bucket_size": workload.largest_unit,
        # True would replace torch.nn.functional.linear for all contenders.
        "memory_efficient_linear": False,
    }
    config = {
        "train_micro_batch_size_per_gpu": len(workload.batches(0, 0)[0][0]),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # The default would clip gradients to a norm of 1.
        "gradient_clipping": 0.0,
    }
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)[0]
