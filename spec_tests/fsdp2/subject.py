"""The API that the tests in this folder use: minifsdp's, or torch's to check the tests themselves.

torch meets most of the requirements tested here, so nearly all of these tests can also run on torch's own
``fully_shard``. This verifies the tests themselves::

    MINIFSDP_TEST_SUBJECT=torch python -m pytest spec_tests/fsdp2

The tests that fail with torch belong to requirements in which minifsdp intentionally differs. The spec lists them.
"""

from __future__ import annotations

import os

IS_TORCH = os.environ.get("MINIFSDP_TEST_SUBJECT") == "torch"

if IS_TORCH:
    import torch.distributed.fsdp as library

    from spec_tests.fsdp2 import torch_trace

    torch_trace.install()
else:
    import minifsdp as library

CPUOffloadPolicy = library.CPUOffloadPolicy
FSDPModule = library.FSDPModule
MixedPrecisionPolicy = library.MixedPrecisionPolicy
OffloadPolicy = library.OffloadPolicy
UnshardHandle = library.UnshardHandle
fully_shard = library.fully_shard
register_fsdp_forward_method = library.register_fsdp_forward_method
share_comm_ctx = library.share_comm_ctx
