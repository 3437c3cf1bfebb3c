"""Checks that find mistakes of programs, for example ranks that issue different collectives.

Observers of the engine. ``MINIFSDP_CHECKS=0`` runs a job without any of them:

* ``attach.py`` attaches them.
* ``collective_log.py`` has the order of the collectives of this rank, ``collective.py`` adds each collective to it, and
  compares it before a state dict is saved or loaded.
* ``rank_checks.py`` compares this order between the ranks at the end of each backward.
* ``place.py`` finds the line of the program.
* ``forward_checks.py`` finds function transforms and a ``DistributedDataParallel`` around a model.
* ``optimizer_checks.py`` finds optimizers with wrong parameters or wrong gradients.

Functions that the front ends and ``minifsdp/checkpoint`` call before they change or send something:

* ``ownership.py`` finds parameters of two units and models of two APIs.
* ``shardable.py`` checks the modules and parameters of ``fully_shard``.
* ``arguments.py`` checks the types of arguments.
* ``details.py`` has lines about one value in a message about several.
* ``agreement.py`` waits for all ranks before a state dict, and raises on all of them if one has a problem.
* ``state_dicts.py`` and ``optimizer_states.py`` describe how a state dict does not fit.
* ``initial_weights.py`` compares the initial weights of the ranks, only with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
"""
