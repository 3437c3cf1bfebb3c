"""Mutants of the wrapper API."""

from __future__ import annotations

from spec_tests.harness.edit import never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- compat/legacy.py ---
    Mutant(
        "old-spelling-without-a-word",
        "LEGACY-01",
        "The old spelling of a keyword causes no warning.",
        remove("policy_by_either_name", "warn_renamed('fsdp_auto_wrap_policy=', 'auto_wrap_policy=')"),
    ),
    # --- compat/wrapper_names.py ---
    Mutant(
        "gradients-are-always-synchronized",
        "START-08",
        "_sync_gradients is true in no_sync().",
        replace("TorchNames._sync_gradients", "all(($unit.policy.reduces for $unit in $units))", "True"),
    ),
    Mutant(
        "summoned-looks-idle",
        "NAMES-12",
        "training_state is IDLE inside summon_full_params for a wrapper without parameters.",
        replace("TorchNames.training_state", "self._shows_clean_names", "False"),
    ),
    # --- fsdp1/build.py ---
    Mutant(
        "no-shard-is-not-deprecated",
        "SHARD-18",
        "NO_SHARD of several ranks causes no warning.",
        never("strategy_on", "strategy is ShardingStrategy.NO_SHARD and $mesh.replicate is not None"),
    ),
    Mutant(
        "pair-the-wrong-way-round",
        "HYB-02",
        "The pair of process groups is read as (replicate, shard).",
        replace("choose_mesh", "*map(Group.of, $given)", "*map(Group.of, $given[::-1])"),
    ),
    Mutant(
        "given-group-is-forgotten",
        "CTOR-06",
        "A unit shards over the default group and ignores process_group.",
        replace("choose_mesh", "default_group() if $given is None else $given", "default_group()"),
    ),
    Mutant(
        "children-of-ignored-modules-are-sharded",
        "IGN-01",
        "Only the ignored module's own parameters are ignored; those of its children are sharded.",
        replace("find_ignored", "{$inner for $_, $inner in modules_of_unit($roots, $is_wrapper)}", "set($roots)"),
    ),
    # --- fsdp1/full_params.py ---
    Mutant(
        "summoned-changes-are-lost",
        "SUMMON-07",
        "writeback=True writes nothing back.",
        remove("_full_params", "$layout.overwrite_local($flat[$layout.shard_range])"),
    ),
    Mutant(
        "backward-while-summoned-is-accepted",
        "PROG-02",
        "A backward inside summon_full_params leaves unreduced gradients.",
        remove("_use_full_params", "$node.register_prehook(partial(_refuse_backward, $unit.name))"),
    ),
    # --- fsdp1/grad_scaler.py ---
    Mutant(
        "each-rank-decides-about-inf",
        "MP-29",
        "One rank skips an optimizer step that the other ranks take.",
        remove("ShardedGradScaler._unscale_grads_", "call(dist.all_reduce, $group, $any_inf, dist.ReduceOp.MAX)"),
    ),
    # --- fsdp1/initial.py ---
    Mutant(
        "replicas-are-not-synchronized",
        "SYNC-02",
        "Under a hybrid strategy only the first shard group receives rank 0's initial values.",
        replace("synchronize", "($mesh.replicate, $mesh.shard)", "($mesh.shard,)"),
    ),
    Mutant(
        "containers-are-not-initialized",
        "META-06",
        "param_init_fn is called only for modules that own tensors.",
        replace("materialize", "$is_container and $given is not None", "False"),
    ),
    Mutant(
        "to-empty-recurses",
        "META-04",
        "Allocating memory for a module overwrites the initialized values of its children.",
        replace("_initialize", "False", "True"),
    ),
    # --- fsdp1/training.py ---
    Mutant(
        "no-sync-leaves-its-setting",
        "NOSYNC-06",
        "The end of no_sync() does not restore the earlier setting.",
        remove("TrainingMethods.no_sync", "for ($unit, $_), $policy in zip($units, $before, strict=True):\n    ..."),
    ),
    Mutant(
        "hook-of-the-root-alone",
        "HOOK-01 HOOK-04",
        "A communication hook is called only for the root's gradients.",
        replace(
            "TrainingMethods.register_comm_hook",
            "$inner._unit is not None",
            "$inner is self",
        ),
    ),
    Mutant(
        "ignored-gradients-do-not-count",
        "CLIP-08",
        "The norm omits gradients of ignored parameters.",
        never("TrainingMethods.clip_grad_norm_", "$parameter not in $owned"),
    ),
    Mutant(
        "norm-of-this-rank",
        "CLIP-02",
        "The norm covers only this rank's gradients.",
        remove("_norm", "call(dist.all_reduce, $group, $power, $operation, about=$about)"),
    ),
    Mutant(
        "replicated-gradients-count-for-each-rank",
        "CLIP-08 HYB-09",
        "The norm counts replicated gradients once for each replica.",
        replace(
            "gradient_parts",
            "() if $mesh.shard is None else ($mesh.shard,)",
            "tuple(group for group in ($mesh.shard, $mesh.replicate) if group is not None)",
        ),
    ),
    # --- fsdp1/wrap.py ---
    Mutant(
        "size-policy-wraps-above-only",
        "WRAP-06",
        "A subtree with exactly the threshold's number of elements is not wrapped.",
        replace(
            "size_based_auto_wrap_policy", "$nonwrapped_numel >= $min_num_params", "$nonwrapped_numel > $min_num_params"
        ),
    ),
    Mutant(
        "custom-policy-overrides-nothing",
        "NEW-02",
        "A dict from a CustomPolicy is treated as True.",
        replace(
            "CustomPolicy._run_policy",
            "{**$root_kwargs, **($answer if isinstance($answer, dict) else {})}",
            "{**$root_kwargs}",
        ),
    ),
    Mutant(
        "old-third-parameter-is-unknown",
        "LEGACY-03",
        "A policy with the old signature cannot be called.",
        replace(
            "_name_of_numel",
            "'unwrapped_params' if 'unwrapped_params' in $names else 'nonwrapped_numel'",
            "'nonwrapped_numel'",
        ),
    ),
    Mutant(
        "wrapped-elements-count-again",
        "WRAP-03",
        "nonwrapped_numel counts parameters that an inner unit already manages.",
        remove("choose", "$taken.update($module.parameters())"),
    ),
    Mutant(
        "policy-may-split-ties",
        "ORIG-16",
        "A policy that splits a tied parameter across two units is accepted.",
        never("refuse_ties", "$owner is not $unit and $parameter not in $ignored"),
    ),
    Mutant(
        "batch-norms-stay-in-their-unit",
        "MP-19",
        "Batch norms compute in low precision.",
        replace("auto_wrap", "getattr($kwargs.get('mixed_precision'), '_module_classes_to_ignore', ())", "()"),
    ),
    # --- fsdp1/wrapper.py ---
    Mutant(
        "clean-names-everywhere",
        "NAMES-04",
        "Parameter names lack the wrapper's prefix outside summon_full_params, too.",
        replace(
            "Wrapper._shown",
            "$name.replace(PREFIX, '') if self._shows_clean_names else $name",
            "$name.replace(PREFIX, '')",
        ),
    ),
    Mutant(
        "evaluation-keeps-what-it-gathered",
        "SHARD-14",
        "FULL_SHARD keeps all parameters unsharded between forward and backward.",
        replace("Wrapper._make_unit", "self._reshards = $reshards", "self._reshards = False"),
    ),
    Mutant(
        "root-is-resharded-after-forward",
        "FRESH-09",
        "The root of a FULL_SHARD model is resharded after forward like any other unit.",
        replace("Wrapper._create_root_state", "$wrapper._reshards and not $is_kept", "$wrapper._reshards"),
    ),
    Mutant(
        "values-written-while-summoned-are-not-used",
        "SUMMON-21",
        "Units that are kept unsharded compute with the values from before `summon_full_params`.",
        remove("_one", "unit.reshard()"),
    ),
    Mutant(
        "reduce-dtype-is-ignored",
        "MP-05 MP-07 MP-08",
        "Gradients are reduced in the compute dtype although reduce_dtype is set.",
        replace("Wrapper._make_unit", "$chosen.reduce_dtype", "None"),
    ),
    Mutant(
        "offloaded-shards-stay",
        "OFF-02 OFF-03",
        "CPUOffload(True) offloads nothing.",
        replace("Wrapper._make_unit", "self.cpu_offload.offload_params", "False"),
    ),
    Mutant(
        "former-roots-stay-alive",
        "CTOR-11",
        "A unit that ran alone before keeps its own tree under a new root.",
        remove("Wrapper._create_root_state", "$wrapper._root_state.dissolve()"),
    ),
    Mutant(
        "hybrid-zero2-frees",
        "HYB-06",
        "_HYBRID_SHARD_ZERO2 reshards after forward and issues an all-gather for backward.",
        replace(
            "Wrapper._make_unit",
            "self.sharding_strategy in build.RESHARDS_AFTER_FORWARD",
            "self.sharding_strategy.name not in ('SHARD_GRAD_OP', 'NO_SHARD')",
        ),
    ),
    # --- fully_sharded_data_parallel.py ---
    Mutant(
        "inner-units-lose-the-strategy",
        "WRAP-14",
        "Units made by a policy all have the default strategy.",
        replace(
            "FullyShardedDataParallel.__init__",
            "auto_wrap($module, $policy, $cls, $options, *$ignored)",
            "auto_wrap($module, $policy, $cls, {**$options, 'sharding_strategy': None}, *$ignored)",
        ),
    ),
    Mutant(
        "the-final-callback-does-nothing",
        "START-09",
        "Torch's final callback leaves units unsharded after a backward that has failed.",
        replace("TorchNames._exec_order_data", "self._current_root_state().recover_after_error", "dict"),
    ),
    Mutant(
        "passed-dict-is-ignored",
        "OSD-02",
        "optim_state_dict ignores the dict that is passed to it.",
        replace(
            "FullyShardedDataParallel.optim_state_dict",
            "$optim.state_dict() if $optim_state_dict is None else $optim_state_dict",
            "$optim.state_dict()",
        ),
    ),
    Mutant(
        "not-loaded-directly",
        "OSD-LOAD-04",
        "load_directly=True loads nothing.",
        never("FullyShardedDataParallel.optim_state_dict_to_load", "$load_directly"),
    ),
    Mutant(
        "old-full-dict-everywhere",
        "OSD-FULL-01",
        "full_optim_state_dict returns the states on every rank.",
        replace("FullyShardedDataParallel.full_optim_state_dict", "Form(first_only=$rank0_only)", "Form()"),
    ),
    Mutant(
        "scattered-states-from-every-rank",
        "OSD-SCAT-01",
        "scatter_full_optim_state_dict reads the argument of every rank.",
        replace("FullyShardedDataParallel.scatter_full_optim_state_dict", "Form(first_only=True)", "Form()"),
    ),
    Mutant(
        "apply-sees-slices",
        "APPLY-01 APPLY-04",
        "apply() calls its function on modules without full parameters.",
        replace("TrainingMethods.apply", "with TrainingMethods.summon_full_params(...):\n    ...", "..."),
    ),
    Mutant(
        "flattened-as-if-full",
        "OSD-FLAT-01",
        "flatten_sharded_optim_state_dict expects full tensors.",
        replace(
            "FullyShardedDataParallel.flatten_sharded_optim_state_dict",
            "Form(StateDictType.SHARDED_STATE_DICT)",
            "Form()",
        ),
    ),
    Mutant(
        "old-sharded-dict-is-full",
        "OSD-SHD-01",
        "sharded_optim_state_dict returns full tensors.",
        replace(
            "FullyShardedDataParallel.sharded_optim_state_dict",
            "Form(StateDictType.SHARDED_STATE_DICT, use_dtensor=$use_dtensor)",
            "Form()",
        ),
    ),
]
