"""Reference trainers for the same model, to compare with.

A gradient does not show whether it is right. But four trainers are widely trusted: a single process without sharding,
`DistributedDataParallel`, and torch's own FSDP1 and FSDP2. Each of them gets the same model (see ``spec_tests/models``)
and the same `Recipe`, and returns a `Record`. Two records can be compared::

    recipe = Recipe(steps=3, optimizer=adamw, accumulate=2, no_sync=True)
    ours = train_fsdp1(minifsdp.FullyShardedDataParallel, info, recipe, sharding_strategy="FULL_SHARD")
    assert_same_training(ours, train_single(info, 2, recipe, flat_units=True), tolerance_for(2))

A record contains the losses of all ranks, and the full parameters and full gradients of the last step, by their names
in the plain model. Nothing in a record is sharded, so it does not depend on how the model was sharded.

How equal must two records be? With two ranks, the only sum over ranks is ``a + b``, which does not depend on the order,
and dividing by two is exact. All trainers therefore agree *bitwise* there, so a subtle error cannot go unnoticed. With
four ranks a sum depends on its order, and the last bits can differ without an error. ``compare.py`` has the tolerances,
and `tolerance_for` selects one.

Reading order: ``recipe`` -> ``training`` -> ``gathering`` -> ``compare`` -> ``counting``.
"""

from spec_tests.oracles.compare import (
    BIT_EQUAL,
    FLOAT,
    LOW_PRECISION,
    SAME_MATH,
    Tolerance,
    assert_same_training,
    tolerance_for,
)
from spec_tests.oracles.counting import Counts, count_collectives
from spec_tests.oracles.gathering import Chunks, clean_name, flat_chunks, gather_chunks, split_by_name, units_of
from spec_tests.oracles.recipe import Recipe, Record, adamw, forward_backward, sgd
from spec_tests.oracles.training import (
    shard_fsdp1,
    shard_fsdp2,
    train_ddp,
    train_fsdp1,
    train_fsdp2,
    train_single,
    train_torch_fsdp1,
    train_torch_fsdp2,
)

__all__ = [
    "BIT_EQUAL",
    "FLOAT",
    "LOW_PRECISION",
    "SAME_MATH",
    "Chunks",
    "Counts",
    "Recipe",
    "Record",
    "Tolerance",
    "adamw",
    "assert_same_training",
    "clean_name",
    "count_collectives",
    "flat_chunks",
    "forward_backward",
    "gather_chunks",
    "sgd",
    "shard_fsdp1",
    "shard_fsdp2",
    "split_by_name",
    "tolerance_for",
    "train_ddp",
    "train_fsdp1",
    "train_fsdp2",
    "train_single",
    "train_torch_fsdp1",
    "train_torch_fsdp2",
    "units_of",
]
