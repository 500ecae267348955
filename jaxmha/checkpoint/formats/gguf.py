"""The .gguf format of llama.cpp: metadata, tensor descriptions, aligned data. Read only.

Quantised tensors become float32. llama.cpp permutes the rows of queries and keys of Llama, and
transposes the kernels of GPT-2, when it writes them. Reading undoes both, so that the arrays equal
the arrays of the Hugging Face model.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    MalformedFile,
    UnsupportedDtype,
    UnsupportedFormat,
)
from jaxmha.checkpoint.formats.ggml_blocks import OTHERS, QUANTISED
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import from_bytes

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PLAIN = {
    0: np.dtype(np.float32), 1: np.dtype(np.float16), 24: np.dtype(np.int8),
    25: np.dtype(np.int16), 26: np.dtype(np.int32), 27: np.dtype(np.int64),
    28: np.dtype(np.float64), 30: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_KEPT = ("general.architecture", "general.alignment")
_PERMUTED = ("llama",)  # architectures whose queries and keys llama.cpp permutes
# Architecture -> layers whose kernels llama.cpp transposes: the Conv1D layers of GPT-2.
_TRANSPOSED = {"gpt2": ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}
# Architectures that llama.cpp writes without changing values. It adds 1 to the norms of Gemma, and
# reorders BLOOM, so an architecture that no table here lists is refused.
_UNCHANGED = ("qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "starcoder2")
_RANK, _NESTED, _PIECE = 4, 4, 1 << 22
_AGAIN = "download it again"
_DESCRIPTION = 400  # memory for the description of one tensor, in bytes


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Cursor:
    """Reads the values of the header in order, from a buffered window of the file."""

    def __init__(self, source: Source, budget: Budget) -> None:
        self.source, self.budget, self.at, self.steps = source, budget, 0, 0
        self._start, self._window = 0, b""

    def take(self, count: int) -> bytes:
        self.steps += 1
        if self.steps > self.budget.limits.steps:
            self.budget.spend("the number of values", self.steps, self.budget.limits.steps)
        start = self.at - self._start
        if start + count > len(self._window):
            left = self.source.size - self.at
            if count > left:
                raise MalformedFile(self.source.path, "the header leaves the file", _AGAIN)
            self._start, start = self.at, 0
            self._window = self.source.read(self.at, min(left, max(count, 1 << 16)))
        self.at += count
        return self._window[start : start + count]

    def skip(self, count: int) -> None:
        if count > self.source.size - self.at:
            raise MalformedFile(self.source.path, "the header leaves the file", _AGAIN)
        self.at += count
        if self.at > self._start + len(self._window):
            self._start, self._window = self.at, b""

    def skip_texts(self, count: int) -> None:
        """Skips strings without a call for each, since a vocabulary has hundreds of thousands."""
        self.steps += count
        for _ in range(count):
            at = self.at - self._start
            if at + 8 > len(self._window):
                self.take(8)
                at = self.at - 8 - self._start
            else:
                self.at += 8
            length = int.from_bytes(self._window[at : at + 8], "little")
            if at + 8 + length > len(self._window):
                self.skip(length)
            else:
                self.at += length

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value

    def text(self, *, keep: bool = True) -> str:
        length = self.number("Q")
        most = self.budget.limits.name_bytes
        if not keep and length > most:
            self.skip(length)
            return ""
        self.budget.spend("the length of a name", length, most)
        raw = self.take(length)
        try:
            return raw.decode() if keep else ""
        except UnicodeDecodeError:
            raise MalformedFile(self.source.path, "a name is not UTF-8", _AGAIN) from None

    def value(self, kind: int, *, keep: bool, depth: int = 0) -> Any:
        """Reads one value; returns None for a list, and "" for a string unless `keep` is True."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text(keep=keep)
        if kind != _ARRAY:
            raise MalformedFile(self.source.path, f"a value has the type {kind}", _AGAIN)
        self.budget.spend("the depth of lists", depth, _NESTED)
        inner, count = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[inner]}"))
            return None
        self.budget.spend("the number of values", self.steps + count, self.budget.limits.steps)
        if inner == _STRING:
            return self.skip_texts(count)
        for _ in range(count):
            self.value(inner, keep=False, depth=depth + 1)
        return None


