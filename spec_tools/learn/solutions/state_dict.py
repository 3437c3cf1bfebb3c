"""A solution of exercise 9, written from the text of its page."""

from collections.abc import MutableMapping
from typing import Any

from minifsdp.checkpoint.codec import UnitCodec
from minifsdp.checkpoint.state_dict_options import Form
from minifsdp.fsdp1.full_params import all_gather_unit


def _write_unit(codec: UnitCodec, form: Form, state: MutableMapping[str, Any]) -> None:
    state.pop(codec.flat_key, None)
    flat = all_gather_unit(codec.unit)
    if form.first_only and not codec.mesh.is_first:
        return
    values = codec.layout.views_of(flat)
    for key, number in codec.keys.items():
        value = values[number]
        state[key] = codec.in_form(value, form, value.device)
