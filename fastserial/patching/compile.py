"""Patched copies of torch's functions, compiled from the installed source."""

from __future__ import annotations
import __future__

import functools
import importlib.util
import linecache
import operator
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fastserial.errors import PatchError

if TYPE_CHECKING:
    from fastserial.patching.build import BuiltFunction, BuiltModule
    from fastserial.patching.patch_file import Patch

__all__ = ["Installation", "SwappedFunction", "prepare"]


_FUTURE_FLAGS = functools.reduce(
    operator.or_,
    (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names),
)


@dataclass(frozen=True, slots=True)
class SwappedFunction:
    """One function of torch and its patched copy."""

    module: types.ModuleType
    name: str
    original: types.FunctionType
    patched: types.FunctionType

    @property
    def full_name(self) -> str:
        return f"{self.module.__name__}.{self.name}"

    @property
    def current(self) -> object:
        return vars(self.module).get(self.name)


class Installation(NamedTuple):
    """A patch made ready. Whether it is in force is read from torch's namespace."""

    patch: Patch
    exact: bool
    functions: tuple[SwappedFunction, ...]

    def replaced(self) -> tuple[SwappedFunction, ...]:
        return tuple(item for item in self.functions if item.current is not item.patched)

    def in_force(self) -> bool:
        return len(self.replaced()) < len(self.functions)


def prepare(version: str) -> Installation:
    """Find the patch that fits and compile its functions; torch is not touched."""
    # here, so that `import fastserial` alone (every process, with FASTSERIAL=1) costs little
    from fastserial.patching.patch_file import shipped_candidates

    sources = functools.lru_cache(maxsize=None)(_source)
    why: str | None = None
    for patch, exact in shipped_candidates(version):
        try:
            return Installation(patch, exact, tuple(_compiled(patch, sources)))
        except PatchError as error:
            # the reason of the patch made for this version says most
            why = why or (str(error) if exact else None)
    if why is None:
        raise PatchError(f"fastserial has no patch for torch {version}")
    raise PatchError(f"torch {version} is not as released: {why}")


def _source(module: types.ModuleType) -> str:
    spec, path = module.__spec__, getattr(module, "__file__", None)
    get_source = getattr(spec.loader if spec else None, "get_source", None)
    try:
        text = get_source(module.__name__) if get_source else None
    except (ImportError, OSError) as error:
        raise PatchError(f"the source of {module.__name__} cannot be read: {error}") from error
    if text is None or path is None:
        raise PatchError(f"the source of {module.__name__} is not installed")
    return str(text)


def _compiled(patch: Patch, source: Callable[[types.ModuleType], str]) -> Iterator[SwappedFunction]:
    from fastserial.patching.build import build_module, check_hashes

    for module_name in patch.modules:
        module = importlib.import_module(module_name)
        built = build_module(source(module), patch, module_name)
        if (reason := check_hashes(built)) is not None:
            raise PatchError(reason)
        file = _built_file(module, patch)
        for function in built.functions:
            original = _running(module, function)
            yield SwappedFunction(
                module, function.patch.name, original, _patched(function, original, file)
            )
        _show_lines(file, built)


def _built_file(module: types.ModuleType, patch: Patch) -> str:
    """Return the name of the built copy in tracebacks.

    Below torch's own path, because torch.compile decides by path what it must not trace.
    """
    stem, extension = os.path.splitext(str(module.__file__))
    return f"{stem}.fastserial-{patch.name}{extension}"


def _show_lines(file: str, built: BuiltModule) -> None:
    from fastserial.patching.build import split_lines

    # no modification time: linecache then never looks for the file on disk
    linecache.cache[file] = (len(built.text), None, split_lines(built.text), file)


def _running(module: types.ModuleType, built: BuiltFunction) -> types.FunctionType:
    """Return torch's function, if it is the one in the installed file."""
    function = vars(module).get(built.patch.name)
    if (
        not isinstance(function, types.FunctionType)
        or function.__globals__ is not vars(module)
        or function.__module__ != module.__name__
        or function.__code__.co_firstlineno != built.original_line
        or not _same_file(function.__code__.co_filename, str(module.__file__))
    ):
        raise PatchError(
            f"{built.patch.full_name} is not the function in its source file: other code replaced "
            "it, or the file changed after the import"
        )
    return function


def _same_file(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _patched(built: BuiltFunction, original: types.FunctionType, file: str) -> types.FunctionType:
    """Return a copy of a function that runs the built code.

    Only the code is new: defaults, annotations and decorators are not evaluated a second time.
    """
    flags = original.__code__.co_flags & _FUTURE_FLAGS
    text = "\n" * (built.line - 1) + built.text  # so its lines have the numbers of the built file
    outer = compile(text, file, "exec", flags=flags, dont_inherit=True)
    codes = [
        constant
        for constant in outer.co_consts
        if isinstance(constant, types.CodeType) and constant.co_name == built.patch.name
    ]
    if len(codes) != 1 or codes[0].co_freevars:
        raise PatchError(f"{built.patch.full_name} does not compile to one function")
    patched = types.FunctionType(
        codes[0], original.__globals__, original.__name__, original.__defaults__
    )
    # `__annotate__` and `__type_params__` are of newer Pythons
    lazy = hasattr(original, "__annotate__")
    for name in (
        "__kwdefaults__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__annotate__" if lazy else "__annotations__",
        "__type_params__",
    ):
        if hasattr(original, name):
            setattr(patched, name, getattr(original, name))
    vars(patched).update(vars(original))
    return patched
