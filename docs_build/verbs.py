"""The table of verbs and layouts, and the path of one parameter through one training step."""

from __future__ import annotations

from docs_build import directives, fragments
from docs_build.order import PACKAGE
from docs_build.pages import address
from docs_build.recordings import find
from docs_build.running import only_records
from docs_build.source import find_function, read_module

__all__ = ["call_path", "verb_table"]

# The verbs of `Layout` in groups, and a short description of each layout's implementation.
VERBS: list[tuple[str, list[str], str, str]] = [
    (
        "parameters for the optimizer",
        ["local_parameters"],
        "one flat parameter; with `use_orig_params`, the original parameters as 1-D shards",
        "one DTensor for each parameter, sharded by rows (`Shard(0)`)",
    ),
    (
        "all-gather",
        ["all_gather"],
        "one collective from the local shard directly into the memory that forward reads; a cast is written there, too",
        "one collective from the bucket of all local shards, then one operator sorts its output by parameter",
    ),
    (
        "register the unsharded parameters",
        ["use_unsharded_params", "use_unsharded_params_again"],
        "views of one split, created at use; a recomputed forward gets the recorded views again",
        "the same leaf tensors every time",
    ),
    (
        "register the sharded parameters",
        ["use_sharded_params", "use_kept_params"],
        "placeholders without values, or the local shards of the original parameters",
        "the DTensors",
    ),
    (
        "reshard",
        ["free", "is_stale"],
        "resizes the storage of the unsharded flat parameter to 0 bytes",
        "resizes the storage that the leaf tensors of a bucket share to 0 bytes",
    ),
    (
        "is the gradient complete?",
        ["on_gradient", "is_trained"],
        "a hook on the only leaf tensor detects this",
        "detected from the gradients of the unit's inputs, or at the end of backward",
    ),
    (
        "take and pack gradients",
        ["take_gradient", "pack"],
        "the whole flat gradient, with zeros for parameters without a gradient",
        "only parameters that have a gradient, split by rows and sorted by rank",
    ),
    (
        "store the reduced gradient shard",
        ["accept_gradient"],
        "added to the gradient of the local shard",
        "a DTensor gradient for each parameter",
    ),
    (
        "gradients that wait for a reduction",
        ["keep_unreduced", "has_unreduced"],
        "visible as `.grad` of the flat parameter",
        "stored internally, in the reduce dtype",
    ),
    (
        "detect changes by the user",
        ["accept_replacements", "refresh_from_module"],
        "raises an error for a replaced parameter",
        "uses the new tensors if they fit",
    ),
]
FLAT, EACH = ("engine/flat.py", "FlatLayout"), ("engine/per_param.py", "PerParameterLayout")


def verb_table(start: str) -> str:
    """Every method of the layout interface in a row, with links to both layouts and their code below.

    Raises:
        KeyError: a verb is not in the interface, so this table is out of date.
    """
    rows = []
    for title, verbs, flat, each in VERBS:
        contract = _links("engine/layout.py", "Layout", verbs, start)
        rows.append(
            f"<tr><th>{title}<br>{contract}</th><td>{_text(flat)}<br>{_links(*FLAT, verbs, start)}</td>"
            f"<td>{_text(each)}<br>{_links(*EACH, verbs, start)}</td></tr>"
        )
        rows.append(f'<tr class="verb-code"><td colspan="3">{_both(title, verbs, start)}</td></tr>')
    head = "<tr><th>operation</th><th>flat (FSDP1)</th><th>per parameter (FSDP2)</th></tr>"
    return directives._raw(f'<table class="verbs"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>')


def _text(text: str) -> str:
    from docs_build.markup import to_html

    return to_html(text, is_markdown=True).removeprefix("<p>").removesuffix("</p>")


def _links(name: str, owner: str, verbs: list[str], start: str) -> str:
    answers = [(verb, *_answer(name, owner, verb)) for verb in verbs]
    return " ".join(f'<a href="{address(start, *where)}"><code>{verb}</code></a>' for verb, *where in answers)


