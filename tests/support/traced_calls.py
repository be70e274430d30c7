"""The system calls of a program, as strace tells them, as operations of `weak_disk`.

A program says how far it has got by `mark`. What this does not understand, such as a file that is
mapped for writing, shows at the end: `Reader.disk` is then not what is in the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from support import weak_disk
from support.weak_disk import (
    Attribute,
    Attributes,
    Disk,
    Mark,
    Names,
    Node,
    Operation,
    Resize,
    Sync,
    Write,
)

CALLS = (
    "open,openat,creat,close,dup,dup2,dup3,fcntl,lseek,write,pwrite64,writev,pwritev,pwritev2,"
    "sendfile,copy_file_range,truncate,ftruncate,fallocate,fsync,fdatasync,sync,syncfs,rename,"
    "renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,symlink,symlinkat,chmod,"
    "fchmod,fchmodat,fchmodat2,chown,fchown,lchown,fchownat,ioctl,chdir,clone,clone3"
)
_MARK = "/.mark/"
_LINE = re.compile(r"^(\d+) +(.*)$")
_STARTED = re.compile(r"^(\w+)\((.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$")
_WHOLE = re.compile(r"^(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"^(-?\d+|AT_FDCWD)(?:<((?:\\x[0-9a-f]{2})*)>)?")
_OF_PROC = re.compile(r"^/proc/(?:self|thread-self|\d+)/fd/(\d+)(?:/(.*))?$")


def mark(text: str) -> None:
    """Say in the trace how far this process has got."""
    with contextlib.suppress(OSError):
        os.chdir(_MARK + text)  # there is no such directory


@contextlib.contextmanager
def attached(pids: list[int], words: Sequence[str], calls: Path, report: Path) -> Iterator[None]:
    """Attach strace to running processes for the `with` block, at whose end they are gone.

    Args:
        words: its options.
        calls: where it writes the calls.
        report: where it says what it does.
    """
    who = [word for pid in pids for word in ("-p", str(pid))]
    with report.open("wb") as errors:
        tracer = subprocess.Popen(["strace", "-f", *words, "-o", str(calls), *who], stderr=errors)
    try:
        deadline = time.monotonic() + 60
        while report.read_bytes().count(b" attached") < len(pids):
            assert tracer.poll() is None, report.read_text()
            assert time.monotonic() < deadline, "strace does not attach"
            time.sleep(0.002)
        yield
    except BaseException:
        tracer.kill()
        raise
    finally:
        tracer.wait(60)


def traced(pids: list[int], trace: Path) -> AbstractContextManager[None]:
    """Trace running processes for a `with` block, at whose end they are gone."""
    calls = ",".join(f"?{name}" for name in CALLS.split(","))  # not every machine has all
    words = ["-xx", "-y", "-s", str(64 << 20), "-e", f"trace={calls}"]
    return attached(pids, words, trace, trace.with_suffix(".err"))


class _Call(NamedTuple):
    process: int
    name: str
    arguments: list[str]
    result: int
    since: int  # the operations that were there when it began


class _Open(NamedTuple):
    node: int
    path: str
    appends: bool


class Reader:
    """Goes through the calls on what is in a folder."""

    def __init__(self, folder: Path, umask: int, processes: dict[int, int]) -> None:
        """Read what is there before the first call.

        Args:
            processes: of each thread that runs already.
        """
        self.disk = Disk.of(folder)
        self._marked: dict[str, tuple[Disk, int]] = {}  # and how many operations came before
        self._made_as: dict[int, Node] = {}
        self.operations: list[Operation] = []
        self._root = str(folder)
        self._umask = umask
        self._process = processes
        self._files: dict[tuple[int, int], _Open] = {}
        self._at: dict[tuple[int, int], int] = {}  # where the next `write` goes

    def read(self, trace: Path) -> None:
        """Read a whole trace."""
        begun: dict[int, tuple[str, int]] = {}
        with trace.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                found = _LINE.match(line)
                if found is None:
                    continue
                thread, text = int(found[1]), found[2]
                since = len(self.operations)
                if started := _STARTED.match(text):
                    begun[thread] = f"{started[1]}({started[2]}", since
                    continue
                if resumed := _RESUMED.match(text):
                    first, since = begun.pop(thread)
                    text = first + resumed[2]
                whole = _WHOLE.match(text)
                if whole is None:
                    continue
                process = self._process.setdefault(thread, thread)
                call = _Call(process, whole[1], _split(whole[2]), int(whole[3]), since)
                if call.name == "chdir" and call.result < 0:
                    path = _string(call.arguments[0])
                    if path.startswith(_MARK):
                        self._marks(path.removeprefix(_MARK))
                elif call.result >= 0:
                    handler: Callable[[_Call], None] | None = getattr(self, f"_{call.name}", None)
                    if handler is not None:
                        handler(call)

    def _marks(self, text: str) -> None:
        self._marked.setdefault(text, (self.disk.copy(), len(self.operations)))
        self.operations.append(Mark(text))

    def between(self, first: str, last: str, folder: str) -> tuple[Disk, list[Operation]]:
        """Return what was in a folder of the folder at a mark, and what was done until another."""
        (disk, begin), (_, end) = self._marked[first], self._marked[last]
        disk.root = disk.names[0, folder]
        for number in range(len(disk.nodes), len(self.disk.nodes)):
            made = self._made_as[number]
            disk.add(Node(made.attributes, made.data))
        return disk, self.operations[begin:end]

    # -- paths -------------------------------------------------------------------------------------

    def _path(self, call: _Call, directory: str, path: str) -> str:
        """Return the absolute path of what a call names; of a descriptor: `fd:` and its number."""
        if match := _OF_PROC.match(path):
            if match[2] is None:
                return f"fd:{match[1]}"
            opened = self._files.get((call.process, int(match[1])))
            return f"{opened.path}/{match[2]}" if opened else path
        if path.startswith("/"):
            return path
        found = _FD.match(directory)
        assert found is not None, directory
        if not path:
            return f"fd:{found[1]}"
        return os.path.normpath(f"{_text(found[2] or '')}/{path}")

    def _find(self, call: _Call, path: str, follow: bool = True) -> int | None:
        """Return the node at a path, if it is in the folder."""
        if path.startswith("fd:"):
            opened = self._files.get((call.process, int(path[3:])))
            return opened.node if opened else None
        place = self._place(path)
        if place is None:
            return None
        where, name = place
        number = 0 if name == "" else self.disk.names.get((where, name))
        if number is not None and follow and self.disk.nodes[number].is_link:
            leads = self.disk.nodes[number].data.decode()
            return self._find(call, os.path.normpath(os.path.join(os.path.dirname(path), leads)))
        return number

    def _place(self, path: str) -> tuple[int, str] | None:
        """Return the directory and the name of a path in the folder; of the folder: `(0, "")`."""
        if path == self._root:
            return 0, ""
        if not path.startswith(self._root + "/"):
            return None
        *above, name = path[len(self._root) + 1 :].split("/")
        number = 0
        for index, one in enumerate(above):
            found = self.disk.names.get((number, one))
            if found is None:
                return None
            if self.disk.nodes[found].is_link:
                leads = self.disk.nodes[found].data.decode()
                where = os.path.join(self._root, *above[:index])
                return self._place(
                    os.path.normpath(os.path.join(where, leads, *above[index + 1 :], name))
                )
            number = found
        return number, name

    def _say(self, path: str) -> str:
        return path.removeprefix(self._root + "/")

    # -- what changes something --------------------------------------------------------------------

    def _do(self, operation: Operation) -> None:
        """Take note of an operation, and do it."""
        self.operations.append(operation)
        if isinstance(operation, Names):
            weak_disk.change_names(self.disk.names, operation)
        elif not isinstance(operation, (Sync, Mark)):
            node = self.disk.nodes[operation.node]  # type: ignore[attr-defined]
            node.attributes, node.data = weak_disk.applied(node.attributes, node.data, [operation])

    def _made(self, mode: int, data: bytes = b"") -> int:
        mask = 0 if stat.S_ISLNK(mode) else self._umask
        node = Node(Attributes(mode & ~mask, os.geteuid(), os.getegid()), data)
        number = self.disk.add(node)
        self._made_as[number] = Node(node.attributes, data)
        return number

    def _name(self, text: str, path: str, node: int | None, *more: str) -> None:
        place = self._place(path)
        assert place is not None, path
        gone = [self._place(other) for other in more]
        changes = [(*place, node), *((*other, None) for other in gone if other is not None)]
        self._do(Names(text, place[0], tuple(changes)))

    def _openat(self, call: _Call) -> None:
        directory, path, flags, *mode = call.arguments
        self._opens(call, self._path(call, directory, _string(path)), flags.split("|"), mode)

    def _open(self, call: _Call) -> None:
        path, flags, *mode = call.arguments
        self._opens(call, self._path(call, _CWD, _string(path)), flags.split("|"), mode)

    def _creat(self, call: _Call) -> None:
        path, mode = call.arguments
        flags = ["O_CREAT", "O_TRUNC"]
        self._opens(call, self._path(call, _CWD, _string(path)), flags, [mode])

    def _opens(self, call: _Call, path: str, flags: list[str], mode: list[str]) -> None:
        key = (call.process, call.result)
        self._files.pop(key, None)
        self._at[key] = 0
        if "O_TMPFILE" in flags:
            if self._place(path) is not None:
                number = self._made(stat.S_IFREG | int(mode[0], 8))
                self._files[key] = _Open(number, f"{path}/(no name)", False)
            return
        number = self._find(call, path)  # type: ignore[assignment]
        if number is None:
            if "O_CREAT" not in flags or self._place(path) is None:
                return
            number = self._made(stat.S_IFREG | int(mode[0], 8))
            self._name(f"create({self._say(path)})", path, number)
        elif "O_TRUNC" in flags and self.disk.nodes[number].data:
            self._do(Resize(f"truncate({self._say(path)}, 0)", number, 0))
        if path.startswith("fd:"):
            path = self._files[call.process, int(path[3:])].path
        self._files[key] = _Open(number, path, "O_APPEND" in flags)

    def _close(self, call: _Call) -> None:
        self._files.pop((call.process, _fd(call.arguments[0])), None)

    def _dup(self, call: _Call) -> None:
        opened = self._opened(call)
        if opened is not None:
            self._files[call.process, call.result] = opened

    _dup2 = _dup3 = _dup

    def _fcntl(self, call: _Call) -> None:
        if call.arguments[1].startswith("F_DUPFD"):
            self._dup(call)

    def _clone(self, call: _Call) -> None:
        text = ",".join(call.arguments)
        if "CLONE_THREAD" in text:
            self._process[call.result] = call.process
        else:
            for (process, fd), opened in list(self._files.items()):
                if process == call.process:
                    self._files[call.result, fd] = opened

    _clone3 = _clone

    def _opened(self, call: _Call) -> _Open | None:
        return self._files.get((call.process, _fd(call.arguments[0])))

    def _lseek(self, call: _Call) -> None:
        self._at[call.process, _fd(call.arguments[0])] = call.result

    def _writes(self, call: _Call, offset: int, data: bytes) -> None:
        opened = self._opened(call)
        if opened is not None:
            data = data[: call.result]
            text = f"write({self._say(opened.path)}, {len(data)} bytes at {offset})"
            self._do(Write(text, opened.node, offset, data))

    def _write(self, call: _Call) -> None:
        key = (call.process, _fd(call.arguments[0]))
        opened = self._files.get(key)
        if opened is None:
            return
        offset = len(self.disk.nodes[opened.node].data) if opened.appends else self._at.get(key, 0)
        data = b"".join(map(_bytes, _TEXT.findall(call.arguments[1])))
        self._writes(call, offset, data)
        self._at[key] = offset + call.result

    _writev = _write

    def _pwrite64(self, call: _Call) -> None:
        data = b"".join(map(_bytes, _TEXT.findall(call.arguments[1])))
        self._writes(call, int(call.arguments[3]), data)

    _pwritev = _pwritev2 = _pwrite64

    def _sendfile(self, call: _Call) -> None:
        """From a file of the folder, or from any other."""
        key = (call.process, _fd(call.arguments[0]))
        if key in self._files:
            raise NotImplementedError(f"sendfile to {self._files[key].path}")

    def _copy_file_range(self, call: _Call) -> None:
        opened = self._files.get((call.process, _fd(call.arguments[2])))
        if opened is not None:
            raise NotImplementedError(f"copy_file_range to {opened.path}")

    def _ioctl(self, call: _Call) -> None:
        opened, name = self._opened(call), call.arguments[1]
        if opened is None or not name.startswith("FICLONE"):
            return
        found = dict(re.findall(r"(src_\w+|dest_offset)=(\d+)", ",".join(call.arguments[2:])))
        source = self._files[call.process, int(found["src_fd"])]
        first, nbytes = int(found["src_offset"]), int(found["src_length"])
        data = self.disk.nodes[source.node].data[first : first + nbytes]
        text = f"clone({self._say(opened.path)}, {nbytes} bytes at {found['dest_offset']})"
        self._do(Write(text, opened.node, int(found["dest_offset"]), data))

    def _resizes(self, path: str, number: int | None, size: int, grows: bool) -> None:
        if number is not None:
            what = "fallocate" if grows else "truncate"
            self._do(Resize(f"{what}({self._say(path)}, {size})", number, size, grows))

    def _ftruncate(self, call: _Call) -> None:
        if opened := self._opened(call):
            self._resizes(opened.path, opened.node, int(call.arguments[1]), False)

    def _truncate(self, call: _Call) -> None:
        path = self._path(call, _CWD, _string(call.arguments[0]))
        self._resizes(path, self._find(call, path), int(call.arguments[1]), False)

    def _fallocate(self, call: _Call) -> None:
        opened = self._opened(call)
        _, mode, offset, nbytes = call.arguments
        if opened is not None:
            if mode == "0":
                self._resizes(opened.path, opened.node, int(offset) + int(nbytes), True)
            elif mode != "FALLOC_FL_KEEP_SIZE":
                raise NotImplementedError(f"fallocate {mode}")

    def _fsync(self, call: _Call) -> None:
        if opened := self._opened(call):
            text = f"{call.name}({self._say(opened.path)})"
            self._do(Sync(text, opened.node, call.since, call.name == "fdatasync"))

    _fdatasync = _fsync

    def _sync(self, call: _Call) -> None:
        self._do(Sync("sync()", None, call.since))

    _syncfs = _sync

    def _renames(self, call: _Call, old: str, new: str) -> None:
        number = self._find(call, old, follow=False)
        if number is not None:
            self._name(f"rename({self._say(old)}, {self._say(new)})", new, number, old)

    def _rename(self, call: _Call) -> None:
        old, new = (self._path(call, _CWD, _string(one)) for one in call.arguments[:2])
        self._renames(call, old, new)

    def _renameat(self, call: _Call) -> None:
        first, old, second, new, *flags = call.arguments
        assert flags in ([], ["0"], ["RENAME_NOREPLACE"]), flags
        self._renames(
            call, self._path(call, first, _string(old)), self._path(call, second, _string(new))
        )

    _renameat2 = _renameat

    def _links(self, call: _Call, old: str, new: str) -> None:
        number = self._find(call, old)
        if number is not None:
            self._name(f"link({self._say(new)})", new, number)

    def _link(self, call: _Call) -> None:
        old, new = (self._path(call, _CWD, _string(one)) for one in call.arguments[:2])
        self._links(call, old, new)

    def _linkat(self, call: _Call) -> None:
        first, old, second, new, *_ = call.arguments
        self._links(
            call, self._path(call, first, _string(old)), self._path(call, second, _string(new))
        )

    def _removes(self, path: str) -> None:
        if self._place(path) is not None:
            self._name(f"unlink({self._say(path)})", path, None)

    def _unlink(self, call: _Call) -> None:
        self._removes(self._path(call, _CWD, _string(call.arguments[0])))

    _rmdir = _unlink

    def _unlinkat(self, call: _Call) -> None:
        self._removes(self._path(call, call.arguments[0], _string(call.arguments[1])))

    def _makes(self, path: str, mode: str) -> None:
        if self._place(path) is not None:
            self._name(f"mkdir({self._say(path)})", path, self._made(stat.S_IFDIR | int(mode, 8)))

    def _mkdir(self, call: _Call) -> None:
        path, mode = call.arguments
        self._makes(self._path(call, _CWD, _string(path)), mode)

    def _mkdirat(self, call: _Call) -> None:
        directory, path, mode = call.arguments
        self._makes(self._path(call, directory, _string(path)), mode)

    def _symlink(self, call: _Call) -> None:
        leads, path = (_string(one) for one in call.arguments)
        where = self._path(call, _CWD, path)
        if self._place(where) is not None:
            number = self._made(stat.S_IFLNK | 0o777, leads.encode())
            self._name(f"symlink({self._say(where)})", where, number)

    def _sets(self, path: str, number: int | None, **values: int) -> None:
        if number is None:
            return
        for name, value in values.items():
            if name == "mode":
                value |= stat.S_IFMT(self.disk.nodes[number].attributes.mode)
            if value >= 0 and value != getattr(self.disk.nodes[number].attributes, name):
                self._do(Attribute(f"{name}({self._say(path)})", number, name, value))

    def _fchmod(self, call: _Call) -> None:
        if opened := self._opened(call):
            self._sets(opened.path, opened.node, mode=int(call.arguments[1], 8))

    def _chmod(self, call: _Call) -> None:
        path = self._path(call, _CWD, _string(call.arguments[0]))
        self._sets(path, self._find(call, path), mode=int(call.arguments[1], 8))

    def _fchmodat(self, call: _Call) -> None:
        path = self._path(call, call.arguments[0], _string(call.arguments[1]))
        self._sets(path, self._find(call, path), mode=int(call.arguments[2], 8))

    _fchmodat2 = _fchmodat

    def _fchown(self, call: _Call) -> None:
        if opened := self._opened(call):
            uid, gid = map(int, call.arguments[1:])
            self._sets(opened.path, opened.node, uid=uid, gid=gid)

    def _chown(self, call: _Call) -> None:
        path = self._path(call, _CWD, _string(call.arguments[0]))
        uid, gid = map(int, call.arguments[1:])
        self._sets(path, self._find(call, path), uid=uid, gid=gid)


_CWD = "AT_FDCWD"


def threads_of(pids: list[int]) -> dict[int, int]:
    """Return the process of each thread of some processes."""
    return {int(thread): pid for pid in pids for thread in os.listdir(f"/proc/{pid}/task")}


def _split(text: str) -> list[str]:
    """Return arguments: what commas part, but not those in brackets; no text has any."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[][{}(),]", text):
        if match[0] in "[{(":
            depth += 1
        elif match[0] in "]})":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


def _text(escaped: str) -> str:
    return os.fsdecode(_bytes(escaped))


def _string(argument: str) -> str:
    found = _TEXT.match(argument)
    assert found is not None, argument[:100]
    return _text(found[1])


def _fd(argument: str) -> int:
    found = _FD.match(argument)
    return -1 if found is None or found[1] == _CWD else int(found[1])
