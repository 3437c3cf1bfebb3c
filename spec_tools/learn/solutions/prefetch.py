"""A solution of exercise 5, written from the text of its page."""

from minifsdp.engine.unit import Unit


def leave(self, unit: Unit) -> None:
    positions = self._left_at.setdefault(unit, [])
    positions.append(len(self._left))
    self._left.append(unit)


def next_backward(self, unit: Unit) -> Unit | None:
    positions = self._left_at.get(unit, [])
    if not positions:
        return None
    earlier = self._left[: positions.pop()]
    while earlier and earlier[-1] is unit:
        earlier.pop()
    return earlier[-1] if earlier else None
