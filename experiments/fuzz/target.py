"""One reader under atheris: a checkpoint of the given bytes is refused with a type, or read.

    python -m experiments.fuzz.target safetensors CORPUS -max_total_time=60

Anything but a CheckpointError ends the run, and so does an input that takes more than a second.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["jaxmha.converters.checkpoint"]):
    from jaxmha.converters import checkpoint

from tests.checkpoint import hostile

SECONDS = 1.0
# Reader -> the sound file that damage starts from. Of several files, each is damaged in turn.
READERS = {
    "safetensors": "sound_safetensors",
    "torch": "sound_torch",
    "keras_h5": "sound_keras",
    "npz": "sound_npz",
    "keras": "sound_keras_archive",
    "sharded": "sound_sharded",
    "orbax": "sound_orbax_of_files",
}
LIMITS = checkpoint.Limits(logical_bytes=64 << 20, chunk_bytes=1 << 20)


class Slow(Exception):  # noqa: N818
    """An input that takes too long."""


def seeds(reader: str, folder: Path) -> None:
    """Writes a corpus: the sound files, and hostile ones of the same suffix."""
    sound = hostile.SOUND[READERS[reader]]
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in (hostile.SOUND | hostile.CASES).items():
            path = Path(scratch) / f"{name}{case.suffix}"
            if case.suffix != sound.suffix:
                continue
            case.build(path)
            if not path.is_file() and not path.is_dir():
                continue
            for at, file in enumerate(hostile.files(path)[:8] if name in hostile.SOUND else []):
                (folder / f"{name}-{at}").write_bytes(bytes([at]) + file.read_bytes())
            if name in hostile.CASES and path.is_file() and path.stat().st_size < 1 << 16:
                (folder / name).write_bytes(b"\0" + path.read_bytes())


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    reader, corpus = sys.argv[1], Path(sys.argv[2])
    seeds(reader, corpus)
    case = hostile.SOUND[READERS[reader]]
    scratch = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    path = Path(scratch) / f"m{case.suffix}"
    case.build(path)
    files = hostile.files(path)
    wholes = [file.read_bytes() for file in files]

    def run(data: bytes) -> None:
        at = data[0] % len(files) if data else 0
        files[at].write_bytes(data[1:])
        start = time.process_time()
        try:
            with checkpoint.open(path, limits=LIMITS) as file:
                for name in file:
                    _ = file[name]
        except checkpoint.CheckpointError:
            pass
        seconds = time.process_time() - start
        if len(files) > 1:
            files[at].write_bytes(wholes[at])
        if seconds > SECONDS:
            raise Slow(f"{seconds:.1f} s")

    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
