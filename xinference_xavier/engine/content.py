"""Digests that tell one model's or adapter's files from another's without reading all of a model.

Covers: names, sizes, safetensors headers, and small pieces of every tensor. Does not cover: an edit
inside one tensor that no piece hits; training and quantisation change far more than that. Reads
files only: no torch, no vLLM. Runs in the model process (adapters) and in EngineCore (weights).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SAFETENSORS = ".safetensors"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")

#: Pieces read of one model, spread over its files; at a millisecond each (a slow disk) two seconds.
MODEL_PIECES = 2048
PIECE_BYTES = 64
#: Fewest pieces of one file, however many files a model has.
FILE_PIECES = 8
#: Most pieces of one tensor.
TENSOR_PIECES = 4
#: The end of a file of another kind: PyTorch's archives keep the checksums of all tensors there.
TAIL_BYTES = 65536

#: Files of a model up to this size, and those of an adapter, are read whole.
WHOLE_MODEL_BYTES = 1 << 20
WHOLE_ADAPTER_BYTES = 64 << 20

#: A safetensors header may not be longer; a larger number is another format.
_MAX_HEADER_BYTES = 100_000_000


class FilesDigest(NamedTuple):
    """Files in short: how many, their bytes, and a hex SHA-256 over what was read of them."""

    files: int
    nbytes: int
    digest: str

    def __str__(self) -> str:
        return f"{self.files} files, {self.nbytes} bytes, {short(self.digest)}"


def short(digest: str) -> str:
    """A digest as shown to people. 64 bits: an accident cannot make two alike."""
    return digest[:16]


def process_token() -> str:
    """16 hex digits that no other process has, not even one forked from this."""
    return _token(os.getpid())


@functools.cache
def _token(_pid: int) -> str:
    return secrets.token_hex(8)


def unshared(what: str) -> str:
    """The value of something unknown: it equals that of no other process."""
    return f"{what}, shared with nobody: {process_token()}"


def model_digest(path: Path, safetensors_first: bool = True) -> FilesDigest | None:
    """Digest of the weights in a model's folder, or of one file; None if there are none.

    Args:
        safetensors_first: files of other kinds count only where there are no safetensors files.
    """
    files = _weight_files(path, safetensors_first)
    if not files:
        return None
    pieces = max(FILE_PIECES, MODEL_PIECES // len(files))
    return _digest(files, WHOLE_MODEL_BYTES, pieces)


def adapter_digests(paths: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Content of LoRA adapters, given as (name, folder): hex SHA-256 by name, or "unknown ...".

    Of several adapters with one name the first counts, as it does for requests.
    """
    found: dict[str, str] = {}
    for name, path in paths:
        if name not in found:
            digest = _adapter_digest(Path(path).expanduser())
            found[name] = unshared("unknown adapter") if digest is None else digest.digest
    return found


def _adapter_digest(folder: Path) -> FilesDigest | None:
    files = _weight_files(folder, safetensors_first=False)
    if not files:
        return None
    config = folder / "adapter_config.json"
    files += [config] if config.is_file() else []
    return _digest(files, WHOLE_ADAPTER_BYTES, MODEL_PIECES)


def small_files_digest(folder: Path, names: Sequence[str]) -> str:
    """Hex SHA-256 over those of the named files that exist, read whole."""
    files = [folder / name for name in names if (folder / name).is_file()]
    digest = _digest(files, WHOLE_ADAPTER_BYTES, FILE_PIECES)
    return unshared("unknown files") if digest is None else digest.digest


def value_digest(value: Any) -> str:
    """Hex SHA-256 of plain data, whatever the order of its dictionaries."""
    text = json.dumps(_ordered(value), separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _ordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _ordered(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_ordered(item) for item in value]
    return value


def _weight_files(path: Path, safetensors_first: bool) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    files = sorted(file for file in path.iterdir() if file.is_file())
    tensors = [file for file in files if file.suffix == SAFETENSORS]
    if tensors and safetensors_first:
        return tensors
    return [file for file in files if file.suffix in (SAFETENSORS, *OTHER_WEIGHTS)]


def _digest(files: Sequence[Path], whole_bytes: int, pieces: int) -> FilesDigest | None:
    """None when a file cannot be read: then its content is unknown."""
    total, digest = 0, hashlib.sha256()
    try:
        for file in files:
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                digest.update(f"{file.name}\0{size}\0".encode())
                for part in _parts(opened.fileno(), size, whole_bytes, pieces):
                    digest.update(part)
            total += size
    except OSError:
        return None
    return FilesDigest(len(files), total, digest.hexdigest())


def _parts(fd: int, size: int, whole_bytes: int, pieces: int) -> Iterator[bytes]:
    """What is hashed of one file; how much of it that is follows from the file alone."""
    if size <= whole_bytes:
        for start in range(0, size, 1 << 20):
            yield os.pread(fd, 1 << 20, start)
        return
    if hasattr(os, "posix_fadvise"):  # no read-ahead around pieces
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    header = _safetensors_header(fd, size)
    if header is None:
        starts = _spread(0, size, pieces)
        yield os.pread(fd, TAIL_BYTES, size - min(size, TAIL_BYTES))
    else:
        starts = _tensor_pieces(header, pieces)
        yield header
    for start in starts:
        yield os.pread(fd, PIECE_BYTES, start)


def _safetensors_header(fd: int, size: int) -> bytes | None:
    """The header of a safetensors file as it stands there, or None if this is none."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
        return None
    header = os.pread(fd, length, 8)
    return header if header.lstrip().startswith(b"{") else None


def _tensor_pieces(header: bytes, pieces: int) -> list[int]:
    """Where to read: up to ``TENSOR_PIECES`` of each tensor, of as many tensors as allowed."""
    try:
        tensors = sorted(
            tuple(entry["data_offsets"])
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    if not tensors:
        return []
    step = max(1, -(-len(tensors) // pieces))
    each = min(TENSOR_PIECES, max(1, pieces // len(tensors)))
    data = 8 + len(header)
    return [
        start for begin, end in tensors[::step] for start in _spread(data + begin, data + end, each)
    ]


def _spread(begin: int, end: int, count: int) -> list[int]:
    """``count`` places inside ``[begin, end)``, evenly spread."""
    return [begin + (end - begin) * (2 * i + 1) // (2 * count) for i in range(count)]
