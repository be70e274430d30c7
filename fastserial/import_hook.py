"""Call a function once a module has been imported, without importing anything for it.

A process that switches fastserial on by the environment runs this at its start, whether it will
use torch or not: so nothing is imported here that the interpreter has not imported already.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` itself takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Callback = Callable[[ModuleType], None]


class _Finder:
    """Finds nothing itself: makes the loader of an awaited module call back when it is done.

    It stays in `sys.meta_path`: taking it out would let an import in another thread, which goes
    through that list, miss the finder behind it.
    """

    def __init__(self) -> None:
        self.awaited: dict[str, list[Callback]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in behind:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._attend(spec)
                return spec
        return None

    def _attend(self, spec: ModuleSpec) -> None:
        """Let the loader, a copy of it, call back after it has run the module."""
        from copy import copy

        loader = copy(spec.loader)  # one loader may serve many modules, as that of a zip file
        if loader is None or isinstance(loader, type):
            return
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # restore the loader
            run(module)
            for callback in self.awaited.pop(spec.name, ()):
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        spec.loader = loader


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback` with the module `name` when it has been imported: at once if it was.

    Another thread that imports the module has it only once the callback has returned. An error in
    the callback makes the import fail.
    """
    if name in sys.modules:
        from importlib import import_module

        callback(import_module(name))  # waits for a thread that is still at it
        return
    _finder.awaited.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
