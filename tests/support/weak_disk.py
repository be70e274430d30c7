"""What may be on a disk after a power cut, if a file system promises no more than POSIX does.

The model: bytes, sizes and attributes of a file are on the disk once the file was synced, names
once their directory was. Of everything else any part may be there, in any order: any of the writes,
or some sectors of one; a size without its bytes (zeros); any of the names. A rename is atomic.
(Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, call such states intermediate.)

`states_of` goes through the operations of a program and yields every state that a cut at any moment
may leave. Where more is open at once than can be tried, it tries what `_chosen` says.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

SECTOR = 512
_PAGE = 4096
_MOST_AT_ONCE = 10  # operations of which all subsets are tried
_MOST_OF_A_FILE = 6
_MOST_PRODUCTS = 3000


@dataclass(frozen=True)
class Operation:
    """Something that a program did; `text` is what a reader is told."""

    text: str


@dataclass(frozen=True)
class Write(Operation):
    node: int
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Resize(Operation):
    """A file gets a size; one that only `grows` stays as it is if it is larger."""

    node: int
    size: int
    grows: bool = False


@dataclass(frozen=True)
class Attribute(Operation):
    """The mode, the owner (`uid`), the group (`gid`)."""

    node: int
    name: str
    value: int


@dataclass(frozen=True)
class Names(Operation):
    """Names in directories come to lead to nodes (None: are removed), all at once.

    `where` is the directory whose sync makes that last.
    """

    where: int
    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Sync(Operation):
    """A sync of a node (None: of all), that covers the first `since` operations.

    One of `data_only` leaves attributes out.
    """

    node: int | None
    since: int
    data_only: bool = False


@dataclass(frozen=True)
class Mark(Operation):
    """The program has got as far as `text`."""


_Some = TypeVar("_Some", bound=Operation)


class Attributes(NamedTuple):
    mode: int
    uid: int
    gid: int


@dataclass
class Node:
    """A file, a directory or a symbolic link, as it was made or found."""

    attributes: Attributes
    data: bytes = b""  # of a link: where it leads

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.attributes.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.attributes.mode)


class Disk:
    """Nodes and their names; paths begin at the node `root`."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.names: dict[tuple[int, str], int] = {}
        self.root = 0

    @classmethod
    def of(cls, folder: Path) -> Disk:
        """Read what is in a folder."""
        disk = cls()
        disk._read(folder)
        return disk

    def _read(self, path: Path) -> int:
        found = path.lstat()
        node = Node(Attributes(found.st_mode, found.st_uid, found.st_gid))
        number = self.add(node)
        if node.is_link:
            node.data = os.readlink(path).encode()
        elif node.is_directory:
            for one in sorted(path.iterdir()):
                self.names[number, one.name] = self._read(one)
        else:
            node.data = path.read_bytes()
        return number

    def copy(self) -> Disk:
        """Return what does not change with this one."""
        made = Disk()
        made.nodes = [Node(node.attributes, node.data) for node in self.nodes]
        made.names = dict(self.names)
        return made

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


class Entry(NamedTuple):
    """What is at a path."""

    path: str
    attributes: Attributes
    data: bytes


State = tuple[Entry, ...]  # in the order of the paths


def make(state: State, folder: Path) -> None:
    """Make a state in an empty folder."""
    for path, attributes, data in state:
        where = folder / path
        if stat.S_ISDIR(attributes.mode):
            where.mkdir(exist_ok=True)
        elif stat.S_ISLNK(attributes.mode):
            where.symlink_to(data.decode())
            continue
        else:
            where.write_bytes(data)
        if os.geteuid() == 0:
            os.chown(where, attributes.uid, attributes.gid)
        where.chmod(stat.S_IMODE(attributes.mode))


def everything(disk: Disk) -> State:
    """Return all that is on a disk."""
    places = sorted(_walk(disk.nodes, disk.names, disk.root))
    return tuple(
        Entry(path, disk.nodes[number].attributes, disk.nodes[number].data)
        for path, number in places
    )


class Found(NamedTuple):
    """A state, the operation that the cut came after (its index), and which before it were lost."""

    state: State
    after: int
    lost: tuple[str, ...]


class _Content(NamedTuple):
    attributes: Attributes
    data: bytes
    lost: tuple[str, ...]


