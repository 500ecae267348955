"""The .weights.h5 format of Keras 3: HDF5 groups with datasets named by position.

The HDF5 reader of this package reads only hard links to numeric datasets, and opens no other file.
The HDF5 library is used for writing only: its reader can loop forever, opens external files that a
dataset names, and trusts declared sizes.

Format: https://keras.io/api/models/model_saving_apis/weights_saving_and_loading/
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from jaxmha.checkpoint import digests
from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    ForbiddenContent,
    IncompleteCheckpoint,
    MalformedFile,
    MissingDependency,
    PathEscape,
    UnsupportedDtype,
    UnsupportedFormat,
    shown,
)
from jaxmha.checkpoint.formats.hdf5 import file as hdf5_file
from jaxmha.checkpoint.formats.hdf5.attribute import Attributes
from jaxmha.checkpoint.formats.hdf5.data import Box, Dataset, dataset
from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File
from jaxmha.checkpoint.formats.hdf5.header import (
    DATASPACE,
    DATATYPE,
    LAYOUT,
    LINK_INFO,
    SYMBOL_TABLE,
    Header,
    check_extension,
    read_header,
)
from jaxmha.checkpoint.formats.hdf5.heap import Texts
from jaxmha.checkpoint.formats.hdf5.links import links
from jaxmha.checkpoint.formats.hdf5.type import dataspace, datatype, no_dtype
from jaxmha.checkpoint.limits import Budget, Limits, check_name
from jaxmha.checkpoint.plan import UNORDERED, Contents, WriteJob
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import BFLOAT16, NUMPY

MAGIC = hdf5_file.MAGIC
DTYPES = frozenset(NUMPY) | {BFLOAT16}
VARIABLES = "vars"
_DIGEST = "jaxmha.digest"  # attribute: digest of a dataset; at the root, the manifest digest
_STEPS = 30  # most steps to read an object that `write` wrote
LEGACY = ("layer_names", "model_config", "model_weights", "keras_version")
_CONVERT_LEGACY = "load it with keras and call model.save_weights('new.weights.h5')"


def read(source: Source, limits: Limits) -> Contents:
    """Walks all groups and checks every dataset.

    Raises:
        ForbiddenContent, MalformedFile, AmbiguousFile, UnsupportedFormat, UnsupportedDtype,
        IncompleteCheckpoint, BudgetExceeded, PathEscape.
    """
    file = File(source, limits)
    walk = _Walk(file)
    every = walk.check_all()
    if every is not None:
        texts = [*walk.names.items(), *[UNORDERED] * (not walk.ordered)]
        digests.check_manifest(every, walk.budget.info, walk.digests, texts, source.path)

    def part(name: str, box: Box) -> np.ndarray:
        return walk.datasets[name].read(file, name, box)

    return Contents(
        walk.budget.info,
        lambda name: part(name, ()),
        names=walk.names,
        ordered=walk.ordered,
        digests=walk.digests,
        view=lambda name: walk.datasets[name].view(source),
        part=part,
    )


def check(plan: WriteJob) -> None:
    """Raises if the format cannot hold a name or dtype, or variables are not numbered from 0.

    Raises:
        MissingDependency, UnsupportedDtype, PathEscape, AmbiguousFile, IncompleteCheckpoint,
        UnsupportedFormat, BudgetExceeded, MalformedFile.
    """
    _h5py(plan.path)
    rename, groups = "rename the tensor", dict[str, set[str]]()
    for name, info in plan.info.items():
        if info.dtype not in DTYPES:
            problem = f"Keras stores no {info.dtype}"
            raise UnsupportedDtype(plan.path, problem, "convert the tensor first", name)
        _check_parts(plan, name)
        if name.partition("/")[0] in LEGACY:
            raise UnsupportedFormat(plan.path, "a name of Keras 2 style .h5 files", rename, name)
        _enter(groups, name)
    for group, text in plan.names.items():
        path = f"{group}/{VARIABLES}" if group else VARIABLES
        _check_parts(plan, f"{path}/0")
        check_name(plan.path, text, Limits())
        _enter(groups, path)
        groups.setdefault(path, set())
    for name in plan.info.keys() & groups.keys():
        raise AmbiguousFile(plan.path, "is both a tensor and a group", "rename one of them", name)
    steps = _STEPS * (len(plan.info) + len(groups)) + sum(map(len, plan.names.values()))
    if steps > Limits().steps:
        problem = f"{len(plan.info)} tensors are more than a .weights.h5 file is read with"
        raise UnsupportedFormat(plan.path, problem, "write .safetensors")
    for group, children in groups.items():
        if group.rpartition("/")[2] == VARIABLES and (found := _misnumbered(children)):
            problem = f"the variables are numbered {found[:9]}, not from 0"
            raise IncompleteCheckpoint(plan.path, problem, rename, group)


def _check_parts(plan: WriteJob, name: str) -> None:
    parts, limits = name.split("/"), Limits()
    if "" in parts:
        raise PathEscape(plan.path, "an empty group name", "rename the tensor", name)
    Budget(plan.path, 0, limits).spend("the depth of groups", len(parts), limits.depth, name)
    for part in parts:
        check_name(plan.path, part, limits)


def _enter(groups: dict[str, set[str]], name: str) -> None:
    """Adds every component of a name to the children of its parent group in `groups`."""
    while "/" in name:
        name, _, child = name.rpartition("/")
        groups.setdefault(name, set()).add(child)


def _misnumbered(children: Iterable[str]) -> list[int]:
    """The numbers of the variables if they do not run from 0 without gaps; else an empty list."""
    positions = sorted(int(name) for name in children if name.isdecimal() and len(name) < 8)
    return [] if positions == list(range(len(positions))) else positions


def write(file: BinaryIO, plan: WriteJob) -> None:
    """Writes each tensor as a dataset, and layer names as attributes of the `vars` groups."""
    h5py = _h5py(plan.path)
    file.truncate(0)  # HDF5 would parse the reserved space as an existing file
    with h5py.File(file, "w") as target:
        for name, info in plan.info.items():
            kind = np.dtype("V2") if info.dtype == BFLOAT16 else info.dtype
            early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            dataset = target.create_dataset(name, info.shape, kind, dcpl=early)
            # Early allocation fixes the offset of the data: write it without a copy in HDF5.
            at = dataset.id.get_offset()
            if at is not None:
                file.seek(at)
                file.writelines(plan.pieces(name))
            else:  # HDF5 gives no offset for a scalar or an empty array
                for block in plan.blocks(name):
                    if info.nbytes:
                        dataset[()] = block.view(kind)[0]
            if info.dtype == BFLOAT16:
                dataset.attrs["dtype"] = "bfloat16"
            if plan.keep_digests:
                dataset.attrs[_DIGEST] = np.bytes_(plan.digests[name])
        if plan.keep_digests:
            target.attrs[_DIGEST] = np.bytes_(plan.manifest())
        if not plan.ordered:
            target.attrs[UNORDERED[0]] = np.bytes_(UNORDERED[1])
        for group, name in plan.names.items():
            path = f"{group}/{VARIABLES}" if group else VARIABLES
            target.require_group(path).attrs["name"] = name


class _Walk:
    """One traversal of all links, starting at the root group."""

    def __init__(self, file: File) -> None:
        self.file, self.limits, self.path = file, file.limits, file.source.path
        self.budget = Budget(self.path, file.source.size, self.limits)
        self.texts = Texts(file)
        self.names: dict[str, str] = {}
        self.ordered = True
        self.digests: dict[str, str] = {}
        self.datasets: dict[str, Dataset] = {}
        self.groups: set[int] = set()
        self.linked: dict[int, tuple[Dataset, str | None]] = {}  # datasets by address
        self.links = 0

    def check_all(self) -> str | None:
        """Checks every group and dataset, and that no storage overlaps; collects the datasets.

        Returns the manifest digest of the file, or None if it has none.
        """
        file = self.file
        with file.damage("/"):
            if file.extension != UNDEFINED:
                check_extension(file, file.extension)
            header, attributes = self.object(file.root)
            if not _is_group(header):
                raise ValueError("the root is not a group")
            every = attributes.text(_DIGEST)
            self.ordered = self.order(attributes)
            if any(key in attributes for key in LEGACY):
                self.legacy()
            self.group(file.root, header, attributes, "", 1)
        with file.damage("/"):
            file.check_overlaps()
        return every

    def order(self, attributes: Attributes) -> bool:
        """Returns False if the attribute `UNORDERED` marks the order of the layers as unknown."""
        found = attributes.text(UNORDERED[0])
        if found not in (None, UNORDERED[1]):
            raise ValueError(f"{UNORDERED[0]} is {shown(found)}, not {UNORDERED[1]}")
        return found is None

    def legacy(self) -> NoReturn:
        self.file.fail(UnsupportedFormat, "a Keras 2 style .h5 file", _CONVERT_LEGACY)

    def object(self, address: int) -> tuple[Header, Attributes]:
        """The header and the attributes of the object at an address."""
        header = read_header(self.file, address)
        return header, Attributes(self.file, header, self.texts)

    def group(
        self, address: int, header: Header, attributes: Attributes, path: str, depth: int
    ) -> None:
        """Checks a group and everything below it."""
        self.budget.spend("the depth of groups", depth, self.limits.depth, path or "/")
        self.groups.add(address)
        children = [(self.name(raw), target) for raw, target in links(self.file, header)]
        self.links += len(children)
        self.budget.spend("the number of links", self.links, self.limits.members)
        if not path and any(name in LEGACY for name, _ in children):
            self.legacy()
        if path.rpartition("/")[2] == VARIABLES:
            self.variables(attributes, path, [name for name, _ in children])
        for name, target in children:
            child = f"{path}/{name}" if path else name
            with self.file.damage(child):
                self.item(target, child, depth)

    def name(self, raw: bytes) -> str:
        """Decodes the name of a link; refuses a name that is a path."""
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.file.fail(MalformedFile, "a link name is not UTF-8")
        check_name(self.path, name, self.limits)
        if "/" in name:
            self.file.fail(PathEscape, "a link name is a path")
        return name

    def item(self, address: int, path: str, depth: int) -> None:
        """Checks the object that a link leads to."""
        check_name(self.path, path, self.limits)
        if address in self.groups:
            self.file.fail(AmbiguousFile, "the group is linked twice, or into itself")
        if address in self.linked:
            self.budget.tensor(path, *self.linked[address][0].info)
        else:
            header, attributes = self.object(address)
            if _is_group(header):
                self.group(address, header, attributes, path, depth + 1)
                return
            if not header.one.keys() >= {DATASPACE, DATATYPE, LAYOUT}:
                self.file.fail(ForbiddenContent, "neither a group nor a dataset")
            self.linked[address] = self.dataset(header, attributes, path)
        found, kept = self.linked[address]
        self.datasets[path] = found
        # A dataset with several names is read again for each of them.
        self.file.step(found.steps)
        self.budget.read(found.overhang, path)
        self.budget.load(found.info.nbytes, found.buffers, path)
        if kept is not None:
            self.digests[path] = kept

    def variables(self, attributes: Attributes, path: str, children: list[str]) -> None:
        """Checks that the variables of a group are numbered from 0; reads the layer name."""
        if positions := _misnumbered(children):
            problem = f"the variables are numbered {positions[:9]}"
            self.file.fail(IncompleteCheckpoint, problem)
        name = attributes.text("name")
        if name:
            check_name(self.path, name, self.limits)
            self.names[path.rpartition("/")[0]] = name

    def dataset(
        self, header: Header, attributes: Attributes, path: str
    ) -> tuple[Dataset, str | None]:
        """Checks type, size and storage of a dataset; returns it and its digest (None: none)."""
        file = self.file
        kind = datatype(file, header.one[DATATYPE])
        if kind.opaque and attributes.text("dtype") != "bfloat16":
            no_dtype(file)
        shape, largest = dataspace(file, header.one[DATASPACE])
        info = self.budget.tensor(path, shape, kind.dtype)
        kept = attributes.text(_DIGEST)
        return dataset(file, header, info, largest, kind, self.budget), kept


def _is_group(header: Header) -> bool:
    found = header.one.keys() & {SYMBOL_TABLE, LINK_INFO}
    if found and header.one.keys() & {DATASPACE, DATATYPE, LAYOUT}:
        raise ValueError("it is both a group and a dataset")
    return bool(found)


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError as e:
        raise MissingDependency(
            path, "writing .weights.h5 needs h5py", "pip install 'jaxmha[files]'"
        ) from e
    return h5py
