"""The cases that add methods to ``FSDPModule``.

Worked example: `ManualFinalization` has the method ``finalize_backward``. Without its name in this list, the module
does not have the method.

*In torch:* all methods are in one class, ``FSDPModule``.
"""

from minifsdp.cases.ddp_around import RefusesDDP
from minifsdp.cases.kept_storage import KeepsStorage
from minifsdp.cases.manual_finalization import ManualFinalization
from minifsdp.cases.program_collectives import ProgramCollectives
from minifsdp.cases.symmetric_memory import SymmetricMemory
from minifsdp.cases.unsupported_methods import UnsupportedMethods


class AddedMethods(
    KeepsStorage,
    ManualFinalization,
    ProgramCollectives,
    RefusesDDP,
    SymmetricMemory,
    UnsupportedMethods,
):
    """The base class of `FSDPModule`. Each base class of it is a case."""
