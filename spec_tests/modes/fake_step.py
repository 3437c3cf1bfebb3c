"""A program that trains for two steps with fake tensors over the fake backend, as estimates of memory do.

Its arguments are ``torch`` or ``minifsdp``, and the APIs. For each API it prints the bytes of the gradients of one rank
of eight.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


def fully_sharded(library: Any, model: nn.Sequential, **options: Any) -> nn.Module:
    for module in (*model, model):
        library.fully_shard(module, **options)
    return model


def wrapped(library: Any, model: nn.Sequential, **options: Any) -> nn.Module:
    options["device_id"] = torch.device("cpu")
    made = nn.Sequential(*(library.FullyShardedDataParallel(module, **options) for module in model))
    whole: nn.Module = library.FullyShardedDataParallel(made, **options)
    return whole


def sharded(api: str, library: Any, model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    if api in ("fully_shard", "hybrid"):
        return fully_sharded(library, model, mesh=mesh, reshard_after_forward=api == "fully_shard")
    if api == "mixed":
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return fully_sharded(library, model, mesh=mesh, mp_policy=policy)
    return wrapped(library, model, use_orig_params=api == "original parameters")


def main(name: str, *apis: str) -> None:
    warnings.simplefilter("ignore")
    library = importlib.import_module("torch.distributed.fsdp" if name == "torch" else "minifsdp")
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    for api in apis:
        train(api, library)


def train(api: str, library: Any) -> None:
    # A mesh reads its numbers of ranks, which fake tensors do not have.
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 4) if api == "hybrid" else (1, 8), mesh_dim_names=names)
    if api != "hybrid":
        mesh = mesh["shard"]
    with FakeTensorMode():
        layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 8))
        model = sharded(api, library, layers, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            if isinstance(model, library.FullyShardedDataParallel):
                model.clip_grad_norm_(1.0)
            optimizer.step()
        gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        print(sum(gradient.nbytes for gradient in gradients if gradient is not None))


if __name__ == "__main__":
    main(*sys.argv[1:])
