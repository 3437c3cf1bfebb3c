"""Replaces torch's names of FSDP by those of minifsdp. Import it before the framework that uses them.

A module that runs ``from torch.distributed.fsdp import fully_shard`` afterwards gets minifsdp's function. Modules of
``torch.distributed`` that have already imported one of the names get minifsdp's object, too. The modules with torch's
own implementation, ``torch.distributed.fsdp._*``, keep theirs.
"""

import sys

from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import api, sharded_grad_scaler, wrap

import minifsdp

PAIRS = [(wrap, minifsdp.wrap), *((old, minifsdp) for old in (api, fsdp, sharded_grad_scaler, state_dict))]
OURS = {id(getattr(old, n)): getattr(new, n) for old, new in PAIRS for n in new.__all__ if hasattr(old, n)}

for name, module in list(sys.modules.items()):
    if name.startswith("torch.distributed.") and not name.startswith("torch.distributed.fsdp._"):
        vars(module).update({n: OURS[id(value)] for n, value in vars(module).items() if id(value) in OURS})
