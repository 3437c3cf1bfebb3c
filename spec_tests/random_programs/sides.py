"""The sharded model of a program, with either API. Its methods have the names of the calls, like those of `Reference`.

Shards are compared locally. From the reference's full tensors, each rank computes its expected shard with independent
arithmetic. Nothing is all-gathered, so an error that cancels out in splitting and joining is found.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from minifsdp.engine.messages import message
from spec_tests import subject
from spec_tests.random_programs import wrong
from spec_tests.random_programs.description import Call, Description, Node
from spec_tests.random_programs.front_ends import PRECISIONS, RESHARDS, Group, parameters_here, sharded
from spec_tests.random_programs.modules import (
    Bang,
    Kept,
    batch,
    loss_of,
    optimizer_for,
    output_of,
    part_of,
    plain_model,
    prepared,
    root_of,
    units_of,
)
from spec_tests.random_programs.reference import DTYPES, READS, chosen, to_be_loaded
from spec_tests.subject import FullyShardedDataParallel as FSDP

# PyTorch's error for a reentrant checkpoint around modules without gradients. The program ends there.
MEANINGLESS = "this checkpoint() is not necessary"


def side_of(d: Description, group: Group = None) -> Sharded:
    """The sharded model. Every rank must call it."""
    return (ByFunction if d.is_per_parameter else ByWrapper)(d, group)


class Sharded:
    """The sharded model. The subclasses also have these methods:

    * ``expected``: this rank's shards of full tensors, by the names in `owned`; 1-D, or per parameter. ``joined`` is
      the reverse: full tensors from the shards of all ranks.
    * ``state`` and ``optimizer_state``: the state dicts, which share no memory with the model. ``resume`` loads them
      into another model of the same kind.

    Args:
        d: the program.
        group: the ranks that shard the model, if not all.

    Attributes:
        owned: the optimizer's parameters. Between forward and backward, modules may have other ones.
        kept: the kept gradients of each forward.
        is_over: whether a loss had no gradients, so that there is nothing to train.
    """

    model: Any

    def __init__(self, d: Description, group: Group = None) -> None:
        self.d, self.group, self.rank = d, group, dist.get_rank(group)
        self.pending: list[Tensor] = []
        self.used: Tensor | None = None
        self.saved: list[tuple[str, dict[str, Any]]] = []
        self.saved_optimizer: list[tuple[str, dict[str, Any]]] = []
        self.contexts: list[tuple[Call, contextlib.ExitStack]] = []
        plain = plain_model(d)
        self.clock, self.units = plain.clock, units_of(plain)
        self.shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
        self.model = sharded(d, plain, group)
        self.owned = dict(parameters_here(self.model))
        self.optimizer = optimizer_for(d, self.model)
        self.kept: list[Kept] = []
        self.dtype: torch.dtype | None = None
        # Whether a recorded forward or the user has left units unsharded. Then `model.parameters()` can be unsharded.
        self.is_left_unsharded = self.keeps_after_backward = self.is_over = False
        # Whether a forward or an evaluation has left the root unsharded.
        self.is_root_left = False

    # --- shards ---

    def sharers(self, node: Node) -> list[int]:
        """The ranks that together store a copy of a unit; this rank is one of them."""
        strategy = node.strategy or self.d.strategy
        if strategy == "NO_SHARD" and not self.d.is_per_parameter:
            return [self.rank]
        num = self.d.num_ranks // self.d.num_replicas
        first = self.rank // num * num
        return list(range(first, first + num))

    def saved_against(self, form: str, state: dict[str, Any], expected: dict[str, Tensor]) -> dict[str, Any]:
        """The tensors of a state dict on this rank, with their expected values."""
        if form == "local" or (form == "rank0" and self.rank != 0):
            return {}
        num = self.d.num_ranks // self.d.num_replicas
        found = {}
        for key, whole in expected.items():
            value = state.get(key)
            if isinstance(value, DTensor) or hasattr(value, "local_shards"):
                shards = [value.to_local()] if isinstance(value, DTensor) else [s.tensor for s in value.local_shards()]
                value, whole = (shards or [whole[:0]])[0], _chunk(whole, num, self.rank % num)
            found[f"{key!r} of the state dict"] = (value, whole)
        return found

    @property
    def inner_unit(self) -> Any:
        """A unit among the root's parts."""
        parts, children = root_of(self.model).parts, self.d.model.children
        return next(part for part, node in zip(parts, children, strict=True) if node.unit)

    @property
    def part_without_unit(self) -> Any:
        """A part of the root that belongs to the root's unit and has parameters."""
        parts, children = root_of(self.model).parts, self.d.model.children
        return next(part for part, node in zip(parts, children, strict=True) if node.kind == "linear" and not node.unit)

    def has_to_load(self, call: Call) -> bool:
        """Whether the state dict to be loaded has entries on this rank. A full one can be on rank 0 only."""
        return bool(self.saved) and bool(to_be_loaded(self.saved, call)[1])

    # --- contexts ---

    @property
    def is_summoned(self) -> bool:
        """Whether full parameters are summoned."""
        return any(call["what"] == "summon" for call, _ in self.contexts)

    @property
    def keeps_edits(self) -> bool:
        """Whether a user's edit of `model.parameters()` is kept now."""
        # With one shard nothing is sharded: the wrapper treats such a hybrid like `NO_SHARD`.
        if len(self.sharers(self.d.model)) == 1:
            return True
        return all(call.get("writeback", True) for call, _ in self.contexts if call["what"] == "summon")

    @property
    def hides_from_some(self) -> bool:
        """Whether only the first rank has full parameters."""
        return any(call.get("rank0_only", False) for call, _ in self.contexts)

    def leave(self, call: Call) -> None:
        if self.contexts:
            _, stack = self.contexts.pop()
            stack.close()

    def entered(self, call: Call, context: Any) -> None:
        """Enters a context, which stays open until `leave`."""
        stack = contextlib.ExitStack()
        stack.enter_context(context)
        self.contexts.append((call, stack))

    # --- training ---

    def begin_step(self, call: Call) -> None:
        self.clock.step = call["step"]

    def inputs(self, call: Call, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        """The inputs of a forward."""
        # Only the outermost unit casts its inputs.
        low = {} if "part" not in call or self.d.precision == "single" else PRECISIONS[self.d.precision]
        return prepared(batch(self.d, call["batch"], self.rank), low.get("param_dtype") or self.dtype, kept)

    def forward(self, call: Call) -> Tensor:
        self.is_left_unsharded = True
        kept = Kept() if self.d.tracks_input else None
        output = self._output(call, kept)
        self.pending.append(loss_of([output]))
        if kept is not None:
            self.kept.append(kept)
        return output

    def evaluate(self, call: Call) -> Tensor:
        self.is_left_unsharded |= "bang" in call or call.get("is_recorded", False)
        with torch.set_grad_enabled(call.get("is_recorded", False)):
            if not call.get("in_mode"):
                return self._output(call)
            self.model.eval()
            output = self._output(call)
            self.model.train()
            return output

    def _output(self, call: Call, kept: Kept | None = None) -> Tensor:
        self.is_root_left = True
        node, called = part_of(self.d.model, self.model, call.get("part"))
        with self.clock.of_call(call, self.rank, kept):
            return output_of(node, called, self.inputs(call, kept))

    def strange_input(self, call: Call) -> Any:
        return self.model(call["input"])

    def backward(self, call: Call) -> None:
        losses = chosen(self.pending, call["which"])
        if losses:
            self.used = torch.stack(losses).sum()
            if not self.used.requires_grad:
                self.is_over = True
                return
            self.differentiate(self.used)
            self.is_root_left = False
            self.is_left_unsharded = self.keeps_after_backward or (bool(self.pending) and self.is_left_unsharded)

    def differentiate(self, loss: Tensor) -> None:
        """The backward of a loss."""
        loss.backward()

    def backward_again(self, call: Call) -> None:
        if self.used is not None:
            self.used.backward()

    def break_off(self, call: Call) -> None:
        """A micro-batch that raises an error; without synchronization if the first one of a step has none."""
        in_sync = self.breaks_off_in_sync()
        if not in_sync:
            self.sync({"value": False})
        self.clock.bomb = call["bomb"]
        try:
            with contextlib.suppress(Bang):
                loss = loss_of([output_of(self.d.model, self.model, self.inputs(call))])
                if loss.requires_grad:
                    loss.backward()
        except RuntimeError as error:
            # The following backward detects this in the plain model.
            if MEANINGLESS not in str(error):
                raise
        finally:
            self.clock.bomb = None
            if not in_sync:
                self.sync({"value": True})

    def breaks_off_in_sync(self) -> bool:
        """Whether the interrupted micro-batch synchronizes."""
        # Per-parameter gradients that wait for reduction are hidden from `zero_grad()`; the same is true in torch.
        return self.d.micro_batches[0] or self.d.is_per_parameter

    def step(self, call: Call) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        self.changed()

    def zero_grad(self, call: Call) -> None:
        # Gradients are hidden while full parameters are summoned, so an optimizer cannot find them.
        if not self.is_summoned and self.optimizer is not None:
            (self.model if call["of_model"] else self.optimizer).zero_grad(set_to_none=call["to_none"])

    def new_optimizer(self, call: Call) -> None:
        if self.is_summoned:
            # An optimizer over unsharded parameters is an error of the program.
            return
        if self.is_left_unsharded:
            self.reshard_all()
        self.optimizer = optimizer_for(self.d, self.model)

    def reshard_all(self) -> None:
        """Makes `model.parameters()` the sharded parameters, after a forward that no backward has followed."""
        self.is_left_unsharded = False

    @torch.no_grad()
    def halve(self, parameters: Iterable[Any], how: str | None) -> None:
        """Halves parameters, in one of the ways that users do it."""
        if how == "foreach":
            torch._foreach_mul_(list(parameters), 0.5)
            return
        for parameter in parameters:
            if how == "new_data":
                parameter.data = parameter.data * 0.5
            else:
                (parameter.data if how == "data" else parameter).mul_(0.5)

    def see(self, *tensors: Tensor) -> None:
        """The user reads tensors."""

    def mode(self, call: Call) -> None:
        self.model.train(call["train"])

    def changed(self) -> None:
        """The parameters have changed: drops losses that were computed from the old ones."""
        self.pending.clear()
        self.used = None

    def nothing(self, call: Call) -> None:
        pass

    unshard_by_hand = read_gradients = nothing

    def copy(self, call: Call) -> None:
        copy.deepcopy(self.model)

    def wrong(self, call: Call) -> None:
        wrong.make(call["line"], self)


class ByWrapper(Sharded):
    """Through ``FullyShardedDataParallel``."""

    def expected(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        local_shards: dict[str, Tensor] = {}
        for unit, (node, names) in self.units.items():
            if names:
                sharers = self.sharers(node)
                rows = _cut([whole[name] for name in names], len(sharers), sharers.index(self.rank))
                local_shards.update(zip(names, rows, strict=False) if self.d.originals else {unit: torch.cat(rows)})
        return local_shards

    def joined(self, of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for unit, (node, names) in self.units.items():
            sharers = self.sharers(node)
            if self.d.originals:
                whole.update({name: torch.cat([of_ranks[rank][name] for rank in sharers]) for name in names})
            elif names:
                row = torch.cat([of_ranks[rank][unit] for rank in sharers])
                sizes = [self.shapes[name].numel() for name in names]
                whole.update(zip(names, row[: sum(sizes)].split(sizes), strict=True))
        return {name: row.view(self.shapes[name]) for name, row in whole.items()}

    # --- training ---

    def _refuse_local_steps(self, what: str) -> None:
        """With ``NO_SHARD`` a rank can train alone (FRESH-07), but the reference is one model and cannot."""
        units = [module._unit for module in self.model.modules() if hasattr(module, "_unit")]
        if any(unit is not None and unit.layout.has_unreduced for unit in units):
            raise RuntimeError(message("unreduced-gradients", what=what))

    def step(self, call: Call) -> None:
        self._refuse_local_steps("step()")
        super().step(call)

    def clip(self, call: Call) -> Tensor:
        self._refuse_local_steps("clip_grad_norm_()")
        return self.model.clip_grad_norm_(call["most"], call["norm"])

    def edit(self, call: Call) -> None:
        how = call.get("how")
        self.changed()
        if how == "write" or how in READS:
            options = {"offload_to_cpu": how == "read_on_cpu", "with_grads": how == "gradients"}
            with self.model.summon_full_params(self.model, writeback=how == "write", **options):
                if how == "write":
                    self.halve(self.model.parameters(), None)
                self.see(*self.model.parameters())
            return
        # If a rank only has shards, it would edit these, and the edit would be kept.
        if self.hides_from_some:
            return
        shown = self.model.parameters() if self.is_summoned or self.d.steps else self.owned.values()
        # Parameters that stay unsharded after a forward detect an edit only by its version (FRESH-03, FRESH-05).
        is_zero2 = self.d.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
        is_left = self.is_left_unsharded or self.is_root_left
        is_kept = not self.d.steps and (is_zero2 or (self.d.strategy != "NO_SHARD" and is_left))
        self.halve(list(shown), None if is_kept else how)

    def apply(self, call: Call) -> None:
        self.model.apply(lambda module: self.halve(module.parameters(recurse=False), None))
        self.changed()

    def mode(self, call: Call) -> None:
        (self.model.module if call.get("inner") else self.model).train(call["train"])
        if self.d.full_in_eval:
            # The parameters have another dtype from here on.
            self.changed()

    def sync(self, call: Call) -> None:
        if call["value"]:
            self.leave(call)
        else:
            self.enter({"do": "enter", "what": "no_sync"})

    def enter(self, call: Call) -> None:
        if call["what"] == "no_sync":
            self.entered(call, self.model.no_sync())
            return
        options = {name: call.get(name, False) for name in ("rank0_only", "offload_to_cpu", "with_grads")}
        summoned = self.model.summon_full_params(self.model, writeback=call.get("writeback", True), **options)
        self.entered(call, summoned)

    def sees(self, call: Call) -> dict[str, Tensor]:
        """The parameters that a summoned model has on this rank."""
        if call["what"] != "summon" or (call.get("rank0_only") and self.rank != 0):
            return {}
        return {name: parameter.detach() for name, parameter in parameters_here(self.model)}

    # --- saving ---

    def _chosen(self, form: str) -> Any:
        kind, options = {
            "full": ("Full", {"offload_to_cpu": self.d.seed % 2 == 1}),
            "rank0": ("Full", {"rank0_only": True, "offload_to_cpu": True}),
            "sharded": ("Sharded", {"offload_to_cpu": self.d.seed % 2 == 1}),
            "dtensor": ("Sharded", {"_use_dtensor": True}),
            "local": ("Local", {}),
        }[form]
        return FSDP.state_dict_type(
            self.model,
            subject.StateDictType[f"{kind.upper()}_STATE_DICT"],
            getattr(subject, f"{kind}StateDictConfig")(**options),
            getattr(subject, f"{kind}OptimStateDictConfig")(**options),
        )

    def state(self, form: str) -> dict[str, Any]:
        with self._chosen(form):
            return self.model.state_dict()

    def optimizer_state(self, form: str) -> dict[str, Any]:
        if form == "local" and self.d.resumes:
            # The optimizer's own dict belongs to the same run as local shards.
            return copy.deepcopy(self.optimizer.state_dict())
        with self._chosen(form):
            return FSDP.optim_state_dict(self.model, self.optimizer)

    def resume(self, form: str, state: dict[str, Any], optimizer_state: dict[str, Any]) -> None:
        if form == "rank0":
            # The wrapper sends the optimizer's state. The user sends the model's.
            sent = [state]
            dist.broadcast_object_list(sent, src=0)
            state = sent[0]
        with self._chosen(form):
            self.model.load_state_dict(state)
            if form != "local":
                optimizer_state = FSDP.optim_state_dict_to_load(self.model, self.optimizer, optimizer_state)
        self.optimizer.load_state_dict(optimizer_state)

    def save(self, call: Call) -> dict[str, Any] | None:
        if self.hides_from_some:
            # Only rank 0 can save.
            if self.rank == 0:
                self.model.state_dict()
            return None
        state = self.state(call["form"])
        if self.is_summoned and not self.keeps_edits:
            # The state contains edits that are lost at the end of the context.
            return None
        self.saved.append((call["form"], state))
        return state

    def load(self, call: Call) -> None:
        if not self.saved:
            return
        form, state = to_be_loaded(self.saved, call)
        with self._chosen(call.get("form") or form):
            self.model.load_state_dict(state, strict=call["strict"])
        self.changed()

    def save_optimizer(self, call: Call) -> None:
        if self.optimizer is not None and self.optimizer.state:
            self.saved_optimizer.append((call["form"], self.optimizer_state(call["form"])))

    def load_optimizer(self, call: Call) -> None:
        if self.saved_optimizer:
            form, state = to_be_loaded(self.saved_optimizer, call)
            with self._chosen(form):
                loadable = FSDP.optim_state_dict_to_load(self.model, self.optimizer, state)
            self.optimizer.load_state_dict(loadable)


class ByFunction(Sharded):
    """Through ``fully_shard``."""

    def __init__(self, d: Description, group: Group = None) -> None:
        super().__init__(d, group)
        self.handles: list[Any] = []
        # All units or, with ``None``, the root.
        self.keeps_evaluated = not (d.among or d.frees or RESHARDS.get(d.strategy))
        self.modules = [module for module in self.model.modules() if isinstance(module, subject.FSDPModule)]
        if self.modules:
            subject.register_fsdp_forward_method(self.model, "generate")

    def expected(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        sharers = self.sharers(self.d.model)
        return {name: _chunk(tensor, len(sharers), sharers.index(self.rank)) for name, tensor in whole.items()}

    def joined(self, of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        sharers = self.sharers(self.d.model)
        return {name: torch.cat([of_ranks[rank][name] for rank in sharers]) for name in self.owned}

    def at(self, call: Call) -> Any:
        """The module that a switch is set on: the whole model, or one of its parts."""
        return part_of(self.d.model, self.model, call.get("part"))[1]

    # --- training ---

    def generate(self, call: Call) -> Tensor:
        return output_of(self.d.model, self.model.generate, self.inputs(call))

    def _output(self, call: Call, kept: Kept | None = None) -> Tensor:
        try:
            return super()._output(call, kept)
        except Exception:
            # The units detect the exception only when the same module is called again. A submodule that is called alone
            # would use parameters that were all-gathered before.
            self.reshard_all()
            raise

    def break_off(self, call: Call) -> None:
        super().break_off(call)
        if self.d.resets:
            self.model.reset_iter_state()

    def clip(self, call: Call) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.owned.values(), call["most"], float(call["norm"]))
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def edit(self, call: Call) -> None:
        how = call.get("how")
        # If units stay unsharded after an evaluation, the next one only detects edits that change a version (FRESH-03).
        if self.is_left_unsharded or self.d.steps or (how and self.keeps_evaluated):
            self.reshard_all()
        if how in READS:
            self.see(*map(whole_of, self.model.parameters()))
            return
        self.halve(list(self.owned.values() if call.get("of_model") is False else self.model.parameters()), how)
        self.changed()

    def convert(self, call: Call) -> None:
        self.reshard_all()
        self.dtype = DTYPES[call["dtype"]]
        self.model.zero_grad()
        if call["how"] == "method":
            getattr(self.model, call["dtype"])()
        else:
            state = self.model.state_dict()
            state = {key: value.to(self.dtype) if value.is_floating_point() else value for key, value in state.items()}
            self.model.load_state_dict(state, assign=True)
        self.owned = dict(parameters_here(self.model))
        self.new_optimizer(call)
        self.changed()

    def apply(self, call: Call) -> None:
        self.reshard_all()
        self.model.apply(lambda module: self.halve(module.parameters(recurse=False), None))
        self.changed()

    def reshard_all(self) -> None:
        super().reshard_all()
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    # --- switches ---

    def sync(self, call: Call) -> None:
        self.at(call).set_requires_gradient_sync(call["value"], recurse=call.get("recurse", True))

    def keep(self, call: Call) -> None:
        self.keeps_evaluated |= call["value"]
        self.at(call).set_reshard_after_forward(not call["value"], recurse=call.get("recurse", True))

    def keep_after_backward(self, call: Call) -> None:
        self.keeps_after_backward |= call["value"]
        self.at(call).set_reshard_after_backward(not call["value"], recurse=call.get("recurse", True))

    def unshard(self, call: Call) -> None:
        self.is_left_unsharded = True
        handle = self.at(call).unshard(async_op=call["later"])
        if handle is not None:
            self.handles.append(handle)

    def wait(self, call: Call) -> None:
        while self.handles:
            self.handles.pop(0).wait()

    def reshard(self, call: Call) -> None:
        self.at(call).reshard()

    def prefetch(self, call: Call) -> None:
        listed = [self.at({"part": part}) for part in call["parts"]]
        getattr(self.at(call), f"set_modules_to_{call['when']}_prefetch")(listed)

    # --- saving ---

    def _options(self, form: str, **others: Any) -> dcp.StateDictOptions:
        full = form in ("full", "rank0")
        return dcp.StateDictOptions(full_state_dict=full, cpu_offload=form == "rank0", **others)

    def state(self, form: str) -> dict[str, Any]:
        if form == "own":
            state = self.model.state_dict()
        else:
            state = dcp.get_model_state_dict(self.model, options=self._options(form))
        # Copied, because these can be the local shards themselves, which training changes.
        return {key: value.detach().clone() for key, value in state.items()}

    def optimizer_state(self, form: str) -> dict[str, Any]:
        if form == "own":
            return copy.deepcopy(self.optimizer.state_dict())
        state = dcp.get_optimizer_state_dict(self.model, self.optimizer, options=self._options(form))
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)

    def resume(self, form: str, state: dict[str, Any], optimizer_state: dict[str, Any]) -> None:
        self._load(form, state)
        self._load_optimizer(form, optimizer_state)

    def _load(self, form: str, state: Any, *, strict: bool = True) -> None:
        if form == "own":
            self.model.load_state_dict(state, strict=strict)
            return
        options = self._options(form, broadcast_from_rank0=form == "rank0", strict=strict)
        dcp.set_model_state_dict(self.model, state, options=options)

    def _load_optimizer(self, form: str, state: dict[str, Any]) -> None:
        if form == "own":
            self.optimizer.load_state_dict(state)
            return
        options = self._options(form, broadcast_from_rank0=form == "rank0")
        dcp.set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    def save(self, call: Call) -> dict[str, Any]:
        self.saved.append((call["form"], self.state(call["form"])))
        return self.saved[-1][1]

    def load(self, call: Call) -> None:
        if self.saved:
            form, state = to_be_loaded(self.saved, call)
            self._load(call.get("form") or form, state, strict=call["strict"])
            self.changed()

    def save_optimizer(self, call: Call) -> None:
        # Without optimizer states torch's function creates them with a step, which would count.
        if not self.optimizer.state:
            return
        if call["form"] == "rank0" and len(self.optimizer.state) < len(self.owned):
            # If a parameter has no state, torch's function raises on rank 0 alone, and the other ranks wait.
            return
        self.saved_optimizer.append((call["form"], self.optimizer_state(call["form"])))

    def load_optimizer(self, call: Call) -> None:
        if self.saved_optimizer:
            self._load_optimizer(*to_be_loaded(self.saved_optimizer, call))


def whole_of(parameter: Any) -> Tensor:
    """The full tensor, on the device, because NCCL only supports device tensors."""
    full: Tensor = parameter.detach().to(parameter.device_mesh.device_type).full_tensor()
    return full


def _chunk(tensor: Tensor, num: int, index: int) -> Tensor:
    chunks = tensor.chunk(num)
    return chunks[index] if index < len(chunks) else tensor[:0]


def _cut(tensors: list[Tensor], num: int, index: int) -> list[Tensor]:
    """Concatenates and splits the tensors: the part of each tensor that shard ``index`` contains, and its padding."""
    lengths = [tensor.numel() for tensor in tensors]
    local_shard = -(-sum(lengths) // num)
    padding = tensors[0].new_zeros(local_shard * num - sum(lengths))
    parts, first = [], -index * local_shard
    for tensor in [*tensors, padding]:
        row = tensor.reshape(-1)
        parts.append(row[max(0, -first) : max(0, min(row.numel(), local_shard - first))])
        first += row.numel()
    return parts
