"""What a new file takes over from the one it replaces: owner, group, mode, ACL, other attributes.

Nobody may read the new file who could not read the old one, not for a moment: it is made with no
more permissions, and the ACL, which widens them, comes after the owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from fastserial.reasons import ANOTHER_OWNER, Reason

__all__ = ["Attributes", "CannotKeep", "attributes_of", "give"]

# What is refused to us, or not known to the file system; anything else is a fault.
_REFUSED = (
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,  # an owner that has no number in this user namespace (container)
    errno.EOVERFLOW,  # the same, on an idmapped mount
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.E2BIG,
    errno.ERANGE,
)
# Made for the old content: the kernel takes them off a file that is written to.
_OF_THE_CONTENT = frozenset({"security.capability", "security.evm", "security.ima"})
# Users, administrators and the kernel rely on these; other kinds are the file system's own affair.
_PROMISED = ("user.", "security.", "system.")
_ACL = "system."
_NOBODY = 65534  # what the kernel shows for an owner who is not known here
_EVERYBODY = ["0", "0", "4294967295"]  # a map of all numbers


class CannotKeep(Exception):
    """The new file cannot be given an attribute; `reason` says which."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.reason = Reason(text, ANOTHER_OWNER)


class Attributes(NamedTuple):
    """A file's permission bits, user and group, and its extended attributes, ACL included."""

    mode: int
    owner: tuple[int, int]
    extended: dict[str, bytes]


def attributes_of(status: os.stat_result, place: int | str) -> Attributes:
    """Return the attributes of a regular file.

    Args:
        status: of the file.
        place: its descriptor or path.

    Raises:
        CannotKeep: an attribute may not be read.
        OSError: the disk failed, or the file is gone.
    """
    owner = (status.st_uid, status.st_gid)
    return Attributes(stat.S_IMODE(status.st_mode), owner, _extended(place))


def give(fd: int, wanted: Attributes) -> None:
    """Give a new file of ours, of no more permissions, the attributes of another one.

    Raises:
        CannotKeep: one of them is refused.
        OSError: the disk is full or failed.
    """
    made = attributes_of(os.fstat(fd), fd)
    if made == wanted:
        return
    _extend(fd, made.extended, wanted.extended, acl=False)  # as long as the file is ours
    if made.owner != wanted.owner:
        if not (_is_known(wanted.owner[0], "uid") and _is_known(wanted.owner[1], "gid")):
            raise CannotKeep("its owner is unknown in this user namespace")
        with _kept("owner"):
            os.fchown(fd, *wanted.owner)
    with _kept("mode"):
        # The ACL changes the group's bits, a new owner clears others. Where the owner is not us,
        # this takes the right that replacing a file in a sticky directory takes.
        _extend(fd, made.extended, wanted.extended, acl=True)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode != wanted.mode or made.owner != wanted.owner:
            os.fchmod(fd, wanted.mode)
    now = attributes_of(os.fstat(fd), fd)  # some file systems only pretend
    if now.owner != wanted.owner:
        raise CannotKeep(_text("owner"))
    if (now.mode ^ wanted.mode) & 0o777:
        raise CannotKeep(_text("mode"))
    for name in now.extended.keys() ^ wanted.extended.keys():
        if name.startswith(_ACL):
            raise CannotKeep(_text(f"attribute {name}"))


def _text(what: str) -> str:
    return f"a new file cannot have its {what}"


@contextlib.contextmanager
def _kept(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise CannotKeep(_text(what)) from error


def _extended(place: int | str) -> dict[str, bytes]:
    follow = isinstance(place, int)
    try:
        names = os.listxattr(place, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return {}
        if error.errno in _REFUSED:
            raise CannotKeep("its extended attributes cannot be read") from error
        raise
    found = {}
    for name in names:
        if name in _OF_THE_CONTENT:
            continue
        try:
            found[name] = os.getxattr(place, name, follow_symlinks=follow)
        except OSError as error:
            if error.errno == errno.ENODATA or not name.startswith(_PROMISED):
                continue
            if error.errno in _REFUSED:
                raise CannotKeep(f"its attribute {name} cannot be read") from error
            raise
    return found


def _extend(fd: int, made: dict[str, bytes], wanted: dict[str, bytes], acl: bool) -> None:
    """Set the extended attributes that differ, and remove those that the folder handed down."""
    for name in sorted(made.keys() | wanted.keys()):
        if made.get(name) == wanted.get(name) or name.startswith(_ACL) is not acl:
            continue
        try:
            if name in wanted:
                os.setxattr(fd, name, wanted[name])
            else:
                os.removexattr(fd, name)
        except OSError as error:
            if error.errno == errno.ENODATA:
                continue
            if error.errno not in _REFUSED:
                raise
            if name.startswith(_PROMISED):
                raise CannotKeep(_text(f"attribute {name}")) from error


def _is_known(number: int, kind: str) -> bool:
    """Return whether an owner's number is mapped, and not the overflow one."""
    if number != _NOBODY:
        return True
    try:
        with open(f"/proc/self/{kind}_map", encoding="utf-8") as file:
            return file.read().split() == _EVERYBODY
    except OSError:  # no /proc, or a kernel without user namespaces
        return True
