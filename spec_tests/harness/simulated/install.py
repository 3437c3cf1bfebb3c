"""Makes ``sim`` a device of this process. It cannot be undone: torch supports one Python backend per process.

This uses private hooks of torch, so it works only with the versions in `TORCH`. With other versions `is_available`
returns False. It hooks:

* the device's name, its module, its guard and its hooks (``_setup_privateuseone_for_python_backend``);
* ``empty`` and ``empty_strided``, which create all new tensors;
* ``UntypedStorage.resize_``, with which FSDP frees memory;
* a dispatch mode at the bottom of the stack, for operators without a tensor of the device;
* ``Tensor.data`` and ``Tensor.grad``, so that a parameter can move between the CPU and the device in place, and keep a
  gradient on the other device, as parameters can between the CPU and CUDA;
* the engine of autograd, for exceptions of hooks (see ``errors.py``);
* ``torch.accelerator``;
* ``torch.save`` and ``torch.load``, with the device as the location;
* a backend of ``torch.distributed`` with the name ``simulated``.

Spec: SIM-01.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.backend_registration as registration
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from spec_tests.harness.simulated import errors, nccl, tensor
from spec_tests.harness.simulated.cells import install_cells
from spec_tests.harness.simulated.clocks import HOST, LOCK
from spec_tests.harness.simulated.module import DeviceModule
from spec_tests.harness.simulated.tensor import Recorder, SimTensor
from spec_tests.harness.simulated.world import NUM_DEVICES, WORLD

__all__ = ["TORCH", "install", "is_available"]

TORCH = ("2.11.", "2.12.", "2.13.", "2.14.", "2.15.")

# Kept permanently: torch holds no reference to some of them.
_kept: list[Any] = []


def is_available() -> bool:
    """Whether the simulation supports this version of torch."""
    return torch.__version__.startswith(TORCH)


@functools.cache
def install() -> torch.device:
    """Installs the device. Every process of a test must call it before it creates tensors there.

    Returns:
        ``sim:0``, the device for training.

    Raises:
        RuntimeError: another version of torch, or another backend is installed already.
    """
    if not is_available():
        raise RuntimeError(f"the simulated device needs torch 2.11 to 2.15 and this is {torch.__version__}")

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def has_primary_context(self, index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def is_available(self) -> bool:
            return True

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            errors.keep_pending()
            return torch._C._autograd.DeviceType.PrivateUse1

    module, hooks, guard = DeviceModule(), Hooks(), Guard()
    _kept.extend([module, hooks, guard])
    registration._setup_privateuseone_for_python_backend("sim", module, hooks, guard)
    tensor.DEVICES.extend(torch.device("sim", index) for index in range(NUM_DEVICES))
    _make_factories()
    _kept.append(install_cells())
    _watch_resizes()
    _move_in_place()
    _save_and_load()
    _answer_for_the_accelerator(module)
    errors.watch_backward()
    dist.Backend.register_backend("simulated", nccl.create, devices=["sim"])
    # Since 2.15, torch otherwise attaches its flight recorder, which needs a process group that is written in C++.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("simulated")
    _name_the_device_of_barriers()
    recorder = Recorder()
    recorder.__enter__()
    _kept.append(recorder)
    return tensor.DEVICES[0]


def _make_factories() -> None:
    """Registers factories for new tensors when the recorder is not active: under other modes, or without a mode."""
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)

    def made_by(operator: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            return tensor.run(operator, args, {"device": torch.device("sim"), **kwargs})

        return make

    library.impl("empty.memory_format", made_by(torch.ops.aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", made_by(torch.ops.aten.empty_strided.default), "PrivateUse1")

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        tensor.run(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
        return target

    # `torch.tensor(..., device="sim")` copies without a dispatch to a tensor subclass.
    library.impl("_copy_from", copy_from, "PrivateUse1")

    # Functional collectives of complex numbers call these without a dispatch to a tensor subclass.
    as_real, as_complex = torch.ops.aten.view_as_real.default, torch.ops.aten.view_as_complex.default
    library.impl("view_as_real", lambda values: tensor.run(as_real, (values,), {}), "PrivateUse1")
    library.impl("view_as_complex", lambda values: tensor.run(as_complex, (values,), {}), "PrivateUse1")


def _watch_resizes() -> None:
    real = torch.UntypedStorage.resize_

    def resize_(self: Any, num_bytes: int) -> Any:
        home = WORLD.memory.homes.get(self._cdata)
        if home is None:
            return real(self, num_bytes)
        stream = WORLD.current_stream(home.index)
        with LOCK:
            return WORLD.memory.resized(self, stream, lambda: real(self, num_bytes))

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _move_in_place() -> None:
    """Supports ``parameter.data = tensor`` between the CPU and the device, as torch does between the CPU and CUDA."""
    data, grad = torch._C.TensorBase.data, torch._C.TensorBase.grad  # type: ignore[attr-defined]
    compatible = torch._has_compatible_shallow_copy_type

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        if isinstance(self, SimTensor) is isinstance(new, SimTensor):
            data.__set__(self, new)
            if isinstance(self, SimTensor) and isinstance(new, SimTensor):
                tensor.settle(self, new._index)
            return
        gradient, elsewhere = grad.__get__(self), self.__dict__.pop("_grad_elsewhere", None)
        requires_grad, is_parameter = self.requires_grad, isinstance(self, torch.nn.Parameter)
        # `.data` and not `.detach()`: as in torch, autograd must not count later writes to `new` for this tensor.
        other = data.__get__(new).requires_grad_(requires_grad)
        kind = torch.nn.Parameter if is_parameter and not isinstance(new, SimTensor) else type(new)
        attributes = {k: v for k, v in self.__dict__.items() if k not in ("_index", "_home", "_is_param")}
        before = self.__dict__.get("_home")
        torch._C._swap_tensor_impl(self, other)
        # `other` has the old memory now.
        del other
        object.__setattr__(self, "__class__", kind)
        self.__dict__.clear()
        self.__dict__.update(attributes)
        if isinstance(new, SimTensor):
            if is_parameter:
                self.__dict__["_is_param"] = True
            tensor.settle(self, new._index)  # type: ignore[arg-type]
        if before is not None:
            before.unwatch(self, WORLD.memory.released)
        for gradient_here in (elsewhere, gradient):
            if gradient_here is not None:
                if gradient_here.device == self.device:
                    grad.__set__(self, gradient_here)
                else:
                    self.__dict__["_grad_elsewhere"] = gradient_here

    def get_grad(self: torch.Tensor) -> torch.Tensor | None:
        elsewhere: torch.Tensor | None = self.__dict__.get("_grad_elsewhere")
        return grad.__get__(self) if elsewhere is None else elsewhere

    def set_grad(self: torch.Tensor, new: torch.Tensor | None) -> None:
        self.__dict__.pop("_grad_elsewhere", None)
        grad.__set__(self, new)

    def has_compatible(one: torch.Tensor, other: torch.Tensor) -> bool:
        kinds = (torch.Tensor, torch.nn.Parameter, SimTensor)
        if SimTensor in (type(one), type(other)) and type(one) in kinds and type(other) in kinds:
            return True
        return compatible(one, other)

    torch.Tensor.data = property(lambda self: data.__get__(self), set_data)  # type: ignore[assignment]
    torch.Tensor.grad = property(get_grad, set_grad, lambda self: set_grad(self, None))  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = has_compatible


def _save_and_load() -> None:
    """``torch.save`` writes the values, with ``sim:0`` as their location. ``map_location`` can change it on load."""

    def location_of(storage: Any) -> str | None:
        home = WORLD.memory.homes.get(storage._cdata)
        is_device = home is not None and home.block is not None and home.block.owner != HOST
        return f"sim:{home.index}" if home is not None and is_device else None

    def put(storage: Any, location: str) -> Any:
        if not location.startswith("sim"):
            return None
        index = torch.device(location).index
        tensor.loaded[storage._cdata] = (StorageWeakRef(storage), WORLD.current_index if index is None else index)
        return storage

    torch.serialization.register_package(5, location_of, put)
    torch.serialization.add_safe_globals([tensor.rebuilt])


def _answer_for_the_accelerator(module: DeviceModule) -> None:
    """``torch.accelerator`` calls C++, which has no information on the simulated streams."""
    torch.accelerator.device_count = module.device_count
    torch.accelerator.current_device_index = module.current_device
    torch.accelerator.set_device_index = module.set_device
    torch.accelerator.current_stream = module.current_stream
    torch.accelerator.set_stream = module.set_stream
    torch.accelerator.synchronize = module.synchronize


def _name_the_device_of_barriers() -> None:
    """Passes a device to every barrier. If groups had a device, torch would split them, which only NCCL supports."""
    real = dist.barrier

    @functools.wraps(real)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **options: Any) -> Any:
        return real(group, async_op, device_ids or [WORLD.current_index], **options)

    dist.barrier = distributed_c10d.barrier = barrier
