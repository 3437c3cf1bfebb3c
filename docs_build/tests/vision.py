"""The visible difference between two colours for people who lack one kind of cone.

Simulates colours with the method of Machado, Oliveira and Fernandes (2009) for people who lack one kind of cone
completely: one matrix for each kind, applied to linear light. Differences are distances in the Lab colour space. A
distance of 2 is hardly visible side by side; a distance of 10 is visible at a glance.
"""

from __future__ import annotations

import math

__all__ = ["KINDS", "apart"]

Colour = tuple[float, float, float]  # each from 0 to 255
Matrix = tuple[Colour, Colour, Colour]

KINDS: dict[str, Matrix] = {
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
_TO_XYZ: Matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
_WHITE = (0.9505, 1.0, 1.089)


def apart(one: Colour, other: Colour, kind: str) -> float:
    """The visible difference between two colours for people with this kind of colour blindness."""
    return math.dist(_lab(one, KINDS[kind]), _lab(other, KINDS[kind]))


def _lab(colour: Colour, matrix: Matrix) -> Colour:
    seen = [min(1.0, max(0.0, value)) for value in _times(matrix, [_linear(part / 255) for part in colour])]
    x, y, z = (_cube_root(value / white) for value, white in zip(_times(_TO_XYZ, seen), _WHITE, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _times(matrix: Matrix, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _cube_root(value: float) -> float:
    return value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
