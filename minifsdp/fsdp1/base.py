"""What every wrapper is: a module with one unit, a place in a tree of wrappers, and a name to be left out.

The public methods of ``FullyShardedDataParallel`` stand in rooms of their own, one for each theme. All of them build on
the class here, which says what a wrapper consists of:

* ``_unit``: the parameters that no wrapper inside has taken; ``None`` if nothing was left
* ``_tree``: the units that run together, found at the first forward by the outermost wrapper that runs
* ``_is_inner``: whether another wrapper contains this one

Worked example: ``root(block0, block1)`` with all three wrapped. Each has a unit. The first ``root(batch)`` finds the
tree of three and tells all of them. Had ``block0(x)`` been called on its own before, a tree of one would have been
made for it; the tree of three takes it over.

*In torch:* the same facts are some thirty attributes of a class ``_FSDPState``, filled in by free functions.

Spec: CTOR-10, CTOR-11, NAMES-01, NAMES-06.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import message
from minifsdp.engine.precision import Precision
from minifsdp.engine.root import Root
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1 import build
from minifsdp.fsdp1.compiling import warn_if_compiled
from minifsdp.fsdp1.options import BackwardPrefetch, ShardingStrategy

WRAPPED = "_fsdp_wrapped_module"
PREFIX = WRAPPED + "."


def clean_name(name: str) -> str:
    """A parameter's or module's name without the wrappers' prefixes."""
    return name.replace(PREFIX, "").removesuffix(WRAPPED).removesuffix(".")


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper itself; not whether it contains one."""
    return isinstance(module, WrapperBase)


class WrapperBase(nn.Module):
    """A module that stands around another one and shards its parameters; see the page's head."""

    mesh: Mesh
    process_group: dist.ProcessGroup
    device_mesh: Any
    compute_device: torch.device
    sharding_strategy: ShardingStrategy
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    _use_orig_params: bool
    _precision: Precision
    _unit: build.FlatUnit | None
    _tree: Root | None
    _is_inner: bool
    _is_tree_root: bool
    _shows_clean_names: bool
    _ignored_modules: set[nn.Module]
    _ignored_parameters: set[nn.Parameter]
    _buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype]

    @property
    def module(self) -> nn.Module:
        """The wrapped module (NAMES-01)."""
        wrapped = self._modules[WRAPPED]
        assert wrapped is not None
        return wrapped

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[WrapperBase]:
        """All wrappers in ``module``, itself included if it is one; ``root_only`` leaves inner ones out (NAMES-06)."""
        found = [m for m in module.modules() if isinstance(m, WrapperBase)]
        return [m for m in found if not m._is_inner] if root_only else found

    def _current_tree(self) -> Root:
        tree = self._tree
        return self._find_tree() if tree is None or tree.is_dissolved else tree

    def _mend(self) -> None:
        """Before the user looks at what the units hold: tidies up after a backward that ended in an exception."""
        if self._tree is not None:
            self._tree.mend()

    def _find_tree(self) -> Root:
        """A forward runs here with no other wrapper around it, so here is the root (CTOR-10)."""
        wrappers = [(clean_name(name), m) for name, m in self.named_modules() if isinstance(m, WrapperBase)]
        # Parts that ran on their own before were roots of small trees; this one takes them over (CTOR-11).
        for small in {id(m._tree): m._tree for _, m in wrappers if m._tree is not None}.values():
            if not small.is_dissolved:
                small.dissolve()
        warn_if_compiled(not self._use_orig_params)
        tree = Root(
            [(name, wrapper._unit) for name, wrapper in wrappers if wrapper._unit is not None],
            self._unit,
            self.compute_device,
            backward_prefetch=build.prefetch_of(self.backward_prefetch),
            forward_prefetch=self.forward_prefetch,
            limit_gathers=self.limit_all_gathers,
        )
        for _, wrapper in wrappers:
            wrapper._tree = tree
            wrapper._is_tree_root = wrapper is self
            wrapper._cast_buffers()
        return tree

    def _cast_buffers(self) -> None:
        dtype = self._precision.buffers
        if dtype is None:
            return
        for _, owner in build.modules_of_unit(self.module, is_wrapper, self._ignored_modules):
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype:
                    self._buffer_dtypes[owner, name] = buffer.dtype
                    owner._buffers[name] = buffer.to(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Dtype or device may have changed: the layout settles, and the next forward finds the tree anew.
        if self._tree is not None and not self._tree.is_dissolved:
            self._tree.dissolve()
        if self._unit is not None and self._unit.phase is Phase.IDLE:
            self._unit.layout.settle()
        return self

    def _only_on_the_root(self, what: str) -> None:
        if self._is_inner:
            raise RuntimeError(message("root-only", what=what))
