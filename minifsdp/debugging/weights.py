"""Debug check ``weights``: compares the initial weights of all ranks, before a unit is sharded.

``checks/initial_weights.py`` describes the comparison and its cost. Here it is called for every unit of both APIs::

    model                                   compared before its parameters are sharded
    FullyShardedDataParallel(block, ...)    the parameters of this wrapper, over its shard and replicate groups
    fully_shard(block, ...)                 the parameters of this call, over the groups of each mesh

*In torch:* no check.

Spec: DEBUG-04.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from minifsdp.checks.initial_weights import compare, compare_sharded
from minifsdp.debugging.attach import attached, warn_about_late_units
from minifsdp.engine.flat_params import is_flattened
from minifsdp.engine.layout import owned_parameters
from minifsdp.fsdp1.wrapper import Wrapper
from minifsdp.fsdp2 import fully_shard


@contextmanager
def check_weights() -> Iterator[None]:
    """Inside the block, compares the parameters of each new unit between ranks."""
    with (
        warn_about_late_units("weights"),
        attached(Wrapper, "_initialize", _compare_in_wrapper),
        attached(
            fully_shard,
            "compare_while_debugging",
            lambda _, params: compare_sharded(params),
        ),
    ):
        yield


def _compare_in_wrapper(
    _: None,
    wrapper: Wrapper,
    modules: list[tuple[str, nn.Module]],
    *_arguments: Any,
    **_options: Any,
) -> None:
    if parameters := owned_parameters(modules, wrapper._ignored_params, is_flattened):
        compare(type(wrapper.module).__name__, parameters.items(), wrapper._mesh)
