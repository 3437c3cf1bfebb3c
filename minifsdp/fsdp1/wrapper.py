"""The wrapper module: ``FullyShardedDataParallel``.

::

    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.Adam(model.parameters())        # after wrapping: these are the flat parameters
    model(batch).sum().backward()
    optimizer.step()

A wrapper stands between a module and whoever calls it. It takes the module's parameters away, keeps a slice of them,
and gives the whole back for the time of a forward and a backward. All of that is in `forward`, five lines of it; what
each line does is the engine's.

Wrappers nest. Each has at most one unit, with the parameters that no wrapper inside has taken. The outermost one to
run forward is the root and makes the tree that all share; see ``engine/root.py``.

The original parameters are not in ``parameters()`` any more, one flat parameter for each unit is. Everything else about
the wrapped module can be reached through the wrapper as before: ``model.layer``, ``model[0]``, ``model.vocab_size``.

*In torch:* ``fully_sharded_data_parallel.py``, 2167 lines, of which the constructor and ``forward`` are 140.

Spec: CTOR, SHARD, HYB, FWD, NOSYNC, NAMES; each method names its rows.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine import misuse
from minifsdp.engine.collectives import rank_of_this_process
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import owned_parameters
from minifsdp.engine.mesh import Group
from minifsdp.engine.precision import cast_floating, move
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.root import Root
from minifsdp.engine.unit import State, Unit
from minifsdp.fsdp1 import build, compiling, initial, state_dict, wrap
from minifsdp.fsdp1.full_params import check_idle, check_not_running, check_summon_options, summoned
from minifsdp.fsdp1.ignored import find_ignored
from minifsdp.fsdp1.legacy import takes_old_spellings, warn_renamed
from minifsdp.fsdp1.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.fsdp1.state_dict_options import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    common_settings,
    settings_for,
)
from minifsdp.fsdp1.training_aids import clip_gradients

__all__ = ["FullyShardedDataParallel"]

WRAPPED = "_fsdp_wrapped_module"
PREFIX = WRAPPED + "."


def clean_name(name: str) -> str:
    """A parameter's or module's name without the wrappers' prefixes."""
    return name.replace(PREFIX, "").removesuffix(WRAPPED).removesuffix(".")


