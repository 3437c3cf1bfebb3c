"""Finds the private names of torch that the package uses, for the page "What minifsdp relies on".

``python -m docs_build.tests.private_names`` prints the table of that page. A private name is an import from a module of
torch, or an attribute of an object, with a leading underscore. Attributes that the package defines itself are not
counted, nor are those of Python.
"""

import ast

from docs_build.reading.order import all_modules, path_of

# Attributes of Python's modules and classes, and the module whose attributes are counted.
NOT_OF_TORCH = {"_exit", "_getframe", "_current_frames", "_replace", "_C"}


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(trees: list[ast.Module]) -> set[str]:
    """The names that the package defines: functions, classes, variables and attributes."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def private_names() -> dict[str, list[str]]:
    """Maps each private name of torch to the modules that use it, sorted."""
    trees = {name: ast.parse(path_of(name).read_text(encoding="utf-8")) for name in all_modules()}
    ours, found = own_names(list(trees.values())) | NOT_OF_TORCH, dict[str, set[str]]()
    for where, tree in trees.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [f"{node.module}.{one.name}" for one in node.names]
            elif isinstance(node, ast.Attribute) and node.attr not in ours:
                names = [node.attr]
            for name in filter(is_private, names):
                found.setdefault(name, set()).add(where)
    return {name: sorted(modules) for name, modules in sorted(found.items(), key=lambda one: one[0].lower())}


def table() -> str:
    """The names and their modules as a Markdown table."""
    rows = [
        f"| `{name}` | {', '.join(f'`{module}`' for module in modules)} |" for name, modules in private_names().items()
    ]
    return "\n".join(["| name | used in |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
