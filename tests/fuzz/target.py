"""One target under atheris: a file of the given bytes is refused with a type, or read.

    python -m tests.fuzz.target safetensors CORPUS -max_total_time=60

Anything but a typed error ends the run, and so does an input that takes too long.
"""

import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["jaxmha.checkpoint", "jaxmha.cli", "jaxmha.converters"]):
    from jaxmha import checkpoint
    from tests.fuzz.commands import TARGETS, Target

from tests.checkpoint import hostile
from tests.fuzz.json_changes import changed

# Reader -> the sound file that damage starts from. Of several files, each is damaged in turn.
READERS = {
    "safetensors": "sound_safetensors", "torch": "sound_torch", "keras_h5": "sound_keras",
    "npz": "sound_npz", "keras": "sound_keras_archive", "sharded": "sound_sharded",
    "orbax": "sound_orbax_of_files", "gguf": "sound_gguf",
}  # fmt: skip
LIMITS = checkpoint.Limits(logical_bytes=64 << 20, chunk_bytes=1 << 20)


class Slow(Exception):  # noqa: N818
    """An input that takes too long."""


def reader(name: str, folder: Path) -> Target:
    """A sound checkpoint, opened and read; to begin with, hostile ones of the same suffix too."""
    case = hostile.SOUND[READERS[name]]
    path = folder / f"m{case.suffix}"
    case.build(path)

    def run() -> None:
        try:
            with checkpoint.open(path, limits=LIMITS) as file:
                for tensor in file:
                    _ = file[tensor]
        except checkpoint.CheckpointError:
            pass

    return Target([(file, run) for file in hostile.files(path)], seeds=tuple(seeds(case.suffix)))


def seeds(suffix: str) -> list[bytes]:
    """The sound files of a suffix, and the hostile ones."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in (hostile.SOUND | hostile.CASES).items():
            path = Path(scratch) / f"{name}{case.suffix}"
            if case.suffix != suffix:
                continue
            case.build(path)
            if not path.is_file() and not path.is_dir():
                continue
            for at, file in enumerate(hostile.files(path)[:8] if name in hostile.SOUND else []):
                found.append(bytes([at]) + file.read_bytes())
            if name in hostile.CASES and path.is_file() and path.stat().st_size < 1 << 16:
                found.append(b"\0" + path.read_bytes())
    return found


def prepared(name: str, folder: Path) -> tuple[Target, list[bytes]]:
    """A target in a folder, and the inputs to begin with."""
    target = reader(name, folder) if name in READERS else TARGETS[name](folder)
    sound = [bytes([at]) + file.read_bytes() for at, (file, _) in enumerate(target.pairs)]
    return target, [*sound, *target.seeds]


def once(target: Target, wholes: dict[Path, bytes], data: bytes) -> None:
    """Does one run of a target with one file changed.

    Raises:
        Slow, and whatever ends a target untyped.
    """
    file, run = target.pairs[data[0] % len(target.pairs) if data else 0]
    file.write_bytes(data[1:])
    start = time.process_time()
    try:
        run()
    finally:
        file.write_bytes(wholes[file])
    seconds = time.process_time() - start
    if seconds > target.seconds:
        raise Slow(f"{seconds:.1f} s")


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    name, corpus = sys.argv[1], Path(sys.argv[2])
    scratch = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    folder = Path(scratch) / "model"
    folder.mkdir()
    target, inputs = prepared(name, folder)
    for at, data in enumerate(inputs):
        (corpus / f"seed-{at}").write_bytes(data)
    wholes = {file: file.read_bytes() for file, _ in target.pairs}
    for _, run in target.pairs:  # what is imported late takes seconds, and so does a collection
        run()
    gc.collect()
    gc.freeze()
    atheris.Setup(
        [sys.argv[0], str(corpus), *sys.argv[3:]],
        lambda data: once(target, wholes, data),
        custom_mutator=lambda data, most, seed: changed(data, seed, atheris.Mutate, most),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
