"""One runtime for all units; it does not depend on the API that created them.

A *unit* is a group of parameters that is all-gathered and resharded together. A *case* is a rare situation that the
engine does not know, see ``extension_points``.

From the bottom layer to the top. Each module uses only modules above it in this list:

``messages``        error messages and warnings
``compiler``        functions that ``torch.compile`` must not trace
``events``          named events for observers, and the transport between CPUs
``comm_streams``    communication streams, and how to wait for them
``mesh``            shard groups and replicate groups
``collectives``     the collectives of a training step
``precision``       the dtype at each step
``lifetime``        when memory can be reused; the rate limiter
``shards``          how a single parameter is sharded
``exchange``        objects, and functions of ``torch.distributed``, outside of a step
``layout``          the interface for storing a unit's parameters
``placeholder``     the placeholder for a parameter that is not available
``flat_tensor``     how a flat parameter is sharded; the unsharded tensor, which autograd owns
``flat_params``     the registered parameters of a flat unit and their gradients: a flat parameter, or the original ones
``flat``            layout 1: one flat tensor, and views of it
``sharded_param``   one parameter: its local shard, DTensor and leaf
``bucket``          the memory of parameters: contiguous shards
``per_param``       layout 2: one DTensor for each parameter
``reduce``          gradient reduction
``unit``            the state machine: all-gather, wait, reshard
``schedule``        prefetching: which unit is all-gathered next
``backward_hooks``  detects where a unit's backward starts and ends
``extension_points``  the points of a step at which cases run code
``hooks``           forward and backward hooks
``root``            the root state: lazy start, begin and end of an iteration

Suggested reading order: ``layout``, ``sharded_param``, ``bucket``, ``per_param``, ``unit``, ``backward_hooks``,
``hooks``, ``reduce``, ``schedule``, ``lifetime``, ``root`` and ``extension_points``; then ``flat``.
"""
