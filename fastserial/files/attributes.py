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

__all__ = ["Attributes", "CannotReplace", "attributes_of", "give"]

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
_KEPT = ("user.", "security.", "system.", "btrfs.")
_ACL = "system."
_NOBODY = 65534  # what the kernel shows for an owner who is not known here


class CannotReplace(Exception):
    """No new file can take the target's place, as `reason` says; nothing was changed so far."""

    def __init__(self, text: str, remedy: str = ANOTHER_OWNER) -> None:
        super().__init__(text)
        self.reason = Reason(text, remedy)


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
        CannotReplace: an attribute may not be read.
        OSError: the disk failed, or the file is gone.
    """
    follow = isinstance(place, int)
    extended = {}
    with _refused_as("its extended attributes cannot be read"):
        for name in _names(place, follow):
            if name.startswith(_KEPT) and name not in _OF_THE_CONTENT:
                value = _value(place, name, follow)
                if value is not None:
                    extended[name] = value
    owner = (status.st_uid, status.st_gid)
    return Attributes(stat.S_IMODE(status.st_mode), owner, extended)


def _names(place: int | str, follow: bool) -> list[str]:
    try:
        return os.listxattr(place, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return []
        raise


def _value(place: int | str, name: str, follow: bool) -> bytes | None:
    try:
        return os.getxattr(place, name, follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise


def give(fd: int, wanted: Attributes) -> None:
    """Give a new file of ours, of no more permissions, the attributes of another one.

    Raises:
        CannotReplace: one of them is refused.
        OSError: the disk is full or failed.
    """
    made = attributes_of(os.fstat(fd), fd)
    if made == wanted:
        return
    if any(one == _NOBODY != own for one, own in zip(wanted.owner, made.owner, strict=True)):
        raise CannotReplace("its owner is unknown in this user namespace")  # or `nobody`
    differing = sorted(
        name
        for name in made.extended.keys() | wanted.extended.keys()
        if made.extended.get(name) != wanted.extended.get(name)
    )
    lists = [name for name in differing if name.startswith(_ACL)]
    for name in differing:
        if name not in lists:  # as long as the file is ours
            _set_extended(fd, name, wanted.extended.get(name))
    if made.owner != wanted.owner:
        with _refused_as(_text("owner")):
            os.fchown(fd, *wanted.owner)
    # An ACL changes the group's bits, a new owner clears others. Where the owner is not us, this
    # takes the right that replacing a file in a sticky directory takes.
    for name in lists:
        _set_extended(fd, name, wanted.extended.get(name))
    with _refused_as(_text("mode")):
        if stat.S_IMODE(os.fstat(fd).st_mode) != wanted.mode or made.owner != wanted.owner:
            os.fchmod(fd, wanted.mode)
    now = attributes_of(os.fstat(fd), fd)  # some file systems only pretend
    has_lists = all((name in now.extended) == (name in wanted.extended) for name in lists)
    if now.owner != wanted.owner or (now.mode ^ wanted.mode) & 0o777 or not has_lists:
        raise CannotReplace(_text("owner, mode or ACL"))


def _text(what: str) -> str:
    return f"a new file cannot have its {what}"


@contextlib.contextmanager
def _refused_as(text: str) -> Iterator[None]:
    """Raise a refusal in the body as a `CannotReplace` of that text."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise CannotReplace(text) from error


def _set_extended(fd: int, name: str, value: bytes | None) -> None:
    """Set an extended attribute, or remove one that the folder handed down."""
    with _refused_as(_text(f"attribute {name}")):
        if value is not None:
            os.setxattr(fd, name, value)
        else:
            os.removexattr(fd, name)
