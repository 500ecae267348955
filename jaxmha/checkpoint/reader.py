"""An open checkpoint: a lazy mapping from names to arrays."""

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from jaxmha.checkpoint import digests, hub
from jaxmha.checkpoint.errors import (
    BudgetExceeded,
    CheckpointError,
    UnknownTensor,
    UnreadableFile,
    listed,
    printable,
    shown,
)
from jaxmha.checkpoint.folder import Folder
from jaxmha.checkpoint.formats import dequantise as dequantising
from jaxmha.checkpoint.formats import nnx_values, table
from jaxmha.checkpoint.inside import open_folder, open_inside, refuse_link
from jaxmha.checkpoint.limits import Limits
from jaxmha.checkpoint.plan import Contents, Progress
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import TensorInfo

_DEFAULT = Limits()


class Lazy(Mapping[str, np.ndarray]):
    """A mapping that loads each tensor on access, so that `write` holds one at a time.

    Attributes:
        info: name -> TensorInfo(shape, dtype).

    Args:
        info: shape and dtype that `load` will return, by name.
        load: returns one tensor by name. A view, such as a transposed array, is written block by
            block without a copy.

    Example:
        >>> from jaxmha.converters import checkpoint
        >>> info = {"w": checkpoint.TensorInfo((2, 3), np.dtype("float32"))}
        >>> checkpoint.Lazy(info, lambda name: np.ones((3, 2), "float32").T)["w"].shape
        (2, 3)
    """

    def __init__(self, info: Mapping[str, TensorInfo], load: Callable[[str], np.ndarray]) -> None:
        self.info: Mapping[str, TensorInfo] = MappingProxyType(dict(info))
        self._make = load

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.info:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)


