"""A solution of exercise 4, written from the text of its page."""

from minifsdp.engine import collectives
from minifsdp.engine.layout import Gradient, Layout
from minifsdp.engine.reduce import ReducePlan


def reduce(self, layout: Layout, plan: ReducePlan, gradient: Gradient) -> None:
    packed = layout.pack(gradient, plan.dtype, is_written=True)
    plan.scaling.prepare(packed)
    result = packed
    if plan.mesh.shard is not None:
        result = packed.new_empty(packed.numel() // plan.mesh.shard.size)
        collectives.reduce_scatter(plan.mesh.shard, result, packed, layout.name, gradient.indices).wait()
    if plan.mesh.replicate is not None:
        collectives.all_reduce(plan.mesh.replicate, result, layout.name, gradient.indices).wait()
    plan.scaling.complete(result)
    layout.accept_gradient(gradient, result)
