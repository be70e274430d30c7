"""Build the patched text of a module of torch, verify it, strip it again.

A patch names places in torch's syntax tree and the lines we insert there; torch's own text comes
from the installed file. This module works on text only: it imports nothing of torch.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fastserial.errors import PatchError
from fastserial.patching.patch_file import Anchor, FunctionPatch, Match, Patch

if TYPE_CHECKING:
    from symtable import SymbolTable

__all__ = [
    "BuiltFunction",
    "BuiltModule",
    "build_module",
    "check_hashes",
    "digest",
    "split_lines",
    "strip",
    "unknown_names",
]

BEGIN = "# >>> fastserial"
END = "# <<< fastserial"


_Function = ast.FunctionDef | ast.AsyncFunctionDef


class BuiltFunction(NamedTuple):
    """One function in a built module.

    Attributes:
        patch: the edits that made it.
        original: its text as installed, decorators included.
        text: its text with our lines.
        original_line: the first line of `original` in the installed file.
        line: the first line of `text` in the built file.
    """

    patch: FunctionPatch
    original: str
    text: str
    original_line: int
    line: int


class BuiltModule(NamedTuple):
    """A module's whole text with our lines, and its edited functions."""

    module: str
    original: str
    text: str
    functions: tuple[BuiltFunction, ...]


def digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def build_module(text: str, patch: Patch, module: str) -> BuiltModule:
    """Insert a patch's lines into a module's text, whatever its hashes.

    Raises:
        PatchError: a function is missing, or an anchor does not match exactly one place.
    """
    if BEGIN in text or END in text:
        raise PatchError(f"{module} already holds lines of fastserial")
    lines = split_lines(text)
    insertions: dict[int, list[str]] = {}
    spans: list[tuple[FunctionPatch, int, int]] = []
    for function in patch.functions:
        if function.module != module:
            continue
        try:
            first, node = _find_function(lines, function.name)
            end = first + (node.end_lineno or 0)
            for edit in function.edits:
                at, indent = _locate(node, edit.anchor, lines[first:end])
                insertions.setdefault(first + at, []).extend(_marked(edit.insert, indent))
        except PatchError as error:
            raise PatchError(f"{function.full_name}: {error}") from None
        spans.append((function, first, end))
    built, new_index = _spliced(lines, insertions)
    functions = tuple(
        BuiltFunction(
            function,
            "".join(lines[first:end]),
            "".join(built[new_index[first] : new_index[end]]),
            first + 1,
            new_index[first] + 1,
        )
        for function, first, end in spans
    )
    return BuiltModule(module, text, "".join(built), functions)


def check_hashes(built: BuiltModule) -> str | None:
    """Return why a built module is not the one its patch was made for, or None."""
    for function in built.functions:
        name = function.patch.full_name
        expected = function.patch.hashes.get(digest(function.original))
        if expected is None:
            return f"the source of {name} is not the one this patch was made for"
        if expected != digest(function.text):
            return f"the built copy of {name} is not the one this patch was tested with"
    return None


def unknown_names(text: str, function: FunctionPatch) -> str | None:
    """Return why the inserted lines cannot run in a function of a module's text, or None.

    Lines that only read their names take their place: then Python's own symbol table says what
    these are there, and no assignment of ours hides that a variable of torch's is gone.

    Raises:
        PatchError: as `build_module`.
    """
    import symtable  # here: `install()` does without

    try:
        wanted = [_names_of_torch(edit.insert) for edit in function.edits]
        edits = (
            edit._replace(insert=f"[{', '.join(sorted(names))}]")
            for edit, names in zip(function.edits, wanted, strict=True)
        )
        alone = Patch("", "", (function._replace(edits=tuple(edits)),))
        built = build_module(text, alone, function.module).text
        top = symtable.symtable(built, function.module, "exec")
    except SyntaxError as error:
        return f"the inserted lines are no valid Python there: {error}"
    made = (one for one in top.get_symbols() if one.is_assigned() or one.is_imported())
    known = {*dir(builtins), *(one.get_name() for one in made)}
    unknown = {
        symbol.get_name()
        for body in top.lookup(function.name).get_namespaces()
        for table in _tables(body)
        for symbol in table.get_symbols()
        if symbol.is_global() and not symbol.is_declared_global()
    }
    if missing := sorted(set().union(*wanted) & unknown - known):
        return (
            f"the inserted lines name {', '.join(missing)}, which the function does not know: "
            "write what torch calls it now (names of our own begin with `_fastserial`)"
        )
    return None


def _names_of_torch(insert: str) -> set[str]:
    """Return the names that inserted lines read or give a value, but for their own."""
    nodes = list(ast.walk(ast.parse(f"def _():\n{textwrap.indent(insert, ' ')}")))
    targets = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for one in targets for node in ast.walk(one) if isinstance(node, ast.Name)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    return {name for name in names if not name.startswith("_fastserial")}


