import os
from spec_tests.mutants.mutant import Mutant
def X(name, place, old, new, tests, prefix="spec_tests/"):
    return (Mutant(name, place, old, new, "x", "X-01"), " ".join(prefix+t for t in tests.split()))
M = [
X("schedule-repeats","Schedule.next_backward","while position and self._left[position - 1] is unit:","while False:","engine/test_schedule.py engine/test_repeated.py"),
X("abandoned-order-kept","Schedule.abandon_iteration","            self._entered.clear()\n","","engine/test_schedule.py"),
X("storage-to-the-end","with_own_storage","own = storage[start : start + view.numel() * view.itemsize]","own = storage[start:]","engine/test_shards.py engine/test_bucket.py checkpoint/test_loading.py"),
X("limiter-not-cleared","RateLimiter.clear","self._events.clear()","pass","engine/test_lifetime.py fsdp1/test_limiter.py engine/test_hooks.py"),
X("limiter-queues-when-off","RateLimiter.released","if self.enabled:","if True:","engine/test_lifetime.py fsdp1/test_limiter.py"),
X("closure-steps-uncounted","OptimizerWatch._before_step.checked_closure","            self._count_step(optimizer)\n","","engine/test_stale_weights.py"),
X("groups-added-later-unchecked","OptimizerWatch._layouts_of","if known is None or known[0] != sizes:","if known is None:","engine/test_misuse.py engine/test_stale_weights.py"),
X("cleared-unreduced-keeps-reduced","FlatGradients.take_unreduced","before.zero_()","pass","fsdp1/test_nosync.py"),
X("reduced-in-stored-dtype","FlatGradients.reduced","dtype = next((gradient.dtype for gradient in gradients if gradient is not None), self._registered.shard.dtype)","dtype = self._registered.shard.dtype","fsdp1/test_summon.py"),
X("write-back-no-version","RegisteredOrigParams.write_back","            torch.autograd.graph.increment_version(original)\n","","engine/test_originals.py fsdp1/test_orig.py"),
X("packed-inverse","map_tensors","return type(value)(data, value.batch_sizes, order, inverse)","return type(value)(data, value.batch_sizes, order, order)","engine/test_precision.py"),
X("fields-without-init","map_tensors","for f in dataclasses.fields(value) if f.init}","for f in dataclasses.fields(value)}","engine/test_precision.py"),
X("ddp-ignored-refused","check_not_in_ddp"," and name not in around.parameters_to_ignore","","engine/test_misuse.py engine/test_neighbours.py"),
X("dlpack-of-placeholder","PlaceholderParameter","tolist = numpy = share_memory_ = __dlpack__ = __reduce_ex__ = _refuse","tolist = numpy = __reduce_ex__ = _refuse","engine/test_absent.py"),
X("extension-keeps-padding","ExtendedBucket.copy_out","tensor = tensor[tuple(map(slice, self._shape))]","pass","fsdp2/test_extension.py"),
X("unused-frozen-reduced","PerParameterLayout.take_gradient"," and with_unreduced and param.parameter.requires_grad:"," and with_unreduced:","fsdp2/test_switches.py fsdp2/test_new.py"),
X("unfrozen-dtype-not-chosen","PerParameterLayout.accept_replacements","            self._choose_dtype()\n","            pass\n","fsdp2/test_mixed_dtypes.py"),
X("small-group-kept","Bucket.unshard_from_full_mesh","self._own, self._own.group, self._own.sends_each","self._own, self.group, self._own.sends_each","fsdp2/test_groups.py engine/test_bucket.py"),
X("pending-forgotten","IterationState.end_backward","unit.awaits_backward = unit.num_pending > 0","unit.awaits_backward = False","fsdp2/test_sync.py"),
X("inner-summoned-unchecked","RootState.begin_forward","(caller, *caller.inner)","(caller,)","fsdp1/test_summon.py"),
X("steps-start-anew","RootState._connect_units","steps = max((unit.layout.steps for unit in self.units), key=lambda steps: steps.count, default=Steps())","steps = Steps()","engine/test_stale_weights.py fsdp2/test_after_evaluation.py engine/test_root.py"),
X("uneven-steps-warned-each-time","RankChecks._warn_of_uneven_steps","            self._has_warned = True\n","","engine/test_comparison.py"),
X("undone-entry-stays","CollectiveLog.undo","        self.entries.pop()\n","","checkpoint/test_agreement.py"),
X("wrapper-names-count","_is_local","component.isdigit() or component in _OF_WRAPPERS","component.isdigit()","engine/test_order_check.py engine/test_comparison.py engine/test_ledger.py"),
]
