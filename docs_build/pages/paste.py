"""The box on the page "Troubleshoot": the patterns with which its script searches pasted text.

There are two sources, and no separate list that could become outdated:

* each message of the package, from its template in ``messages.toml``: the fixed words between braces, in their order;
* each entry of ``docs/troubleshoot.md`` that quotes an error of torch, in a line in double braces below its heading::

      {{ says CUDA out of memory | HIP out of memory }}            either of these means this entry
      {{ follows Watchdog caught collective operation timeout }}   so does this, but it follows from another error
      {{ launcher ChildFailedError }}                              this is the launcher's report of any error

An entry can also have questions, in the words of a user who has no message::

      {{ asked my training hangs | stuck at the first step }}

An ellipsis in a quoted text stands for the variable parts. The script (``docs/assets/js/troubles.js``) ignores white
space, quotes and case, so it recognises a message even if a terminal has wrapped it. The search of all pages
(``search.js``) also calls it, because a search for words would also find the message's requirement.
"""

import json
import re
from dataclasses import asdict, dataclass
from html import escape
from string import Formatter

from markupsafe import Markup

from docs_build.reading.messages import Message, messages
from docs_build.reading.order import ROOT
from minifsdp.engine.messages import texts

PAGE = ROOT / "docs" / "troubleshoot.md"
KNOWN = "assets/troubles/known.js"  # path of the output of `script`
ENTRY = re.compile(r"^### (?P<title>.+?) \{ #(?P<id>E-[\w-]+)[^}]*\}$(?P<body>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ASKED = re.compile(r"^\{\{ asked (.*) \}\}$", re.MULTILINE)
QUOTED = re.compile(r"^\{\{ (?P<verb>says|follows|launcher) (?P<texts>.*) \}\}$", re.MULTILINE)

# Messages with lines of variable content, and the catalogue's entries for these lines. A single line is found as well.
LINES = {
    "initial-weights-differ": ["rank-differs"],
    "not-finite": ["parameter-not-finite", "output-not-finite", "gradient-not-finite"],
    "optimizer-parameters": ["own-count", "own-names", "foreign-parameters"],
}
NOT_IN_STATE_DICTS = {name for names in LINES.values() for name in names}


@dataclass(frozen=True)
class Known:
    """An entry that pasted text can match.

    Attributes:
        id: its anchor on the page.
        title: its heading.
        api: the source of the error, ``minifsdp`` or ``PyTorch``; ``Symptom`` if there is no message.
        kind: ``error``; ``warning``, after which a program continues; ``follows``, mostly caused by another error;
            ``launcher``, always caused by another error.
        wholes: texts that match, each as its fixed parts in order.
        lines: the same for single lines of the message, which are used if no text in ``wholes`` matches.
        asked: questions of users, which are used if no message matches.
    """

    id: str
    title: str
    api: str
    kind: str
    wholes: list[list[str]]
    lines: list[list[str]]
    asked: list[str]


def known() -> list[Known]:
    """All entries that can be found, those of the page first."""
    return [*of_the_page(), *(_of_message(message) for message in messages())]


def of_the_page() -> list[Known]:
    """The entries of the page that quote errors of torch or have questions."""
    found = []
    for entry in ENTRY.finditer(PAGE.read_text(encoding="utf-8")):
        quotes = list(QUOTED.finditer(entry["body"]))
        asked = [question for line in ASKED.findall(entry["body"]) for question in _texts(line)]
        if quotes or asked:
            kind = next((quote["verb"] for quote in quotes if quote["verb"] != "says"), "error")
            wholes = [text.split("…") for quote in quotes for text in _texts(quote["texts"])]
            title, api = re.sub(r"[\\`]", "", entry["title"]), "PyTorch" if quotes else "Symptom"
            found.append(Known(entry["id"], title, api, kind, wholes, [], asked))
    return found


def _of_message(message: Message) -> Known:
    name = message.id.removeprefix("E-")
    details = texts()["detail"]
    lines = [_pieces(details[line]) for line in LINES.get(name, [])]
    if name == "state-dict-refused":
        others = [line for line in details if line not in NOT_IN_STATE_DICTS and not line.startswith("explain-")]
        lines = [_pieces(details[line]) for line in others]
    whole = _pieces(texts()["message"][name])
    # The message consists only of its lines.
    wholes, lines = ([whole], lines) if whole else (lines, [])
    kind = "warning" if message.kind.endswith("Warning") else "error"
    return Known(message.id, message.text, "minifsdp", kind, wholes, lines, [])


def _pieces(template: str) -> list[str]:
    """The fixed words of a template, between the variable parts."""
    return [words for words, _, _, _ in Formatter().parse(template) if words.strip()]


def _texts(quotes: str) -> list[str]:
    return [text.strip() for text in quotes.split(" | ")]


def quoted(rest: str, *, is_first: bool) -> str:
    """A line of an entry: the words by which the box, the search and a reader recognise the message."""
    codes = ", ".join(f"<code>{escape(text, quote=False)}</code>" for text in _texts(rest))
    why = "" if is_first else "This error usually follows from another error, so look for that error first. "
    return Markup(f'<p class="quoted">{why}Read as {codes}</p>')


def questions(rest: str) -> str:
    """A line of an entry: the questions by which the box, the search and a reader recognise it."""
    return Markup(f'<p class="quoted">Also asked as: {escape("; ".join(_texts(rest)), quote=False)}.</p>')


def script() -> str:
    """The entries as a script that sets a global variable, because a page from a disk cannot fetch other files."""
    facts = json.dumps([asdict(one) for one in known()], ensure_ascii=False, separators=(",", ":"))
    return f"var minifsdpKnown = {facts};\n"