def _tables(table: SymbolTable) -> Iterator[SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from _tables(inner)


def strip(text: str) -> str:
    """Return a built text without our lines.

    Raises:
        PatchError: the markers around our lines do not pair.
    """
    kept: list[str] = []
    ours = False
    for line in split_lines(text):
        if (mark := line.strip()) in (BEGIN, END):
            if ours == (mark == BEGIN):
                raise PatchError("the markers around fastserial's lines do not pair")
            ours = not ours
        elif not ours:
            kept.append(line)
    if ours:
        raise PatchError("the markers around fastserial's lines do not pair")
    return "".join(kept)


def split_lines(text: str) -> list[str]:
    """Return the lines of a source text, ends included, as Python's parser counts them."""
    # str.splitlines also splits on form feeds and the like, where the parser counts no line
    return io.StringIO(text).readlines()


def _find_function(lines: list[str], name: str) -> tuple[int, _Function]:
    """Return the index of a top-level function's first line, and its tree counted from there.

    Only its own lines are parsed: a whole file of torch costs ten times as much.
    """
    heads = (f"def {name}(", f"async def {name}(")
    starts = [index for index, line in enumerate(lines) if line.startswith(heads)]
    if len(starts) != 1:
        raise PatchError(f"it is defined {len(starts)} times, not once")
    first = starts[0]
    while first and lines[first - 1].startswith("@"):
        first -= 1
    if first and lines[first - 1].startswith(")"):
        raise PatchError("it has a decorator over several lines")
    ends = [i for i in range(starts[0] + 1, len(lines)) if lines[i][0] not in " \t\r\n#)"]
    for end in [*ends, len(lines)]:
        try:
            found = ast.parse("".join(lines[first:end])).body
        except (SyntaxError, ValueError):
            continue  # that line was inside a string or brackets
        if len(found) == 1 and isinstance(found[0], _Function):
            return first, found[0]
        break
    raise PatchError("its source cannot be parsed")


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _locate(function: _Function, anchor: Anchor, lines: list[str]) -> tuple[int, str]:
    """Return the index in the function's lines to insert before, and the indentation there."""
    blocks = [function.body]
    for step in anchor.inside:
        blocks = list(_blocks(_the_one(blocks, step)))
    if anchor.match is not None:
        node = _the_one(blocks, anchor.match)
    elif len(blocks) == 1:
        node, anchor = _start(blocks[0])
    else:
        raise PatchError("`start` needs a statement with one block")
    first = _first_line(node) - 1
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    if len(indent.encode()) != node.col_offset:
        raise PatchError("the anchor shares its line with another statement")
    if anchor.place != "after":
        return first, indent
    end = node.end_lineno or 0
    rest = lines[end - 1].encode()[node.end_col_offset :]
    if not rest.endswith(b"\n") or (rest.strip() and not rest.strip().startswith(b"#")):
        raise PatchError("the anchor shares its line with another statement")
    return end, indent


def _start(block: list[ast.stmt]) -> tuple[ast.stmt, Anchor]:
    first = block[0]
    docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first, Anchor("after" if docstring else "before")


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    holders: list[ast.AST] = [
        statement,
        *getattr(statement, "handlers", ()),
        *getattr(statement, "cases", ()),
    ]
    for holder in holders:
        for field in ("body", "orelse", "finalbody"):
            if block := getattr(holder, field, None):
                yield block


def _the_one(blocks: list[list[ast.stmt]], match: Match) -> ast.stmt:
    found = [node for block in blocks for node in block if _matches(node, match, block)]
    if len(found) != 1:
        raise PatchError(f"{len(found)} statements match the anchor {match}, not one")
    return found[0]


def _matches(node: ast.stmt, match: Match, block: list[ast.stmt]) -> bool:
    return (
        type(node).__name__ == match.statement
        and (not match.last or node is block[-1])
        and (match.name is None or getattr(node, "name", None) == match.name)
        and (match.calls is None or match.calls in _calls(node))
    )


def _calls(node: ast.stmt) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            if isinstance(part.func, ast.Attribute):
                yield part.func.attr
            elif isinstance(part.func, ast.Name):
                yield part.func.id


def _marked(insert: str, indent: str) -> list[str]:
    block = f"{BEGIN}\n{insert.strip()}\n{END}\n"
    return split_lines(textwrap.indent(block, indent))


def _spliced(lines: list[str], insertions: Mapping[int, list[str]]) -> tuple[list[str], list[int]]:
    """Return the lines with the insertions, and the new index of each line and of the end."""
    built: list[str] = []
    new_index: list[int] = []
    for index, line in enumerate(lines):
        built.extend(insertions.get(index, ()))
        new_index.append(len(built))
        built.append(line)
    built.extend(insertions.get(len(lines), ()))
    return built, [*new_index, len(built)]
