"""Files made to cost more than they weigh: they nest, repeat, deflate and overlap."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

DCP = "torch.distributed.checkpoint"
BIG = 2**62

# -- pickles ---------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    if len(data) < 256:
        return b"\x8a" + bytes((len(data),)) + data
    return b"\x8b" + struct.pack("<I", len(data)) + data


def listed(items: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def tupled(items: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


def mapped(items: Iterable[bytes]) -> bytes:
    """Keys and values by turns."""
    return b"}(" + b"".join(items) + b"u"


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"h" + bytes((index,)) if index < 256 else b"j" + struct.pack("<I", index)


def named(name: str) -> bytes:
    module, _, kind = name.rpartition(".")
    return f"c{module}\n{kind}\n".encode()


def called(name: str, *arguments: bytes) -> bytes:
    return named(name) + tupled(arguments) + b"R"


def made(name: str, **attributes: bytes) -> bytes:
    """An instance."""
    items = [part for key, value in attributes.items() for part in (text(key), value)]
    return named(name) + b")\x81" + mapped(items) + b"b"


def storage(key: str = "0", numel: int = 2) -> bytes:
    fields = (text("storage"), named("torch.FloatStorage"), text(key), text("cpu"), number(numel))
    return tupled(fields) + b"Q"


def tensor(shape: Iterable[int] = (2,), stride: Iterable[int] = (1,)) -> bytes:
    sizes, steps = tupled(map(number, shape)), tupled(map(number, stride))
    hooks = called("collections.OrderedDict")
    return called(
        "torch._utils._rebuild_tensor_v2", storage(), b"K\x00", sizes, steps, b"\x89", hooks
    )


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def levels(count: int, width: int, first: bytes) -> bytes:
    """Lists of lists, each mentioned `width` times in the next: `width ** count` mentions."""
    value = listed([first, *[b"N"] * width]) + put(0)
    for level in range(count):
        value = listed([value, *[get(level)] * (width - 1)]) + put(level + 1)
    return value


# -- files -----------------------------------------------------------------------------------------


def zipped(pickle: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, body in (("data.pkl", pickle), ("byteorder", b"little"), ("data/0", bytes(8))):
            file.writestr(f"x/{name}", body)
        file.writestr("x/version", b"3\n")
    return out.getvalue()


def legacy(pickle: bytes, keys: Iterable[str] = ("0",)) -> bytes:
    system = mapped([text("little_endian"), b"\x88"])
    parts = [pickled(number(0x1950A86A20F9469CFC6C)), pickled(number(1001)), pickled(system)]
    keys = list(keys)
    storages = (struct.pack("<q", 2) + bytes(8)) * len(keys)
    return b"".join([*parts, pickle, pickled(listed(map(text, keys))), storages])


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def safetensors_of(shape: list[int]) -> bytes:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    return safetensors(json.dumps({"a": entry}).encode())


def size_of(shape: Iterable[int]) -> bytes:
    return named("torch.Size") + tupled([tupled(map(number, shape))]) + b"R"


def chunk(offsets: Iterable[int] = (0,), sizes: Iterable[int] = (4,)) -> bytes:
    name = f"{DCP}.metadata.ChunkStorageMetadata"
    return made(name, offsets=size_of(offsets), sizes=size_of(sizes))


def dcp_tensor(shape: Iterable[int] = (4,), *chunks: bytes) -> bytes:
    properties = made(f"{DCP}.metadata.TensorProperties")[:-1]  # its state is no dictionary
    properties = named(f"{DCP}.metadata.TensorProperties") + b")\x81"
    properties += tupled([named("torch.float32"), b"N", b"\x89", b"N", b"\x89"]) + b"b"
    return made(
        f"{DCP}.metadata.TensorStorageMetadata",
        properties=properties,
        size=size_of(shape),
        chunks=listed(chunks or [chunk()]),
    )


def place(file: str = "__0_0.distcp", offset: int = 0, length: int = 16) -> bytes:
    name = f"{DCP}.filesystem._StorageInfo"
    return made(name, relative_path=text(file), offset=number(offset), length=number(length))


def index(key: str = "a", offset: Iterable[int] = (0,)) -> bytes:
    return made(f"{DCP}.metadata.MetadataIndex", fqn=text(key), offset=size_of(offset))


def metadata(tensors: bytes, places: bytes) -> bytes:
    name = f"{DCP}.metadata.Metadata"
    return pickled(made(name, state_dict_metadata=tensors, storage_data=places))


def folder(path: Path, metadata: bytes, shard: bytes = bytes(16)) -> Path:
    path.mkdir(exist_ok=True)
    (path / ".metadata").write_bytes(metadata)
    (path / "__0_0.distcp").write_bytes(shard)
    return path


def one_tensor(path: Path, value: bytes, where: bytes) -> Path:
    """A folder with one tensor, `a`, in one chunk."""
    return folder(path, metadata(mapped([text("a"), value]), mapped([index(), where])))


def file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- what costs more than it weighs ----------------------------------------------------------------

_LONG = 100_000

FILES: dict[str, Callable[[], bytes]] = {
    "lists of lists.pt": lambda: zipped(pickled(levels(8, 30, b"N"))),
    "lists of lists of tensors.pt": lambda: zipped(pickled(levels(8, 30, tensor()))),
    "lists of lists.legacy.pt": lambda: legacy(pickled(levels(8, 30, tensor()))),
    "a long key above a list.pt": lambda: zipped(
        pickled(mapped([text("k" * 4000), levels(2, 300, b"N")]))
    ),
    "a list in itself.pt": lambda: zipped(
        pickled(b"]" + put(0) + b"(" + tensor() + get(0) * 1000 + b"e")
    ),
    "a tuple of long keys, again and again.pt": lambda: zipped(
        pickled(
            b"("
            + tupled([text("k" * 60_000)] * 16)
            + put(0)
            + tensor()
            + put(1)
            + mapped([get(0) + get(1)] * 50_000)
            + b"t"
        )
    ),
    "a tensor in 300 dimensions, again and again.pt": lambda: zipped(
        pickled(listed([tensor([1] * 300, [1] * 300) + put(0), *[get(0)] * 100_000]))
    ),
    "tensors that make no sense.pt": lambda: zipped(
        pickled(
            tupled(
                [
                    listed(
                        [called("torch._utils._rebuild_parameter") + put(0), *[get(0)] * 99_999]
                    ),
                    listed([tensor((2, 2), (1,)) + put(1), *[get(1)] * 99_999]),
                ]
            )
        )
    ),
    "a tensor of 2^18600 elements.pt": lambda: zipped(pickled(tensor([BIG] * 300, [0] * 300))),
    "a deflated pickle of a gigabyte.pt": lambda: zipped(
        b"\x80\x02" + b"]0" * (1 << 29) + b"N.", zipfile.ZIP_DEFLATED
    ),
    "a deflated pickle of lists.pt": lambda: zipped(
        b"\x80\x02" + b"]" * (1 << 25) + b".", zipfile.ZIP_DEFLATED
    ),
    "100,000 dimensions.safetensors": lambda: safetensors_of([BIG] * _LONG),
    "300 dimensions, one 0.safetensors": lambda: safetensors_of([0, *[BIG] * 300]),
    "lists.safetensors": lambda: safetensors(b'{"a":[' + b"[]," * 10_000_000 + b"[]]}"),
}

# They take most of the 10 seconds that they may.
LONGEST = {
    "lists of lists of tensors.pt",
    "lists of lists.legacy.pt",
    "a tensor in 300 dimensions, again and again.pt",
    "a deflated pickle of a gigabyte.pt",
    "a deflated pickle of lists.pt",
}

_MANY = 20_000
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "100,000 dimensions": lambda path: one_tensor(path, dcp_tensor([BIG] * _LONG), place()),
    "300 dimensions": lambda path: one_tensor(
        path, dcp_tensor([BIG] * 300, chunk([0] * 300, [BIG] * 300)), place()
    ),
    "300 dimensions, one 0": lambda path: one_tensor(
        path, dcp_tensor([0, *[BIG] * 300], chunk([0] * 301, [0, *[BIG] * 300])), place()
    ),
    "an offset of 5,000 digits": lambda path: one_tensor(
        path, dcp_tensor(), place(offset=10**5000)
    ),
    "a size of 5,000 digits": lambda path: one_tensor(path, dcp_tensor([10**5000]), place()),
    "NUL in a name": lambda path: one_tensor(path, dcp_tensor(), place("a\0b")),
    "a lone surrogate in a name": lambda path: one_tensor(path, dcp_tensor(), place("\ud800")),
    "a lone surrogate in a key": lambda path: folder(
        path, metadata(mapped([text("\ud800"), dcp_tensor()]), mapped([index("\ud800"), place()]))
    ),
    "chunks of one list, again and again": lambda path: folder(
        path,
        metadata(
            mapped(
                [text("0"), dcp_tensor((4,), chunk() + put(1), *[get(1)] * _MANY) + put(0)]
                + [part for n in range(1, _MANY) for part in (text(str(n)), get(0))]
            ),
            b"}",
        ),
    ),
    "a long key with many chunks": lambda path: folder(
        path,
        metadata(
            mapped([text("k" * 500_000), dcp_tensor((4,), chunk() + put(1), *[get(1)] * _MANY)]),
            b"}",
        ),
    ),
    "items in the same bytes": lambda path: folder(
        path,
        metadata(
            mapped([part for n in range(300) for part in (text(str(n)), dcp_tensor())]),
            mapped(
                [
                    part
                    for n in range(300)
                    for part in (index(str(n)), place(offset=n, length=64 << 20))
                ]
            ),
        ),
        bytes((64 << 20) + 300),
    ),
    "a pipe": lambda path: _with_pipe(path, ".metadata"),
    "a pipe as index": lambda path: _with_pipe(path, "model.safetensors.index.json"),
    "NUL in an index": lambda path: _with_index(path, "a\0b"),
    "a lone surrogate in an index": lambda path: _with_index(path, "\ud800"),
    "lists in an index": lambda path: _with_index(path, "a", b"[]," * 10_000_000),
}


def _with_pipe(path: Path, name: str) -> Path:
    path.mkdir()
    os.mkfifo(path / name)
    (path / "__0_0.distcp").write_bytes(b"x")
    return path


def _with_index(path: Path, name: str, more: bytes = b"") -> Path:
    path.mkdir()
    index = json.dumps({"weight_map": {"w": name}}).encode()[:-1] + b', "x": [' + more + b"1]}"
    (path / "model.safetensors.index.json").write_bytes(index)
    return path