class Checkpoint(Lazy):
    """The tensors of one checkpoint. Indexing reads one tensor into a fresh, writable array.

    Attributes:
        path: the file or folder.
        files: `path`, and for an index also its shards.
        format: "safetensors", "torch", "keras_h5", "keras", "npz", "orbax", "gguf" or "sharded".
        info: name -> TensorInfo(shape, dtype), known without reading data.
        metadata: the strings that the file keeps with its tensors; empty for Keras files.
        names: Keras only: group path -> the user's name of that layer; empty elsewhere.
        ordered: False if a .weights.h5 file says that the order of layers of one class is a guess:
            a Keras model may then load the weights of one layer into another.
        digests: name -> digest that the writer stored; empty if it stored none.
        others: torch only: names of values that are not tensors, such as numbers; not read.
        config: .keras only: the config.json in the archive, as data; empty elsewhere.
        quantised: name -> kind, such as "Q4_K", of tensors that the file holds quantised. They are
            dequantised on reading, so `info` and the arrays differ from the file.
        unboxed: names that lack the key `value` that they have in the folder (`open(unbox=True)`).
        unused: names of other checkpoint files in the folder that was opened; empty for a file.
    """

    def __init__(
        self, source: Source | Folder, format: str, contents: Contents, verify: bool = True
    ) -> None:
        super().__init__(contents.info, contents.load)
        self.path: Path = source.path
        self.files: tuple[Path, ...] = (source.path, *contents.files)
        self.format = format
        self.digests: Mapping[str, str] = MappingProxyType(dict(contents.digests))
        self.metadata: Mapping[str, str] = MappingProxyType(dict(contents.metadata))
        self.names: Mapping[str, str] = MappingProxyType(dict(contents.names))
        self.ordered = contents.ordered
        self.others = contents.others
        self.config: Mapping[str, Any] = MappingProxyType(dict(contents.config))
        self.quantised: Mapping[str, str] = MappingProxyType(dict(contents.quantised))
        self._source, self._load, self._verify = source, contents.load, verify
        self._stream, self._view, self._part = contents.stream, contents.view, contents.part
        self._places, self.unboxed = contents.places, contents.unboxed
        self.unused: tuple[str, ...] = ()
        self._close = weakref.finalize(self, _close, contents, source)

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads one tensor, and checks it against its stored digest, if any.

        Raises:
            UnknownTensor (a KeyError), IntegrityError, MalformedFile, UnreadableFile.
        """
        self._check_asked(name)
        try:
            array = self._load(name)
            if self._verify and name in self.digests:
                digests.check(array, self.digests[name], self.path, name)
        except MemoryError as e:
            raise BudgetExceeded(
                self.path, "there is not enough memory for it", "use a larger machine", name
            ) from e
        finally:
            # Check even after an error: a changed file is its likely cause; raise that instead.
            self._check_unchanged(name)
        return array

    def _check_unchanged(self, name: str) -> None:
        if isinstance(self._source, Folder):
            self._source.check_unchanged(self._places.get(name, ("",)))
        else:
            self._source.check_unchanged()

    def _check_asked(self, name: str) -> None:
        if name not in self.info:
            raise UnknownTensor(
                self.path, f"has no tensor {shown(name)}", "list(checkpoint) gives the names"
            )
        if not self._close.alive:
            raise UnreadableFile(
                self.path, "the checkpoint is closed", "read inside `with checkpoint.open(...)`"
            )

    def view(self, name: str) -> np.ndarray | None:
        """A view of one tensor in a file opened with `mmap=True`; its data is not read or checked.

        None if the file is not mapped, the tensor is empty, or its layout in the file differs from
        that in memory (compressed, chunked, big-endian).
        """
        self._check_asked(name)
        mapped = isinstance(self._source, Source) and self._source.mapped
        if not mapped or self._view is None or not self.info[name].nbytes:
            return None
        return self._view(name) if sys.byteorder == "little" else None

    @property
    def reads_parts(self) -> bool:
        """True if `part` reads less than the whole tensor."""
        return self._part is not None

    def part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Reads a box of one tensor.

        From orbax folders and HDF5 files only the chunks that overlap the box are read, without a
        check of the digest; from other formats the whole tensor is read and checked.

        Raises:
            IndexError: more slices than axes, or a step other than 1. Also errors of `__getitem__`.
        """
        self._check_asked(name)
        shape = self.info[name].shape
        if len(box) > len(shape) or any(one.step not in (None, 1) for one in box):
            raise IndexError(
                f"{shown(name)}: expected up to {len(shape)} slices of step 1, got {box}"
            )
        box += (slice(None),) * (len(shape) - len(box))
        box = tuple(slice(*one.indices(n)[:2]) for one, n in zip(box, shape, strict=True))
        if self._part is None:
            whole: tuple[Any, ...] = (
                *box,
                ...,
            )  # the ellipsis keeps a result without axes an array
            array = self[name][whole]
            return np.ascontiguousarray(array).reshape(array.shape)
        try:
            return self._part(name, box)
        finally:
            self._check_unchanged(name)

    def digest(self, algorithm: str | None = None, progress: Progress | None = None) -> str:
        """One digest over names, dtypes, shapes and values; it reads every tensor.

        Equal tensors give equal digests, for every format and order of names.
        """
        algorithm = algorithm or digests.usual()
        digests.hasher(algorithm, self.path)  # raises here, with the path in the message
        done, total, each = 0, sum(info.nbytes for info in self.info.values()), {}
        for name, info in self.info.items():
            array = self[name]
            kept = self.digests.get(name, "") if self._verify else ""
            known = kept.startswith(f"{algorithm}:")  # if so, reading the tensor verified it
            each[name] = kept if known else digests.digest(array, algorithm)
            done += info.nbytes
            if progress:
                progress(done, total)
        return digests.manifest(self.info, each, (), algorithm, self.path)

    def recompute(
        self, name: str, algorithm: str, advance: Callable[[int], None] = lambda count: None
    ) -> str:
        """Computes the digest of one tensor from the file; calls `advance(bytes)` per piece."""
        self._check_asked(name)
        if self._stream is None:
            array = self[name]
            advance(array.nbytes)
            return digests.digest(array, algorithm)
        state = digests.hasher(algorithm, self.path)
        for piece in self._stream(name):
            state.update(piece)
            advance(len(piece))
        self._check_unchanged(name)
        return f"{algorithm}:{state.hexdigest()}"

    @property
    def streams(self) -> bool:
        """True if `recompute` reads a tensor in pieces."""
        return self._stream is not None

    @property
    def tied(self) -> dict[str, str]:
        """Other name of a tied tensor, as `safetensors.torch.save_model` keeps it -> its name."""
        return {x: y for x, y in self.metadata.items() if x not in self and y in self}

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on dequantised and tied tensors, and on files of the folder that are not used."""
        kinds = Counter(self.quantised.values())
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        note = "quantised tensors are dequantised on reading, and are never written as quantised"
        names = listed([shown(name) for name in self.unused])
        other = f"of its folder, {self.path.name} alone was read, and not used: {names}"
        tied = [f"{x} is {y}" for x, y in self.tied.items()]
        once = (
            f"the file has one name for tied tensors; its metadata gives the others: {listed(tied)}"
        )
        return (
            *(f"{note}: {counts}",) * bool(kinds),
            *(other,) * bool(self.unused),
            *(printable(once),) * bool(tied),
        )

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, format={self.format!r}, {len(self)} tensors)"

    def __enter__(self) -> "Checkpoint":  # noqa: PYI034 (beartype does not support Self here)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; doing so twice is fine."""
        self._close()


