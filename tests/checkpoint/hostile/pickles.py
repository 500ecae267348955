"""Hostile pickles: calls, bombs, loops and damaged programs."""

import os
import pickle
from typing import Any

from tests.checkpoint.hostile.cases import Bad, Big, Code, Out, Two, case, raw_cases
from tests.checkpoint.hostile.torch_files import PROGRAM, V2, state, tensor, text, torch_file


class Runs:
    """Pickles to a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/jaxmha-was-run",)


raw_cases(
    "pickle_", ".pt",
    ("os_system", Code, torch_file(pickle.dumps({"w": Runs()}, 2))),
    ("dotted_global", Code, torch_file(state(text("w"), b"ctorch\n_utils._rebuild_tensor_v2\n"))),
    ("builtins_getattr", Code, torch_file(state(text("w"), b"c__builtin__\ngetattr\n"))),
    ("stack_global", Code, torch_file(state(text("w"), b"\x8c\x02os\x8c\x06system\x93"))),
    ("inst", Code, torch_file(state(text("w"), b"(ios\nsystem\n"))),
    ("obj", Code, torch_file(state(text("w"), b"(ccollections\nOrderedDict\no"))),
    ("newobj", Code, torch_file(state(text("w"), b"ccollections\nOrderedDict\n)\x81"))),
    ("extension", Code, torch_file(state(text("w"), b"\x82\x01"))),
    ("call_of_text", Code, torch_file(state(text("w"), text("os.system") + b")R"))),
    ("call_of_storage_class", Code, torch_file(state(text("w"), b"ctorch\nFloatStorage\n)R"))),
    ("call_without_tuple", Code, torch_file(state(text("w"), b"ccollections\nOrderedDict\n]R"))),
    ("ordered_dict_of_items", Code,
     torch_file(state(text("w"), b"ccollections\nOrderedDict\n]\x85R"))),
    ("build_on_class", Code, torch_file(state(text("w"), b"ccollections\nOrderedDict\n}b"))),
    ("build_on_function", Code,
     torch_file(state(text("w"), V2 + b"}" + text("__code__") + b"Nsb"))),
    ("build_on_plain_dict", Code, torch_file(state(text("w"), tensor(), text("d"), b"}}b"))),
    ("build_attribute", Code,
     torch_file(state(text("w"), tensor(), after=b"}" + text("keys") + b"Nsb"))),
    ("memo_index_bomb", Bad, torch_file(b"\x80\x02}r\x00\x00\x00\x08.")),
    ("memo_missing", Bad, torch_file(b"\x80\x02h\x07.")),
    ("length_bomb", Bad, torch_file(b"\x80\x02X\xff\xff\xff\x7fw.")),
    ("long_length_bomb", Bad, torch_file(b"\x80\x02\x8a\xff\x01.")),
    ("long4_bomb", Code, torch_file(b"\x80\x02\x8b\xff\xff\xff\x7f.")),
    ("tuple_key", Code, torch_file(state(b"K\x01K\x02\x86", tensor()))),
    # Forty tuples that each hold the one before twice.
    ("tuple_tower_key", Big, torch_file(state(b")q\x00" + b"".join(
        b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40)) + b"N"))),
    ("boolean_key", Code, torch_file(state(b"\x88", tensor()))),
    ("deep_tuples", Big, lambda: torch_file(b"\x80\x02)" + b"\x85" * 100_000 + b".")),
    ("deep_dicts", Big, lambda: torch_file(
        b"\x80\x02}" + (text("a") + b"}") * 5000 + b"s" * 5000 + b".", b"")),
    # Two bytes for each name.
    ("one_tensor_of_many_names", Big,
     torch_file(state(text("w"), b"](" + tensor() + b"q\x00" + b"h\x00" * 5_000 + b"e"))),
    ("dup", Code, torch_file(b"\x80\x02}2.")),
    ("protocol_4", Code, torch_file(b"\x80\x04}.")),
    ("frame", Code, torch_file(b"\x80\x02\x95\x02\0\0\0\0\0\0\0}.")),
    ("without_protocol", Bad, torch_file(b"}.")),
    ("without_stop", Bad, torch_file(PROGRAM[:-1])),
    ("bytes_after_stop", Bad, torch_file(PROGRAM + b"cos\nsystem\n.")),
    ("empty_stack", Bad, torch_file(b"\x80\x02s.")),
    ("two_objects", Bad, torch_file(b"\x80\x02}}.")),
    ("no_mark", Bad, torch_file(b"\x80\x02}u.")),
    ("odd_items", Bad, torch_file(b"\x80\x02}(K\x01u.")),
    ("duplicate_key", Two, torch_file(state(text("w"), tensor(), text("w"), tensor()))),
    ("same_name_by_two_ways", Two, torch_file(
        state(text("a.b"), tensor(), text("a"), b"}" + text("b") + tensor() + b"s"))),
    ("contains_itself", Code, torch_file(b"\x80\x02}q\x00" + text("a") + b"h\x00s.", b"")),
    ("not_a_dict", Code, torch_file(b"\x80\x02" + tensor() + b".")),
    ("surrogate_name", Bad, torch_file(state(text(b"\xed\xa0\x80"), tensor()))),
    ("path_name", Out, torch_file(state(text("../../etc/passwd"), tensor()))),
    ("long_name", Big, torch_file(state(text("w" * 5000), tensor()))),
    ("text_opcode", Code, torch_file(state(b"S'w\\q'\n", tensor()))),
)  # fmt: skip


def shared_dict_tower() -> bytes:
    """Thirty dicts that each hold the one before twice: 2**30 names for one tensor."""
    tower = b"}" + text("w") + tensor() + b"sq\x00"
    for i in range(30):
        item = b"h" + bytes([i])
        tower += b"}(" + text("a") + item + text("b") + item + b"uq" + bytes([i + 1])
    return tower


raw_cases(
    "pickle_", ".pt",
    ("shared_dict_tower", Code, lambda: torch_file(b"\x80\x02(" + shared_dict_tower() + b"t.")),
    ("shared_dict_tower_in_a_dict", Big,
     lambda: torch_file(state(text("t"), b"](" + shared_dict_tower() + b"e"))),
)  # fmt: skip


@case(".pt", Big)
def pickle_shared_dict_of_many_numbers() -> bytes:
    """Each of its 900 names would be found among 100,000 numbers."""
    numbers = b"".join(b"J" + i.to_bytes(4, "little") + b"N" for i in range(100_000))
    shared = b"}(" + text("w") + tensor() + numbers + b"uq\x00"
    return torch_file(state(text("t"), b"](" + shared + b"h\x00" * 900 + b"e"))
