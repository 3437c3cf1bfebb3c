"""``python -m minifsdp_tools.simulate``: simulates a training step on machines that you do not have.

::

    python -m minifsdp_tools.simulate llama3-70b --ranks 1024 --card H100 --checkpointing full
    python -m minifsdp_tools.simulate mpt-7b --ranks 64 --card A100-40 --api fsdp1 --strategy FULL_SHARD SHARD_GRAD_OP
    python -m minifsdp_tools.simulate llama3-8b --ranks 64 --card H100 --search

*In torch:* no such command.

Spec: SIMULATE-13, SIMULATE-14.
"""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from minifsdp.engine.messages import message
from minifsdp_tools.simulate.machine import CARDS, Card, Network, measured_costs
from minifsdp_tools.simulate.recording import record
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.report import json_line, picture, table
from minifsdp_tools.simulate.search import search
from minifsdp_tools.simulate.setup import DTYPES, STRATEGIES, Setup
from minifsdp_tools.simulate.shapes import SHAPES, shape_of

# Number of slower settings in the table of a search.
_SHOWN = 12
# The options in their groups; those without a group describe the step.
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "": {
        "model": {
            "help": f"{', '.join(SHAPES)}; sizes such as layers=4,width=256,heads=4,vocabulary=1000; module:function",
        },
        "--ranks": {"type": int, "required": True, "help": "number of all ranks"},
        "--ranks-per-machine": {"type": int, "default": 8},
        "--shards": {
            "type": int,
            "help": "ranks that share a copy, for hybrid strategies; default: those of a machine",
        },
        "--reshard-after-forward": {
            "type": int,
            "help": "fully_shard: keep 1/n of each unit for backward",
        },
        "--unit": {"type": int, "default": 1, "help": "blocks in a unit"},
        "--micro-batch": {
            "type": int,
            "default": 1,
            "help": "sequences in a micro-batch of a rank",
        },
        "--sequence": {
            "type": int,
            "help": "tokens in a sequence; default: that of the model",
        },
        "--accumulation": {
            "type": int,
            "default": 1,
            "help": "micro-batches in a step",
        },
        "--api": {
            "choices": ("fsdp1", "fsdp2"),
            "default": "fsdp2",
            "help": "FullyShardedDataParallel or fully_shard",
        },
        "--strategy": {
            "nargs": "+",
            "choices": STRATEGIES,
            "default": ["FULL_SHARD"],
            "help": "one or more, each in a line",
        },
        "--no-sync": {
            "action": "store_true",
            "help": "reduce gradients in the last micro-batch only",
        },
        "--checkpointing": {
            "choices": ("none", "selective", "full"),
            "default": "none",
        },
        "--param-dtype": {"choices": DTYPES, "default": "bf16"},
        "--reduce-dtype": {"choices": DTYPES, "default": "fp32"},
        "--backward-prefetch": {
            "choices": ("BACKWARD_PRE", "BACKWARD_POST", "none"),
            "default": "BACKWARD_PRE",
        },
        "--forward-prefetch": {"action": "store_true"},
        "--no-limiter": {
            "dest": "limit_all_gathers",
            "action": "store_false",
            "help": "limit_all_gathers=False",
        },
        "--optimizer": {"choices": ("adamw", "sgd"), "default": "adamw"},
    },
    "the card; without --card, give the first three numbers": {
        "--card": {"choices": CARDS},
        "--teraflops": {"type": float, "help": "peak of matrix products in bfloat16"},
        "--memory": {"type": float, "help": "GB"},
        "--bandwidth": {"type": float, "help": "of the memory, GB/s"},
        "--efficiency": {
            "type": float,
            "help": "share of the peak that matrix products reach",
        },
        "--slowdown": {
            "type": float,
            "help": "share of a collective's time that computation next to it loses",
        },
    },
    "the network, in GB/s and in one direction": {
        "--within": {
            "type": float,
            "default": 300,
            "help": "for each rank, within a machine",
        },
        "--between": {
            "type": float,
            "default": 200,
            "help": "for each machine, between machines",
        },
        "--costs": {
            "type": Path,
            "help": "gpu-report.json of python -m spec_tools.gpu, with measured collectives",
        },
    },
    "output": {
        "--timeline": {
            "type": Path,
            "metavar": "FILE.svg",
            "help": "draw the first run",
        },
        "--json": {"action": "store_true", "help": "a line of JSON for each run"},
        "--search": {
            "action": "store_true",
            "help": "find the best settings that fit into memory",
        },
    },
}
# The options that are numbers of a card: the field of `Card`, and the unit.
_CARD = {
    "teraflops": ("matmul", 1e12),
    "memory": ("memory", 1e9),
    "bandwidth": ("bandwidth", 1e9),
    "efficiency": ("efficiency", 1),
    "slowdown": ("slowdown", 1),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m minifsdp_tools.simulate", description="Simulates a training step."
    )
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title) if title else parser
        for option, settings in options.items():
            group.add_argument(option, **settings)
    given = parser.parse_args(arguments)
    # Sharding over one rank, and `NO_SHARD`, are valid settings here.
    warnings.filterwarnings("ignore", message=".*`NO_SHARD`")
    try:
        card = _card(given)
        network = Network(
            given.ranks_per_machine,
            given.within * 1e9,
            given.between * 1e9,
            costs={} if given.costs is None else measured_costs(given.costs),
        )
        setups = [_setup(given, strategy) for strategy in given.strategy]
        if given.search:
            runs, num_best = search(setups[0], card, network)
            num_shown = num_best + _SHOWN
            head = (
                f"{len(runs)} settings. The first {num_best} are simulated with all layers, the others extrapolated. "
                f"{max(0, len(runs) - num_shown)} more are slower or do not fit."
            )
            runs = runs[:num_shown]
        else:
            runs = [(setup, replay(record(setup), card, network)) for setup in setups]
            head = (
                f"{given.model} on {given.ranks} ranks of {card.name}, {given.ranks_per_machine} in each machine; "
                "simulated, not measured"
            )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if given.json:
        print("\n".join(json_line(setup, card, result) for setup, result in runs))
    else:
        print(f"{head}\n\n{table(runs, card)}")
    if given.timeline:
        given.timeline.write_text(picture(*runs[0]), encoding="utf-8")
    return 0


def _setup(given: argparse.Namespace, strategy: str) -> Setup:
    options = {
        field.name: getattr(given, field.name)
        for field in fields(Setup)
        if field.name in given
    }
    converted = {
        "model": shape_of(given.model) if "=" in given.model else given.model,
        "num_ranks": given.ranks,
        "strategy": strategy,
        "num_shards": given.shards,
        "backward_prefetch": None
        if given.backward_prefetch == "none"
        else given.backward_prefetch,
    }
    return Setup(**options | converted)


def _card(given: argparse.Namespace) -> Card:
    values = vars(given)
    numbers = {
        name: values[key] * unit
        for key, (name, unit) in _CARD.items()
        if values[key] is not None
    }
    if given.card is not None:
        return replace(CARDS[given.card], **numbers)
    if missing := [
        f"--{option}"
        for option in ("teraflops", "memory", "bandwidth")
        if values[option] is None
    ]:
        raise ValueError(message("simulate-card", missing=", ".join(missing)))
    return Card("the given card", matmul32=numbers["matmul"] / 2, **numbers)


if __name__ == "__main__":
    raise SystemExit(main())