# Runtime type checkers sample the items of generic mappings; sampling this one would read a tensor.
type.__delattr__(Lazy, "__orig_bases__")


def open(
    path: str | os.PathLike[str],
    *,
    limits: Limits = _DEFAULT,
    mmap: bool = False,
    verify: bool = True,
    dequantise: bool = False,
    unbox: bool = False,
) -> Checkpoint:
    """Opens a checkpoint and checks everything that it declares, without reading a tensor.

    The format is decided by content and must agree with the suffix. No code in the file is run,
    no link inside a folder or file followed and no framework imported.

    Args:
        path: a file, the index of a sharded checkpoint, a folder with either (as written by
            save_pretrained of Hugging Face), an orbax folder, or `hf://org/model[@revision]`.
        limits: limits on memory and work for each file of the checkpoint.
        mmap: return read-only views of the mapped file where its layout allows, without a copy. If
            another process truncates the file meanwhile, the system kills this process.
        verify: check tensors against the digests kept in the file, if any.
        dequantise: dequantise weights whose scales are other tensors (FP8, MXFP4, bitsandbytes,
            GPTQ, AWQ, compressed-tensors), and leave out the scales. Tensors of .gguf files are
            always dequantised.
        unbox: for an orbax folder of `nnx.State`: leave out the last key of its names, `value`.

    Raises:
        CheckpointError: always one of the classes in `jaxmha.checkpoint.errors`.

    Example:
        >>> import numpy, tempfile
        >>> from jaxmha.converters import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = checkpoint.write(f"{folder}/a.pt", {"weight": numpy.ones((2, 3), "float32")})
        ...     with checkpoint.open(f"{folder}/a.pt") as file:
        ...         print(file.format, file.info["weight"].shape, file["weight"].sum())
        torch (2, 3) 6.0
    """
    _refuse_no_path(os.fspath(path))
    found_at = hub.fetch(os.fspath(path)).folder if hub.is_address(path) else Path(path)
    given = found_at
    if not table.is_folder(given):
        found_at = table.file_in(given, limits)
    if table.is_folder(found_at):
        if found_at != given:
            refuse_link(found_at)
        return read(Folder(found_at, limits), table.ORBAX, limits, verify, dequantise, unbox)
    if found_at == given:
        source = Source(found_at, mapped=mmap)
    else:
        with open_folder(given) as folder:
            source = open_inside(folder, found_at.name, mapped=mmap)
    try:
        found = table.recognise(source, limits)
        opened = read(source, found, limits, verify, dequantise)
        if found_at != given:
            opened.unused = table.unused(given, {file.name for file in opened.files}, limits)
        return opened
    except BaseException:
        source.close()
        raise


def _refuse_no_path(path: str) -> None:
    """Raises UnreadableFile for an empty path, which would be the working folder, and for URLs."""
    if not path:
        raise UnreadableFile(path, "the path is empty", 'name a file or folder; "." is this folder')
    if (scheme := hub.scheme_of(path)) and not hub.is_address(path):
        remedy = (
            hub.local_remedy(path)
            or "download it, or give hf://ORGANISATION/MODEL for a model of Hugging Face"
        )
        raise UnreadableFile(path, f"an address of {scheme} is no path", remedy)


def read(
    source: Source | Folder,
    format: table.Format,
    limits: Limits = _DEFAULT,
    verify: bool = True,
    dequantise: bool = False,
    unbox: bool = False,
) -> Checkpoint:
    """Reads a checkpoint of a known format; after an error, the caller closes `source`."""
    try:
        contents = format.read(source, limits)
    except (MemoryError, RecursionError) as e:
        raise BudgetExceeded(
            source.path, f"is too large or too deep ({type(e).__name__})", "check where it is from"
        ) from e
    try:
        source.check_unchanged()
        if unbox and format is table.ORBAX:
            contents = nnx_values.unboxed(contents)
        if dequantise:
            size = source.size + sum(file.stat().st_size for file in contents.files)
            contents = dequantising.dequantised(contents, source.path, size, limits)
    except CheckpointError:
        contents.close()
        raise
    return Checkpoint(source, format.name, contents, verify)


def _close(contents: Contents, source: Source | Folder) -> None:
    contents.close()
    source.close()
