"""Mutants of the layouts: where parameters and gradients of a unit are in memory."""

from __future__ import annotations

from spec_tests.harness.edit import never, remove, replace
from spec_tools.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    # --- engine/bucket.py ---
    Mutant(
        "leaves-share-a-version",
        "FS2-13",
        "Autograd treats an all-gather as a change of tensors that forward saved.",
        replace("Bucket.__init__", "$space.data[:$shape.numel()]", "$space[:$shape.numel()]"),
    ),
    Mutant(
        "pieces-have-the-first-shape",
        "FS2-06",
        "Every rank uses the number of rows of the first rank.",
        replace(
            "Source.__init__",
            "shard_shape($param.shape, $param.dim, $num, $rank)",
            "shard_shape($param.shape, $param.dim, $num, 0)",
        ),
    ),
    Mutant(
        "never-wakes",
        "NEW-05",
        "The next forward all-gathers the values of the smaller mesh from before the optimizer step.",
        remove(
            "SmallerMesh.end",
            "for bucket in layout.buckets:\n    ...",
        ),
    ),
    Mutant(
        "the-smaller-mesh-has-equal-shards",
        "NEW-05",
        "After a forward, every rank keeps the first shard of the smaller mesh.",
        replace(
            "SmallerMesh.begin", "shard_of($leaf, $dim, group.size, group.rank)", "shard_of($leaf, $dim, group.size, 0)"
        ),
    ),
    Mutant(
        "the-cpu-waits-for-memory-of-gathers",
        "FS2-26 MIG-14",
        "After an all-gather the CPU waits until the buffer has been copied out.",
        replace("Bucket.copy_out", "$comm_stream.wait_compute", "torch.get_device_module(self.device).synchronize"),
        "simulated",
    ),
    Mutant(
        "late-values-bring-no-device",
        "FS2-META-02",
        "Values that are assigned later are copied into a bucket that stays on the meta device.",
        replace("assign_to_buckets", "$options.storage_device($local_shard)", "$options.device"),
    ),
    # --- cases/tensor_extensions.py ---
    Mutant(
        "patched-rows-are-not-filled-up",
        "FS2-EXT-06",
        "Uneven rows of a patched tensor are sent without padding.",
        replace("ExtendedBucket._fill_up", "return padded", "return tensor"),
    ),
    Mutant(
        "extensions-stay-gathered",
        "FS2-EXT-02",
        "The rebuilt tensor of an extension is never freed.",
        remove("ExtendedBucket.free", "lifetime.release($tensor)"),
    ),
    Mutant(
        "released-outputs-keep-memory",
        "FS2-EXT-07",
        "The gathered tensors that an extension releases keep their memory until the reshard.",
        replace("ExtendedBucket.copy_out", "lifetime.release($output)", "pass"),
    ),
    # --- engine/flat.py ---
    Mutant(
        "kept-flat-unit-is-never-stale",
        "SHARD-05",
        "A unit that stays unsharded computes with the values from before the optimizer step.",
        replace("FlatLayout.is_stale", "self._last_all_gather != (self.steps.count, self.registered.stamp())", "False"),
    ),
    Mutant(
        "borrowed-memory-is-freed",
        "SHARD-11",
        "A unit that is not sharded frees the only copy of its parameters.",
        replace(
            "FlatLayout.free",
            "None if self.is_borrowed else lifetime.release(self.unsharded.alias)",
            "lifetime.release(self.unsharded.alias)",
        ),
    ),
    Mutant(
        "sum-before-is-forgotten",
        "NOSYNC-02 NOSYNC-03",
        "The reducing backward drops the gradients accumulated in no_sync().",
        replace(
            "FlatLayout.take_gradient",
            "$unreduced.add_($gradient) if $is_same else $unreduced + $gradient",
            "$gradient",
        ),
    ),
    Mutant(
        "packed-in-the-dtype-of-compute",
        "MP-05",
        "Gradients are reduced in the dtype in which they were computed.",
        replace(
            "FlatLayout.pack",
            "$part.to($dtype, copy=$is_copied)",
            "$part",
        ),
    ),
    Mutant(
        "reduces-in-shared-memory",
        "GRAD-01",
        "A gradient that shares memory with another one is reduced in place.",
        replace("FlatLayout.pack", "$is_written and self._is_shared", "False"),
    ),
    Mutant(
        "old-cast-is-kept",
        "FRESH-05",
        "NO_SHARD keeps an outdated copy in another dtype.",
        replace("FlatLayout.is_stale", "self.is_copied or $changed", "$changed"),
    ),
    Mutant(
        "summoned-changes-without-a-wait",
        "PROG-26",
        "After summon_full_params, an all-gather reads the shard while the compute stream writes it.",
        remove("FlatLayout.overwrite_local", "self._is_written = True"),
        "simulated",
    ),
    # --- engine/flat_gradients.py ---
    Mutant(
        "second-gradient-replaces",
        "FWD-07",
        "A second backward replaces the flat parameter's gradient.",
        replace(
            "FlatGradients.add_reduced",
            "$parameter.grad.add_($part)",
            "assign_gradient($parameter, $part if $part is shard else $parameter.grad.add_($part))",
        ),
    ),
    Mutant(
        "zero-grad-of-what-is-in-sight",
        "FWD-08",
        "zero_grad(set_to_none=False) clears the unreduced gradient but not the reduced one.",
        replace("FlatGradients.take_unreduced", "if $edited and not $values.any():\n    $before.zero_()", "pass"),
    ),
    # --- engine/flat_params.py ---
    Mutant(
        "one-frozen-original-freezes-all",
        "ORIG-13",
        "A unit with one frozen parameter receives no gradient at all.",
        replace("RegisteredParams.requires_grad", "any", "all"),
    ),
    Mutant(
        "steps-on-flat-parameters-go-unnoticed",
        "SHARD-05",
        "A kept unit does not detect an optimizer step on its flat parameter.",
        replace("RegisteredParams.stamp", "list(map(_VERSION, self.parameters))", "[]"),
    ),
    Mutant(
        "slices-are-copies",
        "ORIG-04",
        "Original parameters are copies instead of views of the unit's storage.",
        replace("RegisteredOrigParams.use_sharded_params", "$original.data = $view", "$original.data = $view.clone()"),
    ),
    Mutant(
        "overwritten-originals-not-stale",
        "SD-FULL-08 SUMMON-07 SD-SHARD-03",
        "Writing values does not make the unsharded parameters stale.",
        remove("RegisteredParams.overwrite", "torch.autograd.graph.increment_version($parameter)"),
    ),
    # --- engine/flat_tensor.py ---
    Mutant(
        "rounded-down",
        "SHARD-02 SHARD-03",
        "The last elements of an unevenly divided flat parameter are stored on no rank.",
        replace("FlatSharding.__init__", "-(-self.numel // $num_shards)", "max(1, self.numel // $num_shards)"),
    ),
    Mutant(
        "slice-keeps-the-row-alive",
        "COST-02",
        "A local shard keeps the memory of the unsharded flat parameter alive.",
        replace(
            "FlatSharding.make_shard", "$flat[self.shard_range($index)].clone()", "$flat[self.shard_range($index)]"
        ),
    ),
    Mutant(
        "gather-looks-like-an-edit",
        "SHARD-04",
        "Autograd treats an all-gather as a change of tensors that forward saved.",
        replace("UnshardedTensor.__init__", "$tensor.data", "$tensor.detach()"),
    ),
    # --- engine/layout.py ---
    Mutant(
        "earlier-gradients-are-not-read",
        "STREAM-11",
        "A gradient is added to one that has not arrived on the CPU.",
        replace("reads_gradient", "_has_hooks(layout) or $has_gradient", "_has_hooks(layout)"),
    ),
    Mutant(
        "second-place-of-a-tie-is-lost",
        "ORIG-15",
        "A tied parameter has unsharded values only in its first module.",
        remove("owned_parameters", "$first.ties.append($info)"),
    ),
    Mutant(
        "hooks-from-before-sharding-are-dropped",
        "PROG-40",
        "A DTensor does not get the tensor hooks of the original parameter.",
        remove("share_hooks", "$other._backward_hooks = $original._backward_hooks"),
    ),
    # --- engine/per_param.py ---
    Mutant(
        "gradients-without-gaps",
        "FS2-OPT-04 FS2-13 FS2-06",
        "On ranks with fewer rows, gradients are shifted by the padding.",
        replace("PerParameterLayout.accept_gradient", "$part[:$numel]", "$part[-$numel:]"),
    ),
    Mutant(
        "never-stale",
        "FS2-19",
        "A unit that stays unsharded computes with the values from before the optimizer step.",
        replace("PerParameterLayout.is_stale", "self._gathered_at != self._stamp()", "False"),
    ),
    Mutant(
        "frozen-parameters-contribute-zeros",
        "NEW-14",
        "Unused frozen parameters get zero gradients, and weight decay changes them.",
        replace(
            "PerParameterLayout.take_gradient",
            "$is_missing and self.reduces_unused and $with_unreduced and $param.parameter.requires_grad",
            "$is_missing and self.reduces_unused and $with_unreduced",
        ),
    ),
    Mutant(
        "partial-sum-in-low-precision",
        "FS2-MP-03",
        "Without synchronization gradients are accumulated in the compute dtype.",
        replace("PerParameterLayout.keep_unreduced", "self.precision.reduces_in($part.dtype)", "$part.dtype"),
    ),
    Mutant(
        "other-dims-are-packed-by-rows",
        "FS2-08",
        "A gradient of another dimension is split along the first dimension.",
        replace(
            "PerParameterLayout.pack", "$part if $param.dim == 0 else torch.cat($part.chunk($num, $param.dim))", "$part"
        ),
    ),
    Mutant(
        "changes-of-a-forward-are-lost",
        "PROG-43 PROG-44",
        "Values that a forward writes into a leaf are freed.",
        remove("keep_changes", "_keep_parameters(layout)"),
    ),
    Mutant(
        "replaced-values-are-not-copied",
        "NEW-23",
        "The values of a parameter that replaces another one are not copied into the bucket.",
        never("accept_changes", "is_edited"),
    ),
    Mutant(
        "hooks-of-the-first-sum-alone-per-parameter",
        "PAR-08",
        "With fully_shard, a hook is not called when a gradient is added to an earlier gradient.",
        replace(
            "PerParameterLayout.accept_gradient",
            "users_hooks($hooks) if $hooks else ()",
            "users_hooks($hooks) if $hooks and before is None else ()",
        ),
    ),
    # --- engine/placeholder.py ---
    Mutant(
        "placeholder-is-exported",
        "ORIG-11",
        "A placeholder can be passed to another library, which reads memory that does not exist.",
        replace(
            "PlaceholderParameter",
            "tolist = numpy = share_memory_ = __dlpack__ = __reduce_ex__ = requires_grad_ = _refuse",
            "tolist = numpy = __reduce_ex__ = requires_grad_ = _refuse",
        ),
    ),
    # --- engine/sharded_param.py ---
    Mutant(
        "every-leaf-is-trained",
        "FS2-22",
        "The leaf of a frozen parameter requires a gradient.",
        replace("ShardedParam.use_leaf", "self.leaf.requires_grad_(self.is_trained)", "self.leaf.requires_grad_(True)"),
    ),
    Mutant(
        "late-hooks-are-not-called",
        "PROG-40 PROG-41",
        "The leaf does not get hooks that are registered on the DTensor.",
        remove("ShardedParam.share_tensor_hooks", "self.leaf._backward_hooks = self.parameter._backward_hooks"),
    ),
    Mutant(
        "unreduced-gradients-keep-the-old-dtype",
        "GRAD-04",
        "Unreduced gradients keep the dtype of before a conversion of the model, and lose the later ones.",
        never("ShardedParam.use_leaf", "self.unreduced is not None"),
    ),
    # --- checks/ownership.py ---
    Mutant(
        "ties-across-units-pass",
        "ORIG-16",
        "A parameter shared by two units is accepted and becomes two parameters.",
        never("check_free", "$parameter in taken"),
    ),
]
