"""The tables of the page "In which state is this parameter now?", from a recorded step on two ranks."""

from typing import Any

from docs_build.reading.text import table
from docs_build.recording.parameter_states import FORMS, IN_FORWARD, NAME, SETTINGS, Setting
from docs_build.recording.records import of_record

APIS = {
    "flat": "`FullyShardedDataParallel`",
    "original": "the same, `use_orig_params=True`",
    "fully_shard": "`fully_shard`",
}
# The moments at which all unsharded parameters are available to the user.
SUMMONED = {"fully_shard": "after `unshard()`"}
HEADS = ["`p.shape`", "on this rank", "dtype", "`p.grad`", "linear.weight", "optimizer holds `p`", "unsharded memory"]


@of_record(NAME)
def states(record: Any, form: str) -> str:
    """A row for each moment, if the unit is resharded after forward."""
    rows = _rows(record, Setting(form, True))
    return table(["moment", "`p` is a", *HEADS], [[moment, *cells] for moment, cells in rows.items()])


@of_record(NAME)
def differences(record: Any, form: str) -> str:
    """The rows that differ if the unit stays unsharded after forward."""
    usual, other = (_rows(record, Setting(form, is_resharded)) for is_resharded in (True, False))
    rows = [[moment, *cells] for moment, cells in other.items() if cells != usual[moment]]
    return table(["moment", "`p` is a", *HEADS], rows) if rows else "No row differs."


@of_record(NAME)
def names(record: Any) -> str:
    """The names of parameters, and their number, for each API."""
    rows = []
    for form in FORMS:
        moments = record["settings"][Setting(form, True).key][0]["moments"]
        for moment in ("after sharding", IN_FORWARD, SUMMONED.get(form, "inside `summon_full_params()`")):
            seen = moments[moment]
            rows.append([APIS[form], moment, f"`{seen['name']}`", seen["num_parameters"]])
    return table(["API", "moment", "first name of the unit", "number of `parameters()`"], rows, "lllr")


@of_record(NAME)
def state_dicts(record: Any) -> str:
    """The value of a weight in ``state_dict()``, for each API."""
    values = [[APIS[form], *_by_rank(record, Setting(form, True), "state_dict")] for form in FORMS]
    return table(["API", "class", "shape", "on this rank", "dtype"], values)


@of_record(NAME)
def memory(record: Any) -> str:
    """Which units have unsharded memory at each moment."""
    moments = list(record["settings"][SETTINGS[0].key][0]["moments"])
    columns = []
    for is_resharded in (True, False):
        for forms in (("flat", "original"), ("fully_shard",)):
            found = [_allocated(record, Setting(form, is_resharded)) for form in forms]
            columns.append([" or ".join(dict.fromkeys(cells)) for cells in zip(*found, strict=True)])
    heads = ["wrapper, `FULL_SHARD`", "`fully_shard`, `True`", "wrapper, `SHARD_GRAD_OP`", "`fully_shard`, `False`"]
    also = {"inside `summon_full_params()`": "after `unshard()`", "after `summon_full_params()`": "after `reshard()`"}
    moments = [f"{moment}, {also[moment]}" if moment in also else moment for moment in moments]
    return table(["moment", *heads], zip(moments, *columns, strict=True))


@of_record(NAME)
def about(record: Any) -> str:
    """The date and the machine of the record."""
    return f"Recorded on two ranks; {record['date']}, {record['machine']}."


def _allocated(record: Any, setting: Setting) -> list[str]:
    """The units with unsharded memory, for each moment."""
    moments = record["settings"][setting.key][0]["moments"].values()
    return [" and ".join(seen["allocated"]) or "none" for seen in moments]


def _rows(record: Any, setting: Setting) -> dict[str, list[str]]:
    """The cells of each moment. If the ranks differ, a cell has the values of both."""
    ranks = [rank["moments"] for rank in record["settings"][setting.key]]
    return {
        moment: _merged([_cells(moments[moment]) for moments in ranks])
        for moment in ranks[0]
        # An unsharded model has no row in these tables.
        if moment != "before sharding"
    }


def _cells(seen: dict[str, Any]) -> list[str]:
    kind, shape, local, dtype = seen["parameter"].split("; ")
    grad = "as `p`" if seen["grad"] and seen["grad"].split("; ")[1:] == [shape, local, dtype] else _short(seen["grad"])
    weight = "as `p`" if seen["module"] == seen["parameter"] else _short(seen["module"])
    is_held, is_allocated = ("yes" if fact else "no" for fact in (seen["is_held"], "block" in seen["allocated"]))
    return [kind, f"`{shape}`", f"`{local}`", dtype, grad, weight, is_held, is_allocated]


def _short(tensor: str | None) -> str:
    """A tensor in one cell."""
    if tensor is None:
        return "`None`"
    kind, shape, local, dtype = tensor.split("; ")
    here = f", on this rank `{local}`" if local != shape else ""
    return f"{kind} `{shape}`{here}, {dtype}"


def _merged(ranks: list[list[str]]) -> list[str]:
    """Cells with the values of all ranks: ``(8,)`` on rank 0 and ``(7,)`` on rank 1 are ``(8,) / (7,)``."""
    return [" / ".join(dict.fromkeys(cells)) for cells in zip(*ranks, strict=True)]


def _by_rank(record: Any, setting: Setting, key: str) -> list[str]:
    ranks = [rank[key].split("; ") for rank in record["settings"][setting.key]]
    return _merged([[kind, f"`{shape}`", f"`{local}`", dtype] for kind, shape, local, dtype in ranks])