def read(source: Source, limits: Limits) -> Contents:
    """Reads the header, and checks the metadata and the description of every tensor.

    Raises:
        MalformedFile, AmbiguousFile, BudgetExceeded, PathEscape, UnsupportedDtype,
        UnsupportedFormat.
    """
    if limits.logical_bytes is None:  # dequantising turns 4 bits into 4 bytes
        limits = replace(limits, logical_bytes=max(8 * source.size, 1 << 30))
    budget = Budget(source.path, source.size, limits)
    cursor = _Cursor(source, budget)
    if cursor.take(4) != MAGIC:
        raise MalformedFile(source.path, "the file does not begin with GGUF", _AGAIN)
    version = cursor.number("I")
    if version not in _VERSIONS:
        problem = f"version {version if version < 2**16 else 'of a big-endian machine'} of GGUF"
        raise UnsupportedFormat(source.path, problem, "write it again with the gguf package")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    budget.spend("the number of tensors", tensors, limits.tensors)
    budget.spend("the number of settings", pairs, limits.members)
    if tensors * 24 + pairs * 13 > source.size:
        raise MalformedFile(source.path, "the header leaves the file", _AGAIN)
    settings = _settings(cursor, pairs)
    found = _tensors(cursor, tensors)
    start = _placed(source, found, settings.get("general.alignment", 32), cursor.at)
    heads = _heads(source, settings, found)
    architecture = str(settings.get("general.architecture", ""))
    turned = {name for name in found if _is_transposed(architecture, name)}
    for name, one in found.items():
        dtype = np.dtype(np.float32) if one.kind in QUANTISED else _PLAIN[one.kind]
        budget.tensor(name, one.shape[::-1] if name in turned else one.shape, dtype)

    def load(name: str) -> np.ndarray:
        array = _loaded(source, budget, name, found[name], start)
        if name in turned:
            return np.ascontiguousarray(array.T)
        return _unpermuted(array, heads[name]) if name in heads else array

    quantised = {n: QUANTISED[x.kind].name for n, x in found.items() if x.kind in QUANTISED}
    return Contents(budget.info, load, metadata={_KEPT[0]: architecture}, quantised=quantised)


def _settings(cursor: _Cursor, count: int) -> dict[str, Any]:
    """The settings that reading needs: architecture, alignment and head counts."""
    found, seen = dict[str, Any](), set[str]()
    for _ in range(count):
        key = cursor.text()
        cursor.budget.build(len(key) + 100, "its settings", key)
        if key in seen:
            raise AmbiguousFile(cursor.source.path, "two settings have this name", _AGAIN, key)
        seen.add(key)
        keep = key in _KEPT or ".attention.head_count" in key
        value = cursor.value(cursor.number("I"), keep=keep)
        if keep:
            found[key] = value
    return found


def _tensors(cursor: _Cursor, count: int) -> dict[str, _Tensor]:
    """The descriptions of all tensors; shapes have the slowest axis first, as in NumPy."""
    path, found = cursor.source.path, dict[str, _Tensor]()
    for _ in range(count):
        name, rank = cursor.text(), cursor.number("I")
        cursor.budget.build(_DESCRIPTION, "its tensors", name)
        if rank > _RANK:
            raise MalformedFile(path, f"the tensor has {rank} axes", _AGAIN, name)
        shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
        kind, offset = cursor.number("I"), cursor.number("Q")
        block = QUANTISED.get(kind)
        if block is None and kind not in _PLAIN:
            problem = f"the type {OTHERS.get(kind, kind)} is not read"
            known = ", ".join(x.name for x in QUANTISED.values())
            raise UnsupportedDtype(path, problem, f"quantise the original as one of {known}", name)
        if block is not None and (not shape or shape[-1] % block.size):
            problem = f"{shape} is not made of blocks of {block.size}"
            raise MalformedFile(path, problem, _AGAIN, name)
        if name in found:
            raise AmbiguousFile(path, "two tensors have this name", _AGAIN, name)
        found[name] = _Tensor(shape, kind, offset)
    return found


