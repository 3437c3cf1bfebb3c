"""One runtime for every unit; it does not know which front door opened it.

From the bottom up, each module using only those above it in this list:

``mesh``         who shards with whom, who replicates with whom
``lanes``        where gathers, reductions and copies run, and how to wait for them
``precision``    which dtype at which step
``lifetime``     when memory may be reused; the rate limiter
``collectives``  the only place that talks to other ranks while training
``offload``      shards that live on the CPU
``layout``       what a unit asks of the tensors it consists of
``flat``         layout 1: one flat parameter, views into it
``reduce``       from unsharded gradients to sharded ones
``unit``         the state machine: gather, wait, reshard
``schedule``     who is gathered next
``hooks``        where the machine touches autograd
``root``         the tree of units: lazy start, begin and end of an iteration
"""
