"""Texts that users paste: messages of minifsdp as a program prints them, and output of torch and its launchers.

The texts of torch are shortened to the part that identifies them. Names, shapes and ranks in them are made up.
"""

from __future__ import annotations

from string import Formatter

from docs_build.reading.messages import Message
from minifsdp.engine.messages import COMMAND, MORE, PAGE, texts

__all__ = ["OF_TORCH", "spoken", "traceback"]

# Plausible values for the placeholders, by their names. All others get the default in `spoken`.
VALUES: dict[str, object] = {
    "path": "layers.3.attention.query.weight",
    "other": "embed.weight",
    "unit": "layers.3",
    "name": "layers.3.norm.bias",
    "type": "TransformerBlock",
    "shape": (1024, 256),
    "expected": (512, 256),
    "found": (1024, 256),
    "ranks": "0, 2 and 3",
    "rank": 2,
    "seconds": 12.5,
    "num_shards": 4,
    "lines": "parameter 'head.weight' on rank(s) 1, 3 differs from that on rank 0",
    "report": "\n  rank 0 waits in the all-gather of layers.1 since 12.0 s (train.py:61)\n  rank 1 has ended",
    "places": "  rank 1: 3 of 64 are nan",
    "error": "connection was lost",
    "problem": "the optimizer: expected parameters of the model, found 3, of shapes [(4, 4)], that are not parameters "
    "of the model; build it from model.parameters() after wrapping, and pass the model that it was built from",
}


def spoken(message: Message, has_address: bool) -> str:
    """Formats a message with values for its placeholders, as the program prints it."""
    template = texts()["message"][message.id.removeprefix("E-")]
    parts = []
    for words, field, spec, conversion in Formatter().parse(template):
        value = VALUES.get(field or "", 3 if spec else "something of yours")
        parts.append(words)
        if field is not None:
            parts.append(format(repr(value) if conversion == "r" else value, spec or ""))
    end = f"\n{MORE}: {PAGE}#{message.id}, {COMMAND}{message.id.removeprefix('E-')}" if has_address else ""
    return f"{message.kind}: rank 1: {''.join(parts)}{end}"


