"""Peaks of cards from NVIDIA's public datasheets: the rate of the link between GPUs, and of dense matrix products.

The kit prints measured figures next to these. They are peaks that no program reaches, and no check fails because of
them. A card that is not in the table, or a part of a card (MIG), has no expected figures.

* ``link``: 1e9 bytes per second in one direction. For NVLink it is half of the figure in a datasheet, which adds both
  directions. A PCIe card has the figure of its slot, also if a bridge connects some of the cards.
* ``rates``: 1e12 operations per second by dtype, without sparsity, which doubles many figures in datasheets.
  ``float32`` is the figure without TF32, because torch uses TF32 for matrix products only if a program asks for it.

Spec: KIT-17.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CARDS", "Card", "find_card"]


@dataclass(frozen=True)
class Card:
    """Peaks of one card, see the module.

    Attributes:
        name: short name.
        pattern: regular expression for the whole name that torch reports, without ``NVIDIA`` and ``GeForce``.
        wire: ``NVLink`` or ``PCIe``.
        link: rate of the wire in one direction, in 1e9 bytes per second.
        rates: rates of matrix products by dtype, in 1e12 operations per second.
    """

    name: str
    pattern: str
    wire: str
    link: float
    rates: Mapping[str, float]


def _card(name: str, pattern: str, wire: str, link: float, float32: float, bfloat16: float) -> Card:
    return Card(name, pattern, wire, link, {"float32": float32, "bfloat16": bfloat16})


CARDS = (
    _card("A100 SXM", r"A100-SXM4-(40|80)GB", "NVLink", 300, 19.5, 312),
    _card("A100 PCIe", r"A100-PCIE-(40|80)GB|A100 80GB PCIe", "PCIe", 32, 19.5, 312),
    _card("H100 SXM", r"H100 80GB HBM3", "NVLink", 450, 67, 989),
    _card("H100 PCIe", r"H100 PCIe", "PCIe", 64, 51, 756),
    _card("H100 NVL", r"H100 NVL", "PCIe", 64, 60, 835),
    _card("H200 SXM", r"H200", "NVLink", 450, 67, 989),
    _card("H200 NVL", r"H200 NVL", "PCIe", 64, 60, 835),
    _card("B200", r"B200", "NVLink", 900, 75, 2250),
    _card("L40S", r"L40S", "PCIe", 32, 91.6, 362),
    _card("L4", r"L4", "PCIe", 32, 30.3, 121),
    _card("A10", r"A10", "PCIe", 32, 31.2, 125),
    _card("RTX A6000", r"RTX A6000", "PCIe", 32, 38.7, 155),
    _card("RTX 3090", r"RTX 3090", "PCIe", 32, 35.6, 71),
    _card("RTX 4090", r"RTX 4090", "PCIe", 32, 82.6, 165),
    _card("RTX 5090", r"RTX 5090", "PCIe", 64, 104.8, 209.5),
)


def find_card(name: str) -> Card | None:
    """The card with the name that ``torch.cuda.get_device_name`` returns, or None if the table does not have it."""
    short = re.sub(r"^(NVIDIA )?(GeForce )?", "", name.strip())
    return next((card for card in CARDS if re.fullmatch(card.pattern, short)), None)