def _answer(name: str, owner: str, verb: str) -> tuple[str, str]:
    """The module and the function that implement a verb: the layout's, or the interface's default."""
    try:
        find_function(name, f"{owner}.{verb}")
    except KeyError:
        name, owner = "engine/layout.py", "Layout"
        find_function(name, f"{owner}.{verb}")
    return name, f"{owner}.{verb}"


def _both(title: str, verbs: list[str], start: str) -> str:
    cells = []
    for name, owner in (FLAT, EACH):
        cells.append("".join(fragments.fragment(*_answer(name, owner, verb), start) for verb in verbs))
    both = "".join(f"<div>{cell}</div>" for cell in cells)
    head = f"<summary>The code for &ldquo;{title}&rdquo;</summary>"
    return f'<details>{head}<div class="verb-both">{both}</div></details>'


# --- the path of one parameter ---

UNIT = "stage0.block1"
PARAMETER = f"{UNIT}.widen.weight"
WORDS = {
    ("AG", True): "its all-gather is issued",
    ("AG", False): "its unit waits for the all-gather",
    ("F", True): "it is registered on its module, and forward runs",
    ("F", False): "the forward of its unit is complete",
    ("FREE", True): "its unsharded memory is freed",
    ("B", True): "the gradient of its unit's output has arrived",
    ("B", False): "the gradient of the unit is complete",
    ("RS", True): "its gradient is packed, and the reduce-scatter is issued",
    ("RS", False): "this rank's shard of the mean gradient is stored",
    ("STEP", True): "the optimizer updates this rank's shard",
}


def call_path(start: str) -> str:
    """One parameter through one recorded step: each moment with the functions that ran, the innermost first."""
    run = find("fsdp2-full-pre-block-2")
    parts = []
    for kind, unit, begins, milliseconds, num_bytes, _, stack, held, _ in run["ranks"][0]["moments"]:
        if (unit != UNIT and kind != "STEP") or (kind, begins) not in WORDS:
            continue
        names = [one["name"] for one in run["units"]]
        state, phase, gradient, _ = held[names.index(UNIT)]
        # Functions that only record the event are not part of the path.
        running = [_frame(frame, start) for frame in stack if not only_records(*frame[:2])]
        frames = " &larr; ".join(running) or "<em>the training loop, outside of the package</em>"
        size = f", {num_bytes:,} bytes" if num_bytes else ""
        facts = f"{_state(state)}, phase {phase}, gradient of the shard {gradient:,} bytes"
        parts.append(
            f'<li><span class="path-when">{milliseconds:.2f} ms</span>'
            f"<div><strong>{kind}</strong> {WORDS[kind, begins]}{size}"
            f'<p class="path-frames">{frames}</p><p class="path-facts">before: {facts}</p></div></li>'
        )
    return directives._raw(f'<ol class="path">{"".join(parts)}</ol>')


def _state(letter: str) -> str:
    return {"S": "SHARDED", "G": "GATHERING", "U": "UNSHARDED"}[letter]


def _frame(frame: list[object], start: str) -> str:
    name, qualified, *_ = frame
    plain = str(qualified).split(".<locals>")[0]
    # An old recording may contain names that have changed.
    known = plain in {row.anchor for row in read_module(str(name)).rows}
    link = f'<a href="{address(start, str(name), plain if known else "")}"><code>{plain}</code></a>'
    # The function itself has returned; its hook is running.
    return f"hook registered by {link}" if "<locals>" in str(qualified) else link


def frame_address(frame: list[object], start: str) -> str:
    """The address of the row that contains a recorded function; of the file if the function no longer exists."""
    name, _, anchor, *_ = map(str, frame)
    if not (PACKAGE / name).exists():
        return ""
    return address(start, name, anchor if anchor in {row.anchor for row in read_module(name).rows} else "")
