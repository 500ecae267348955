"""Checkpoint files as mappings from names to NumPy arrays.

    with checkpoint.open("model.safetensors") as file:
        checkpoint.write("model.pt", file)

Example:
    >>> import numpy, tempfile
    >>> from jaxmha import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = checkpoint.write(f"{folder}/a.npz", {"bias": numpy.zeros(4)})
    ...     done = checkpoint.write(
    ...         f"{folder}/a.npz", {"bias": numpy.full(4, 0.1)}, force=True, dtype="float16"
    ...     )
    ...     print(done.losses["bias"].max_relative_error < 1e-3)
    ...     print(checkpoint.open(f"{folder}/a.npz")["bias"])
    True
    [0.1 0.1 0.1 0.1]

Reads and writes .safetensors (one file, or sharded with an index), torch zip files, Keras
.weights.h5, .npz and orbax folders; reads .keras archives and .gguf files. Requires NumPy and
ml_dtypes; writing Keras files requires h5py, and orbax requires tensorstore. Never imports torch,
keras or flax, and runs no code from the file. Writing stores a digest of each tensor; reading
checks it.

The tests run on Linux, but no POSIX function is required. Windows has no file locks, so temporary
files of a killed writer are reported instead of removed. Only Linux can replace an orbax folder.
"""

from jaxmha.checkpoint.casting import Loss, cast
from jaxmha.checkpoint.digests import ALGORITHMS, digest
from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    BudgetExceeded,
    CheckpointError,
    DestinationExists,
    ForbiddenContent,
    IncompleteCheckpoint,
    IntegrityError,
    MalformedFile,
    MissingDependency,
    PathEscape,
    UnknownTensor,
    UnreadableFile,
    UnsupportedDtype,
    UnsupportedFormat,
    WriteFailed,
)
from jaxmha.checkpoint.formats.table import FORMATS, Format, suffixes
from jaxmha.checkpoint.limits import Limits
from jaxmha.checkpoint.reader import Checkpoint, Lazy, open
from jaxmha.checkpoint.tensor import TensorInfo
from jaxmha.checkpoint.writer import Written, write

__all__ = [
    "ALGORITHMS",
    "FORMATS",
    "AmbiguousFile",
    "BudgetExceeded",
    "Checkpoint",
    "CheckpointError",
    "DestinationExists",
    "ForbiddenContent",
    "Format",
    "IncompleteCheckpoint",
    "IntegrityError",
    "Lazy",
    "Limits",
    "Loss",
    "MalformedFile",
    "MissingDependency",
    "PathEscape",
    "TensorInfo",
    "UnknownTensor",
    "UnreadableFile",
    "UnsupportedDtype",
    "UnsupportedFormat",
    "WriteFailed",
    "Written",
    "cast",
    "digest",
    "open",
    "suffixes",
    "write",
]
