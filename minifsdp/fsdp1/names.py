"""Names of parameters and buffers, as a wrapper shows them.

Names contain the wrappers' prefixes, as in torch. Inside ``summon_full_params``, they are the names of the unwrapped
model. The methods of the wrapper also look up attributes and items in the wrapped module: ``model.layer``, ``model[0]``
and ``model.vocab_size``.

Worked example: the weight of ``FSDP(Sequential(FSDP(Linear(2, 2))))`` is named
``_fsdp_wrapped_module.0._fsdp_wrapped_module.weight``, and inside ``summon_full_params`` it is named ``0.weight``.

*In torch:* methods of the wrapper class.

Spec: NAMES-02, NAMES-03.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from minifsdp.fsdp1.wrapper import PREFIX, Wrapper

T = TypeVar("T")


def shown(wrapper: Wrapper, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """The names and values of ``named``, without wrapper prefixes inside ``summon_full_params``."""
    for name, value in named:
        yield (name.replace(PREFIX, "") if wrapper._shows_clean_names else name), value