class FullyShardedDataParallel(nn.Module):
    """Shards a module's parameters, gradients and optimizer state over the ranks of a group.

    Every rank of the group must construct it, with modules of the same structure and in the same order.

    Args:
        module: the module to wrap.
        process_group: who shards; for a hybrid strategy the pair (sharding group, replication group).
        sharding_strategy: what is sharded, see `ShardingStrategy`; ``None`` means ``FULL_SHARD``.
        cpu_offload: whether shards live on the CPU.
        auto_wrap_policy: which submodules become units of their own.
        backward_prefetch: when backward asks for the next unit; ``None`` means never ahead of time.
        mixed_precision: which dtype at which step.
        ignored_modules: modules whose parameters are left alone.
        param_init_fn: gives values to modules on the meta device.
        device_id: where to compute.
        sync_module_states: whether rank 0's initial values are sent to the others.
        forward_prefetch: whether forward asks for the next unit, in the order of the first iteration.
        limit_all_gathers: whether the CPU waits before a third unit is in flight.
        use_orig_params: whether the original parameters stay visible.
        ignored_states: parameters or modules to be left alone.
        device_mesh: who shards, as a mesh of one axis, or of two for a hybrid strategy.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: arguments contradict each other.
        RuntimeError: there is no process group.
    """

    @takes_old_spellings
    def __init__(
        self,
        module: nn.Module,
        process_group: build.ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
    ) -> None:
        build.check_options(
            module, sharding_strategy, cpu_offload, auto_wrap_policy, backward_prefetch, mixed_precision
        )
        super().__init__()
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        process_group = build.groups_of(device_mesh, process_group, strategy)
        self.device_mesh = device_mesh
        self.compute_device = build.compute_device(module, device_id)
        self.mesh, self.process_group = build.choose_mesh(
            process_group, strategy, has_policy=auto_wrap_policy is not None, device=self.compute_device
        )
        own_group = self.process_group[0] if isinstance(self.process_group, tuple) else self.process_group
        self.rank, self.world_size = own_group.rank(), own_group.size()
        self.sharding_strategy = strategy
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params = use_orig_params
        self._precision = build.precision_of(mixed_precision)
        self._tree: Root | None = None
        # An old switch of torch that programs still set in their environment.
        self._full_precision_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self._is_inner = self._is_tree_root = False
        self._shows_clean_names = False
        ignored = find_ignored(module, ignored_modules, ignored_states, _is_wrapper)
        self._ignored_modules, self._ignored_parameters = ignored
        if auto_wrap_policy is not None:
            inner_arguments = {
                "process_group": self.process_group if device_mesh is None else None,
                "device_mesh": device_mesh,
                "sharding_strategy": strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                # Modules, where modules were given: an inner unit must leave their buffers alone, too.
                **({"ignored_modules": [*ignored[0]]} if ignored[0] else {"ignored_states": ignored[1]}),
            }
            wrap.auto_wrap(module, auto_wrap_policy, FullyShardedDataParallel, inner_arguments, *ignored)
        for inner in FullyShardedDataParallel.fsdp_modules(module):
            inner._is_inner = True
        self.add_module(WRAPPED, module)
        modules = build.modules_of_unit(module, _is_wrapper, self._ignored_modules)
        self._initialize(modules, param_init_fn, device_id, sync_module_states)
        self._unit = self._make_unit(module, modules)
        self._state_dict_settings = StateDictSettings()
        self._register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(self._after_load)  # type: ignore[no-untyped-call]
        compiling.step_over_this_package()

    def _initialize(
        self, modules: list[tuple[str, nn.Module]], param_init_fn: Any, device_id: Any, sync_module_states: bool
    ) -> None:
        """Makes this unit's initial values real, in the right place, and if so wished equal on all ranks."""
        ignored = self._ignored_parameters
        initial.materialize(modules, param_init_fn, self.compute_device, ignored)
        if device_id is not None:
            initial.move_modules(modules, self.compute_device, ignored)
        if sync_module_states:
            initial.synchronize(modules, self.mesh, ignored, type(self.module).__name__)

    def _make_unit(self, module: nn.Module, modules: list[tuple[str, nn.Module]]) -> Unit | None:
        """The unit of what no inner wrapper has taken; ``None`` if nothing is left."""
        parameters = owned_parameters(modules, self._ignored_parameters)
        if not parameters:
            return None
        precision = self._precision
        layout = FlatLayout(
            module,
            parameters,
            self.mesh,
            self.compute_device,
            compute_dtype=precision.compute,
            keep_reduce_dtype=precision.keep_reduce_dtype,
            offload=self.cpu_offload.offload_params,
            keep_originals=self._use_orig_params,
        )
        plan = ReducePlan.mean(self.mesh, precision.reduce or layout.dtype)
        frees = self.sharding_strategy in build.FREES_AFTER_FORWARD and self.mesh.shard is not None
        return Unit(module, layout, plan, precision, reshard_after_forward=frees)

    # --- the algorithm ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module with its full parameters. Every rank of the group must call it.

        Returns:
            What the wrapped module returns, of the same structure.
        """
        tree = self._current_tree()
        is_outermost_call = tree.begin_forward()
        try:
            unit = self._unit
            if self._full_precision_in_eval and unit is not None and unit.state is State.SHARDED:
                unit.layout.use_stored_dtype(not self.training)
            args, kwargs = self._prepare_inputs(args, kwargs, is_outermost_call)
            if unit is not None:
                tree.cycle.pre_forward(unit)
            output = self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]
            if unit is not None:
                tree.cycle.post_forward(unit, (args, kwargs), output)
            elif is_outermost_call:
                tree.cycle.watch(output)
        except BaseException:
            if is_outermost_call:
                tree.fail_forward()
            raise
        if is_outermost_call:
            tree.end_forward()
        return output

    def _prepare_inputs(self, args: Any, kwargs: Any, is_outermost_call: bool) -> tuple[Any, Any]:
        if is_outermost_call and self.compute_device.type != "cpu":
            args, kwargs = move(self.compute_device, (args, kwargs))
        precision = self._precision
        if precision.compute is not None and (self.training or not self._full_precision_in_eval):
            casts = precision.cast_root_inputs if self._is_tree_root else precision.cast_inputs
            if casts:
                args, kwargs = cast_floating(precision.compute, (args, kwargs))
        return args, kwargs

    def _current_tree(self) -> Root:
        tree = self._tree
        return self._find_tree() if tree is None or tree.is_dissolved else tree

    def _find_tree(self) -> Root:
        """A forward runs here with no other wrapper around it, so here is the root (CTOR-10)."""
        members = [(clean_name(name), m) for name, m in self.named_modules() if isinstance(m, FullyShardedDataParallel)]
        # Parts that ran on their own before were roots of small trees; this one takes them over (CTOR-11).
        for small in {id(m._tree): m._tree for _, m in members if m._tree is not None}.values():
            if not small.is_dissolved:
                small.dissolve()
        compiling.warn_if_compiled(not self._use_orig_params)
        tree = Root(
            [(name, member._unit) for name, member in members if member._unit is not None],
            self._unit,
            self.compute_device,
            backward_prefetch=build.prefetch_of(self.backward_prefetch),
            forward_prefetch=self.forward_prefetch,
            limit_gathers=self.limit_all_gathers,
        )
        for _, member in members:
            member._tree = tree
            member._is_tree_root = member is self
            member._cast_buffers()
        return tree

    def _cast_buffers(self) -> None:
        dtype = self._precision.buffers
        if dtype is None:
            return
        for _, owner in build.modules_of_unit(self.module, _is_wrapper, self._ignored_modules):
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype:
                    self._buffer_dtypes[owner, name] = buffer.dtype
                    owner._buffers[name] = buffer.to(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Dtype or device may have changed: the next forward finds the tree anew, and every layout settles again.
        if self._tree is not None and not self._tree.is_dissolved:
            self._tree.dissolve()
        return self

    # --- state dicts ---

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state in the chosen form, full by default (SD-FULL, SD-SHARD, SD-LOCAL). Every rank must call it.

        Takes what ``nn.Module.state_dict`` takes; the form is chosen by `set_state_dict_type` or `state_dict_type`.
        """
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        with state_dict.place_holders(self._unit):
            state: dict[str, Any] = super().state_dict(*args, **kwargs)
        inner = prefix + PREFIX
        if self._unit is not None:
            mesh = self._state_dict_mesh()
            state_dict.write_unit(self._unit, self.module, self._state_dict_settings, state, inner, mesh)
        modules = build.modules_of_unit(self.module, _is_wrapper, self._ignored_modules)
        state_dict.write_rest(modules, self._buffer_dtypes, self._state_dict_settings, state, inner)
        state_dict.rename(state, inner, prefix)
        if getattr(self._state_dict_settings.state_dict_config, "rank0_only", False) and not self.mesh.is_first:
            state_dict.drop(state, prefix)
        return state

    def _state_dict_mesh(self) -> DeviceMesh | None:
        config = self._state_dict_settings.state_dict_config
        if self.device_mesh is None and not getattr(config, "use_dtensor", False):
            return None
        group = self.mesh.shard
        if self.device_mesh is None and group is not None:
            return DeviceMesh.from_group(group.process_group, self.compute_device.type)
        mesh: DeviceMesh | None = self.device_mesh
        return mesh

    def _before_load(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        state_dict.rename(state, prefix, prefix + PREFIX)
        self._reading = state_dict.Reading(self._unit, self.module, self._state_dict_settings)
        self._reading.before_walk(state, prefix + PREFIX, errors)

    def _after_load(self, _: nn.Module, incompatible: Any) -> None:
        self._reading.after_walk(incompatible.missing_keys, incompatible.unexpected_keys)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Chooses the form for all units below ``module``; returns what was chosen before (SD-CFG-02 to 07).

        Raises:
            RuntimeError: a configuration belongs to another type.
            AssertionError: the units differed before.
        """
        settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for wrapper in FullyShardedDataParallel.fsdp_modules(module):
            wrapper._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form that is chosen for all units below ``module`` (SD-CFG-09).

        Raises:
            AssertionError: they differ.
        """
        wrappers = [(n, m) for n, m in module.named_modules() if isinstance(m, FullyShardedDataParallel)]
        return common_settings([(clean_name(name), wrapper._state_dict_settings) for name, wrapper in wrappers])

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None]:
        """`set_state_dict_type` for the time of a ``with`` block (SD-CFG-08)."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in FullyShardedDataParallel.fsdp_modules(module):
                wrapper._state_dict_settings = before

    # --- accumulation ---

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Backwards inside leave their gradients unreduced; the first one after it reduces the sum (NOSYNC-01 to 10).

        Inside, ``.grad`` has the size of the whole unit. Every rank must enter and leave it at the same backward.

        Raises:
            RuntimeError: this is not the root.
        """
        self._only_on_the_root("no_sync()")
        units = self._current_tree().units
        before = [unit.reduces for unit in units]
        for unit in units:
            unit.reduces = False
        try:
            yield
        finally:
            for unit, reduces in zip(units, before, strict=True):
                unit.reduces = reduces

    def _only_on_the_root(self, what: str) -> None:
        if self._is_inner:
            raise RuntimeError(
                f"rank {rank_of_this_process()}: {what} acts on the whole tree and should only be called on the root "
                "FSDP instance, not on one inside it"
            )

    # --- full parameters ---

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None]:
        """Inside, every unit below ``module`` shows its full parameters in the stored dtype (SUMMON-01 to 20).

        All ranks must enter and leave it. Neither forward nor backward may be started inside.

        Args:
            module: where to begin; it need not be a wrapper itself.
            recurse: whether units below ``module``'s own are summoned too.
            writeback: whether changes persist, each rank's in its own slice.
            rank0_only: the first rank alone sees full parameters.
            offload_to_cpu: they are on the CPU, if they are sharded.
            with_grads: ``.grad`` is gathered too; needs ``use_orig_params=True``.

        Raises:
            NotImplementedError: the options do not go together.
            RuntimeError: a unit is busy, or summoned already.
        """
        options = {
            "writeback": writeback,
            "rank0_only": rank0_only,
            "offload_to_cpu": offload_to_cpu,
            "with_grads": with_grads,
        }
        check_summon_options(**options)
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        for wrapper in wrappers:
            if wrapper._tree is not None:
                check_not_running(wrapper._tree)
        units = [wrapper._unit for wrapper in wrappers if wrapper._unit is not None]
        before = [wrapper._shows_clean_names for wrapper in wrappers]
        with summoned(units, **options):
            for wrapper in wrappers:
                wrapper._shows_clean_names = True
            try:
                yield
            finally:
                for wrapper, shown in zip(wrappers, before, strict=True):
                    wrapper._shows_clean_names = shown

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Calls ``fn`` on every submodule and on itself, children first, each unit with full parameters (APPLY-01).

        All ranks must call it.

        Raises:
            RuntimeError: inside ``summon_full_params``.
        """
        if self._unit is not None:
            check_idle(self._unit)
        with FullyShardedDataParallel.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    # --- clipping ---

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int | str = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm, seen as one vector, is at most ``max_norm`` (CLIP-01 to 10).

        Every rank must call it, also one that has no gradients: a rank that does not lets the others wait.

        Returns:
            The norm before clipping, the same on all ranks.

        Raises:
            RuntimeError: this is not the root, or there are gradients that were never reduced.
        """
        self._only_on_the_root("clip_grad_norm_()")
        units = self._current_tree().units
        misuse.check_reduced("clip_grad_norm_()", [unit.layout for unit in units])
        sharded: dict[Group, list[torch.Tensor]] = {}
        owned: set[nn.Parameter] = set()
        whole: list[torch.Tensor] = []
        for unit in units:
            group = unit.plan.mesh.shard
            gradients = whole if group is None else sharded.setdefault(group, [])
            gradients += [p.grad for p in unit.layout.local_parameters() if p.grad is not None]
            owned.update(unit.layout.local_parameters())
        whole += [p.grad for p in self.parameters() if p not in owned and p.grad is not None]
        return clip_gradients(sharded, whole, float(max_norm), float(norm_type), self.compute_device)

    # --- communication hook ---

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces how gradients are combined, for all units of the tree (HOOK-01 to 10).

        A sharded unit calls ``hook(state, grad, out)``: ``grad`` is its padded, unsharded flat gradient, ``out`` this
        rank's piece, to be filled. A unit that is not sharded calls ``hook(state, grad)``, to be changed in place. To
        be called once, on every rank, before the first forward.

        Raises:
            AssertionError: not on the root, a hybrid strategy, or there is a hook already.
            ValueError: ``hook`` is not callable.
            RuntimeError: forward has been run already.
        """
        where = f"rank {rank_of_this_process()}: register_comm_hook"
        if self._is_inner:
            raise AssertionError(f"{where} can only be called on a root instance, not on one inside it")
        if not callable(hook):
            raise ValueError(f"{where} expects a callable hook, got {hook!r}")
        if self._tree is not None:
            raise RuntimeError(f"{where} was called after the first forward; call it right after wrapping")
        units = [w._unit for w in FullyShardedDataParallel.fsdp_modules(self) if w._unit is not None]
        for unit in units:
            if unit.plan.mesh.shard is not None and unit.plan.mesh.replicate is not None:
                raise AssertionError(
                    f"{where} does not support hybrid strategies: there are two collectives to replace"
                )
            if unit.plan.hook is not None:
                raise AssertionError(f"{where}: a communication hook is already registered")
        for unit in units:
            unit.plan.hook = functools.partial(hook, state)

    # --- names and traversal ---

    @property
    def module(self) -> nn.Module:
        """The wrapped module (NAMES-01)."""
        wrapped = self._modules[WRAPPED]
        assert wrapped is not None
        return wrapped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever, and also where a unit that is gathered right now shows views in place of its parameters (FWD-08)."""
        super().zero_grad(set_to_none)
        for wrapper in FullyShardedDataParallel.fsdp_modules(self):
            for parameter in wrapper._unit.layout.local_parameters() if wrapper._unit is not None else []:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All parameters that have a gradient; the name is one of torch 1.13 (NAMES-09)."""
        warn_renamed("params_with_grad", "[p for p in model.parameters() if p.grad is not None]", stacklevel=2)
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """Refuses: slices and hooks cannot be copied one by one (NEW-22)."""
        raise RuntimeError(
            f"rank {rank_of_this_process()}: a FullyShardedDataParallel cannot be copied with copy.deepcopy. Copy the "
            "plain model before wrapping it, or carry the values over with state_dict() and load_state_dict()"
        )

    def __getattr__(self, name: str) -> Any:
        """Looks up what the wrapper does not have in the wrapped module (NAMES-08)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """Indexes the wrapped module (NAMES-08)."""
        return self.module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ever, but without the wrappers' prefixes inside ``summon_full_params`` (NAMES-02)."""
        if self._tree is not None:
            self._tree.mend()
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (name.replace(PREFIX, "") if self._shows_clean_names else name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As ever, but without the wrappers' prefixes inside ``summon_full_params`` (NAMES-03)."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (name.replace(PREFIX, "") if self._shows_clean_names else name), buffer

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in ``module``, itself included if it is one; ``root_only`` leaves inner ones out (NAMES-06)."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if not m._is_inner] if root_only else found


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)
