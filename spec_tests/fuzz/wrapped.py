"""The sharded model with the first API, ``FullyShardedDataParallel``."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from minifsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.engine.messages import message
from minifsdp.wrap import ModuleWrapPolicy
from spec_tests.fuzz import net as nets
from spec_tests.fuzz.case import Call, to_be_loaded
from spec_tests.fuzz.sides import Pieces, Side, grown, halve
from spec_tests.fuzz.twin import Twin, damaged
from spec_tests.fuzz.wrong import WRONG_WRAPPED

__all__ = ["FORMS", "Wrapped"]

FORMS: dict[str, tuple[StateDictType, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig()),
    "full on rank 0": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()),
    "sharded as DTensor": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(use_dtensor=True)),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()),
}


def halve_in_place(group: dist.ProcessGroup, gradient: Tensor, *shard: Tensor) -> None:
    """A communication hook that modifies its gradient in place."""
    gradient.div_(2)
    if shard:
        dist.reduce_scatter_tensor(shard[0], gradient, group=group)
    else:
        dist.all_reduce(gradient, group=group)


class Wrapped(Side):
    """See `Side`."""

    model: FSDP

    def shard(self, net: nets.Net) -> None:
        options = self.options
        prefetch = options.get("prefetch", "pre")
        # Everything is float32, because a submodule that is called alone gets an input in float64.
        mixed = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True) if options.get("mixed") else None
        full = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"} if options.get("full_in_eval") else {}
        with mock.patch.dict(os.environ, full):
            self._wrap(net, prefetch, mixed)
        if options.get("hook") and options.get("replicas") is None:
            self.model.register_comm_hook(self.group, halve_in_place)
        # In the order of `parameters()`: this rank's elements of each unit, flat or as original parameters.
        self.owned = list(self.model.named_parameters())

    def _wrap(self, net: nets.Net, prefetch: str, mixed: MixedPrecision | None) -> None:
        options = self.options
        self.model = FSDP(
            net,
            **self._ranks(),
            mixed_precision=mixed,
            auto_wrap_policy=ModuleWrapPolicy({nets.Block}),
            backward_prefetch=None if prefetch == "none" else BackwardPrefetch[f"BACKWARD_{prefetch.upper()}"],
            forward_prefetch=options.get("forward_prefetch", False),
            use_orig_params=options.get("originals", False),
            cpu_offload=CPUOffload(offload_params=options.get("offload", False)),
        )

    def _ranks(self) -> dict[str, Any]:
        """The ranks and the strategy."""
        strategy = self.options.get("strategy", "FULL_SHARD")
        if self.options.get("replicas") is None or strategy == "NO_SHARD":
            return {"process_group": self.group, "sharding_strategy": ShardingStrategy[strategy]}
        hybrid = {"FULL_SHARD": ShardingStrategy.HYBRID_SHARD, "SHARD_GRAD_OP": ShardingStrategy._HYBRID_SHARD_ZERO2}
        return {"device_mesh": self.mesh(), "sharding_strategy": hybrid[strategy]}

    @property
    def net(self) -> Any:
        return self.model.module

    # --- shards ---

    def _local_shards(self, twin: Twin, which: str) -> Pieces:
        mine: dict[str, list[Tensor]] = {}
        for name, parameter in self.owned:
            name = name.replace("_fsdp_wrapped_module.", "")
            unit = twin.unit_of.get(name, name.removesuffix("_flat_param").removesuffix("."))
            value = parameter.detach() if which == "parameter" else grown(parameter.grad, parameter.detach())
            mine.setdefault(unit, []).append(value.reshape(-1))
        found: Pieces = {}
        for unit in twin.units:
            if which == "gradient" and unit in twin.waiting_units:
                continue
            whole = [
                (p if which == "parameter" else grown(p.grad, p)).detach().reshape(-1)
                for name, p in twin.net.named_parameters()
                if twin.unit_of[name] == unit
            ]
            row = torch.cat(mine[unit])
            expected = self._cut(torch.cat(whole))
            # Elements after the expected length are padding.
            found[f"{which}s of unit {unit!r}"] = (row[: expected.numel()], expected)
        return found

    def _cut(self, row: Tensor) -> Tensor:
        if self.options.get("strategy") == "NO_SHARD":
            return row
        number, of_all = self.local_shard
        size = -(-row.numel() // of_all)
        return row[size * number : size * (number + 1)]

    def parameters_against(self, twin: Twin) -> Pieces:
        return self._local_shards(twin, "parameter")

    def gradients_against(self, twin: Twin) -> Pieces:
        return self._local_shards(twin, "gradient")

    def saved_against(self, form: str, state: dict[str, Any], expected: dict[str, Tensor]) -> Pieces:
        if form == "local" or (form == "full on rank 0" and self.rank != 0):
            return {}
        found: Pieces = {}
        for key, whole in expected.items():
            value = state.get(key)
            if isinstance(value, DTensor):
                value, whole = value.to_local(), self._rows(whole, value.to_local().shape)
            elif hasattr(value, "local_shards"):
                shards = value.local_shards()
                value = shards[0].tensor if shards else whole.new_empty(0)
                whole = self._rows(whole, value.shape)
            found[f"{key!r} of the state dict"] = (value, whole)
        return found

    def _rows(self, whole: Tensor, shape: torch.Size) -> Tensor:
        number, of_all = self.local_shard
        local_shards = whole.chunk(of_all)
        return local_shards[number] if number < len(local_shards) else whole.new_empty(shape)

    def joined(self, name: str, shards: list[Tensor], twin: Twin) -> dict[str, Tensor]:
        whole = shards[0] if self.options.get("strategy") == "NO_SHARD" else torch.cat(shards)
        plain = {n: p for n, p in twin.net.named_parameters() if twin.unit_of[n] == name.split("'")[1]}
        rows = whole.split([parameter.numel() for parameter in plain.values()])
        return {n: row.view(p.shape) for (n, p), row in zip(plain.items(), rows, strict=True)}

    def mode(self, call: Call) -> None:
        (self.model.module if call.get("inner") else self.model).train(call["train"])
        if self.options.get("full_in_eval"):
            # The parameters have another dtype from here on.
            self.changed()

    # --- calls ---

    def _refuse_local_steps(self, what: str) -> None:
        """With ``NO_SHARD`` a rank can train alone (FRESH-07), but the reference model is one model and cannot."""
        units = [wrapper._unit for wrapper in FSDP.fsdp_modules(self.model)]
        if any(unit is not None and unit.layout.has_unreduced for unit in units):
            raise RuntimeError(message("unreduced-gradients", what=what))

    def step(self, call: Call) -> None:
        self._refuse_local_steps("step()")
        super().step(call)

    def clip(self, call: Call) -> Tensor:
        self._refuse_local_steps("clip_grad_norm_()")
        return self.model.clip_grad_norm_(call["most"], call["norm"])

    def edit(self, call: Call) -> None:
        self.changed()
        # If a rank only has shards, it would edit these, and the edit would be kept.
        if self.hides_from_some:
            return
        shown = self.model.parameters() if self.is_summoned else [parameter for _, parameter in self.owned]
        how = call.get("how", "")
        strategy = self.options.get("strategy", "FULL_SHARD")
        # Parameters that stay unsharded after a forward detect an edit only by its version (FRESH-03, FRESH-05).
        is_kept = strategy == "SHARD_GRAD_OP" or (strategy == "FULL_SHARD" and self.is_left_unsharded)
        self.edited(list(shown), "" if is_kept else how)

    def apply(self, call: Call) -> None:
        self.model.apply(halve)
        self.changed()

    def enter(self, call: Call) -> None:
        if call["what"] == "no_sync":
            self.entered(call, self.model.no_sync())
            return
        options = {name: call.get(name, False) for name in ("rank0_only", "offload_to_cpu", "with_grads")}
        summoned = FSDP.summon_full_params(self.model, writeback=call.get("writeback", True), **options)
        self.entered(call, summoned)

    def sees(self, call: Call) -> dict[str, Tensor]:
        """The parameters that a summoned model has on this rank."""
        if call["what"] != "summon" or (call.get("rank0_only") and self.rank != 0):
            return {}
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def save(self, call: Call) -> dict[str, Any] | None:
        if self.hides_from_some:
            # Only rank 0 can save.
            if self.rank == 0:
                self.model.state_dict()
            return None
        with FSDP.state_dict_type(self.model, *FORMS[call["form"]]):
            state = self.model.state_dict()
        if self.is_summoned and not self.keeps_edits:
            # The state contains edits that are lost at the end of the context.
            return None
        self.saved.append((call["form"], state))
        return state

    def load(self, call: Call) -> None:
        if not self.saved:
            return
        form, state = to_be_loaded(self.saved, call)
        with FSDP.state_dict_type(self.model, *FORMS[call.get("form") or form]):
            self.model.load_state_dict(damaged(state, call.get("damage")), strict=call.get("strict", True))
        self.changed()

    def save_optimizer(self, call: Call) -> None:
        if not self.optimizer.state:
            return
        with FSDP.state_dict_type(self.model, *FORMS[call["form"]]):
            self.saved_optimizer.append((call["form"], FSDP.optim_state_dict(self.model, self.optimizer)))

    def load_optimizer(self, call: Call) -> None:
        if not self.saved_optimizer:
            return
        form, state = to_be_loaded(self.saved_optimizer, call)
        with FSDP.state_dict_type(self.model, *FORMS[form]):
            loadable = FSDP.optim_state_dict_to_load(self.model, self.optimizer, state)
        self.optimizer.load_state_dict(loadable)

    def wrong(self, call: Call) -> None:
        WRONG_WRAPPED[call["name"]](self)