def states_of(
    disk: Disk, operations: Sequence[Operation], matters: Callable[[str], bool]
) -> Iterator[Found]:
    """Yield what a cut may leave, after each of the operations.

    A state that an earlier operation allowed already is not repeated, but at a mark.

    Args:
        disk: what was on the disk before the first.
        matters: says of a path whether the bytes of a file there can make a difference. Those of
            others are all there or, as long as some may be missing, none.
    """
    cut = _Cut(disk, matters)
    for index, operation in enumerate(operations):
        if isinstance(operation, Sync):
            cut.sync(operation)
            continue
        if not isinstance(operation, Mark):
            cut.pending.append((index, operation))
        for state, lost in cut.states(None if isinstance(operation, Mark) else operation):
            yield Found(state, index, lost)


def subsets_of(disk: Disk, operations: Sequence[Operation]) -> int:
    """Return for how many choices of what is lost the states stand, those of sectors left out."""
    cut, count = _Cut(disk, lambda path: True), 0
    for index, operation in enumerate(operations):
        if isinstance(operation, Sync):
            cut.sync(operation)
        elif not isinstance(operation, Mark):
            cut.pending.append((index, operation))
        count += 2 ** len(cut.pending)
    return count


class _Cut:
    """What is on the disk for certain, and what may be."""

    def __init__(self, disk: Disk, matters: Callable[[str], bool]) -> None:
        self._nodes, self._root = disk.nodes, disk.root
        self._matters = matters
        self._names = dict(disk.names)
        self._kept = {
            number: (node.attributes, node.data) for number, node in enumerate(disk.nodes)
        }
        self.pending: list[tuple[int, Operation]] = []
        self._contents: dict[tuple[int, bool, tuple[int, ...]], list[_Content]] = {}

    def sync(self, sync: Sync) -> None:
        left = []
        for index, operation in self.pending:
            node = operation.where if isinstance(operation, Names) else operation.node  # type: ignore[attr-defined]
            is_other = sync.node is not None and node != sync.node
            is_left_out = sync.data_only and isinstance(operation, Attribute)
            if index >= sync.since or is_other or is_left_out:
                left.append((index, operation))
            elif isinstance(operation, Names):
                change_names(self._names, operation)
            else:
                self._kept[node] = applied(*self._certain(node), [operation])
        self.pending = left

    def _certain(self, number: int) -> tuple[Attributes, bytes]:
        """Return the attributes and bytes of a node that are there whenever a name leads to it."""
        if number not in self._kept:  # it was made later
            self._kept[number] = self._nodes[number].attributes, self._nodes[number].data
        return self._kept[number]

    def states(self, needed: Operation | None) -> Iterator[tuple[State, tuple[str, ...]]]:
        """Yield what may be there, if `needed` is."""
        names = [one for _, one in self.pending if isinstance(one, Names)]
        tried: set[frozenset[tuple[tuple[int, str], int]]] = set()
        for kept in _chosen(names, _MOST_AT_ONCE):
            if isinstance(needed, Names) and needed not in kept:
                continue
            found = dict(self._names)
            for one in kept:
                change_names(found, one)
            key = frozenset(found.items())
            if key in tried:
                continue
            tried.add(key)
            lost = tuple(one.text for one in names if one not in kept)
            for state, more in self._with_contents(found, needed):
                yield state, (*lost, *more)

    def _with_contents(
        self, names: dict[tuple[int, str], int], needed: Operation | None
    ) -> Iterator[tuple[State, tuple[str, ...]]]:
        places = sorted(_walk(self._nodes, names, self._root))
        numbers = sorted({number for _, number in places})
        if needed is not None and not isinstance(needed, Names):
            where = [path for path, number in places if number == needed.node]  # type: ignore[attr-defined]
            if not any(map(self._matters, where)):
                return  # as if it had not happened
        full = dict.fromkeys(numbers, False)
        for path, number in places:
            full[number] |= self._matters(path)
        choices = [self._contents_of(number, full[number]) for number in numbers]
        for chosen in _products(choices):
            content = dict(zip(numbers, chosen, strict=True))
            state = tuple(
                Entry(path, content[number].attributes, content[number].data)
                for path, number in places
            )
            yield state, tuple(text for one in chosen for text in one.lost)

    def _contents_of(self, number: int, full: bool) -> list[_Content]:
        """Return what a node may have in it; the first is everything."""
        mine = [
            (index, one)
            for index, one in self.pending
            if not isinstance(one, Names) and one.node == number  # type: ignore[attr-defined]
        ]
        key = (number, full, tuple(index for index, _ in mine))
        if key not in self._contents:
            operations = [one for _, one in mine]
            attributes, data = self._certain(number)
            found = dict.fromkeys(_contents(attributes, data, operations, full))
            least: dict[tuple[Attributes, bytes], _Content] = {}
            for one in found:
                before = least.setdefault(one[:2], one)
                if len(one.lost) < len(before.lost):
                    least[one[:2]] = one
            self._contents[key] = list(least.values())
        return self._contents[key]


