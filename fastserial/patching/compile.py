"""Patched copies of torch's functions, compiled from the installed source."""

from __future__ import annotations

import functools
import importlib
import linecache
import os
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from fastserial.errors import PatchError

if TYPE_CHECKING:
    from fastserial.patching.patches import BuiltFunction


class Swap(NamedTuple):
    """A name in a module, torch's object for it, and ours that takes its place."""

    namespace: dict[str, Any]
    name: str
    original: Any
    ours: Any

    @property
    def full_name(self) -> str:
        return f"{self.namespace['__name__']}.{self.name}"

    @property
    def current(self) -> object:
        """What the module has under the name."""
        return self.namespace.get(self.name)

    @property
    def in_force(self) -> bool:
        return self.current is self.ours


class Installation(NamedTuple):
    """A patch made ready. Whether it is in force is read from torch's namespace.

    Attributes:
        patch: the name of the patch.
        exact: it is made for the version of torch that is imported.
        swaps: the functions.
    """

    patch: str
    exact: bool
    swaps: tuple[Swap, ...]

    @property
    def in_force(self) -> bool:
        """Whether torch runs one of our functions, at least."""
        return any(swap.in_force for swap in self.swaps)


def prepare(version: str) -> Installation:
    """Find the patch that fits and compile its functions; torch is not touched.

    Raises:
        PatchError: there is none for this version, or the installed torch is not as released.
    """
    # here, so that `import fastserial` alone (every process, with FASTSERIAL=1) costs little
    from fastserial.patching.patches import MODULE, build, choose, split_lines

    module = importlib.import_module(MODULE)
    source = _source(module)
    patch, problems = choose(source, version)
    exact = patch.is_for(version)
    for problem in filter(None, problems.values()):
        if not exact:
            raise PatchError(f"fastserial has no patch for torch {version}")
        raise PatchError(f"torch {version} is not as released: {problem}")
    text, functions = build(source, patch)
    # below torch's own path, because torch.compile decides by path what it must not trace
    stem, extension = os.path.splitext(str(module.__file__))
    file = f"{stem}.fastserial-{patch.name}{extension}"
    swaps = []
    for function in functions:
        original = _running(module, function)
        ours = _patched(function, original, file)
        swaps.append(Swap(vars(module), function.name, original, ours))
    # for tracebacks; no modification time: linecache then never looks for the file on disk
    linecache.cache[file] = (len(text), None, split_lines(text), file)
    return Installation(patch.name, exact, tuple(swaps))


def _source(module: types.ModuleType) -> str:
    loader: Any = getattr(module.__spec__, "loader", None)
    try:
        text = loader.get_source(module.__name__)
    except (AttributeError, ImportError, OSError) as error:
        raise PatchError(f"the source of {module.__name__} cannot be read: {error}") from error
    if text is None:
        raise PatchError(f"the source of {module.__name__} is not installed")
    return str(text)


def _running(module: types.ModuleType, built: BuiltFunction) -> types.FunctionType:
    """Return torch's function, if it is the one in the installed file."""
    function = vars(module).get(built.name)
    if (
        not isinstance(function, types.FunctionType)
        or function.__globals__ is not vars(module)
        or function.__code__.co_firstlineno != built.original_line
        or function.__code__.co_filename != module.__file__
    ):
        raise PatchError(
            f"{module.__name__}.{built.name} is not the function in its source file: other "
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
