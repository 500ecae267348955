"""An open checkpoint: a lazy mapping from names to arrays."""

import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np

from jaxmha.converters.checkpoint import formats
from jaxmha.converters.checkpoint.contents import Contents
from jaxmha.converters.checkpoint.errors import (
    BudgetExceeded,
    CheckpointError,
    UnknownTensor,
    UnreadableFile,
    shown,
)
from jaxmha.converters.checkpoint.limits import Limits
from jaxmha.converters.checkpoint.source import Source
from jaxmha.converters.checkpoint.tensor import TensorInfo

_DEFAULT = Limits()


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of one file. Indexing reads one tensor into a fresh, writable array.

    Attributes:
        path: the file.
        format: "safetensors", "torch", "keras_h5" or "npz".
        info: name -> TensorInfo(shape, dtype), known without reading data.
        metadata: the strings of a safetensors file; empty elsewhere.
        names: Keras only: group path -> the user's name of that layer; empty elsewhere.
    """

    def __init__(self, source: Source, format: str, contents: Contents) -> None:
        self.path: Path = source.path
        self.format = format
        self.info: Mapping[str, TensorInfo] = MappingProxyType(dict(contents.info))
        self.metadata: Mapping[str, str] = MappingProxyType(dict(contents.metadata))
        self.names: Mapping[str, str] = MappingProxyType(dict(contents.names))
        self._source, self._load = source, contents.load
        self._close = weakref.finalize(self, _close, contents, source)

    def __getitem__(self, name: str) -> np.ndarray:
        """One tensor.

        Raises:
            UnknownTensor (a KeyError), IntegrityError, MalformedFile, UnreadableFile.
        """
        if name not in self.info:
            raise UnknownTensor(
                self.path, f"has no tensor {shown(name)}", "list(checkpoint) gives the names"
            )
        if not self._close.alive:
            raise UnreadableFile(
                self.path, "the checkpoint is closed", "read inside `with checkpoint.open(...)`"
            )
        try:
            array = self._load(name)
        except MemoryError as e:
            raise BudgetExceeded(
                self.path, "there is not enough memory for it", "use a larger machine", name
            ) from e
        finally:
            # A change is the likely cause of whatever else went wrong, so it is reported first.
            self._source.check_unchanged()
        return array

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, format={self.format!r}, {len(self)} tensors)"

    def __enter__(self) -> "Checkpoint":  # noqa: PYI034 (Self is more than beartype takes here)
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


# Type checkers that run look into generic mappings; looking into this one would read a tensor.
type.__delattr__(Checkpoint, "__orig_bases__")


def open(path: str | os.PathLike[str], *, limits: Limits = _DEFAULT) -> Checkpoint:
    """Opens a checkpoint and checks everything that it declares; reads no tensor yet.

    The format is decided by content and must agree with the suffix. No code in the file is run,
    no link followed and no framework imported.

    Raises:
        CheckpointError: always one of the classes in `jaxmha.converters.checkpoint.errors`.

    Example:
        >>> import numpy, tempfile
        >>> from jaxmha.converters import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.write(f"{folder}/a.pt", {"weight": numpy.ones((2, 3), "float32")})
        ...     with checkpoint.open(f"{folder}/a.pt") as file:
        ...         print(file.format, file.info["weight"].shape, file["weight"].sum())
        torch (2, 3) 6.0
    """
    formats.refuse_directory(Path(path))
    source = Source(path)
    try:
        found = formats.recognise(source, limits)
        return read(source, found, limits)
    except BaseException:
        source.close()
        raise


def read(source: Source, format: formats.Format, limits: Limits = _DEFAULT) -> Checkpoint:
    """A checkpoint of a known format."""
    try:
        contents = format.read(source, limits)
    except (MemoryError, RecursionError) as e:
        raise BudgetExceeded(
            source.path, f"is too large or too deep ({type(e).__name__})", "check where it is from"
        ) from e
    try:
        source.check_unchanged()
    except CheckpointError:
        contents.close()
        raise
    return Checkpoint(source, format.name, contents)


def _close(contents: Contents, source: Source) -> None:
    contents.close()
    source.close()
