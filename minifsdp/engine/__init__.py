"""One runtime for every unit; it does not know which front door opened it.

From the bottom up, each module using only those above it in this list:

``messages``        how it speaks when something is wrong
``compiler``        what ``torch.compile`` is told about it
``mesh``            who shards with whom, who replicates with whom
``lanes``           where gathers, reductions and copies run, and how to wait for them
``collectives``     the only place that talks to other ranks while training
``gloo``            how two of its collectives are sent between CPUs
``precision``       which dtype at which step
``lifetime``        when memory may be reused; the rate limiter
``partition``       where a row of parameters is cut
``cut``             where each of them is cut
``misuse``          mistakes that are noticed when they are made
``layout``          what a unit asks of the tensors it consists of
``optimizer_watch`` mistakes that are noticed at an optimizer's step
``absent``          what a module shows in place of a parameter that is not here
``unsharded``       the tensor that autograd owns
``ownership``       what the optimizer owns, and its gradients
``flat_parameter``  ... one flat parameter
``originals``       ... the original parameters
``flat``            layout 1: one flat tensor, views into it
``row``             the pieces of many parameters, side by side
``extension``       ... of one that decides for itself what is sent
``dtensors``        how a piece becomes a DTensor
``rows``            which parameters share a row, also after edits
``per_param``       layout 2: one DTensor for each parameter
``summoned``        full parameters of a flat unit, shown for a while
``reduce``          from unsharded gradients to sharded ones
``unit``            the state machine: gather, wait, reshard
``schedule``        who is gathered next
``triggers``        what tells where a unit's backward begins and ends
``order_check``     do all ranks gather the same?
``hooks``           where the machine touches autograd
``root``            the tree of units: lazy start, begin and end of an iteration

To read, begin at ``layout`` and go on with ``row``, ``per_param``, ``unit``, ``hooks``, ``reduce``, ``schedule``,
``lifetime`` and ``root``; then ``flat``.
"""