def _stored(one: _Tensor) -> int:
    """The size of a tensor in the file, in bytes."""
    count = 1
    for size in one.shape:
        count *= size
    block = QUANTISED.get(one.kind)
    return count // block.size * block.nbytes if block else count * _PLAIN[one.kind].itemsize


def _placed(source: Source, found: dict[str, _Tensor], alignment: Any, at: int) -> int:
    """The offset of the data section, which follows the header that ends at `at`.

    Raises MalformedFile unless the tensors follow one another up to the end of the file.
    """
    path = source.path
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise MalformedFile(path, f"the alignment is {str(alignment)[:20]}", _AGAIN)

    def aligned(offset: int) -> int:
        return -(-offset // alignment) * alignment

    start, position = aligned(at), 0
    for name, one in sorted(found.items(), key=lambda item: (item[1].offset, _stored(item[1]))):
        if one.offset != position:
            what = "overlaps the tensor before it" if one.offset < position else "leaves a hole"
            raise MalformedFile(path, f"the data {what}", _AGAIN, name)
        end = start + one.offset + _stored(one)
        if end > source.size:
            raise MalformedFile(path, "the data leaves the file", _AGAIN, name)
        position = aligned(one.offset + _stored(one))
    if found and source.size > start + position:
        raise MalformedFile(path, "the file has bytes after its tensors", _AGAIN)
    return start


def _heads(source: Source, settings: dict[str, Any], found: dict[str, _Tensor]) -> dict[str, int]:
    """The number of heads of every tensor whose rows llama.cpp permuted.

    Raises:
        UnsupportedFormat: it is not known how llama.cpp writes this architecture.
        MalformedFile: the head counts do not fit.
    """
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str):
        raise MalformedFile(source.path, "general.architecture is no text", _AGAIN)
    if architecture in _UNCHANGED or architecture in _TRANSPOSED:
        return {}
    if architecture not in _PERMUTED:
        problem = f"it is not known which weights of {architecture[:40]!r} llama.cpp changes"
        remedy = "convert the safetensors of the original model"
        raise UnsupportedFormat(source.path, problem, remedy)
    queries = settings.get(f"{architecture}.attention.head_count")
    keys = settings.get(f"{architecture}.attention.head_count_kv", queries)
    heads = {}
    for name, one in found.items():
        count = queries if ".attn_q." in name else keys if ".attn_k." in name else None
        if ".attn_q." not in name and ".attn_k." not in name:
            continue
        if type(count) is not int or count < 1 or not one.shape or one.shape[0] % (2 * count):
            problem = f"{str(count)[:20]} heads do not divide {one.shape} into pairs of rows"
            raise MalformedFile(source.path, problem, _AGAIN, name)
        heads[name] = count
    return heads


def _is_transposed(architecture: str, name: str) -> bool:
    """True if llama.cpp transposed the tensor of this name."""
    *_, layer, array = ("", "", *name.split("."))
    return array == "weight" and layer in _TRANSPOSED.get(architecture, ())


def _unpermuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows for RoPE: llama.cpp pairs adjacent rows; Hugging Face, the halves of a head."""
    pairs = array.reshape(heads, len(array) // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _loaded(source: Source, budget: Budget, name: str, one: _Tensor, start: int) -> np.ndarray:
    """Reads one tensor, and dequantises it block by block if it is quantised."""
    info, block, offset = budget.info[name], QUANTISED.get(one.kind), start + one.offset
    if block is None:
        raw = source.read_array(offset, info.nbytes)
        return from_bytes(raw, info.dtype, "little", source.path, name).reshape(one.shape)
    out = np.empty(info.size // block.size * block.size, np.float32).reshape(-1, block.size)
    step = max(1, _PIECE // block.nbytes)
    for at in range(0, len(out), step):
        count = min(step, len(out) - at)
        raw = source.read_array(offset + at * block.nbytes, count * block.nbytes)
        with np.errstate(invalid="ignore", over="ignore"):  # scales may be infinite
            out[at : at + count] = block.dequantise(raw.reshape(count, block.nbytes))
    return out.reshape(one.shape)
