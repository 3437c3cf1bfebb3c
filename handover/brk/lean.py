import importlib.util
def load(p):
    s=importlib.util.spec_from_file_location(p[-8:-3],p); m=importlib.util.module_from_spec(s); s.loader.exec_module(m); return {x[0].name:x[0] for x in m.M}
B={**load("/tmp/brk/four.py"),**load("/tmp/brk/four2.py")}
def L(n,a): return (B[n],a)
A=[
L("packed-inverse","spec_tests/engine/test_precision.py"),
L("fields-without-init","spec_tests/engine/test_precision.py"),
L("dlpack-of-placeholder","spec_tests/engine/test_absent.py -k 'operation or memory or text'"),
L("undone-entry-stays","spec_tests/checkpoint/test_agreement.py -k tried_alone"),
L("wrapper-names-count","spec_tests/engine/test_ledger.py spec_tests/engine/test_order_check.py -k 'name or wrapper or checkpoint'"),
L("zero-grad-before-reduction","spec_tests/fsdp2/test_sync.py -k 'backward or zero_grad'"),
L("reset-keeps-unreduced","spec_tests/fsdp2/test_new.py spec_tests/fsdp2/test_switches.py -k 'reset'"),
L("empty-list-disables-prefetch","spec_tests/fsdp2/test_prefetch.py -k empty_list"),
L("own-tensors-loaded","spec_tests/checkpoint/test_checkpoint_both_ways.py"),
L("clean-names-not-restored","spec_tests/fsdp1/test_summon.py -k 'inside_the_other or twice or exit'"),
L("two-names-one-wrapped","spec_tests/fsdp1/test_wrap.py"),
L("counted-for-outer","spec_tests/fsdp1/test_wrap.py"),
L("dtypes-of-states-ignored","spec_tests/checkpoint/test_optim_state_dtypes.py"),
L("rows-of-other-start","spec_tests/checkpoint/test_checkpoint_refusals.py"),
]
Z=[
L("unused-frozen-reduced","spec_tests/fsdp2/test_new.py spec_tests/fsdp2/test_switches.py -k 'unused'"),
L("pending-forgotten","spec_tests/fsdp2/test_sync.py -k 'backward'"),
L("cleared-unreduced-keeps-reduced","spec_tests/fsdp1/test_nosync.py -k 'zero or clear'"),
L("reduced-in-stored-dtype","spec_tests/fsdp1/test_summon.py -k 'gradient'"),
L("extension-keeps-padding","spec_tests/fsdp2/test_extension.py"),
L("unfrozen-dtype-not-chosen","spec_tests/fsdp2/test_mixed_dtypes.py"),
L("small-group-kept","spec_tests/fsdp2/test_groups.py -k 'reshard or smaller or ranks'"),
L("uneven-steps-warned-each-time","spec_tests/engine/test_comparison.py -k 'warn or step'"),
L("checksum-is-a-sum","spec_tests/fsdp2/test_new.py -k 'initial or differ or checksum'"),
L("inner-failure-ends-all","spec_tests/fsdp2/test_idioms.py -k exception"),
L("no-sync-restores-true","spec_tests/fsdp1/test_nosync.py -k 'nest or restore or inner or inside'"),
L("apart-output-not-cast","spec_tests/fsdp1/test_precision.py -k 'norm or apart or class'"),
L("inner-summoned-unchecked","spec_tests/fsdp1/test_summon.py -k 'inner_unit_is_summoned'"),
L("assigned-cut-unchecked","spec_tests/checkpoint/test_loading.py -k 'other or assign'"),
L("old-mesh-shards-kept","spec_tests/fsdp2/test_groups.py spec_tests/fsdp2/test_switches.py -k reshard"),
]
import os
M = A if os.environ["HALF"]=="a" else Z
