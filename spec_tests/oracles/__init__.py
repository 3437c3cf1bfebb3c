"""Reference trainers for the same model, to compare with.

A gradient does not show whether it is right. But four trainers are widely trusted: a single process without sharding,
`DistributedDataParallel`, and torch's own FSDP1 and FSDP2. Each of them gets the same model (see ``spec_tests/models``)
and the same `Recipe`, and returns a `Record`. Two records can be compared::

    recipe = Recipe(steps=3, optimizer=adamw, accumulate=2, no_sync=True)
    ours = train_sharded(apis.WRAPPED, info, recipe, strategy=FULL_SHARD)
    assert_same_training(ours, train_single(info, 2, recipe, flat_units=True), tolerance_for(2))

A record contains the losses of all ranks, and the full parameters and full gradients of the last step, by their names
in the plain model. Nothing in a record is sharded, so it does not depend on how the model was sharded.

How equal must two records be? With two ranks, the only sum over ranks is ``a + b``, which does not depend on the order,
and dividing by two is exact. All trainers therefore agree *bitwise* there, so a subtle error cannot go unnoticed. With
four ranks a sum depends on its order, and the last bits can differ without an error. ``compare.py`` has the tolerances,
and `tolerance_for` selects one.

Reading order: ``recipe`` -> ``training`` -> ``gathering`` -> ``compare`` -> ``counting``.
"""

# Tests find these names as attributes of this package.
# ruff: noqa: F403

from spec_tests.oracles.compare import *
from spec_tests.oracles.counting import *
from spec_tests.oracles.gathering import *
from spec_tests.oracles.recipe import *
from spec_tests.oracles.training import *
