"""The APIs of FSDP behind one interface, for tests of behaviour that all of them have.

::

    @both_apis
    @ranks(2)
    def test_micro_batches_add_up(api: Api) -> None:
        model = api.shard()
        with api.no_sync(model):
            iterate(model, 0)
        iterate(model, 1)
        assert_same(api.gradients(model), mean_gradients(seeded(), (0, 1)))

`WRAPPED` is `FullyShardedDataParallel` with a flat parameter for each unit, `ORIGINALS` is the same class with
``use_orig_params=True``, and `FULLY_SHARD` is `fully_shard`. `Api.of_torch` is the same API of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from spec_tests import subject
from spec_tests.harness import device
from spec_tests.models.modules import MLP, Block, seeded
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD_ZERO2,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    column_mesh,
    grid,
    grid_mesh,
)
from spec_tests.models.values import full
from spec_tests.oracles.gathering import clean_name, flat_chunks, gather_chunks, split_by_name, units_of, wrap_units

Named = dict[str, Tensor]

# For each wrapped model: the names and shapes of the parameters by unit, and the ranks that shard them.
_layouts: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Api:
    """One API of FSDP.

    Attributes:
        name: its name in the names of tests.
        is_torch: whether it is the API of torch, and not of the implementation that is tested.
    """

    name: str
    is_torch: bool = False

    def __str__(self) -> str:
        return self.name

    def of_torch(self) -> Any:
        """The same API of torch."""
        return dataclasses.replace(self, is_torch=True)

    def shard(
        self,
        model: nn.Module | None = None,
        *,
        unit_classes: tuple[type[nn.Module], ...] = (Block, MLP),
        strategy: Any = FULL_SHARD,
        **options: Any,
    ) -> Any:
        """Shards each module of ``unit_classes``; the rest belongs to the root. The options are those of `unit`."""
        model = seeded() if model is None else model
        units = units_of(model, unit_classes)
        model = wrap_units(model, unit_classes, lambda module: self.unit(module, strategy=strategy, **options))
        group = grid()[0] if strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") else dist.group.WORLD
        _layouts[model] = units, None if strategy.name == "NO_SHARD" else group
        return model

    def unit(
        self,
        module: nn.Module,
        *,
        strategy: Any = FULL_SHARD,
        precision: Mapping[str, Any] | None = None,
        offload: bool = False,
        **options: Any,
    ) -> Any:
        """Shards the parameters of one module that belong to no unit yet.

        Args:
            module: the module.
            strategy: `fully_shard` gets the mesh and ``reshard_after_forward`` that have the same effect.
            precision: the fields of `MixedPrecision` or of `MixedPrecisionPolicy`.
            offload: whether the shards are on the CPU.
            options: other options of the API.
        """
        with warnings.catch_warnings():
            # torch's NO_SHARD is deprecated.
            warnings.filterwarnings("ignore", ".*NO_SHARD.*deprecated", FutureWarning)
            return self.call(module, **{**self.options_of(strategy, precision, offload), **options})

    def call(self, module: nn.Module, **options: Any) -> Any:
        """Calls the API."""
        raise NotImplementedError

    def options_of(self, strategy: Any, precision: Mapping[str, Any] | None, offload: bool) -> dict[str, Any]:
        """The options of the API for the arguments of `unit`."""
        raise NotImplementedError

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """A context without reduction of gradients."""
        raise NotImplementedError

    def values(self, model: Any) -> Named:
        """The unsharded parameters by name, on the device of this rank, between two computations. All ranks call it."""
        return self.values_and_gradients(model)[0]

    def gradients(self, model: Any) -> Named:
        """The same for the gradients that exist."""
        return self.values_and_gradients(model)[1]

    def values_and_gradients(self, model: Any) -> tuple[Named, Named]:
        raise NotImplementedError

    def reshard(self, model: Any) -> None:
        """Reshards the units that a forward without gradients has left unsharded. The wrapper leaves none."""

    def clip(self, model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients, and returns their norm."""
        raise NotImplementedError

    def state_dict(self, model: Any) -> dict[str, Any]:
        """The full state dict."""
        raise NotImplementedError