def _walk(
    nodes: list[Node], names: dict[tuple[int, str], int], number: int, path: str = ""
) -> Iterator[tuple[str, int]]:
    for (where, name), found in names.items():
        if where == number:
            below = f"{path}{name}"
            yield below, found
            if nodes[found].is_directory:
                yield from _walk(nodes, names, found, below + "/")


def change_names(names: dict[tuple[int, str], int], change: Names) -> None:
    for where, name, node in change.changes:
        if node is None:
            names.pop((where, name), None)
        else:
            names[where, name] = node


def applied(
    attributes: Attributes, data: bytes, operations: Iterable[Operation]
) -> tuple[Attributes, bytes]:
    """Return attributes and bytes after some operations."""
    changed = bytearray(data)
    for one in operations:
        if isinstance(one, Attribute):
            attributes = attributes._replace(**{one.name: one.value})
        elif isinstance(one, Resize):
            if not one.grows:
                del changed[one.size :]
            changed.extend(bytes(max(0, one.size - len(changed))))
        elif isinstance(one, Write):
            changed.extend(bytes(max(0, one.offset - len(changed))))
            changed[one.offset : one.offset + len(one.data)] = one.data
    return attributes, bytes(changed)


def _contents(
    attributes: Attributes, data: bytes, operations: list[Operation], full: bool
) -> Iterator[_Content]:
    """Yield what a node may come to if some of these operations are lost."""
    if not full:
        yield _Content(*applied(attributes, data, operations), ())
        if operations:
            yield _Content(attributes, data, ("all that was done to it",))
        return
    sized = len(applied(attributes, data, operations)[1])
    for kept in _chosen(operations, _MOST_OF_A_FILE):
        lost = tuple(one.text for one in operations if one not in kept)
        found, left = applied(attributes, data, kept)
        yield _Content(found, left, lost)
        if len(left) < sized and lost:
            yield _Content(found, left + bytes(sized - len(left)), (*lost, "not its size"))
    for place, one in enumerate(operations):
        if isinstance(one, Write):
            for offset, part in _torn(one):
                text = (f"{len(one.data) - len(part)} bytes of {one.text}",)
                before = [*operations[:place], Write(one.text, one.node, offset, part)]
                yield _Content(
                    *applied(attributes, data, [*before, *operations[place + 1 :]]), text
                )
                later = tuple(other.text for other in operations[place + 1 :])
                yield _Content(*applied(attributes, data, before), (*text, *later))


def _torn(write: Write) -> Iterator[tuple[int, bytes]]:
    """Yield parts of a write that end or begin at the border of a sector or a page."""
    first = write.offset - write.offset % SECTOR + SECTOR
    end = write.offset + len(write.data)
    pages = range(first - first % _PAGE + _PAGE, end, _PAGE)
    borders = {*range(first, min(end, first + _PAGE), SECTOR), *pages[:: max(1, len(pages) // 8)]}
    borders.add(end - 1 - (end - 1) % SECTOR)
    for border in sorted(borders):
        if write.offset < border < end:
            yield write.offset, write.data[: border - write.offset]
            yield border, write.data[border - write.offset :]


def _chosen(operations: Sequence[_Some], most: int) -> Iterator[list[_Some]]:
    """Yield subsets, in order: all of them, if there are few operations.

    Else the first ones, all but one or two of these, and one or two of all.
    """
    count = len(operations)
    if count <= most:
        for size in range(count, -1, -1):
            yield from map(list, itertools.combinations(operations, size))
        return
    for end in range(count, -1, -1):
        yield list(operations[:end])
        for size in (1, 2):
            for lost in itertools.combinations(range(end), size):
                yield [operations[index] for index in range(end) if index not in lost]
    for size in (1, 2):
        yield from map(list, itertools.combinations(operations, size))


def _products(choices: list[list[_Content]]) -> Iterator[tuple[_Content, ...]]:
    """Yield every combination; if there are very many, those in which two nodes differ."""
    count = 1
    for one in choices:
        count *= len(one)
    if count <= _MOST_PRODUCTS:
        yield from itertools.product(*choices)
        return
    whole = [one[0] for one in choices]
    open_ones = [place for place, one in enumerate(choices) if len(one) > 1]
    for pair in itertools.combinations(open_ones, 2):
        for contents in itertools.product(*(choices[place] for place in pair)):
            chosen = list(whole)
            for place, content in zip(pair, contents, strict=True):
                chosen[place] = content
            yield tuple(chosen)
