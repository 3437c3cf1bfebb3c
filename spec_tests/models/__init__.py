"""The models of the tests, how they are built, and how they are sharded.

Most tests use one model, a `Stack`: four equal blocks inside a root that has its own parameters. It and the other
models that many tests share are in ``modules.py``. A model that only one file needs is next to its tests.

* ``modules.py``: the layers of the models, and `seeded`, which gives them the same values in every process.
* ``sharding.py``: `wrapped` and `sharded`, one for each API, with the groups and meshes of four ranks.
* ``running.py``: batches, one iteration, and its events, collectives and memory.
* ``values.py``: parameters and gradients, the expected ones and those of the sharded model.
* ``info.py``, ``arrangement.py``, ``calls.py``, ``layers.py``: `MODELS`, a table of small models, each of which is
  difficult in one way.

A sharded trainer that was only tested with a stack of equal blocks can be right by accident. Every model in `MODELS` is
five to twelve lines of ordinary PyTorch, as used in production. A comment gives the reason for each model. All models
compute in float32, and a step takes a millisecond or two, so a behavior can be tested on all of them.
``arrangement.py`` has models in which the arrangement, the use or the training of units is difficult. ``calls.py`` has
models that are difficult to call, and ``layers.py`` has models with a difficult layer.

Each model in the table comes with its batches (see `ModelInfo`). The batches do not depend on the trainer: the seed,
the step and the rank determine that rank's part of the batch. The parts of ``n`` ranks together are *the* batch of
the step. A single process that draws all the parts, one after the other, trains on exactly the same numbers::

    ranks       rank 0 draws batch(seed, step, 0)       rank 1 draws batch(seed, step, 1)       gradients are averaged
    one process draws batch(seed, step, 0), then batch(seed, step, 1)                           gradients are averaged

The single process does not concatenate the parts, and the ranks do not split a batch: batch norm gets four samples on a
rank, and must get the same four in the single process.

*In torch:* ``torch.testing._internal.common_fsdp`` has models for the same purpose.

Spec: PAR-06.
"""

# These imports fill MODELS.
from spec_tests.models import arrangement, calls, layers  # noqa: F401
from spec_tests.models.info import MODELS, Batch, ModelInfo

__all__ = ["MODELS", "Batch", "ModelInfo"]
