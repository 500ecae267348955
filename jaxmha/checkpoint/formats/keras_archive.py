"""The .keras archives of Keras 3: a zip of two JSON files and the weights.

Reads the weights, and config.json as data; imports no class that config.json names.

Format: https://keras.io/api/models/model_saving_apis/model_saving_and_loading/
"""

import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from jaxmha.checkpoint import json_text
from jaxmha.checkpoint.errors import IncompleteCheckpoint, MalformedFile, UnsupportedFormat
from jaxmha.checkpoint.formats import keras_h5
from jaxmha.checkpoint.formats import zip as zip_directory
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.source import Section, Source

WEIGHTS, CONFIG, ABOUT = "model.weights.h5", "config.json", "metadata.json"
_ASSETS = "assets/"
_BLOCK = 1 << 20
_MOST_JSON = 16 << 20  # bytes of an inflated JSON member
_AGAIN = "save it again with model.save"


def read(source: Source, limits: Limits) -> Contents:
    """Checks the archive and reads the weights file inside it with `keras_h5.read`.

    Raises:
        IncompleteCheckpoint, MalformedFile, UnsupportedFormat, IntegrityError, and the errors of
        zip and HDF5 files.
    """
    path, budget = source.path, Budget(source.path, source.size, limits)
    members = zip_directory.members(source, budget)
    for name in (WEIGHTS, CONFIG, ABOUT):
        if name not in members:
            raise IncompleteCheckpoint(path, "the member is missing", _AGAIN, name)
    documents: dict[str, dict[str, Any]] = {}
    for name, member in members.items():
        if name in (CONFIG, ABOUT):
            budget.spend("the size", member.size, _MOST_JSON, name)
            raw = zip_directory.read_member(source, member).tobytes().strip()
            documents[name] = json_text.parse(raw, budget, _AGAIN, name, numbers=True)
        elif name != WEIGHTS and not name.startswith(_ASSETS):
            raise MalformedFile(path, "Keras writes no such member", _AGAIN, name)
    member = members[WEIGHTS]
    if member.method != zip_directory.STORED:
        raise UnsupportedFormat(path, "the weights are compressed", _AGAIN, WEIGHTS)
    inside = keras_h5.read(Section(source, member.offset, member.size), limits)
    verified = False

    def load(name: str) -> np.ndarray:
        nonlocal verified
        if not verified:
            crc = 0
            for at in range(0, member.size, _BLOCK):
                block = source.read(member.offset + at, min(_BLOCK, member.size - at))
                crc = zlib.crc32(block, crc)
            zip_directory.check_crc(source, member, crc)
            verified = True
        return inside.load(name)

    return replace(inside, load=load, config=documents[CONFIG])
