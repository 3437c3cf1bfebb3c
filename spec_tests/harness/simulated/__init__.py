"""A simulated accelerator: what goes wrong on streams, seen on a laptop.

A GPU does what it is told later, on several streams at once. A program for it can be wrong in ways that no value on a
CPU ever shows: a gather that overwrites weights which are still read, a gradient that is divided before it has arrived,
memory that is handed out while a copy is under way. Such mistakes pass every test, for the machine is usually slow or
fast in the right places; until it is not.

This package is a device for PyTorch with the name ``sim``. It computes with real values in real memory, one operator
after the other as the program says, and beside that keeps the books of a machine that would not:

======================  ============================================================================================
``clocks.py``           streams and events, and what is known to have happened before what
``memory.py``           whose bytes are whose: a caching allocator, ``record_stream``, pinned memory
``operators.py``        which operator reads and writes what
``races.py``            two accesses without an order between them, and how that is told
``world.py``            the machine: devices, the current stream of each thread, the CPU's clock, its stops
``tensor.py``           tensors of the device, and the way of every operator
``cells.py``            steps of an LSTM and of a GRU, which are one kernel on a device
``nccl.py``             collectives with NCCL's contract, over gloo between real ranks or with invented peers
``module.py``           the names that ``torch.cuda`` has
``install.py``          how torch is told
``errors.py``           exceptions in backward, which must survive the way through C++
``replay.py``           the judge of the judge: the same program in other orders that the streams allow, bit by bit
======================  ============================================================================================

What it can say: that in *no* order which the streams allow two accesses collide (a happens-before argument, not a
sample), how often and where the CPU stops, what may run beside what, and how many bytes an allocator would have had in
use. What it cannot: code that did not run, the inside of kernels, NCCL's own deadlocks, time, a forward on a stream of
the user's own (autograd's backward runs on the default stream here), CUDA graphs.

Measured: an operator takes about 30 to 60 microseconds on it.

Nothing in ``minifsdp/`` knows of it; the package asks ``torch.get_device_module`` for streams, whatever the device.

Spec: SIM-01 to SIM-05, SIM-08.
"""

from spec_tests.harness.simulated.install import install, is_available
from spec_tests.harness.simulated.memory import Access
from spec_tests.harness.simulated.nccl import INVENTED_STORE
from spec_tests.harness.simulated.races import Race, SimulatedRaceError
from spec_tests.harness.simulated.replay import Log, Operation, Verdict
from spec_tests.harness.simulated.world import WORLD

__all__ = [
    "INVENTED_STORE",
    "WORLD",
    "Access",
    "Log",
    "Operation",
    "Race",
    "SimulatedRaceError",
    "Verdict",
    "install",
    "is_available",
]
