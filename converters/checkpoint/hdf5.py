"""The .weights.h5 format of Keras 3: HDF5 groups with datasets named by position.

Only hard links to plain numeric datasets are followed. HDF5 can also point into other files, run
filter plugins and declare more than it stores; all of that is refused before data is read.

Format: https://keras.io/api/models/model_saving_apis/weights_saving_and_loading/
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from jaxmha.converters.checkpoint import digests
from jaxmha.converters.checkpoint.contents import Contents, Plan
from jaxmha.converters.checkpoint.errors import (
    AmbiguousFile,
    CheckpointError,
    ForbiddenContent,
    IncompleteCheckpoint,
    MalformedFile,
    MissingDependency,
    PathEscape,
    UnsupportedDtype,
    UnsupportedFormat,
    damage,
)
from jaxmha.converters.checkpoint.hdf5_attribute import text_attribute
from jaxmha.converters.checkpoint.hdf5_index import check_index, root_address
from jaxmha.converters.checkpoint.limits import Budget, Limits, check_name
from jaxmha.converters.checkpoint.source import Source
from jaxmha.converters.checkpoint.tensor import BFLOAT16, NUMPY, over

MAGIC = b"\x89HDF\r\n\x1a\n"
DTYPES = frozenset(NUMPY) | {BFLOAT16}
VARIABLES = "vars"
_DIGEST = "jaxmha.digest"  # an attribute of datasets, and of the root for all of them
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
_MOST_DEFLATED = 1032  # deflate cannot expand further
_LEGACY = ("layer_names", "model_config", "model_weights", "keras_version")
_AGAIN = "save it again with model.save_weights"
_CONVERT_LEGACY = "load it with keras and call model.save_weights('new.weights.h5')"


def read(source: Source, limits: Limits) -> Contents:
    """Walks all groups and checks every dataset.

    Raises:
        MissingDependency, ForbiddenContent, MalformedFile, AmbiguousFile, UnsupportedFormat,
        UnsupportedDtype, IncompleteCheckpoint, BudgetExceeded, PathEscape.
    """
    h5py = _h5py(source.path)
    # The checked descriptor is handed over, so that no name is opened a second time.
    raw = source.file()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(raw.close)
        with damage(source.path, "HDF5", _AGAIN):
            root = root_address(source)
            check_index(source, root, "/", limits.members)
            file = h5py.File(raw, "r")
            cleanup.callback(file.close)
            walk = _Walk(h5py, source, limits)
            walk.group(file.id, root, "", 1)
        close = cleanup.pop_all().close

    def load(name: str) -> np.ndarray:
        return part(name, ())

    def view(name: str) -> np.ndarray | None:
        info, dataset = walk.budget.info[name], file[name]
        at = dataset.id.get_offset()  # None: not in one piece
        little = dataset.dtype == dataset.dtype.newbyteorder("<")
        if at is None or not little or dataset.id.get_storage_size() != info.nbytes:
            return None
        return over(source, at, info.shape, info.dtype)

    def part(name: str, box: tuple[slice, ...]) -> np.ndarray:
        info = walk.budget.info[name]
        with damage(source.path, "HDF5", _AGAIN, name):
            data = np.asarray(file[name][box])
        return (
            data.view(BFLOAT16)
            if info.dtype == BFLOAT16
            else data.astype(info.dtype, "C", copy=False)
        )

    try:
        every = text_attribute(source, root, _DIGEST, "/")
        if every is not None:
            texts = walk.names.items()
            digests.check_manifest(every, walk.budget.info, walk.digests, texts, source.path)
    except CheckpointError:
        close()
        raise
    return Contents(
        walk.budget.info,
        load,
        names=walk.names,
        digests=walk.digests,
        close=close,
        view=view,
        part=part,
    )


def write(file: BinaryIO, plan: Plan) -> None:
    """Writes datasets at their names and the `name` attributes of the `vars` groups."""
    h5py = _h5py(plan.path)
    file.truncate(0)  # HDF5 takes room that was made in advance for a file of its own
    with h5py.File(file, "w") as target:
        for name, info in plan.info.items():
            if info.dtype not in DTYPES:
                raise UnsupportedDtype(
                    plan.path, f"Keras stores no {info.dtype}", "convert the tensor first", name
                )
            if "" in name.split("/"):
                raise PathEscape(plan.path, "an empty group name", "rename the tensor", name)
            kind = np.dtype("V2") if info.dtype == BFLOAT16 else info.dtype
            with _no_clash(plan, name):
                early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                dataset = target.create_dataset(name, info.shape, kind, dcpl=early)
            # The place of the data is known, so that blocks go there without a copy in HDF5.
            at = dataset.id.get_offset()
            if at is not None:
                file.seek(at)
                file.writelines(plan.pieces(name))
            else:  # a scalar, which h5py gives no place in advance, or nothing
                for block in plan.blocks(name):
                    if info.nbytes:
                        dataset[()] = block.view(kind)[0]
            if info.dtype == BFLOAT16:
                dataset.attrs["dtype"] = "bfloat16"
            if plan.keep_digests:
                dataset.attrs[_DIGEST] = np.bytes_(plan.digests[name])
        if plan.keep_digests:
            target.attrs[_DIGEST] = np.bytes_(plan.manifest())
        for group, name in plan.names.items():
            path = f"{group}/{VARIABLES}" if group else VARIABLES
            check_name(plan.path, path, Limits())
            with _no_clash(plan, path):
                target.require_group(path).attrs["name"] = name


@contextlib.contextmanager
def _no_clash(plan: Plan, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as e:
        raise AmbiguousFile(
            plan.path, f"is both a tensor and a group ({e})", "rename one of them", name
        ) from e


class _Walk:
    """One pass over all links, from the root."""

    def __init__(self, h5py: Any, source: Source, limits: Limits) -> None:
        self.h5py, self.source, self.limits = h5py, source, limits
        self.budget = Budget(source.path, source.size, limits)
        self.names: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.groups: set[int] = set()
        self.links = 0

    def fail(
        self, kind: type[CheckpointError], problem: str, member: str, remedy: str = _AGAIN
    ) -> NoReturn:
        raise kind(self.source.path, problem, remedy, member or "/")

    def group(self, group: Any, address: int, path: str, depth: int) -> None:
        """Checks a group, whose index is sound, and everything below it."""
        h5py = self.h5py
        self.budget.spend("the depth of groups", depth, self.limits.depth, path)
        if address in self.groups:
            self.fail(AmbiguousFile, "the group is linked twice, or into itself", path)
        self.groups.add(address)
        self.links += group.get_num_objs()
        self.budget.spend("the number of links", self.links, self.limits.members)
        children = dict(self.child(group, path, raw) for raw in group)
        if not path and any(
            key in children or h5py.h5a.exists(group, key.encode()) for key in _LEGACY
        ):
            self.fail(UnsupportedFormat, "a Keras 2 style .h5 file", path, _CONVERT_LEGACY)
        if path.rpartition("/")[2] == VARIABLES:
            self.variables(address, path, list(children))
        for name, target in children.items():
            child = f"{path}/{name}" if path else name
            check_index(self.source, target, child, self.limits.members)
            item = h5py.h5o.open(group, name.encode())
            if isinstance(item, h5py.h5g.GroupID):
                self.group(item, target, child, depth + 1)
            elif isinstance(item, h5py.h5d.DatasetID):
                self.dataset(item, target, child)
            else:
                self.fail(ForbiddenContent, "neither a group nor a dataset", child)

    def child(self, group: Any, path: str, raw: bytes) -> tuple[str, int]:
        """The name and address of a link, which must be hard."""
        h5l = self.h5py.h5l
        link = group.links.get_info(raw)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.fail(MalformedFile, "a link name is not UTF-8", path)
        check_name(self.source.path, name, self.limits)
        if "/" in name:
            self.fail(PathEscape, "a link name is a path", path)
        if link.type != h5l.TYPE_HARD:
            what = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}
            self.fail(
                ForbiddenContent, what.get(link.type, "a user-defined link"), f"{path}/{name}"
            )
        return name, link.u

    def variables(self, address: int, path: str, children: list[str]) -> None:
        """Positions must run from 0, and the user's name of the layer is an attribute."""
        positions = sorted(int(name) for name in children if name.isdecimal() and len(name) < 8)
        if positions != list(range(len(positions))):
            self.fail(IncompleteCheckpoint, f"the variables are numbered {positions[:9]}", path)
        name = text_attribute(self.source, address, "name", path)
        if name:
            check_name(self.source.path, name, self.limits)
            self.names[path.rpartition("/")[0]] = name

    def dataset(self, item: Any, address: int, name: str) -> None:
        """Checks storage, type and size."""
        h5py = self.h5py
        layout = item.get_create_plist()
        if layout.get_layout() not in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
            self.fail(ForbiddenContent, "an unknown storage layout", name)
        filters = {layout.get_filter(i)[0] for i in range(layout.get_nfilters())}
        if not filters <= _FILTERS.keys():
            unknown = sorted(filters - _FILTERS.keys())
            self.fail(ForbiddenContent, f"the filter {unknown[0]} would load a plugin", name)
        dtype, width = self.dtype(item, address, name)
        space = item.get_space()
        if space.get_simple_extent_type() == h5py.h5s.NULL:
            self.fail(MalformedFile, "the dataset has no shape", name)
        info = self.budget.tensor(name, tuple(space.get_simple_extent_dims()), dtype)

        kept = text_attribute(self.source, address, _DIGEST, name)
        if kept is not None:
            self.digests[name] = kept
        declared, stored = info.size * width, item.get_storage_size()
        if stored > self.source.size:
            self.fail(MalformedFile, "stores more than the file has", name)
        if layout.get_layout() == h5py.h5d.CHUNKED:
            chunk = math.prod(layout.get_chunk()) * width
            allowed = declared + self.limits.chunk_bytes
            self.budget.spend("the chunk size", chunk, allowed, name)
        if declared > stored * (_MOST_DEFLATED if filters & {1, 32000} else 1):
            self.fail(MalformedFile, f"declares {declared} bytes and stores {stored}", name)

    def dtype(self, item: Any, address: int, name: str) -> tuple[np.dtype, int]:
        """The dtype in NumPy and its width in the file."""
        h5t = self.h5py.h5t
        kind, width = item.get_type().get_class(), item.get_type().get_size()
        if kind == h5t.OPAQUE:
            text = text_attribute(self.source, address, "dtype", name)
            if width == 2 and text == "bfloat16":
                return BFLOAT16, width
            self.fail(UnsupportedDtype, "bytes of a dtype that the file does not name", name)
        numeric = kind in (h5t.INTEGER, h5t.FLOAT)
        pair = kind in (h5t.COMPOUND, h5t.ENUM) and item.get_type().get_nmembers() == 2
        dtype = item.dtype.newbyteorder("=") if numeric or pair else None
        # h5py stores complex numbers as a pair of floats and Booleans as an enumeration of two.
        if dtype is None or (pair and dtype.kind not in "bc"):
            self.fail(ForbiddenContent, "holds objects, text or records, not numbers", name)
        if dtype not in DTYPES:
            self.fail(UnsupportedDtype, f"the dtype {dtype}", name)
        return np.dtype(dtype.type), width


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError as e:
        raise MissingDependency(
            path, "reading .weights.h5 needs h5py", "pip install 'jaxmha[files]'"
        ) from e
    return h5py
