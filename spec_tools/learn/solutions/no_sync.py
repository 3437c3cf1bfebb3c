"""A solution of exercise 7, written from the text of its page."""

from minifsdp.engine.layout import Gradient


def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
    taken = Gradient([], [])
    for number, param in enumerate(self.params):
        found = [param.leaf.grad]
        param.leaf.grad = None
        if with_unreduced:
            found.insert(0, param.unreduced)
            param.unreduced = None
        parts = [part for part in found if part is not None]
        if parts:
            taken.parts.append(parts[0] if len(parts) == 1 else parts[0] + parts[1])
            taken.indices.append(number)
    return taken if taken.parts else None


def keep_unreduced(self, gradient: Gradient) -> None:
    for number, part in zip(gradient.indices, gradient.parts, strict=True):
        param = self.params[number]
        part = part.to(self.precision.reduces_in(part.dtype))
        if param.unreduced is not None:
            part = param.unreduced + part
        param.unreduced = part
