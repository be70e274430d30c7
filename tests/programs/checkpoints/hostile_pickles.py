"""Pickles made to end the process that reads them: a key that is a tuple nested 300,000 deep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from support.archives import rewritten
from support.identity import stock_bytes
from support.processes import answer

import fastserial
from fastserial import distributed

DCP = "torch.distributed.checkpoint"
KEY = b"X\x01\x00\x00\x00a"
DEEP = b")" + b"\x85" * 300_000  # hashing it takes more stack than there is


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def made(name: str, **attributes: bytes) -> bytes:
    """The opcodes of an instance."""
    module, _, kind = name.rpartition(".")
    items = b"".join(text(key) + value for key, value in attributes.items())
    return f"c{module}\n{kind}\n".encode() + b")\x81}(" + items + b"ub"


def a_folder(path: Path) -> Path:
    index = made(f"{DCP}.metadata.MetadataIndex", fqn=DEEP)
    place = made(
        f"{DCP}.filesystem._StorageInfo",
        relative_path=text("__0_0.distcp"),
        offset=b"K\x00",
        length=b"K\x00",
    )
    whole = made(
        f"{DCP}.metadata.Metadata",
        state_dict_metadata=b"}",
        storage_data=b"}(" + index + place + b"u",
    )
    path.mkdir()
    (path / ".metadata").write_bytes(b"\x80\x02" + whole + b".")
    return path


def a_file(path: Path) -> Path:
    whole = stock_bytes({"a": torch.ones(2)})
    path.write_bytes(rewritten(whole, change=lambda name, data: (name, data.replace(KEY, DEEP))))
    return path


def a_legacy_file(path: Path) -> Path:
    path.write_bytes(stock_bytes({"a": torch.ones(2)}, "legacy").replace(KEY, DEEP, 1))
    return path


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except fastserial.FastserialError as error:
        return type(error).__name__
    return "nothing"


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, dict[str, str]] = {}
    for make, name in ((a_folder, "folder"), (a_file, "file.pt"), (a_legacy_file, "legacy.pt")):
        path = make(folder / name)
        fastserial.verify(path)
        calls: dict[str, Callable[[], object]] = {
            "inspect": partial(fastserial.inspect, path),
            "convert": partial(fastserial.convert, path, folder / "out.pt"),
        }
        if path.is_file():
            calls["open"] = partial(fastserial.open, path)
            calls["load_into"] = partial(fastserial.load_into, {"a": torch.ones(2)}, path)
            calls["on ranks"] = partial(distributed.load, path, {"a": torch.ones(2)})
        found[name] = {what: raised(call) for what, call in calls.items()}
    answer(found)


if __name__ == "__main__":
    main()
