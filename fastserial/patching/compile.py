"""Patched copies of torch's functions, compiled from the installed source."""

from __future__ import annotations

import functools
import importlib
import linecache
import os
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fastserial.errors import PatchError

if TYPE_CHECKING:
    from fastserial.patching.patches import BuiltFunction, Patch

__all__ = ["Installation", "SwappedFunction", "prepare"]


@dataclass(frozen=True, slots=True)
class SwappedFunction:
    """One function of torch and its patched copy."""

    original: types.FunctionType
    patched: types.FunctionType

    @property
    def name(self) -> str:
        return self.original.__name__

    @property
    def full_name(self) -> str:
        return f"{self.original.__module__}.{self.name}"

    @property
    def current(self) -> object:
        """What torch's namespace has under the name."""
        return self.original.__globals__.get(self.name)


class Installation(NamedTuple):
    """A patch made ready. Whether it is in force is read from torch's namespace.

    Attributes:
        patch: the name of the patch.
        exact: it is made for the version of torch that is imported.
        namespace: that of the patched module.
        functions: what to swap.
    """

    patch: str
    exact: bool
    namespace: dict[str, object]
    functions: tuple[SwappedFunction, ...]

    def replaced(self) -> tuple[SwappedFunction, ...]:
        return tuple(item for item in self.functions if item.current is not item.patched)

    def in_force(self) -> bool:
        return len(self.replaced()) < len(self.functions)


def prepare(version: str) -> Installation:
    """Find the patch that fits and compile its functions; torch is not touched.

    Raises:
        PatchError: there is none for this version, or the installed torch is not as released.
    """
    # here, so that `import fastserial` alone (every process, with FASTSERIAL=1) costs little
    from fastserial.patching.patches import MODULE, candidates

    module = importlib.import_module(MODULE)
    source = _source(module)
    why: str | None = None
    for patch in candidates(version):
        exact = patch.is_for(version)
        try:
            functions = _compiled(patch, module, source)
        except PatchError as error:
            # the patch made for this version has the most specific reason
            why = why or (str(error) if exact else None)
        else:
            return Installation(patch.name, exact, vars(module), functions)
    if why is None:
        raise PatchError(f"fastserial has no patch for torch {version}")
    raise PatchError(f"torch {version} is not as released: {why}")


def _source(module: types.ModuleType) -> str:
    loader: Any = getattr(module.__spec__, "loader", None)
    try:
        text = loader.get_source(module.__name__)
    except (AttributeError, ImportError, OSError) as error:
        raise PatchError(f"the source of {module.__name__} cannot be read: {error}") from error
    if text is None:
        raise PatchError(f"the source of {module.__name__} is not installed")
    return str(text)


def _compiled(patch: Patch, module: types.ModuleType, source: str) -> tuple[SwappedFunction, ...]:
    from fastserial.patching.patches import build, split_lines

    built = build(source, patch)
    for function in built.functions:
        if function.problem is not None:
            raise PatchError(function.problem)
    # below torch's own path, because torch.compile decides by path what it must not trace
    stem, extension = os.path.splitext(str(module.__file__))
    file = f"{stem}.fastserial-{patch.name}{extension}"
    swapped = []
    for function in built.functions:
        original = _running(module, function)
        swapped.append(SwappedFunction(original, _patched(function, original, file)))
    # for tracebacks; no modification time: linecache then never looks for the file on disk
    linecache.cache[file] = (len(built.text), None, split_lines(built.text), file)
    return tuple(swapped)


def _running(module: types.ModuleType, built: BuiltFunction) -> types.FunctionType:
    """Return torch's function, if it is the one in the installed file."""
    function = vars(module).get(built.patch.name)
    if (
        not isinstance(function, types.FunctionType)
        or function.__globals__ is not vars(module)
        or function.__code__.co_firstlineno != built.original_line
        or function.__code__.co_filename != module.__file__
    ):
        raise PatchError(
            f"{module.__name__}.{built.patch.name} is not the function in its source file: other "
            "code replaced it, or the file changed after the import"
        )
    return function


def _patched(built: BuiltFunction, original: types.FunctionType, file: str) -> types.FunctionType:
    """Return a copy of a function that runs the built code.

    Only the code is new: defaults, annotations and decorators are not evaluated a second time.
    """
    flags = original.__code__.co_flags & annotations.compiler_flag  # of its `from __future__`
    text = "\n" * (built.line - 1) + built.text  # so its lines have the numbers of the built file
    outer = compile(text, file, "exec", flags=flags, dont_inherit=True)
    code = next(
        constant
        for constant in outer.co_consts
        if isinstance(constant, types.CodeType) and constant.co_name == original.__name__
    )
    patched = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__
    )
    patched.__kwdefaults__ = original.__kwdefaults__
    functools.update_wrapper(patched, original)
    del patched.__wrapped__  # type: ignore[attr-defined]  # `inspect` is to show ours
    return patched