def traceback(last: str, prefix: str = "") -> str:
    """A traceback that ends with a message."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 61, in <module>',
        "    loss = model(batch).mean()",
        '  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1779, in _wrapped_call_impl',
        "    return self._call_impl(*args, **kwargs)",
        *last.splitlines(),
    ]
    return "\n".join(prefix + line for line in lines)


# By the ID of the entry that must be found first.
OF_TORCH = {
    "E-flat-loss": "HINT: The optimizer does not seem to reference any FSDP parameters. Create it after the model",
    "E-watchdog": "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=600, "
    "OpType=_ALLGATHER_BASE, NumelIn=65536, NumelOut=131072, Timeout(ms)=600000) ran for "
    "600026 milliseconds",
    "E-tied": "ValueError: Parameter 'emb.weight' is shared with a parameter already managed by another FSDP group.",
    "E-frozen": "ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
    "E-mixed-dtensor": "RuntimeError: aten.addmm.default got mixed torch.Tensor and DTensor, need to convert "
    "all torch.Tensor to DTensor before calling",
    "E-view-inplace": "RuntimeError: 'weight' must be 2-D",
    "E-lazy-init": "AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet or "
    "should have been set",
    "E-dtype": "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
    "E-meta": "RuntimeError: FSDP parameters should be materialized from meta device before "
    "training, but the following: ['2.weight']",
    "E-no-reset": "AttributeError: 'Block' object has no attribute 'reset_parameters'",
    "E-plain-into-sharded": 'While copying the parameter named "0.a.weight", whose dimensions in the model are '
    "torch.Size([8, 8]) and whose dimensions in the checkpoint are torch.Size([8, 8]), an "
    "exception occurred : ('aten.copy_.default got mixed torch.Tensor and DTensor, need "
    "to convert all torch.Tensor to DTensor",
    "E-deepcopy": "AssertionError: FSDP does not support deepcopy. Please use state dict for serialization.",
    "E-no-sync": "AttributeError: 'FSDPSequential' object has no attribute 'no_sync'",
    "E-container": "ValueError: fully_shard does not support containers that do not implement forward: ModuleList(",
    "E-scalar": "ValueError: fully_shard doesn't support scalar parameters. Change scale to a 1D "
    "tensor with numel equal to 1.",
    "E-mesh": "ValueError: Expected device_mesh to have ndim=2 but got 1",
    "E-factor": "ValueError: If passing reshard_after_forward as an int, it should be a factor of 2, not 3",
    "E-offload-cpu": "RuntimeError: Cannot access accelerator device when none is available.",
    "E-terminate": "terminate called without an active exception",
    "E-duplicate-gpu": "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    "E-out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a "
    "total capacity of 79.10 GiB of which 1.20 GiB is free.",
    "E-freed-storage": "RuntimeError: setStorage: sizes [4096, 4096], strides [4096, 1], storage offset 0, "
    "and itemsize 2 requiring a storage size of 33554432 are out of bounds for storage of "
    "size 0",
    "E-not-allocated": "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.",
    "E-uniform-dtype": "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
    "E-forward-order": "RuntimeError: Forward order differs across ranks: rank 0 is all-gathering 2 "
    "parameters while rank 1 is all-gathering 0 parameters",
    "E-devices": "RuntimeError: Expected all tensors to be on the same device, but found at least two "
    "devices, cuda:1 and cpu! (when checking argument for argument index in method "
    "wrapper_CUDA__index_select)",
    "E-managed-device": "RuntimeError: An FSDP-managed module unexpectedly has parameters on cpu. Make sure "
    "to move the module",
    "E-writeback": "RuntimeError: Cannot writeback when the parameter shape changes\nExpects "
    "torch.Size([512]) but got torch.Size([32, 32])",
    "E-second-backward": "RuntimeError: Trying to backward through the graph a second time (or directly access "
    "saved tensors",
    "E-wrapper-keys": "RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "
    '"_flat_param".',
    "E-shard-shape": "\tsize mismatch for head.weight: copying a param with shape torch.Size([50257, 768]) "
    "from checkpoint, the shape in current model is torch.Size([0]).",
    "E-empty-optimizer": "ValueError: loaded state dict contains a parameter group that doesn't match the size "
    "of optimizer's group",
    "E-no-cpu-backend": "RuntimeError: No backend type associated with device type cpu",
    "E-norm-not-finite": "RuntimeError: The total norm of order inf for gradients from `parameters` is "
    "non-finite, so it cannot be",
    "E-not-the-root": "RuntimeError: `clip_grad_norm_()` should only be called on the root FSDP instance",
    "E-not-idle": "ValueError: expected to be in states [<TrainingState.IDLE: 1>] but current state is "
    "TrainingState.FORWARD_BACKWARD",
    "E-meta-copy": "NotImplementedError: Cannot copy out of meta tensor; no data! Please use "
    "torch.nn.Module.to_empty()",
    "E-gradient-shape": "RuntimeError: Function SplitWithSizesBackward0 returned an invalid gradient at index "
    "0 - got [32] but expected shape compatible with [0]",
    "E-batchnorm-dtype": "RuntimeError: Expected counts to have type Half but got Float",
    "E-no-group": "ValueError: Default process group has not been initialized, please make sure to call "
    "init_process_group.",
    "E-ordinal": "RuntimeError: CUDA error: invalid device ordinal",
    "E-killed": "E1124 02:11:08 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) "
    "local_rank: 1 (pid: 4711) of binary: /usr/bin/python",
    "E-nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, "
    "NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.",
    "E-no-connection": "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving "
    "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
    "E-port": "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
    "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "E-dcp-key": "RuntimeError: Missing key in checkpoint state_dict: optim.state.0.exp_avg.",
    "E-layer-class": "ValueError: Could not find the transformer layer class LlamaDecoderLayers in the model.",
    "E-illegal-access": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "E-integer-dtype": "ValueError: Cannot flatten integer dtype tensors",
    "E-ddp-unused": "RuntimeError: Expected to have finished reduction in the prior iteration before starting a "
    "new one. This error indicates that your module has parameters that were not used",
    "E-no-grad": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "E-child-failed": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \ntrain.py FAILED",
}
