"""Damaged files: every outcome is a typed error or the same tensors, never another exception.

Formats that carry checksums (torch, npz) must in addition never give other numbers.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from jaxmha import checkpoint
from jaxmha.checkpoint.formats.torch import pickle, records
from jaxmha.checkpoint.limits import Budget, Limits
from tests.checkpoint import hostile
from tests.checkpoint.hostile import torch_files
from tests.fuzz import commands
from tests.rewrite import rewrite

FLIPS = int(os.environ.get("JAXMHA_FUZZ", "120"))
EXHAUSTIVE = "JAXMHA_FUZZ" in os.environ
CHECKED = ("sound_torch", "sound_npz")


def _contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        with checkpoint.open(path) as file:
            return {
                name: (str(array.dtype), array.shape, array.tobytes())
                for name, array in file.items()
            }
    except checkpoint.CheckpointError:
        return None


@pytest.mark.parametrize("name", CHECKED)
def test_every_bit_flip_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    case = hostile.SOUND[name]
    path = tmp_path / f"m{case.suffix}"
    case.build(path)
    whole = path.read_bytes()
    sound = _contents(path)
    for at in range(len(whole)):
        for bit in range(8) if EXHAUSTIVE else (at % 8,):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            rewrite(path, flipped)
            assert _contents(path) in (None, sound), (at, bit)


@pytest.mark.slow_variants("*keras*")
@pytest.mark.parametrize("name", hostile.SOUND)
def test_random_damage(name: str, tmp_path: Path) -> None:
    case = hostile.SOUND[name]
    path = tmp_path / f"m{case.suffix}"
    case.build(path)
    files = [file for file in hostile.files(path) if file.stat().st_size]
    wholes = [file.read_bytes() for file in files]
    random = np.random.default_rng(0)
    for turn in range(FLIPS // 4 if path.is_dir() else FLIPS):
        chosen = turn % len(files)
        damaged = bytearray(wholes[chosen])
        for _ in range(random.integers(1, 4)):
            if not damaged:  # a small file, all of which was taken
                break
            at = int(random.integers(len(damaged)))
            match random.integers(5):
                case 0:
                    damaged[at] = int(random.integers(256))
                case 1:
                    damaged[at : at + 4] = random.bytes(4)
                case 2:
                    damaged[at : at + 8] = b"\xff" * 8
                case 3:
                    del damaged[at : at + int(random.integers(1, 9))]
                case 4:
                    damaged[at:at] = damaged[: int(random.integers(1, 30))]
        rewrite(files[chosen], damaged)
        _contents(path)
        rewrite(files[chosen], wholes[chosen])


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed: int) -> None:
    """Pickles of random opcodes and arguments."""
    random = np.random.default_rng(seed)
    pieces = [bytes([c]) for c in b")(.Rbst\x85\x86\x87uQ\x88\x89N]}aeq\x00h\x00K\x01M"]
    pieces += [
        torch_files.ORDERED,
        torch_files.V2,
        torch_files.V3,
        torch_files.tensor(),
        torch_files.storage(),
    ]
    pieces += [
        torch_files.text("w"),
        torch_files.numbers(2, 3),
        b"q\x01",
        b"h\x01",
        b"\x8a\x01\xff",
    ]
    limits, finished = Limits(), 0
    for _ in range(FLIPS):
        body = b"".join(
            pieces[i] for i in random.integers(len(pieces), size=random.integers(1, 40))
        )
        try:
            program = b"\x80\x02" + body + b"."
            budget = Budget("m.pt", len(program), limits)
            root, _storages = pickle.run(program, "m.pt", limits, budget, 0)
            list(records.flatten(root, "m.pt", limits, []))
            finished += 1
        except checkpoint.CheckpointError:
            pass
    assert finished < FLIPS


@pytest.mark.slow_variants("commands")
@pytest.mark.parametrize("name", commands.TARGETS)
def test_targets_of_the_fuzzer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of a target cut short, doubled and overwritten."""
    for setting in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):  # the hub's target sets them for its process
        monkeypatch.setattr(constants, setting, getattr(constants, setting))
    (tmp_path / "model").mkdir()
    target = commands.TARGETS[name](tmp_path / "model")
    for _, run in target.pairs:
        run()
    for at, (file, run) in enumerate(target.pairs):
        whole = file.read_bytes()
        damaged = [whole[: len(whole) // 2], whole * 2, whole.replace(b"a", b"\xff")]
        for data in damaged if EXHAUSTIVE else damaged[at % 3 : at % 3 + 1]:
            file.write_bytes(data)
            run()
        file.write_bytes(whole)
