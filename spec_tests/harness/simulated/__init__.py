"""A simulated accelerator: finds errors in the use of streams without a GPU.

A GPU runs its operations later, on several streams at once. A program for it can have errors that never change a value
on a CPU: an all-gather that overwrites weights that are still read, a gradient that is divided before it has arrived,
memory that is reused during a copy. Such errors usually pass every test, because they need an unlucky timing to change
a result.

This package is a device for PyTorch with the name ``sim``. It computes with real values in real memory, one operator
after the other in program order. It also records the orders that a device with concurrent streams allows:

======================  ============================================================================================
``clocks.py``           streams, events, and the happens-before relation between operations
``memory.py``           ownership of memory: a caching allocator, ``record_stream``, pinned memory
``operators.py``        which operator reads and writes what
``races.py``            the report of two accesses without an order between them
``world.py``            the machine: devices, the current stream of each thread, the CPU's clock, its stops
``tensor.py``           tensors of the device, and the dispatch of every operator
``cells.py``            steps of an LSTM and of a GRU, which are one kernel on a device
``nccl.py``             collectives with NCCL's contract, over gloo between real ranks or with fake peers
``stuck.py``            collectives that cannot complete, aborts and time-outs
``capture.py``          captures of graphs, and the calls that make them invalid
``issue_order.py``      the order in which NCCL runs the collectives of one group, for pictures and overlaps
``module.py``           the functions of ``torch.cuda``
``install.py``          registration of the device in torch
``backward.py``         the stream of each node of autograd in backward
``errors.py``           exceptions in backward, which must be passed through C++
``replay.py``           a check of the race checker: replays the program in other allowed orders and compares the bits
======================  ============================================================================================

It shows that two accesses do not collide in *any* order that the streams allow (a happens-before argument, not a
sample), how often and where the CPU stops, what can run concurrently, and how many bytes an allocator would use. It
does not show code that did not run, the inside of kernels, NCCL's own deadlocks, time, or the replay of CUDA graphs.

Measured: an operator on this device takes about 30 to 60 microseconds.

``minifsdp/`` does not depend on it: the package gets its streams from ``torch.get_device_module`` for any device.

Spec: SIM-01 to SIM-05, SIM-08, SIM-12 to SIM-17.
"""

from spec_tests.harness.simulated.install import install, is_available
from spec_tests.harness.simulated.issue_order import IssueOrder
from spec_tests.harness.simulated.memory import Access
from spec_tests.harness.simulated.nccl import STORE_OF_ONE_PROCESS
from spec_tests.harness.simulated.races import Race, SimulatedRaceError
from spec_tests.harness.simulated.replay import Log, Operation, Verdict
from spec_tests.harness.simulated.world import WORLD

__all__ = [
    "STORE_OF_ONE_PROCESS",
    "WORLD",
    "Access",
    "IssueOrder",
    "Log",
    "Operation",
    "Race",
    "SimulatedRaceError",
    "Verdict",
    "install",
    "is_available",
]
