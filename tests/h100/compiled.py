"""Compiles programs for an H100 without one, and counts what the optimised program holds."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as private
from jax.experimental import topologies
from jax.extend import backend

import jaxmha
from jaxmha.implementations.fused import tokamax

# Instructions that launch no kernel.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all"}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
         "f64": 8}  # fmt: skip
MIB = 2**20


class Program(NamedTuple):
    """Parts of an optimised program.

    Attributes:
      temporary: bytes of temporary arrays.
      kernels: instructions that launch something, those in loops and branches once.
      calls: targets of custom calls: fused attention and matmuls of a library.
      copies: MiB of every other kernel's result above 1 MiB.
      waits: branches and loops that the host decides by data of the device.
      collectives: number of instructions that communicate.
    """

    temporary: int
    kernels: int
    calls: list[str]
    copies: list[tuple[str, float]]
    waits: int
    collectives: int


def topology(shape: str = "1x1x1") -> Any:
    """Devices of a machine with H100s; skips the test where the CUDA compiler is not installed."""
    xla_bridge.backends()
    config = (Path(__file__).parent / "h100.txtpb").read_text()
    try:
        return topologies.get_topology_desc("h100", "cuda", target_config=config, topology=shape)
    except Exception as error:  # noqa: BLE001  an absent plugin raises any
        pytest.skip(f"no compiler for an H100 here (make h100 installs one): {error}"[:150])


def install(patch: pytest.MonkeyPatch) -> None:
    """JAX asks a GPU's libraries for versions while it traces; these are what an H100 has."""
    patch.setattr(private, "check_cudnn_version", lambda: 91900)
    patch.setattr(private, "check_compute_capability", lambda c: c in ("8.0", "8.9", "9.0"))


def install_tokamax(patch: pytest.MonkeyPatch) -> None:
    """tokamax asks the default device for its properties; skips the test where it is not installed."""
    pytest.importorskip("tokamax")

    class Hopper:
        platform, compute_capability, core_count = "gpu", "9.0", 132
        shared_memory_per_block_optin, device_kind = 232448, "NVIDIA H100 80GB HBM3"

    device = Hopper()
    patch.setattr(backend, "get_default_device", lambda: device)
    patch.setattr(tokamax, "traceable", lambda: None)


def compiled(
    function: Any,
    *arguments: Any,
    sharding: Any = None,
    name: str = "h100",
    donate: tuple[int, ...] = (),
) -> Program:
    """Compiles `function` of arrays with these shapes, and counts; `donate`: arguments that it may
    overwrite."""
    sharding = sharding or jax.sharding.SingleDeviceSharding(topology().devices[0])
    make: Any = jax.ShapeDtypeStruct
    with jaxmha.lowering_for(name):
        placed = jax.tree.map(
            lambda x: make(x.shape, x.dtype, sharding=x.sharding or sharding), arguments
        )
        program = jax.jit(function, donate_argnums=donate).trace(*placed).lower().compile()
    return counted(program.as_text(), program.memory_analysis().temp_size_in_bytes)


def counted(text: str, temporary: int) -> Program:
    """Counts the instructions that the entry computation reaches by calls, loops and branches."""
    bodies, entry = computations(text)
    kernels, waits, collectives = 0, 0, 0
    calls: list[str] = []
    copies: list[tuple[str, float]] = []
    todo, seen = [entry], set()
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        for shape, kind, line in bodies[here]:
            if kind in FREE:
                continue
            todo += reached(line) if kind in ("while", "conditional", "call") else []
            if kind == "conditional" or (kind == "while" and "known_trip_count" not in line):
                waits += 1
            if kind in ("while", "conditional", "call"):
                continue
            kernels += 1
            collectives += kind.removesuffix("-start") in COLLECTIVES
            target = re.search(r'custom_call_target="([^"]+)"', line)
            if target:
                calls.append(target[1])
            elif nbytes(shape) > MIB:
                copies.append((kind, nbytes(shape) / MIB))
    return Program(temporary, kernels, calls, copies, waits, collectives)


def computations(text: str) -> tuple[dict[str, list[tuple[str, str, str]]], str]:
    """Instructions `(shape, opcode, line)` by computation, and the name of the entry."""
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line.rstrip())
        if head:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        found = re.match(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(", line)
        if found and name:
            bodies[name].append((found[1], found[2], line))
    return bodies, entry


def reached(line: str) -> list[str]:
    """Computations that a loop, a branch or a call runs."""
    named = r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    found: list[str] = re.findall(named, line)
    branches = re.search(r"branch_computations=\{([^}]*)\}", line)
    more = branches[1].split(",") if branches else []
    return found + [x.strip().lstrip("%") for x in more]


def nbytes(shape: str) -> int:
    """Bytes of every array in the text of a shape."""
    total = 0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        size = BYTES.get(dtype, 0)
        for axis in filter(None, sizes.split(",")):
            size *= int(axis)
        total += size
    return total
