"""Files of up to some megabytes, made from choices: they nest, repeat, deflate and overlap.

The choices are bytes, so that a fuzzer can change one of them and see what that does.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from support import costly

_T = TypeVar("_T")
_MOST = 8_000_000  # bytes of a file, roughly
_COUNTS = (0, 1, 1, 2, 3, 5, 16, 100, 300, 1100, 5000, 40_000, 300_000, 2_000_000)
_NUMBERS = (0, 0, 1, 1, 2, 3, 4, 7, 255, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**5000)
_TEXTS = ("", "a", "w", "0", "1", "cpu", "\0", "\ud800", "\udc80", "é", "😀", ".", "..", "/", "\n")
_NAMES = (
    "torch.FloatStorage", "torch.float32", "torch.bfloat16", "torch.Size", "builtins.set",
    "collections.OrderedDict", "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_wrapper_subclass", "posix.system", "a.b",
)  # fmt: skip
_DEEPEST = 6


class Choices:
    """Bytes that choose; 0 when there are none left."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.left = _MOST  # bytes that may still be made

    def below(self, count: int) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        if count > 256:
            value = value * 256 + self.below(256)
        return value % count

    def one_of(self, things: Sequence[_T]) -> _T:
        return things[self.below(len(things))]

    def count(self, nbytes: int) -> int:
        """How many times something of `nbytes` bytes comes."""
        count = max(0, min(self.one_of(_COUNTS), self.left // max(nbytes, 1)))
        self.left -= count * nbytes
        return count

    def number(self) -> int:
        return self.one_of(_NUMBERS)

    def sizes(self) -> list[int]:
        """A shape, strides, offsets."""
        few = [self.number() for _ in range(self.below(5))]
        return few * self.count(_length(few)) if self.below(8) == 7 else few

    def text(self) -> str:
        text = self.one_of(_TEXTS) + self.one_of(_TEXTS)
        return text * self.count(4 * len(text)) if self.below(8) == 7 else text


def _length(numbers: list[int]) -> int:
    """How many digits, or bytes of a pickle, numbers take at most."""
    return sum(3 + number.bit_length() // 3 for number in numbers)


class _Pickle:
    """Opcodes of one value; what was put into the memo may be mentioned again."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.puts = 0

    def value(self, depth: int = 0) -> bytes:
        kinds: tuple[Callable[[int], bytes], ...] = (
            self._leaf, self._mention, self._list, self._tuple, self._mapping, self._call,
            self._tensor, self._repeated, self._nested, self._object,
        )  # fmt: skip
        if depth >= _DEEPEST:
            kinds = kinds[:2]
        data = self.choices.one_of(kinds)(depth)
        if self.choices.below(3):
            data += costly.put(self.puts)
            self.puts += 1
        self.choices.left -= len(data)
        return data

    def _leaf(self, depth: int) -> bytes:
        kind = self.choices.below(6)
        if kind < 2:
            return b"N\x88\x89)]}"[self.choices.below(6) :][:1]
        if kind == 2:
            return costly.number(self.choices.number())
        if kind == 3:
            return costly.text(self.choices.text())
        if kind == 4:
            data = bytes(self.choices.count(1))
            return b"B" + struct.pack("<I", len(data)) + data
        return costly.named(self.choices.one_of(_NAMES))

    def _mention(self, depth: int) -> bytes:
        if not self.puts:
            return b"N"
        return costly.get(self.choices.below(self.puts))

    def _some(self, depth: int, most: int = 5) -> list[bytes]:
        return [self.value(depth + 1) for _ in range(self.choices.below(most))]

    def _list(self, depth: int) -> bytes:
        return costly.listed(self._some(depth))

    def _tuple(self, depth: int) -> bytes:
        return costly.tupled(self._some(depth))

    def _mapping(self, depth: int) -> bytes:
        count = self.choices.below(4)
        return costly.mapped([self.value(depth + 1) for _ in range(2 * count)])

    def _call(self, depth: int) -> bytes:
        data = costly.called(self.choices.one_of(_NAMES), *self._some(depth, 8))
        return data + self.value(depth + 1) + b"b" if self.choices.below(3) == 2 else data

    def _tensor(self, depth: int) -> bytes:
        return costly.tensor(self.choices.sizes(), self.choices.sizes())

    def _repeated(self, depth: int) -> bytes:
        """A container with one of its parts, again and again."""
        part = self.value(depth + 1) + costly.put(self.puts)
        mention = costly.get(self.puts)
        self.puts += 1
        kind = self.choices.below(4)
        if kind == 0:
            return costly.listed([part, *[mention] * self.choices.count(len(mention))])
        if kind == 1:
            return costly.tupled([part, *[mention] * self.choices.count(len(mention))])
        pair = mention * 2 if kind == 2 else costly.text(self.choices.text()) + mention
        again = pair * self.choices.count(len(pair))
        return costly.tupled([part, costly.mapped([again])])

    def _nested(self, depth: int) -> bytes:
        """A value in many lists, tuples or dictionaries."""
        count = self.choices.count(6)
        kind = self.choices.below(4)
        inner = self.value(depth + 1)
        if kind == 0:
            return b"](" * count + inner + b"e" * count
        if kind == 1:
            return inner + b"\x85" * count
        if kind == 2:
            return b"}(K\x00" * count + inner + b"u" * count
        width = 2 + self.choices.below(60)
        return costly.levels(self.choices.below(12), width, inner)

    def _object(self, depth: int) -> bytes:
        return costly.made(self.choices.one_of(_NAMES), a=self.value(depth + 1))

    def whole(self) -> bytes:
        return costly.pickled(self.value())


def a_pickle(choices: Choices) -> bytes:
    return _Pickle(choices).whole()


def a_zip(choices: Choices) -> bytes:
    """Records of some names, some deflated; entries may repeat, overlap and lie."""
    inflated = [a_pickle(choices)]
    filler = bytes((choices.below(256), choices.below(256)))
    if choices.below(4) == 3:  # more than the file could hold otherwise
        filler_count = choices.one_of((1000, 100_000, 10_000_000, 200_000_000))
        inflated.append(b"\x80\x02" + filler * filler_count + b"N.")
    names = ["x/data.pkl", "x/data/0", "x/data/1", "x/version", "x/byteorder", "x/DATA.PKL", "y"]
    out, entries = bytearray(), []
    for name in [names[0], *(choices.one_of(names) for _ in range(choices.below(8)))]:
        data = choices.one_of(inflated) if name.lower().endswith(".pkl") else b"3\n"
        if name.startswith("x/data/"):
            data = bytes(choices.count(1))
        method = 8 * choices.below(2) if len(data) < 2 * _MOST else 8
        packer = zlib.compressobj(1, wbits=-15)
        packed = packer.compress(data) + packer.flush() if method else data
        fields = [zlib.crc32(data), len(packed), len(data)]
        if choices.below(8) == 7:
            fields[choices.below(3)] = choices.number() & 0xFFFFFFFF
        at = len(out)
        head = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 33, *fields, len(name), 0)
        out += b"PK\x03\x04" + head + name.encode() + packed
        entries.append((name, method, fields, at))
    directory, count = bytearray(), 0
    for name, method, fields, at in entries:
        extra = bytes(choices.count(1) & 0xFFFF) if choices.below(8) == 7 else b""
        at = choices.one_of(entries)[3] if choices.below(8) == 7 else at
        lengths = (len(name), len(extra), 0, 0, 0, 0)
        entry = struct.pack("<HHHHHHIII", 20, 20, 0, method, 0, 33, *fields)
        entry = (
            b"PK\x01\x02" + entry + struct.pack("<HHHHHII", *lengths, at) + name.encode() + extra
        )
        again = choices.count(len(entry)) if choices.below(8) == 7 else 1
        directory += entry * again
        count += again
    end = struct.pack("<HHHHIIH", 0, 0, count & 0xFFFF, count & 0xFFFF, len(directory), len(out), 0)
    if count > 0xFFFF:
        at = len(out) + len(directory)
        directory += b"PK\x06\x06" + struct.pack(
            "<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(directory), len(out)
        )
        directory += b"PK\x06\x07" + struct.pack("<IQI", 0, at, 1)
    return bytes(out + directory + b"PK\x05\x06" + end)


def a_legacy_file(choices: Choices) -> bytes:
    keys = [choices.text() for _ in range(choices.below(4))]
    keys = keys * choices.count(20) if choices.below(8) == 7 else ["0", *keys]
    return costly.legacy(a_pickle(choices), keys)


def a_safetensors_file(choices: Choices) -> bytes:
    """A header of entries, of which some repeat; the bytes of the tensors are zeros."""
    parts: list[str] = []
    at = 0
    dtypes = ("F32", "F64", "BF16", "U8", "F4", "F8_E4M3", "BOOL", "X", "", "C64")
    for number in range(1 + choices.below(6)):
        nbytes = choices.count(1)
        shape = choices.sizes() if choices.below(3) == 2 else [nbytes // 4]
        offsets = [at, at + nbytes] if choices.below(8) else [choices.number(), choices.number()]
        at += nbytes
        entry = {"dtype": choices.one_of(dtypes), "shape": shape, "data_offsets": offsets}
        parts.append(f"{json.dumps(f'{choices.text()}{number}')}:{_json(entry)}")
    kind = choices.below(8)
    if kind == 7:  # more of the same: JSON takes any number of them
        more = choices.one_of(('"a":{}', '"b":[[]]', '"__metadata__":{"a":"b"}', parts[0]))
        parts += [more] * choices.count(len(more))
    elif kind == 6:
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [at, at]}
        name = choices.text()[:20]
        count = choices.count(80)
        parts += [f"{json.dumps(f'{name}.{n}')}:{_json(empty)}" for n in range(count)]
    elif kind == 5:
        nest = choices.one_of(("[", '{"a":', "[1,"))
        parts.append('"n":' + nest * choices.count(len(nest)))
    return costly.safetensors(("{" + ",".join(parts) + "}").encode(), bytes(at))


def _json(value: Any) -> str:
    """JSON, with integers of any length."""
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_json(one)}" for key, one in value.items()) + "}"
    if isinstance(value, int) and value > 2**64:
        return "1" * 5000
    return json.dumps(value)


def a_dcp_file(choices: Choices) -> bytes:
    """A `.metadata`; in the fuzzer it is the file with the items, too."""
    keys = [choices.text() for _ in range(1 + choices.below(4))]
    tensors: list[bytes] = []
    places: list[bytes] = []
    for number, key in enumerate(keys):
        shape = choices.sizes()
        one = costly.chunk(choices.sizes(), shape) + costly.put(2 * number)
        chunks = [one, *[costly.get(2 * number)] * choices.count(2)]
        tensor = costly.dcp_tensor(shape, *chunks) + costly.put(2 * number + 1)
        tensors += [costly.text(key), tensor]
        again = choices.count(len(key) + 20) if choices.below(4) == 3 else 0
        for n in range(again):
            tensors += [costly.text(f"{key}{n}"), costly.get(2 * number + 1)]
        file = choices.one_of(("__0_0.distcp", "__0_0.distcp", choices.text()))
        for n in range(1 + choices.count(300 + len(key) + len(file))):
            name = f"{key}{n - 1}" if n else key
            at = choices.number() if choices.below(4) == 3 else 0
            where = costly.place(file, at, choices.one_of((16, 1000, choices.number())))
            places += [costly.index(name, choices.sizes()), where]
    if choices.below(4) == 3:
        tensors += [costly.text(choices.text()), _Pickle(choices).value()]
    return costly.metadata(costly.mapped(tensors), costly.mapped(places))


MAKERS: dict[str, Callable[[Choices], bytes]] = {
    "zip": a_zip,
    "legacy": a_legacy_file,
    "pickle": a_pickle,
    "safetensors": a_safetensors_file,
    "dcp": a_dcp_file,
}


def make(parser: str, choices: bytes) -> bytes:
    """Return a file of the format that a parser reads."""
    return MAKERS[parser](Choices(choices))


def seeds() -> list[bytes]:
    """Return choices to begin with."""
    return [random.Random(seed).randbytes(50 + 10 * seed) for seed in range(60)]
