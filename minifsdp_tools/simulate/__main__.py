"""``python -m minifsdp_tools.simulate``: simulates a training step on machines that you do not have.

::

    python -m minifsdp_tools.simulate llama3-70b --ranks 1024 --card H100 --checkpointing full
    python -m minifsdp_tools.simulate mpt-7b --ranks 64 --card A100-40 --api fsdp1 --strategy FULL_SHARD SHARD_GRAD_OP
    python -m minifsdp_tools.simulate llama3-8b --ranks 64 --card H100 --search

*In torch:* no such command.

Spec: SIMULATE-13, SIMULATE-14.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

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
# The whole numbers of a setting: the default and the help of each option.
_NUMBERS = {
    "--ranks-per-machine": (8, None),
    "--shards": (None, "ranks that share a copy, for hybrid strategies; default: those of a machine"),
    "--reshard-after-forward": (None, "fully_shard: keep 1/n of each unit for backward"),
    "--unit": (1, "blocks in a unit"),
    "--micro-batch": (1, "sequences in a micro-batch of a rank"),
    "--sequence": (None, "tokens in a sequence; default: that of the model"),
    "--accumulation": (1, "micro-batches in a step"),
}
# The numbers of a card: the field of `Card`, the unit and the help of each option.
_CARD = {
    "teraflops": ("matmul", 1e12, "peak of matrix products in bfloat16"),
    "memory": ("memory", 1e9, "GB"),
    "bandwidth": ("bandwidth", 1e9, "of the memory, GB/s"),
    "efficiency": ("efficiency", 1, "share of the peak that matrix products reach"),
    "slowdown": ("slowdown", 1, "share of a collective's time that computation next to it loses"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    # Sharding over one rank, and `NO_SHARD`, are valid settings here.
    warnings.filterwarnings("ignore", message=".*`NO_SHARD`")
    try:
        card, network = _card(given), _network(given)
        setups = [_setup(given, strategy) for strategy in given.strategy]
        if given.search:
            runs, num_best = search(setups[0], card, network)
            num_shown = num_best + _SHOWN
            head = f"{len(runs)} settings. The first {num_best} are simulated with all layers, the others extrapolated."
            head += f" {max(0, len(runs) - num_shown)} more are slower or do not fit."
            runs = runs[:num_shown]
        else:
            runs = [(setup, replay(record(setup), card, network)) for setup in setups]
            ranks = f"{given.ranks} ranks of {card.name}, {network.ranks_per_machine} in each machine"
            head = f"{given.model} on {ranks}; simulated, not measured"
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if given.json:
        print("\n".join(json_line(setup, card, result) for setup, result in runs))
    else:
        print(f"{head}\n\n{table(runs, card)}")
    if given.timeline:
        given.timeline.write_text(picture(*runs[0]), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m minifsdp_tools.simulate", description="Simulates a training step.")
    add = parser.add_argument
    add("model", help=f"{', '.join(SHAPES)}; sizes such as layers=4,width=256,heads=4,vocabulary=1000; module:function")
    add("--ranks", type=int, required=True, help="number of all ranks")
    for option, (default, text) in _NUMBERS.items():
        add(option, type=int, default=default, help=text)
    add("--api", choices=("fsdp1", "fsdp2"), default="fsdp2", help="FullyShardedDataParallel or fully_shard")
    add("--strategy", nargs="+", choices=STRATEGIES, default=["FULL_SHARD"], help="one or more, each in a line")
    add("--no-sync", action="store_true", help="reduce gradients in the last micro-batch only")
    add("--checkpointing", choices=("none", "selective", "full"), default="none")
    add("--param-dtype", choices=DTYPES, default="bf16")
    add("--reduce-dtype", choices=DTYPES, default="fp32")
    add("--backward-prefetch", choices=("BACKWARD_PRE", "BACKWARD_POST", "none"), default="BACKWARD_PRE")
    add("--forward-prefetch", action="store_true")
    add("--no-limiter", dest="limit_all_gathers", action="store_false", help="limit_all_gathers=False")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    _add_machine_options(parser)
    return parser


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    card = parser.add_argument_group("the card; without --card, give the first three numbers")
    card.add_argument("--card", choices=CARDS)
    for option, (_, _, text) in _CARD.items():
        card.add_argument(f"--{option}", type=float, help=text)
    network = parser.add_argument_group("the network, in GB/s and in one direction")
    network.add_argument("--within", type=float, default=300, help="for each rank, within a machine")
    network.add_argument("--between", type=float, default=200, help="for each machine, between machines")
    network.add_argument("--costs", type=Path, help="...-costs.json of python -m spec_tools.gpu, measured collectives")
    output = parser.add_argument_group("output")
    output.add_argument("--timeline", type=Path, metavar="FILE.svg", help="draw the first run")
    output.add_argument("--json", action="store_true", help="a line of JSON for each run")
    output.add_argument("--search", action="store_true", help="find the best settings that fit into memory")


def _setup(given: argparse.Namespace, strategy: str) -> Setup:
    options = {field.name: getattr(given, field.name) for field in fields(Setup) if field.name in given}
    converted = {
        "model": shape_of(given.model) if "=" in given.model else given.model,
        "num_ranks": given.ranks,
        "strategy": strategy,
        "num_shards": given.shards,
        "backward_prefetch": None if given.backward_prefetch == "none" else given.backward_prefetch,
    }
    return Setup(**options | converted)


def _card(given: argparse.Namespace) -> Card:
    values = vars(given)
    numbers = {name: values[key] * unit for key, (name, unit, _) in _CARD.items() if values[key] is not None}
    if given.card is not None:
        return replace(CARDS[given.card], **numbers)
    if missing := [f"--{option}" for option in ("teraflops", "memory", "bandwidth") if values[option] is None]:
        raise ValueError(message("simulate-card", missing=", ".join(missing)))
    return Card("the given card", matmul32=numbers["matmul"] / 2, **numbers)


def _network(given: argparse.Namespace) -> Network:
    costs = {} if given.costs is None else measured_costs(given.costs)
    rates = {"within": given.within * 1e9, "between": given.between * 1e9}
    return Network(ranks_per_machine=given.ranks_per_machine, **rates, costs=costs)


if __name__ == "__main__":
    raise SystemExit(main())
