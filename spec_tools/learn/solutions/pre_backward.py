"""A solution of exercise 3, written from the text of its page."""

from minifsdp.engine.backward_hooks import graph_task
from minifsdp.engine.schedule import BackwardPrefetch
from minifsdp.engine.unit import Phase, State, Unit


def pre_backward(self, unit: Unit) -> None:
    if unit.phase is Phase.PRE_BACKWARD:
        return
    if not self.in_backward:
        self.begin_backward()
    unit.phase = Phase.PRE_BACKWARD
    unit.uses.graph_task = graph_task()
    unit.uses.awaits_backward = False
    if unit.policy.unshards_in_backward:
        unit.unshard()
    if unit.state is not State.SHARDED:
        unit.wait()
        unit.layout.use_unsharded_params(is_backward=True)
    if self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
        self._prefetch_backward(unit)
