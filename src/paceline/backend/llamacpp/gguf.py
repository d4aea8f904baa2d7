"""Read the head of a GGUF file in pure Python, and say what is wrong with it.

llama.cpp maps model files into memory and asserts on some malformed ones, which ends the process; so a
file is checked here before llama.cpp sees it. Layout (GGUF specification, versions 2 and 3, little endian):
magic, version, two counts; the metadata, key by key; one entry per tensor (name, shape, type, offset); padding; the
tensors' data. Only the head is read, never the data.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...errors import ModelFormatError, ModelNotFound

__all__ = ["GgufInfo", "validate_gguf"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
CHUNK = 1 << 22
MAX_DIMS = 4
# The largest vocabularies take some 20 MiB. A sparse file can claim a string of many gigabytes, and have it.
MAX_HEAD = 1 << 27
MAX_LIST = 512
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
VOCABULARY = "tokenizer.ggml.tokens"

# Metadata value type -> struct format of a scalar.
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip

# Tensor type -> (elements per block, bytes per block).
TENSOR_TYPES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip

SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """What the head of a GGUF file says.

    metadata: every key whose value is a scalar or a string. arrays: key -> number of entries, for the
    others. lists: the values of those of at most 512 numbers, such as one for each layer. shapes: each tensor's,
    innermost dimension first. byte_tokens: the bytes that the vocabulary has a token for, <0x00> .. <0xFF> or, in
    ASCII, the character. data_end: bytes the file must have for all its tensors.
    """

    path: Path
    version: int
    size: int
    metadata: dict[str, Scalar]
    arrays: dict[str, int]
    lists: dict[str, tuple[Scalar, ...]]
    shapes: dict[str, tuple[int, ...]]
    byte_tokens: frozenset[int]
    data_end: int

    @property
    def tensors(self) -> int:
        """How many tensors it holds."""
        return len(self.shapes)

    @property
    def architecture(self) -> str:
        """general.architecture, such as "llama"; "" where the file does not say."""
        return str(self.metadata.get("general.architecture", ""))


def validate_gguf(path: str | Path) -> GgufInfo:
    """Check that `path` is a whole GGUF file (all parts of one that is split) and return its head.

    Raises ModelNotFound where there is no such file, ModelFormatError where it is a directory, not a GGUF,
    of a version nobody reads any more, malformed, or shorter than its tensors. Both name the file.
    """
    path = Path(path)
    info = _read(path)
    parts = int(info.metadata.get("split.count", 0))
    if parts > 1:
        _check_parts(path, parts)
    return info


def _check_parts(path: Path, parts: int) -> None:
    match = SPLIT_NAME.match(path.name)
    if match is None or int(match["parts"]) != parts:
        raise ModelFormatError(
            f"{path} is one of {parts} parts of a model, but is not named NAME-00001-of-{parts:05d}.gguf; "
            "restore the names the parts came with"
        )
    if int(match["part"]) != 1:
        raise ModelFormatError(f"{path} is part {int(match['part'])} of {parts}; give the first part")
    for part in range(2, parts + 1):
        _read(path.with_name(f"{match['stem']}-{part:05d}-of-{parts:05d}.gguf"))


def _read(path: Path) -> GgufInfo:
    if path.is_dir():
        found = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(found[:5])}" if found else ""
        raise ModelFormatError(f"{path} is a directory; give the .gguf file itself{hint}")
    if not path.exists():
        raise ModelNotFound(f"no model file at {path}")
    if not path.is_file():
        raise ModelFormatError(f"{path} is not a regular file")
    try:
        with path.open("rb") as file:
            return _Reader(path, file).info()
    except OSError as error:
        raise ModelFormatError(f"cannot read {path}: {error.strerror or error}") from error


class _Reader:
    """A cursor over the head of one file, which reads on as the head turns out longer."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = path.stat().st_size
        self.data = b""
        self.pos = 0
        self.part = "header"
        self.metadata: dict[str, Scalar] = {}
        self.arrays: dict[str, int] = {}
        self.lists: dict[str, tuple[Scalar, ...]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.byte_tokens: frozenset[int] = frozenset()

    def info(self) -> GgufInfo:
        version, tensors, pairs = self._header()
        for i in range(pairs):
            self.part = f"metadata (entry {i + 1} of {pairs})"
            self._pair()
        alignment = self._alignment()
        extents = []
        for i in range(tensors):
            self.part = f"tensor table (entry {i + 1} of {tensors})"
            extents.append(self._tensor())
        start = -(-self.pos // alignment) * alignment
        end = max((start + last for _, last in extents), default=self.pos)
        if end > self.size:
            missing = next(name for name, last in extents if start + last > self.size)
            raise ModelFormatError(
                f"{self.path} is truncated: its tensors need {end} bytes and it has {self.size} "
                f"(the data ends inside tensor {missing!r}); fetch the file again"
            )
        return GgufInfo(
            self.path,
            version,
            self.size,
            self.metadata,
            self.arrays,
            self.lists,
            self.shapes,
            self.byte_tokens,
            end,
        )

    def _header(self) -> tuple[int, int, int]:
        magic = self.data[:4] if self._have(4) else self.data
        if magic != MAGIC:
            what = "is empty" if not magic else f"starts with {magic!r}, not {MAGIC!r}"
            raise ModelFormatError(f"{self.path} is not a GGUF file: it {what}")
        self.pos = 4
        version = int(self._scalar("<I"))
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            why = " (a big-endian file)" if swapped in VERSIONS else ""
            raise ModelFormatError(f"{self.path} is GGUF version {version}{why}; versions 2 and 3 are read")
        tensors, pairs = int(self._scalar("<Q")), int(self._scalar("<Q"))
        if tensors > self.size or pairs > self.size:
            raise self._malformed(f"claims {tensors} tensors and {pairs} metadata entries")
        return version, tensors, pairs

    def _pair(self) -> None:
        key = self._string()
        if not key or key in self.metadata or key in self.arrays:
            raise self._malformed(f"has {'a repeated' if key else 'an empty'} key {key!r}")
        kind = int(self._scalar("<I"))
        if kind == STRING:
            self.metadata[key] = self._string()
        elif kind in SCALARS:
            self.metadata[key] = self._scalar(SCALARS[kind])
        elif kind == ARRAY:
            self._array(key)
        else:
            raise self._malformed(f"holds a value of unknown type {kind} at key {key!r}")

    def _array(self, key: str) -> None:
        of, count = int(self._scalar("<I")), int(self._scalar("<Q"))
        self.arrays[key] = count
        if of == STRING and key == VOCABULARY:
            self._vocabulary(count)
        elif of == STRING:
            self._skip_strings(count)
        elif of in SCALARS and count <= MAX_LIST:
            self.lists[key] = tuple(self._scalar(SCALARS[of]) for _ in range(count))
        elif of in SCALARS:
            self._skip(count * struct.calcsize(SCALARS[of]))
        else:
            raise self._malformed(f"holds an array of unknown type {of} at key {key!r}")

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._malformed(f"has general.alignment {alignment!r}, which is not a power of two")
        return alignment

    def _tensor(self) -> tuple[str, int]:
        """Name of the next tensor and where its data ends, counted from the start of the data."""
        name = self._string()
        dims = int(self._scalar("<I"))
        if dims > MAX_DIMS:
            raise self._malformed(f"gives tensor {name!r} {dims} dimensions")
        shape = [int(self._scalar("<Q")) for _ in range(dims)]
        if name in self.shapes:
            raise self._malformed(f"names tensor {name!r} twice")
        self.shapes[name] = tuple(shape)
        kind, offset = int(self._scalar("<I")), int(self._scalar("<Q"))
        if kind not in TENSOR_TYPES:
            raise self._malformed(f"gives tensor {name!r} the unknown type {kind}")
        block, size = TENSOR_TYPES[kind]
        if shape and shape[0] % block:
            raise self._malformed(f"gives tensor {name!r} rows of {shape[0]}, not a multiple of {block}")
        elements = 1
        for extent in shape:
            elements *= extent
        return name, offset + elements // block * size

    def _string(self) -> str:
        return self._bytes().decode("utf-8", "replace")

    def _bytes(self) -> bytes:
        length = int(self._scalar("<Q"))
        self._need(length)
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        return raw

    def _skip_strings(self, count: int) -> None:
        # The vocabulary: hundreds of thousands of short strings, so this loop keeps to local names.
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self.pos + 8 > len(self.data):
                self._need(8)
            self.pos += 8 + unpack(self.data, self.pos)[0]
            if self.pos > self.size:
                raise self._truncated()

    def _vocabulary(self, count: int) -> None:
        """llama.cpp asserts that no two tokens are spelled alike."""
        seen = set()
        for i in range(count):
            text = self._bytes()
            if text and text in seen:
                raise self._malformed(f"spells token {i} like an earlier one, {text[:40]!r}")
            seen.add(text)
        spelled = ((byte, f"<0x{byte:02X}>".encode(), bytes((byte,))) for byte in range(256))
        self.byte_tokens = frozenset(b for b, name, char in spelled if name in seen or (0 < b < 128 and char in seen))

    def _skip(self, count: int) -> None:
        self.pos += count
        if self.pos > self.size:
            raise self._truncated()

    def _scalar(self, fmt: str) -> int | float | bool:
        size = struct.calcsize(fmt)
        self._need(size)
        value: int | float | bool = struct.unpack_from(fmt, self.data, self.pos)[0]
        self.pos += size
        return value

    def _have(self, count: int) -> bool:
        while self.pos + count > len(self.data):
            more = self.file.read(max(CHUNK, self.pos + count - len(self.data)))
            if not more:
                return False
            self.data += more
        return True

    def _need(self, count: int) -> None:
        end = self.pos + count
        if MAX_HEAD < end <= self.size:
            raise self._malformed(f"runs past the first {MAX_HEAD} bytes, and no model's does")
        if end > self.size or not self._have(count):
            raise self._truncated()

    def _truncated(self) -> ModelFormatError:
        return ModelFormatError(
            f"{self.path} is truncated or damaged: it has {self.size} bytes and its {self.part} "
            "runs past the end; fetch the file again"
        )

    def _malformed(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path} is damaged: its {self.part} {what}")
