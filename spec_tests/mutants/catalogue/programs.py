"""Mutants of PROG: other people's programs that use autograd."""

from __future__ import annotations

from spec_tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        "requested-parameters-get-nothing",
        "RequestedParameters._compute",
        "        if inputs:\n",
        "        if False:\n",
        "backward(inputs=parameters) computes no gradient and raises no error.",
        "PROG-20",
    ),
    Mutant(
        "part-of-a-unit-trains-all-of-it",
        "RequestedParameters._compute",
        "elif 0 < len(requested) < len(trained):",
        "elif False:",
        "backward(inputs=...) with one parameter of a unit also computes gradients of the others.",
        "PROG-21",
    ),
    Mutant(
        "end-of-backward-in-forward-reshards",
        "IterationState.end_backward",
        "        elif not self.in_forward:\n",
        "        else:\n",
        "A backward inside a forward reshards units that compute.",
        "PROG-23",
    ),
    Mutant(
        "graph-of-gradients-loses-parameters",
        "IterationState.pre_backward",
        "        unit.keeps_for_graph |= torch.is_grad_enabled()\n",
        "",
        "Units are resharded although a graph of gradients refers to their parameters.",
        "PROG-24",
    ),
    Mutant(
        "parameters-are-kept-for-no-graph",
        "IterationState.post_backward",
        "        unit.keeps_for_graph = False\n",
        "",
        "Units stay unsharded after the gradients of their parameters are computed.",
        "PROG-24",
    ),
    Mutant(
        "gradients-with-a-graph-are-reduced",
        "IterationState.post_backward",
        "        if any(map(REQUIRES_GRAD, gradient.parts)):\n",
        "        if False:\n",
        "backward(create_graph=True) reduces gradients without their graph, and raises no error.",
        "PROG-25",
    ),
    Mutant(
        "changed-parameters-are-used",
        "IterationState.pre_backward",
        "        if unit in self._changed:\n",
        "        if False:\n",
        "A backward uses parameters that have changed since the forward.",
        "PROG-26",
    ),
    Mutant(
        "summoned-parameters-count-as-changed",
        "IterationState._changed_units",
        " if not unit.layout.is_marked_stale",
        "",
        "A backward after summon_full_params() without a change raises an error.",
        "PROG-26",
    ),
    Mutant(
        "attributes-are-not-watched",
        "RootState.end_forward",
        "            self._side_outputs.watch_attributes()\n",
        "",
        "A loss of tensors in attributes reads freed parameters.",
        "PROG-27",
    ),
    Mutant(
        "hooked-modules-are-not-watched",
        "RootState._prepare",
        "        self._side_outputs.watch_hooked_modules()\n",
        "",
        "A loss of activations that forward hooks have seen reads freed parameters.",
        "PROG-28",
    ),
    Mutant(
        "lists-of-the-caller-stay-as-they-were",
        "InputsHooks.watch_output",
        "            self._update_originals()\n",
        "            pass\n",
        "What a module appends to a list of its inputs is lost.",
        "PROG-29",
    ),
    Mutant(
        "results-in-inputs-are-not-watched",
        "register_pre_backward_hook",
        "        tensors = list(tensors_in(inputs))\n",
        "        tensors = []\n",
        "A unit that returns None gets no pre-backward hook.",
        "PROG-29",
    ),
    Mutant(
        "inputs-are-other-tensors",
        "InputsHooks.watch_inputs",
        "[tensor.view_as(tensor) for tensor in watched]",
        "[tensor.detach().requires_grad_() for tensor in watched]",
        "The inputs of a unit are no views, so autograd loses their graph.",
        "PROG-30",
    ),
    Mutant(
        "transforms-begin-a-forward",
        "RootState._prepare",
        "        if torch._C._are_functorch_transforms_active() and not _only_vmap():\n",
        "        if False:\n",
        "A forward inside a function transform ends in an error of a collective.",
        "PROG-31",
    ),
]
