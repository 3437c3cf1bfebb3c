"""Checks: observers of the engine that find mistakes of programs, for example ranks that issue different collectives.

* ``attach.py`` attaches them. ``MINIFSDP_CHECKS=0`` runs a job without any of them.
* ``collective_log.py`` has the order of the collectives of this rank, ``collective.py`` adds each collective to it, and
  compares it before a state dict is saved or loaded.
* ``rank_checks.py`` compares this order between the ranks at the end of each backward.
* ``place.py`` finds the line of the program.
* ``optimizer_checks.py`` finds optimizers with wrong parameters or wrong gradients.
* ``ownership.py`` finds parameters of two units and models of two APIs.
* ``forward_checks.py`` finds function transforms and a ``DistributedDataParallel`` around a model.
* ``shardable.py`` checks the modules and parameters of ``fully_shard``.
* ``arguments.py`` checks the types of arguments.
* ``initial_weights.py`` compares the initial weights of the ranks, only with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
"""
