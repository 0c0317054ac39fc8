"""The map of the package: modules, the arrows between them, import cycles, private accesses across modules.

    python tests/module_map.py                  # a row for each package, then every cycle and every private access
    python tests/module_map.py --check          # exit status 1 when one of these is not in module_map_allowed.txt
    python tests/module_map.py --source DIR     # of another checkout

An arrow is an import of one module by another, in a function too. Imports that only type checkers see do not count. A
cycle is a set of modules that all lead to each other. A private access is one of these, for a name that begins with
exactly one underscore:

- ``x._name``, where x is not ``self``, ``cls`` or ``super()``, and the module itself defines no such name
- ``from module import _name``
- an import of the module ``package._name`` from outside of ``package``
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_name("module_map_allowed.txt")
PACKAGE = "pylongctx"
OWN = ("self", "cls")
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples
GENERATED = {"_ffi_generated"}


@dataclass
class Module:
    """A file: the modules of the package that it imports, and its private accesses as text."""

    name: str
    tree: ast.Module
    imports: set[str] = field(default_factory=set)
    private: list[str] = field(default_factory=list)


def read(source: Path) -> dict[str, Module]:
    """Return the modules of the package in a checkout, by name."""
    found = {}
    for file in sorted((source / PACKAGE).rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        if parts[-1] in GENERATED:
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, ast.parse(file.read_text(encoding="utf-8")))
    for module in found.values():
        survey(module, found)
    return found


# ---- one module ----


def survey(module: Module, modules: Mapping[str, Module]) -> None:
    """Note the imports and the private accesses of a module."""
    defined = set(defined_names(module.tree))
    for node in running(module.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for target, name in imported(node, modules):
                if target != module.name:
                    module.imports.add(target)
                if access := private_import(module.name, target, name):
                    module.private.append(access)
        elif isinstance(node, ast.Attribute) and foreign(node, defined):
            module.private.append(ast.unparse(node))


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only type checkers see."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (node for part in child.orelse for node in (part, *running(part)))
        else:
            yield child
            yield from running(child)


def is_private(name: str) -> bool:
    """Return whether a name begins with exactly one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def foreign(node: ast.Attribute, defined: set[str]) -> bool:
    """Return whether an attribute is a private name of something that is defined elsewhere."""
    return is_private(node.attr) and node.attr not in defined | PUBLIC and not own(node.value)


def own(value: ast.expr) -> bool:
    """Return whether an expression is self, cls or super()."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in OWN


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield what a module defines: functions, classes, variables, attributes of self, slots and fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node.value):
            yield node.attr


def imported(node: ast.Import | ast.ImportFrom, modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Yield the modules of the package that an import names, and the name that it takes of each, "" for none."""
    if isinstance(node, ast.ImportFrom) and node.level:
        raise ValueError(f"line {node.lineno}: a relative import; name the package")
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names if alias.name in modules)
        return
    for alias in node.names if node.module in modules else ():
        inner = f"{node.module}.{alias.name}"
        yield (inner, "") if inner in modules else (node.module, alias.name)


def private_import(importer: str, target: str, name: str) -> str:
    """Return the private name that an import takes, "" for none."""
    if is_private(name) and target != importer:
        return f"from {target} import {name}"
    *folder, last = target.split(".")
    inside = importer == ".".join(folder) or importer.startswith(".".join(folder) + ".")
    return f"import {target}" if is_private(last) and not inside else ""


# ---- all modules ----


def cycles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one module, by Tarjan's algorithm, largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in arrows[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            part = [stack.pop()]
            while part[-1] != name:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(sorted(part))

    for name in arrows:
        if name not in index:
            visit(name)
    return sorted(found, key=lambda part: (-len(part), part))


def package_of(name: str, modules: Mapping[str, Module]) -> str:
    """Return the folder of a module, ``pylongctx/`` for the files at the top."""
    parts = name.split(".")
    folder = parts if name in {other.rpartition(".")[0] for other in modules} else parts[:-1]
    return "/".join(folder[:2]) + "/"


def table(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield the lines of a table: a row for each package."""
    groups: dict[str, list[Module]] = defaultdict(list)
    for name, module in modules.items():
        groups[package_of(name, modules)].append(module)
    into = Counter(target for module in modules.values() for target in module.imports)
    yield f"{'package':24} {'modules':>8} {'lines':>7} {'arrows out':>11} {'arrows in':>10} {'private':>8}"
    for name, group in sorted(groups.items()):
        n_lines = sum(module.tree.body[-1].end_lineno or 0 for module in group if module.tree.body)
        out = sum(len(module.imports) for module in group)
        accesses = sum(len(module.private) for module in group)
        n_in = sum(into[module.name] for module in group)
        yield f"{name:24} {len(group):8} {n_lines:7} {out:11} {n_in:10} {accesses:8}"


def faults(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield every cycle and every private access as a line."""
    for part in cycles({name: sorted(module.imports) for name, module in modules.items()}):
        yield f"cycle: {' '.join(part)}"
    for name, module in modules.items():
        yield from (f"private: {name}: {access}" for access in module.private)


def allowed() -> list[str]:
    """Return the faults that may be there."""
    lines = ALLOWED.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT, help="a checkout (this one)")
    parser.add_argument("--check", action="store_true", help="fail when there is a cycle or a private access")
    args = parser.parse_args()
    modules = read(args.source)
    found = list(faults(modules))
    n_arrows = sum(len(module.imports) for module in modules.values())
    n_cycles = sum(line.startswith("cycle") for line in found)
    counts = f"{len(modules)} modules, {n_arrows} arrows, {n_cycles} cycles, {len(found) - n_cycles} private accesses"
    print("\n".join([*table(modules), "", counts, *found]))
    return int(args.check and bool(set(found) - set(allowed())))


if __name__ == "__main__":
    sys.exit(main())
