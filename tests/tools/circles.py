#!/usr/bin/env python3
"""Find circles: files of a crate that import each other, directly or through others (`make lint` runs it).

    tests/tools/circles.py [--most N] [--largest N]

Reads the `use` lines of all crates. A file may import from the files of its own folder (`foo.rs` from `foo/`): `foo.rs` is the face of that
folder. Files of tests are left out. Exits with 1 if there are more circles than `--most`, or a circle has more files than `--largest`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USE = re.compile(r"^\s*(?:pub(?:\([a-z ]+\))? )?use ((?:crate|super|self)::[^;]+);", re.M)

Module = tuple[str, ...]


def modules(source: Path) -> dict[Module, Path]:
    """The files of a crate by the path of their module; those of tests are left out."""
    found = {}
    for file in sorted(source.rglob("*.rs")):
        name = file.relative_to(source).with_suffix("").parts
        if "tests" in name or name[0] == "bin":
            continue
        found[() if name in (("lib",), ("main",)) else name] = file
    return found


def paths(tree: str) -> Iterator[list[str]]:
    """The paths that a tree of a `use` names: `a::{b, c::d}` has a::b and a::c::d."""
    head, brace, rest = tree.strip().partition("{")
    before = [part.strip() for part in head.split("::") if part.strip()]
    if not brace:
        yield [part.split(" as ")[0] for part in before]
        return
    depth, part = 0, ""
    for letter in rest[: rest.rindex("}")] + ",":
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            if part.strip():
                for path in paths(part):
                    yield before + path
            part = ""
        else:
            part += letter


def arrows(known: dict[Module, Path]) -> dict[Module, set[Module]]:
    """Which modules each module imports from."""
    found: dict[Module, set[Module]] = {module: set() for module in known}
    for module, file in known.items():
        text = re.sub(r"//[^\n]*", "", file.read_text())
        for tree in USE.findall(text):
            for path in paths(tree):
                at = module
                if path[0] == "crate":
                    at = ()
                while path and path[0] in ("crate", "super", "self"):
                    at = at[:-1] if path[0] == "super" else at
                    path = path[1:]
                to = max((candidate for size in range(len(path) + 1) if (candidate := (*at, *path[:size])) in known), key=len, default=None)
                if to is not None and to != module and to[: len(module)] != module:
                    found[module].add(to)
    return found


def circles(graph: dict[Module, set[Module]]) -> list[list[Module]]:
    """The strongly connected components of more than one module (Tarjan), the largest first."""
    number: dict[Module, int] = {}
    low: dict[Module, int] = {}
    stack: list[Module] = []
    found = []

    def visit(module: Module) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for to in graph[module]:
            if to not in number:
                visit(to)
                low[module] = min(low[module], low[to])
            elif to in stack:
                low[module] = min(low[module], number[to])
        if low[module] == number[module]:
            at = stack.index(module)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(sorted(component))

    for module in graph:
        if module not in number:
            visit(module)
    return sorted(found, key=len, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="circles that are allowed")
    parser.add_argument("--largest", type=int, help="files of a circle that are allowed")
    args = parser.parse_args()
    sys.setrecursionlimit(10_000)
    count = largest = 0
    for source in [ROOT / "src", *sorted((ROOT / "crates").glob("*/src"))]:
        graph = arrows(modules(source))
        for circle in circles(graph):
            count, largest = count + 1, max(largest, len(circle))
            print(f"{source.relative_to(ROOT)}: {', '.join('/'.join(module) or 'lib' for module in circle)}")
            for module in circle:
                for to in sorted(graph[module] & set(circle)):
                    print(f"    {'/'.join(module) or 'lib'} imports {'/'.join(to) or 'lib'}")
    print(f"{count} circles, the largest of {largest} files")
    if (args.most is not None and count > args.most) or (args.largest is not None and largest > args.largest):
        sys.exit(1)


if __name__ == "__main__":
    main()
