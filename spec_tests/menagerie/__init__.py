"""Small models, each difficult in one way of its own.

A sharded trainer that only ever met a stack of equal blocks is right by accident. Every animal here is five to twelve
lines of ordinary PyTorch that somebody has in production, and each is here for one reason, which its comment names. All
compute in float32, and a step of any of them takes a millisecond or two: a behaviour can be tried on all of them.

An animal does not know who will train it. It is told the seed, the step and the rank, and answers with that rank's part
of the batch. What ``n`` ranks draw together is *the* batch of the step, and a single process that draws all the parts,
one after the other, trains on the very same numbers::

    ranks       rank 0 draws batch(seed, step, 0)       rank 1 draws batch(seed, step, 1)       gradients are averaged
    one process draws batch(seed, step, 0), then batch(seed, step, 1)                           gradients are averaged

The parts are not concatenated on the one side and split on the other: batch norm sees four samples on a rank, and must
see the same four in the single process.

``animal.py`` says what an animal is. ``arrangement.py`` keeps those that are difficult by how their units are arranged,
used and trained, ``calls.py`` those that are difficult to call, and ``layers.py`` those with a difficult layer.

*In torch:* ``torch.testing._internal.common_fsdp`` has models for the same purpose.

Spec: PAR-06.
"""

# Importing these fills ANIMALS.
from spec_tests.menagerie import arrangement, calls, layers  # noqa: F401
from spec_tests.menagerie.animal import ANIMALS, Animal, Batch, Block

__all__ = ["ANIMALS", "Animal", "Batch", "Block"]
