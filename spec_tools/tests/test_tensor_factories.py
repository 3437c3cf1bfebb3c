"""Rule for both packages: a tensor that it creates names its device and its dtype.

A program may set a default device or a default dtype, for all of its code or around one call. A tensor without a device
is then created on the device of the program, and a collective between this tensor and the model's tensors fails.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for package in ("minifsdp", "minifsdp_gloo", "minifsdp_tools") for path in (ROOT / package).rglob("*.py")]
# The exercises compare with numbers that learners see. They run as a program of their own, without defaults.
MODULES = sorted(str(path.relative_to(ROOT)) for path in FILES if "learn" not in path.relative_to(ROOT).parts)
# The functions of torch that use the default device.
FACTORIES = {function.__name__ for function in _device_constructors()} | {"Tensor", "FloatTensor", "LongTensor"}

pytestmark = pytest.mark.pure


def incomplete_factories(source: str) -> list[str]:
    """The calls of factories in ``source`` without a device or a dtype."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [(call, call.func) for call in calls if isinstance(call.func, ast.Attribute)]
    of_torch = [(call, name) for call, name in named if ast.unparse(name.value) == "torch" and name.attr in FACTORIES]
    wanted = {"device", "dtype"}
    incomplete = [call for call, _ in of_torch if not wanted <= {keyword.arg for keyword in call.keywords}]
    return [f"line {call.lineno}: {ast.unparse(call)}" for call in incomplete]


@pytest.mark.parametrize("module", MODULES)
def test_every_tensor_of_the_packages_names_its_device_and_dtype(module: str) -> None:
    assert incomplete_factories((ROOT / module).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "call",
    [
        "torch.zeros(2)",
        "torch.tensor([1], device=x.device)",
        "torch.full((2,), 1.0, dtype=x.dtype)",
        "torch.as_tensor(x)",
    ],
)
def test_a_call_without_device_or_dtype_is_found(call: str) -> None:
    assert incomplete_factories(call) == [f"line 1: {ast.unparse(ast.parse(call))}"]
