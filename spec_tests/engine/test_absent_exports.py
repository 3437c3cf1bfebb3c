"""A placeholder gives no memory to other libraries or processes."""

from __future__ import annotations

import pytest
import torch

from minifsdp.engine.placeholder import PlaceholderParameter


@pytest.mark.pure
@pytest.mark.spec("ORIG-11")
@pytest.mark.parametrize("method", ["share_memory_", "__dlpack__", "numpy", "tolist"])
def test_an_export_of_a_placeholder_raises_with_the_name(method: str) -> None:
    placeholder = PlaceholderParameter(torch.Size([2, 3]), torch.float32, torch.device("cpu"), "layer.weight")
    # Without its own method, the export would read memory that does not exist, and end the process.
    assert getattr(PlaceholderParameter, method) is PlaceholderParameter._refuse
    with pytest.raises(RuntimeError, match=r"'layer\.weight'"):
        getattr(placeholder, method)()
