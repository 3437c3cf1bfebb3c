"""The sharded model with the second API, ``fully_shard``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from minifsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from spec_tests.fuzz import net as nets
from spec_tests.fuzz.case import Call, to_be_loaded
from spec_tests.fuzz.sides import Pieces, Side, grown, halve
from spec_tests.fuzz.twin import Twin, damaged
from spec_tests.fuzz.wrong import WRONG_COMPOSED

__all__ = ["FORMS", "Composed"]

FORMS = {
    "plain": None,
    "sharded": dcp.StateDictOptions(),
    "full": dcp.StateDictOptions(full_state_dict=True),
    "full on rank 0": dcp.StateDictOptions(full_state_dict=True, cpu_offload=True),
}


class Composed(Side):
    """See `Side`."""

    def shard(self, net: nets.Net) -> None:
        offload = CPUOffloadPolicy(pin_memory=False) if self.options.get("offload") else OffloadPolicy()
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.float32) if self.options.get("mixed") else MixedPrecisionPolicy()
        )
        shard = functools.partial(
            fully_shard,
            mesh=self.mesh(),
            reshard_after_forward=self.options.get("frees"),
            mp_policy=policy,
            offload_policy=offload,
        )
        for block in net.blocks:
            if block.inner is not None:
                shard(block.inner)
            shard(block)
        self.model = shard(net)
        register_fsdp_forward_method(self.model, "generate")
        self.handles: list[Any] = []
        self.keeps_evaluated = self.options.get("frees") is False
        self.owned = dict(self.model.named_parameters())

    @property
    def net(self) -> Any:
        return self.model

    # --- shards ---

    def parameters_against(self, twin: Twin) -> Pieces:
        return {
            f"parameter {name!r}": (parameter.to_local().detach(), self._cut(expected.detach()))
            for (name, parameter), expected in zip(self.owned.items(), twin.net.parameters(), strict=True)
        }

    def gradients_against(self, twin: Twin) -> Pieces:
        found: Pieces = {}
        for (name, parameter), plain in zip(self.owned.items(), twin.net.parameters(), strict=True):
            local = None if parameter.grad is None else parameter.grad.to_local()
            expected = self._cut(grown(plain.grad, plain.detach()))
            found[f"gradient of {name!r}"] = (grown(local, expected), expected)
        return found

    def _cut(self, whole: Tensor) -> Tensor:
        number, of_all = self.local_shard
        local_shards = whole.chunk(of_all)
        return local_shards[number] if number < len(local_shards) else whole[:0]

    def saved_against(self, form: str, state: dict[str, Any], expected: dict[str, Tensor]) -> Pieces:
        if form == "full on rank 0" and self.rank != 0:
            return {}
        found: Pieces = {}
        for key, whole in expected.items():
            value = state.get(key)
            is_cut = isinstance(value, DTensor)
            found[f"{key!r} of the state dict"] = (
                value.to_local() if isinstance(value, DTensor) else value,
                self._cut(whole) if is_cut else whole,
            )
        return found

    def joined(self, name: str, shards: list[Tensor], twin: Twin) -> dict[str, Tensor]:
        return {name.split("'")[1]: torch.cat(shards)}

    # --- calls ---

    def generate(self, call: Call) -> Tensor:
        return self.model.generate(nets.batch(call["batch"], self.rank).to(nets.DTYPES[self.dtype]))

    def _output(self, call: Call, kept: nets.Kept | None = None) -> Tensor:
        try:
            return super()._output(call, kept)
        except Exception:
            # The units detect the exception only when the same module is called again. A submodule that is called alone
            # would use parameters that were all-gathered before.
            self.reshard_all()
            raise

    def clip(self, call: Call) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.owned.values(), call["most"], float(call["norm"]))
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def edit(self, call: Call) -> None:
        # If units stay unsharded after an evaluation, the next one only detects edits that change a version (FRESH-03).
        if self.is_left_unsharded or (call.get("how") and self.keeps_evaluated):
            self.reshard_all()
        self.edited(list(self.model.parameters() if call.get("of_model") else self.owned.values()), call.get("how", ""))
        self.changed()

    def convert(self, call: Call) -> None:
        self.reshard_all()
        self.dtype = call["dtype"]
        self.model.zero_grad()
        if call["how"] == "method":
            getattr(self.model, self.dtype)()
        else:
            dtype = nets.DTYPES[self.dtype]
            state = self.model.state_dict()
            state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
            self.model.load_state_dict(state, assign=True)
        self.owned = dict(self.model.named_parameters())
        self.new_optimizer(call)
        self.changed()

    def apply(self, call: Call) -> None:
        self.reshard_all()
        self.model.apply(halve)
        self.changed()

    def reshard_all(self) -> None:
        super().reshard_all()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def save(self, call: Call) -> dict[str, Any]:
        options = FORMS[call["form"]]
        if options is None:
            # Cloned, because these are the local shards themselves, which training changes.
            state = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
        else:
            state = dcp.get_model_state_dict(self.model, options=options)
            state = {key: value.detach().clone() for key, value in state.items()}
        self.saved.append((call["form"], state))
        return state

    def load(self, call: Call) -> None:
        if not self.saved:
            return
        form, state = to_be_loaded(self.saved, call)
        form = call.get("form") or form
        state = damaged(state, call.get("damage"))
        options, strict = FORMS[form], call.get("strict", True)
        if options is None:
            self.model.load_state_dict(state, strict=strict, assign=call.get("assign", False))
        else:
            chosen = dcp.StateDictOptions(
                full_state_dict=options.full_state_dict, broadcast_from_rank0=form == "full on rank 0", strict=strict
            )
            dcp.set_model_state_dict(self.model, state, options=chosen)
        self.changed()

    def save_optimizer(self, call: Call) -> None:
        # Without optimizer states torch's function creates them with a step, which would count.
        if not self.optimizer.state:
            return
        form = call["form"]
        if form == "full on rank 0" and len(self.optimizer.state) < len(self.owned):
            # If a parameter has no state, torch's function raises on rank 0 alone, and the other ranks wait.
            return
        state = dcp.get_optimizer_state_dict(self.model, self.optimizer, options=FORMS[form])
        # In sharded form these are the optimizer's own tensors, which training changes.
        copied = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)
        self.saved_optimizer.append((form, copied))

    def load_optimizer(self, call: Call) -> None:
        if not self.saved_optimizer:
            return
        form, state = to_be_loaded(self.saved_optimizer, call)
        full = form.startswith("full")
        options = dcp.StateDictOptions(full_state_dict=full, broadcast_from_rank0=form == "full on rank 0")
        dcp.set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    def sync(self, call: Call) -> None:
        self.at(call.get("part")).set_requires_gradient_sync(call["value"], recurse=call.get("recurse", True))

    def keep(self, call: Call) -> None:
        self.keeps_evaluated |= call["value"]
        self.at(call.get("part")).set_reshard_after_forward(not call["value"], recurse=call.get("recurse", True))

    def keep_after_backward(self, call: Call) -> None:
        self.keeps_after_backward |= call["value"]
        self.at(call.get("part")).set_reshard_after_backward(not call["value"], recurse=call.get("recurse", True))

    def unshard(self, call: Call) -> None:
        self.is_left_unsharded = True
        handle = self.at(call.get("part")).unshard(async_op=call["later"])
        if handle is not None:
            self.handles.append(handle)

    def wait(self, call: Call) -> None:
        while self.handles:
            self.handles.pop(0).wait()

    def reshard(self, call: Call) -> None:
        self.at(call.get("part")).reshard()

    def prefetch(self, call: Call) -> None:
        module = self.at(call.get("part"))
        listed = [self.at(part) for part in call["parts"]]
        getattr(module, f"set_modules_to_{call['when']}_prefetch")(listed)

    def wrong(self, call: Call) -> None:
        WRONG_COMPOSED[call["name"]](self)
