"""The API that all tests of this folder look at: ours, or for checking the tests themselves, torch's.

A test that has never been seen to pass proves as little as one that has never been seen to fail. Most of what is
promised here is promised by torch as well, so nearly all of these tests can be tried on torch's own ``fully_shard``::

    MINIFSDP_TEST_SUBJECT=torch python -m pytest spec_tests/fsdp2

What fails then are the rows in which minifsdp decided to do better; the spec says so in each of them.
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
