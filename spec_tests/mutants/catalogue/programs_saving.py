"""Mutants of PROG-63 to PROG-68, PROG-92, PROG-93: saving and the meta device in other people's programs."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "dict-of-each-rank",
        "_form",
        "first_only=options.cpu_offload or options.broadcast_from_rank0",
        "first_only=options.cpu_offload",
        "The optimizer's dict of rank 0 is not sent to the other ranks.",
        "PROG-63",
    ),
    Mutant(
        "whole-dict-for-each-optimizer",
        "set_optimizer_state_dict",
        "if given and len(listed) > 1:",
        "if False:",
        "Each of several optimizers gets the states of all.",
        "PROG-64",
    ),
    Mutant(
        "states-of-one-rank-only",
        "load",
        'mine = [detail("states-on-others", name=name) for name in in_units if state.get(name)]',
        "mine = []",
        "A state that one rank's dict lacks is not noticed.",
        "OSD-LOAD-01 OSD-LOAD-03",
    ),
    Mutant(
        "shared-on-meta-twice",
        "materialize",
        'if hasattr(parameter, "_materialized"):',
        "if False:",
        "A shared parameter on the meta device gets memory once for each module.",
        "PROG-66",
    ),
    Mutant(
        "ignored-on-meta-forgotten",
        "Wrapper._initialize",
        "self._ignored_parameters = initial.current(self._ignored_parameters)",
        "pass",
        "An ignored parameter that got memory is sharded.",
        "PROG-67",
    ),
    Mutant(
        "parts-are-saved",
        "PartHook.__call__",
        "if unit is not None and not unit.layout.is_summoned and PREFIX not in prefix:",
        "if False:",
        "A part of a unit saves its shards.",
        "PROG-68",
    ),
    Mutant(
        "weights-of-rank-0-stay-there",
        "set_model_state_dict",
        "if options.full_state_dict and (wrappers := Wrapper.fsdp_modules(model)):",
        "if False:",
        "The weights of rank 0 are not sent to the other ranks.",
        "PROG-92",
    ),
    Mutant(
        "two-models-saved-as-one",
        "CollectiveSequence.number_of",
        "number = self._root_numbers.get(root_id.number)",
        "number = None",
        "Ranks that save two models in another order are not noticed.",
        "PROG-93",
    ),
    Mutant(
        "own-dicts-in-one-order-only",
        "load",
        "if first_only or target.form.is_sharded else None",
        "if True else None",
        "Ranks that load their own full dicts in another order are refused.",
        "PROG-93",
    ),
    Mutant(
        "frozen-parameters-are-in-the-state",
        "get_model_state_dict",
        " or owners[name].requires_grad}",
        " or True}",
        "get_model_state_dict() ignores ignore_frozen_params.",
        "PROG-97",
    ),
    Mutant(
        "wrappers-are-in-the-names",
        "FullyShardedDataParallel._fqn_modifiers",
        '**{"": FSDP_WRAPPED_MODULE}',
        "**{}",
        "torch's set_model_state_dict() adds names of wrappers to the caller's dict.",
        "PROG-98",
    ),
    Mutant(
        "torchs-function-ends-in-a-key-error",
        "OmittedNames.get",
        "        if key == WRAPPED:\n",
        "        if False:\n",
        "torch's function for frozen parameters ends in a KeyError.",
        "PROG-97",
    ),
]
