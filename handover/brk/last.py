from spec_tests.mutants.catalogue.unseen import MUTANTS
from spec_tests.mutants.mutant import Mutant
B={m.name:m for m in MUTANTS}
M=[(B["placeholder-is-exported"],"spec_tests/engine/test_absent_exports.py"),
(B["order-of-an-abandoned-iteration-stays"],"spec_tests/engine/test_after_failures.py"),
(B["one-order-of-a-packed-sequence"],"spec_tests/engine/test_nested_inputs.py"),
(Mutant("cleared-unreduced-keeps-reduced","FlatGradients.take_unreduced","before.zero_()","pass","x","X-01"),"spec_tests/fsdp1/test_rare_settings.py -k zeroing"),
(B["meta-buffers-pass"],"spec_tests/fsdp1/test_rare_settings.py -k meta_device"),
(B["storage-up-to-the-end-of-the-bucket"],"spec_tests/engine/test_memory_held.py -k saved_shard"),
(B["only-some-names-of-a-tie"],"spec_tests/tools/test_explain_ties.py"),
]
