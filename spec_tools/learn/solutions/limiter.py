"""A solution of exercise 6, written from the text of its page."""

from minifsdp.engine.lifetime import ReleaseEvent


def throttle(self, unit_name: str) -> None:
    if len(self._events) >= self.num_in_flight:
        oldest = self._events.popleft()
        oldest.synchronize()


def released(self, event: ReleaseEvent) -> None:
    self._events.append(event)
