"""What the doctor's facts mean: warnings, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator

from fastserial.config import Config
from fastserial.diagnosis.facts import Diagnosis, Finding
from fastserial.diagnosis.folder import Folder
from fastserial.engines.gds.memory import missing
from fastserial.memory.huge_pages import SWITCH
from fastserial.reports import format_bytes

__all__ = ["judge"]

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs")
_LITTLE_SPACE = 1 << 30


def judge(found: Diagnosis, options: Config) -> Iterator[Finding]:
    """Yield the findings, the gravest first."""
    yield from _about_torch(found)
    yield from _about_engine(found)
    yield from _about_options(found, options)
    yield from _about_memory(found)
    if found.folder is not None:
        yield from _about_folder(found.folder, options)
    yield from _about_boot(found)


def _about_torch(found: Diagnosis) -> Iterator[Finding]:
    torch = found.torch
    if torch.version is None:
        yield Finding(torch.reason or "there is no torch", "pip install torch", True)
    elif torch.reason is not None:
        yield Finding(
            f"torch.save and torch.load stay stock: {torch.reason}",
            "`fastserial patches check` shows which functions differ from the release: undo the "
            "changes in torch, if there are any; else install a newer fastserial, or a torch that "
            "`fastserial patches list` names",
            True,
        )
    elif not torch.exact:
        yield Finding(
            f"no patch is made for torch {torch.version}; {torch.patch} fits it function by "
            "function and is used",
            "install a newer fastserial",
            False,
        )
    if torch.replaced:
        yield Finding(
            f"other code replaced {', '.join(torch.replaced)}",
            "call fastserial.install() after what replaces them",
            True,
        )


def _about_engine(found: Diagnosis) -> Iterator[Finding]:
    status = {engine.name: engine for engine in found.engines}.get(found.engine)
    fix = f"change {found.engine_source}; engine `threads` runs everywhere"
    if status is None or status.missing is not None:
        why = status.missing if status is not None else f"there is no engine {found.engine!r}"
        yield Finding(f"saves will fail: {why}", fix, True, fails=True)


def _about_options(found: Diagnosis, options: Config) -> Iterator[Finding]:
    if found.options_problem is not None:
        yield Finding(
            f"saves will fail: {found.options_problem}",
            "correct or unset the variable",
            True,
            fails=True,
        )
    if found.unknown_variables:
        known = ", ".join(f"FASTSERIAL_{option.name.upper()}" for option in found.options)
        yield Finding(
            f"{', '.join(found.unknown_variables)}: no option of this name",
            f"there are: {known}",
            False,
        )
    why = missing(options.transfer) if found.torch.version is not None else None
    if why is not None:
        yield Finding(
            f"transfer {options.transfer!r} is not available: {why}",
            'set transfer to "auto"',
            False,
        )
    if options.direct is False:
        yield Finding("direct I/O is switched off", 'set direct to "auto"', True)
    if not options.durable:
        yield Finding(
            "saves are not synced: a power failure can lose the newest ones",
            "set durable to True",
            False,
        )


def _about_memory(found: Diagnosis) -> Iterator[Finding]:
    if found.small_pages is not None:
        yield Finding(
            f"no huge pages for buffers ({found.small_pages}): direct I/O takes up to half as long "
            "again",
            f"as root: echo madvise > {SWITCH}; and start the program where they are not switched "
            "off for it",
            True,
        )


def _about_folder(folder: Folder, options: Config) -> Iterator[Finding]:
    if folder.problem is not None:
        yield Finding(
            f"no file can be made in {folder.path}: {folder.problem}",
            "check the folder's owner, mode and mount options, or save elsewhere",
            True,
            fails=True,
        )
        return
    in_memory = folder.file_system in _IN_MEMORY
    if in_memory:
        yield Finding(
            f"{folder.file_system} keeps files in memory: they are lost at power-off",
            "save to a disk what has to last",
            False,
        )
    elif folder.direct_problem is not None or folder.alignment is None:
        why = folder.direct_problem or "the kernel says this file system has none"
        yield Finding(
            f"no direct I/O on {folder.file_system} ({why}): saves go through the page cache",
            "save to a local ext4 or XFS",
            True,
        )
    elif options.block_size % folder.alignment.offset:
        yield Finding(
            f"block_size {options.block_size} is no multiple of the device's "
            f"{folder.alignment.offset} bytes: saves go through the page cache",
            f"set block_size to a multiple of {folder.alignment.offset}",
            True,
        )
    if not folder.preallocates and not in_memory:
        yield Finding(
            f"{folder.file_system} cannot reserve space (fallocate): a full disk shows late",
            "save to a local ext4 or XFS if speed matters",
            False,
        )
    if not folder.unnamed_files:
        yield Finding(
            f"{folder.file_system} has no nameless files (O_TMPFILE): a killed save leaves a "
            "temporary file until the next save to the same path",
            "nothing to do; this command lists such files",
            False,
        )
    if folder.leftovers:
        yield Finding(
            f"{len(folder.leftovers)} temporary files of killed saves: "
            f"{', '.join(folder.leftovers)}",
            "remove them; the next save to the same path does it, too",
            False,
        )
    if folder.free_bytes < _LITTLE_SPACE:
        yield Finding(
            f"only {format_bytes(folder.free_bytes)} free; a save needs room for the new file "
            "beside the old one",
            "free space there, or save to another disk",
            False,
        )


def _about_boot(found: Diagnosis) -> Iterator[Finding]:
    if found.boot.switch is False:
        yield Finding(
            f"FASTSERIAL={found.boot.variable} switches `import fastserial.auto` off",
            "unset FASTSERIAL",
            True,
        )
    elif found.boot.switch is True and not found.boot.pth:
        yield Finding(
            f"FASTSERIAL={found.boot.variable} has no effect: fastserial.pth is not at work in "
            "this Python",
            "install fastserial there with pip, or put `import fastserial.auto` into the program",
            True,
        )
    elif found.boot.variable and found.boot.switch is None:
        yield Finding(
            f"FASTSERIAL={found.boot.variable} is neither on nor off", "set it to 1 or 0", True
        )
