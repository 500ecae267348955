"""Hostile pickles: opcodes of a byte or two that make objects of hundreds."""

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Big, case, raw_case
from tests.checkpoint.hostile.torch_files import (
    ORDERED,
    V2,
    state,
    storage,
    tensor,
    text,
    torch_file,
)

OPCODES = 400_000
# One object per repetition; all are kept in one list or tuple.
SHAPES: dict[str, tuple[bytes, int, bytes, bytes]] = {
    "empty_tuples": (b")", 1, b"(", b"t"),
    "tuples_of_one": (b"N\x85\x85", 3, b"(", b"t"),
    "empty_dicts": (b"}", 1, b"](", b"e"),
    "empty_lists": (b"]", 1, b"](", b"e"),
    "ordered_dicts": (ORDERED, 3, b"](", b"e"),
}


def _register(shape: str) -> None:
    item, steps, before, after = SHAPES[shape]

    @case(".pt", ck.BudgetExceeded, f"pickle_many_{shape}")
    def build() -> bytes:
        many = before + item * (OPCODES // steps) + after
        return torch_file(state(text("w"), tensor(), text("x"), many))


for _shape in SHAPES:
    _register(_shape)


# One character of four bytes makes all of them so.
raw_case(
    "pickle_wide_text",
    ".pt",
    Big,
    lambda: torch_file(
        state(text("w"), tensor(), text("x"), text("a" * 20_000_000 + "\U0001f600"))
    ),
)


@case(".pt", ck.BudgetExceeded)
def pickle_long_key_in_many_dicts() -> bytes:
    """The name of each value would be as long as the key."""
    dicts = b"}h\x00K\x01s" * 900
    return torch_file(
        state(text("w"), tensor(), text("k" * 1_000_000) + b"q\x00", b"](" + dicts + b"e")
    )


@case(".pt", ck.BudgetExceeded)
def pickle_long_shape_of_many_tensors() -> bytes:
    """Every tensor would go through a shape of 100,000 axes; it takes eight bytes."""
    parts = storage() + b"q\x00(" + b"K\x01" * 100_000 + b"tq\x01K\x00q\x02" + ORDERED + b"q\x03"
    tensors = (V2 + b"(h\x00h\x02h\x01h\x01\x89h\x03tR") * 5_000
    return torch_file(state(text("w"), tensor(), text("x"), b"](" + parts + tensors + b"e"))
