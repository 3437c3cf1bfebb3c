from spec_tests.mutants.catalogue.unseen import MUTANTS
B={m.name:m for m in MUTANTS}
G="spec_tests/fsdp2/test_rare_groups.py::"; S="spec_tests/fsdp1/test_rare_settings.py::"; H="spec_tests/engine/test_memory_held.py::"
M=[(B[n],a) for n,a in [
("ignored-tie-is-refused",S+"test_an_ignored_parameter_may_be_tied_between_units"),
("integers-are-cast",G+"test_integer_parameters_are_not_cast_to_the_param_dtype"),
("extension-always-gets-five-arguments",G+"test_an_extension_may_take_the_mesh_as_its_only_argument"),
("nan-is-a-number",S+"test_clipping_to_nan_is_refused_and_changes_no_gradient"),
("idle-model-is-summoned-in-backward",S+"test_an_idle_model_is_not_summoned_in_the_backward_of_another_one"),
("half-called-group-stays-unsharded",G+"test_a_group_of_which_only_one_module_is_called_is_resharded"),
("gradient-keeps-a-buffer-of-the-unsharded-size",H+"test_gradients_hold_the_memory_of_their_shards_and_no_more"),
("small-parameters-are-sent-one-by-one",H+"test_many_small_parameters_are_sent_together"),
("exchanges-are-kept",H+"test_a_complete_collective_keeps_no_tensor_alive"),
("last-collective-keeps-its-tensors",H+"test_a_complete_collective_keeps_no_tensor_alive"),
("known-orders-grow",H+"test_the_orders_that_the_ranks_remember_do_not_grow_without_limit"),
("saves-leave-keys-in-the-store",H+"test_saves_leave_no_keys_in_the_store"),
]]
