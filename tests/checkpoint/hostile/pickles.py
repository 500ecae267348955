"""Hostile pickles: calls, bombs, loops and damaged programs."""

import os
import pickle
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.torch_files import PROGRAM, V2, state, tensor, text, torch_file


class Runs:
    """Pickles to a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/jaxmha-was-run",)


@case(".pt", ck.ForbiddenContent)
def pickle_os_system() -> bytes:
    return torch_file(pickle.dumps({"w": Runs()}, 2))


@case(".pt", ck.ForbiddenContent)
def pickle_dotted_global() -> bytes:
    return torch_file(state(text("w"), b"ctorch\n_utils._rebuild_tensor_v2\n"))


@case(".pt", ck.ForbiddenContent)
def pickle_builtins_getattr() -> bytes:
    return torch_file(state(text("w"), b"c__builtin__\ngetattr\n"))


@case(".pt", ck.ForbiddenContent)
def pickle_stack_global() -> bytes:
    return torch_file(state(text("w"), b"\x8c\x02os\x8c\x06system\x93"))


@case(".pt", ck.ForbiddenContent)
def pickle_inst() -> bytes:
    return torch_file(state(text("w"), b"(ios\nsystem\n"))


@case(".pt", ck.ForbiddenContent)
def pickle_obj() -> bytes:
    return torch_file(state(text("w"), b"(ccollections\nOrderedDict\no"))


@case(".pt", ck.ForbiddenContent)
def pickle_newobj() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n)\x81"))


@case(".pt", ck.ForbiddenContent)
def pickle_extension() -> bytes:
    return torch_file(state(text("w"), b"\x82\x01"))


@case(".pt", ck.ForbiddenContent)
def pickle_call_of_text() -> bytes:
    return torch_file(state(text("w"), text("os.system") + b")R"))


@case(".pt", ck.ForbiddenContent)
def pickle_call_of_storage_class() -> bytes:
    return torch_file(state(text("w"), b"ctorch\nFloatStorage\n)R"))


@case(".pt", ck.ForbiddenContent)
def pickle_call_without_tuple() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n]R"))


@case(".pt", ck.ForbiddenContent)
def pickle_ordered_dict_of_items() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n]\x85R"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_on_class() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n}b"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_on_function() -> bytes:
    return torch_file(state(text("w"), V2 + b"}" + text("__code__") + b"Nsb"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_on_plain_dict() -> bytes:
    return torch_file(state(text("w"), tensor(), text("d"), b"}}b"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_attribute() -> bytes:
    return torch_file(state(text("w"), tensor(), after=b"}" + text("keys") + b"Nsb"))


@case(".pt", ck.MalformedFile)
def pickle_memo_index_bomb() -> bytes:
    return torch_file(b"\x80\x02}r\x00\x00\x00\x08.")


@case(".pt", ck.MalformedFile)
def pickle_memo_missing() -> bytes:
    return torch_file(b"\x80\x02h\x07.")


@case(".pt", ck.MalformedFile)
def pickle_length_bomb() -> bytes:
    return torch_file(b"\x80\x02X\xff\xff\xff\x7fw.")


@case(".pt", ck.MalformedFile)
def pickle_long_length_bomb() -> bytes:
    return torch_file(b"\x80\x02\x8a\xff\x01.")


@case(".pt", ck.ForbiddenContent)
def pickle_long4_bomb() -> bytes:
    return torch_file(b"\x80\x02\x8b\xff\xff\xff\x7f.")


@case(".pt", ck.BudgetExceeded)
def pickle_tuple_tower_key() -> bytes:
    tower = b")q\x00" + b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(40)
    )
    return torch_file(state(tower + b"N"))


@case(".pt", ck.ForbiddenContent)
def pickle_tuple_key() -> bytes:
    return torch_file(state(b"K\x01K\x02\x86", tensor()))


@case(".pt", ck.ForbiddenContent)
def pickle_boolean_key() -> bytes:
    return torch_file(state(b"\x88", tensor()))


@case(".pt", ck.BudgetExceeded)
def pickle_deep_tuples() -> bytes:
    return torch_file(b"\x80\x02)" + b"\x85" * 100_000 + b".")


@case(".pt", ck.BudgetExceeded)
def pickle_deep_dicts() -> bytes:
    deep = b"}" + (text("a") + b"}") * 5000 + b"s" * 5000
    return torch_file(b"\x80\x02" + deep + b".", b"")


@case(".pt", ck.ForbiddenContent)
def pickle_shared_dict_tower() -> bytes:
    """Thirty dicts that each hold the one before twice: 2**30 names for one tensor."""
    tower = b"}" + text("w") + tensor() + b"sq\x00"
    for i in range(30):
        item = b"h" + bytes([i])
        tower += b"}(" + text("a") + item + text("b") + item + b"uq" + bytes([i + 1])
    return torch_file(b"\x80\x02(" + tower + b"t.").replace(b"(}", b"(}", 1)


@case(".pt", ck.BudgetExceeded)
def pickle_one_tensor_of_many_names() -> bytes:
    """Two bytes for each name."""
    listed = tensor() + b"q\x00" + b"h\x00" * 5_000
    return torch_file(state(text("w"), b"](" + listed + b"e"))


@case(".pt", ck.ForbiddenContent)
def pickle_dup() -> bytes:
    return torch_file(b"\x80\x02}2.")


@case(".pt", ck.ForbiddenContent)
def pickle_protocol_4() -> bytes:
    return torch_file(b"\x80\x04}.")


@case(".pt", ck.ForbiddenContent)
def pickle_frame() -> bytes:
    return torch_file(b"\x80\x02\x95\x02\0\0\0\0\0\0\0}.")


@case(".pt", ck.MalformedFile)
def pickle_without_protocol() -> bytes:
    return torch_file(b"}.")


@case(".pt", ck.MalformedFile)
def pickle_without_stop() -> bytes:
    return torch_file(PROGRAM[:-1])


@case(".pt", ck.MalformedFile)
def pickle_bytes_after_stop() -> bytes:
    return torch_file(PROGRAM + b"cos\nsystem\n.")


@case(".pt", ck.MalformedFile)
def pickle_empty_stack() -> bytes:
    return torch_file(b"\x80\x02s.")


@case(".pt", ck.MalformedFile)
def pickle_two_objects() -> bytes:
    return torch_file(b"\x80\x02}}.")


@case(".pt", ck.MalformedFile)
def pickle_no_mark() -> bytes:
    return torch_file(b"\x80\x02}u.")


@case(".pt", ck.MalformedFile)
def pickle_odd_items() -> bytes:
    return torch_file(b"\x80\x02}(K\x01u.")


@case(".pt", ck.AmbiguousFile)
def pickle_duplicate_key() -> bytes:
    return torch_file(state(text("w"), tensor(), text("w"), tensor()))


@case(".pt", ck.AmbiguousFile)
def pickle_same_name_by_two_ways() -> bytes:
    inner = b"}" + text("b") + tensor() + b"s"
    return torch_file(state(text("a.b"), tensor(), text("a"), inner))


@case(".pt", ck.ForbiddenContent)
def pickle_contains_itself() -> bytes:
    return torch_file(b"\x80\x02}q\x00" + text("a") + b"h\x00s.", b"")


@case(".pt", ck.ForbiddenContent)
def pickle_not_a_dict() -> bytes:
    return torch_file(b"\x80\x02" + tensor() + b".")


@case(".pt", ck.MalformedFile)
def pickle_surrogate_name() -> bytes:
    return torch_file(state(text(b"\xed\xa0\x80"), tensor()))


@case(".pt", ck.PathEscape)
def pickle_path_name() -> bytes:
    return torch_file(state(text("../../etc/passwd"), tensor()))


@case(".pt", ck.BudgetExceeded)
def pickle_long_name() -> bytes:
    return torch_file(state(text("w" * 5000), tensor()))


@case(".pt", ck.ForbiddenContent)
def pickle_text_opcode() -> bytes:
    return torch_file(state(b"S'w\\q'\n", tensor()))
