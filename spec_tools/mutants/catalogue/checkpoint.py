"""Mutants of state dicts and optimizer states."""

from __future__ import annotations

from spec_tests.harness.edit import never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- checks/agreement.py ---
    Mutant(
        "rank0-states-not-to-replicas",
        "OSD-LOAD-05 OSD-SCAT-01",
        "States from rank 0 reach only the first replica of each shard.",
        never("shard_of_first_rank", "$mesh.replicate is not None"),
    ),
    Mutant(
        "barrier-goes-on-counting",
        "SD-FULL-03",
        "A refused save leaves its count behind, so the next save does not wait for all ranks.",
        remove("_wait_for_all", "$store.add($arrived, -1)"),
    ),
    Mutant(
        "tried-alone-and-written-down",
        "ORDER-11",
        "A refused state dict of one rank stays in the log, so the next step is refused, too.",
        remove("BarrierCheck.undo", "self._sequence.undo(self._before)"),
    ),
    # --- checkpoint/codec.py ---
    Mutant(
        "saved-values-are-views",
        "SD-FULL-07",
        "Values of a state dict change when training continues.",
        replace("UnitCodec.in_form", "return $full.to($device, copy=True)", "return $full.to($device)"),
    ),
    Mutant(
        "loaded-into-the-wrong-place",
        "SD-FULL-08",
        "Loading a full dict gives every rank the first part of each parameter.",
        replace(
            "UnitCodec.copy_into",
            "$shard.copy_($elements[$held])",
            "$shard.copy_($elements[: $held.stop - $held.start])",
        ),
    ),
    Mutant(
        "rows-of-the-rank-before",
        "SD-SHARD-01 SD-SHARD-02",
        "Ranks save the rows of the previous rank.",
        replace("UnitCodec.in_form", "self.group.rank", "max(self.group.rank - 1, 0)"),
    ),
    # --- checkpoint/loading.py ---
    Mutant(
        "saved-while-gathered",
        "FS2-SD-01",
        "The state dict of an unsharded module contains full parameters.",
        remove("_show_sharded", "$unit.reshard()"),
    ),
    # --- checkpoint/optim_state.py ---
    Mutant(
        "first-moments-for-second-ones",
        "OSD-04",
        "The saved state contains Adam's first moment in place of the second.",
        replace("_in_form", "$states[$owner][$key]", "$states[$owner]['exp_avg' if $key == 'exp_avg_sq' else $key]"),
    ),
    Mutant(
        "states-for-every-rank",
        "OSD-05",
        "rank0_only=True gives the full optimizer state to every rank.",
        replace("save", "$names.units[0].mesh.is_first if $names.units and $group is None else $rank == 0", "True"),
    ),
    Mutant(
        "states-outside-of-units-are-left-out",
        "OSD-08",
        "States of parameters outside all units are not saved.",
        remove("save", "$found[$name] = {$key: copied(...) for $key, $value in $values}"),
    ),
    # --- checkpoint/optim_state_load.py ---
    Mutant(
        "states-of-one-rank-only",
        "OSD-LOAD-01 OSD-LOAD-03",
        "A state that one rank's dict lacks is not noticed.",
        replace(
            "refuse_misfit",
            "[detail('states-on-others', name=$name) for $name in $units if $state.get($name)]",
            "[]",
        ),
    ),
    Mutant(
        "groups-by-place-lost",
        "OSD-LOAD-01 OSD-LOAD-03",
        "A loaded group without names keeps its current settings instead of the saved ones.",
        replace("_numbered_groups", "$given[$index] if $index < len($given) else $own", "$own"),
    ),
    Mutant(
        "empty-slices-get-states",
        "OSD-LOAD-01 OSD-LOAD-03",
        "Parameters of which this rank stores nothing get states.",
        replace("_states_of", "$unit.holds($number)", "True"),
    ),
    Mutant(
        "frozen-parameters-need-states",
        "OSD-08",
        "A run with frozen parameters cannot load the optimizer state that it has saved.",
        replace(
            "_stored_once",
            "$lacks and $owner.requires_grad and $numel",
            "$lacks and $numel",
        ),
    ),
    # --- checkpoint/state_dict.py ---
    Mutant(
        "buffers-are-saved-as-cast",
        "MP-10",
        "Full and sharded dicts hold buffers in buffer_dtype.",
        replace("_write_buffers", "$value.dtype if $form.is_local else $dtype", "$value.dtype"),
    ),
    Mutant(
        "everybody-gets-the-full-dict",
        "SD-FULL-06",
        "With rank0_only=True each rank keeps the full values until the state dict is complete.",
        replace("_write_unit", "$codec.mesh.is_first or not $form.first_only", "True"),
    ),
    Mutant(
        "values-are-shared-before-backward",
        "SAVE-01",
        "A state dict shares buffers with the model although a backward or an edit of full parameters can follow.",
        never(
            "_unchanged_until_forward",
            "any(($unit.phase is not Phase.IDLE or $unit.uses.awaits_backward for $unit in $units))",
        ),
    ),
    # --- checkpoint/state_dict_load.py ---
    Mutant(
        "missing-keys-pass",
        "SD-FULL-09 SD-FULL-13",
        "Missing keys are reported only after values were changed.",
        remove("_problems", "yield detail('key-missing', ...)"),
    ),
    Mutant(
        "lone-load-hangs",
        "SD-FULL-03",
        "Loading does not check whether all ranks take part.",
        replace("before_walk", "[$inner._mesh for $inner in Wrapper.fsdp_modules($wrapper)]", "[]"),
    ),
    Mutant(
        "loading-changes-saved-values",
        "SAVE-01",
        "Loading changes the values of a state dict that was saved before.",
        remove("before_walk", "$wrapper._copy_shared_values()"),
    ),
    Mutant(
        "local-dict-of-another-layout",
        "SD-LOCAL-04",
        "A local dict of another number of ranks raises no specific error.",
        never("_local_problems", "($found.numel(), $found.dtype) != ($mine.numel(), $mine.dtype)"),
    ),
    # --- checkpoint/state_dict_options.py ---
    Mutant(
        "settings-stay-after-an-error",
        "SD-CFG-08",
        "An exception inside state_dict_type leaves the new settings in place.",
        replace("type_in_block", "try:\n    yield\nfinally:\n    ...", "yield\n..."),
    ),
    Mutant(
        "units-may-disagree",
        "SD-CFG-07 SD-CFG-10",
        "Units with different settings are accepted.",
        never("get_type", "$other != $first"),
    ),
    # --- checkpoint/tensors.py ---
    Mutant(
        "rows-are-not-gathered",
        "SD-SHARD-03",
        "Loading a sharded dict uses this rank's rows as the rows of all ranks.",
        replace(
            "gathered_rows",
            "collectives.all_gather($group, $gathered, $mine).wait()",
            "$gathered.copy_($mine.repeat($group.size))",
        ),
    ),
    Mutant(
        "rows-in-another-order-pass",
        "SD-SHARD-03",
        "A DTensor whose mesh has another rank order is loaded with exchanged rows.",
        replace("misplaced_rows", "_first_row($value) != $start", "False"),
    ),
    Mutant(
        "own-entries-alias-the-unit",
        "SD-FULL-07",
        "State dict entries of buffers and of custom code share memory with the model.",
        replace("copy_shared", "if $where not in $memory:\n    return $tensor", "if True:\n    return $tensor"),
    ),
    # --- compat/optim_state_legacy.py ---
    Mutant(
        "rekeyed-the-wrong-way",
        "OSD-REKEY-01",
        "Rekeying to names returns numbers.",
        replace("rekey", "$key_type is OptimStateKeyType.PARAM_NAME", "$key_type is not OptimStateKeyType.PARAM_NAME"),
    ),
    Mutant(
        "both-counts-pass",
        "OSD-SHARD-02",
        "optim and optim_input are accepted together.",
        never("target", "$optim is not None and $optim_input is not None"),
    ),
    # --- compat/state_dict_functions.py ---
    Mutant(
        "dict-of-each-rank",
        "PROG-63",
        "The optimizer's dict of rank 0 is not sent to the other ranks.",
        replace("_form", "$options.cpu_offload or $options.broadcast_from_rank0", "$options.cpu_offload"),
    ),
    Mutant(
        "whole-dict-for-each-optimizer",
        "PROG-64",
        "Each of several optimizers gets the states of all.",
        never("set_optimizer_state_dict", "$given and len($listed) > 1"),
    ),
    Mutant(
        "weights-of-rank-0-stay-there",
        "PROG-92",
        "The weights of rank 0 are not sent to the other ranks.",
        replace("_received", "value_of_first_rank(given.get($key), $groups)", "given.get($key)"),
    ),
    Mutant(
        "received-dict-is-kept",
        "SCALE-04",
        "Each rank stores the whole full state dict that it receives.",
        replace("_received", "$value if $key not in $units else $units[$key].rows($key, $value)", "$value"),
    ),
    # --- compat/wrapper_names.py ---
    Mutant(
        "wrapper-is-not-recognized",
        "PROG-98",
        "torch's functions for state dicts do not recognize a wrapper.",
        never("class_for_caller", "$is_torchs_function and $frame.f_locals.get('curr_obj_name') == WRAPPED"),
    ),
]
