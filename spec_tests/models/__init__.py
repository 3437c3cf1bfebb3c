"""The models of the tests, how they are made, and how they are sharded.

Most tests speak of one model, a `Stack`: four equal blocks inside a root with parameters of its own. It and the other
models that many tests share are in ``modules.py``; a model that one file needs for its own purpose is beside its tests.

* ``modules.py``: what models are made of, and `seeded`, which gives them the same values in every process.
* ``sharding.py``: `wrapped` and `sharded`, the two doors, with the groups and meshes of four ranks.
* ``running.py``: batches, an iteration, and what was seen of it: in words, on the wire and in memory.
* ``values.py``: parameters and gradients, what they must be and what the sharded model has.
* ``info.py``, ``arrangement.py``, ``calls.py``, ``layers.py``: `MODELS`, a table of small models, each difficult in one
  way of its own.

A sharded trainer that only ever met a stack of equal blocks is right by accident. Every model in `MODELS` is five to
twelve lines of ordinary PyTorch that somebody has in production, and each is here for one reason, which its comment
names. All compute in float32, and a step of any of them takes a millisecond or two: a behaviour can be tried on all of
them. ``arrangement.py`` has those that are difficult by how their units are arranged, used and trained, ``calls.py``
those that are difficult to call, and ``layers.py`` those with a difficult layer.

A model of the table comes with its batches (see `ModelInfo`). It does not know who will train it: it is told the seed,
the step and the rank, and answers with that rank's part of the batch. What ``n`` ranks draw together is *the* batch of
the step, and a single process that draws all the parts, one after the other, trains on the very same numbers::

    ranks       rank 0 draws batch(seed, step, 0)       rank 1 draws batch(seed, step, 1)       gradients are averaged
    one process draws batch(seed, step, 0), then batch(seed, step, 1)                           gradients are averaged

The parts are not concatenated on the one side and split on the other: batch norm sees four samples on a rank, and must
see the same four in the single process.

*In torch:* ``torch.testing._internal.common_fsdp`` has models for the same purpose.

Spec: PAR-06.
"""

# Importing these fills MODELS.
from spec_tests.models import arrangement, calls, layers  # noqa: F401
from spec_tests.models.info import MODELS, Batch, ModelInfo

__all__ = ["MODELS", "Batch", "ModelInfo"]