@dataclass(frozen=True)
class Wrapper(Api):
    """``FullyShardedDataParallel``."""

    use_orig_params: bool = False

    def call(self, module: nn.Module, **options: Any) -> Any:
        return (torch_fsdp if self.is_torch else subject).FullyShardedDataParallel(module, **options)

    def options_of(self, strategy: Any, precision: Mapping[str, Any] | None, offload: bool) -> dict[str, Any]:
        words = torch_fsdp if self.is_torch else subject
        options = {"sharding_strategy": words.ShardingStrategy[strategy.name], "use_orig_params": self.use_orig_params}
        if strategy in HYBRID_STRATEGIES:
            options["process_group"] = grid()
        if precision is not None:
            options["mixed_precision"] = words.MixedPrecision(**precision)
        if offload:
            options["cpu_offload"] = words.CPUOffload(offload_params=True)
        # An outer unit can contain inner units whose shards are on the CPU. torch's wrapper does not support the CPU
        # without this option.
        if offload or self.is_torch:
            options["device_id"] = device()
        return options

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = model.no_sync()
        return context

    def values_and_gradients(self, model: Any) -> tuple[Named, Named]:
        # Not with the wrapper's own methods: a mistake in the split and the same mistake in the join could cancel out.
        units, group = _layouts[model]
        found = split_by_name(gather_chunks(flat_chunks(model), group), units)
        values, gradients = ({name: tensor.to(device()) for name, tensor in tensors.items()} for tensors in found)
        return values, gradients

    def clip(self, model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
        return norm

    def state_dict(self, model: Any) -> dict[str, Any]:
        return dict(model.state_dict())


@dataclass(frozen=True)
class Function(Api):
    """``fully_shard``."""

    def call(self, module: nn.Module, **options: Any) -> Any:
        return (torch_fsdp if self.is_torch else subject).fully_shard(module, **options)

    def options_of(self, strategy: Any, precision: Mapping[str, Any] | None, offload: bool) -> dict[str, Any]:
        words = torch_fsdp if self.is_torch else subject
        options: dict[str, Any] = {}
        if strategy in HYBRID_STRATEGIES:
            options["mesh"] = grid_mesh()
        if strategy is NO_SHARD:
            options["mesh"] = column_mesh()
        if strategy in (SHARD_GRAD_OP, HYBRID_SHARD_ZERO2):
            options["reshard_after_forward"] = False
        if precision is not None:
            options["mp_policy"] = words.MixedPrecisionPolicy(**precision)
        if offload:
            options["offload_policy"] = words.CPUOffloadPolicy(pin_memory=False)
        return options

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def values_and_gradients(self, model: Any) -> tuple[Named, Named]:
        parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        # A process group for GPUs only cannot all-gather a tensor on the CPU.
        with torch.no_grad():
            values, gradients = (
                {name: full(tensor.to(device())).clone() for name, tensor in tensors.items()}
                for tensors in (parameters, gradients)
            )
        return values, gradients

    def reshard(self, model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def clip(self, model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return full(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))

    def state_dict(self, model: Any) -> dict[str, Any]:
        return {name: full(value) for name, value in model.state_dict().items()}


WRAPPED, ORIGINALS = Wrapper("wrapped"), Wrapper("originals", use_orig_params=True)
FULLY_SHARD = Function("fully_shard")
ALL_APIS = (WRAPPED, ORIGINALS, FULLY_SHARD)

both_apis = pytest.mark.parametrize("api", [WRAPPED, FULLY_SHARD], ids=str)
wrapper_apis = pytest.mark.parametrize("api", [WRAPPED, ORIGINALS], ids=str)
all_apis = pytest.mark.parametrize("api", ALL_APIS, ids=str)

# The wrapper with each strategy, with flat and with original parameters.
WRAPPER_SETTINGS = (
    (WRAPPED, FULL_SHARD),
    (ORIGINALS, FULL_SHARD),
    (ORIGINALS, SHARD_GRAD_OP),
    (WRAPPED, NO_SHARD),
    (ORIGINALS, NO_SHARD),
)
SETTINGS = (*WRAPPER_SETTINGS, *((FULLY_SHARD, strategy) for strategy in FLAT_STRATEGIES))
# On four ranks.
HYBRID_SETTINGS = tuple((api, strategy) for api in (WRAPPED, FULLY_SHARD) for strategy in HYBRID_STRATEGIES)


def name_of(value: Any) -> str | None:
    """For ``ids=`` of a parametrization: the name of an API, and pytest's own choice for other values."""
    return str(value) if isinstance(value, Api) else None


def settings_of(*settings: tuple[Api, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test over pairs of an API and a strategy."""
    ids = [f"{api}-{strategy.name}" for api, strategy in settings]
    return pytest.mark.parametrize(("api", "strategy"), settings, ids=ids)


wrapper_settings = settings_of(*WRAPPER_SETTINGS)
every_setting = settings_of(*SETTINGS)
hybrid_settings = settings_of(*HYBRID_SETTINGS)
