"""Runs the pickle program inside a torch file on a machine that can only build plain data.

Pickle opcodes call functions by name. This machine has 31 opcodes and a fixed table of names, none
of which is a Python function: calls yield records of numbers. Nothing is imported or executed.

Format: https://docs.python.org/3/library/pickletools.html and torch/_utils.py
"""

import functools
import os
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import numpy as np

from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    BudgetExceeded,
    CheckpointError,
    ForbiddenContent,
    MalformedFile,
)
from jaxmha.checkpoint.formats.torch.opcodes import opcodes
from jaxmha.checkpoint.formats.torch.records import (
    GLOBALS,
    REMEDIES,
    SAVE,
    Call,
    Storage,
    Type,
    Value,
    View,
)
from jaxmha.checkpoint.limits import Budget, Limits

_STORAGES = 8000  # a file with more may have more opcodes; torch.save writes about 40 per tensor
_MOST_KEY = 2**31  # Python hashes larger integers modulo 2**61 - 1: many could share one hash
_AGAIN = "save it again with torch.save"
_MARK: Final = object()
_UNSET: Final = object()  # an index of the memo that was never set
_PUSHED = frozenset(b"XJKMG\x8a")  # opcodes of their argument
_CONSTANTS = {ord("("): _MARK, ord("N"): None, 0x88: True, 0x89: False}
_TUPLES = {ord(")"): 0, 0x85: 1, 0x86: 2, 0x87: 3}  # of so many objects
# Bytes of memory that opcodes allocate: a small number, a tuple without its items and a dict or list
# (each with its entries in the tables of `flatten`), a dict entry, an entry of the memo, a slot on
# the stack or in a list, the result of REDUCE or BINPERSID.
_NUMBER, _TUPLE, _CONTAINER, _ENTRY, _MEMO, _PLACE, _RECORD = 32, 180, 200, 100, 20, 16, 200
_COSTS = {
    ord(sign): _PLACE + cost
    for signs, cost in {
        "JKMG": _NUMBER,
        "\x8a": 255,
        "qr": _MEMO,
        "}]": _CONTAINER,
        ")t\x85\x86\x87": _TUPLE,
        "s": _ENTRY,
        "RQ": _RECORD,
    }.items()
    for sign in signs
}


class _Ordered(dict[Any, Any]):
    """The result of OrderedDict; the pickle may set only its attribute `_metadata`."""


class _Tuple(tuple[Any, ...]):
    """A tuple whose class holds its nesting depth, since a tuple cannot store attributes."""

    __slots__ = ()
    depth = 0


@functools.cache
def _nested(depth: int) -> type[_Tuple]:
    return type("_Tuple", (_Tuple,), {"__slots__": (), "depth": depth})


def run(
    program: bytes, path: str | os.PathLike[str], limits: Limits, budget: Budget, storages: int
) -> tuple[Any, dict[str, Storage]]:
    """Runs a program; returns the object (dict, list, tuple, str, numbers, View) and storages.

    The memory is charged to `budget`. `storages`: the number of storages in the file, by which the
    limits of opcodes and memory grow.

    Raises:
        ForbiddenContent, MalformedFile, AmbiguousFile, BudgetExceeded.
    """
    machine = _Machine(path, limits, budget)
    budget.grow_for_storages(storages)
    machine.charge(len(program))
    most = limits.opcodes * max(_STORAGES, storages) // _STORAGES
    for count, (code, argument) in enumerate(opcodes(program, machine.charge, machine.fail)):
        if count >= most:
            machine.fail(BudgetExceeded, "too many pickle opcodes", "raise Limits.opcodes")
        if (count == 0) != (code == 0x80):
            machine.fail(MalformedFile, "PROTO is not the first opcode, or not only that")
        machine.step(code, argument, count)
    if len(machine.stack) != 1:
        machine.fail(MalformedFile, "the pickle ends with other than one object")
    return machine.stack[0], machine.storages


class _Machine:
    """The stack and memo of one run."""

    def __init__(self, path: str | os.PathLike[str], limits: Limits, budget: Budget) -> None:
        self.path, self.limits, self._budget = path, limits, budget
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.storages: dict[str, Storage] = {}

    def fail(self, kind: type[CheckpointError], problem: str, remedy: str = _AGAIN) -> NoReturn:
        raise kind(self.path, problem, remedy, "data.pkl")

    def charge(self, amount: int) -> None:
        """Charges the memory of a new object; raises BudgetExceeded beyond the limit."""
        self._budget.build(amount, "its pickle", "data.pkl")

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            self.fail(MalformedFile, "the pickle takes from an empty stack")
        return self.stack.pop()

    def pop_many(self, count: int) -> list[Any]:
        """Takes the last `count` objects in the order in which they came."""
        start = len(self.stack) - count
        items = self.stack[start:] if start >= 0 else []
        if len(items) < count or _MARK in items:
            self.fail(MalformedFile, "the pickle takes from an empty stack")
        del self.stack[start:]
        return items

    def pop_to_mark(self) -> list[Any]:
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        self.fail(MalformedFile, "the pickle misses a mark")

    def step(self, code: int, argument: Any, count: int) -> None:
        self.charge(_COSTS.get(code, _PLACE))
        # Most opcodes of a hostile file are of these three kinds: tables find them at once.
        if code in _PUSHED:
            self.stack.append(argument)
            return
        if code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
            return
        if code in _TUPLES:
            self.stack.append(self.make_tuple(self.pop_many(_TUPLES[code])))
            return
        match chr(code):
            case "\x80":
                if argument != 2:
                    self.fail(ForbiddenContent, f"pickle protocol {argument}, not 2")
            case "q" | "r":
                if argument > count:
                    self.fail(MalformedFile, "a memo index larger than any before it")
                # Picklers number the memo consecutively; no index may exceed the number of opcodes.
                self.memo += [_UNSET] * (argument + 1 - len(self.memo))
                self.memo[argument] = self.pop()
                self.stack.append(self.memo[argument])
            case "h" | "j":
                if argument >= len(self.memo) or self.memo[argument] is _UNSET:
                    self.fail(MalformedFile, "the memo index was never stored")
                self.stack.append(self.memo[argument])
            case "}" | "]":
                self.stack.append({} if code == ord("}") else [])
            case "t":
                self.stack.append(self.make_tuple(self.pop_to_mark()))
            case "s":
                value = self.pop()
                self.set_items([self.pop(), value])
            case "u":
                self.set_items(self.pop_to_mark())
            case "a":
                self.extend([self.pop()])
            case "e":
                self.extend(self.pop_to_mark())
            case "c":
                if argument not in GLOBALS:
                    remedy = REMEDIES.get(argument, SAVE)
                    self.fail(ForbiddenContent, f"the file would run {argument!r}", remedy)
                self.stack.append(GLOBALS[argument])
            case "R":
                arguments, call = self.pop(), self.pop()
                self.stack.append(self.call(call, arguments))
            case "b":
                self.build(self.pop())
            case "Q":
                self.stack.append(self.storage(self.pop()))

    def make_tuple(self, items: list[Any]) -> _Tuple:
        self.charge(8 * len(items))
        depth = 1 + max([x.depth for x in items if isinstance(x, _Tuple)], default=0)
        if depth > self.limits.tuple_depth:
            self.fail(BudgetExceeded, "tuples are nested too deeply", SAVE)
        return _nested(depth)(items)

    def set_items(self, items: Sequence[Any]) -> None:
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, dict) or len(items) % 2:
            self.fail(MalformedFile, "SETITEM without a dict, or without pairs")
        self.charge(_ENTRY * (len(items) // 2))
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                self.fail(ForbiddenContent, "a dict key is neither a string nor an integer", SAVE)
            if type(key) is int and abs(key) > _MOST_KEY:
                self.fail(ForbiddenContent, "a dict has a key of more than 32 bits", SAVE)
            if key in target:
                self.fail(AmbiguousFile, f"a dict has the key {str(key)[:80]!r} twice")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, list):
            self.fail(MalformedFile, "APPEND without a list")
        self.charge(_PLACE * len(items))
        target.extend(items)

    def build(self, state: Any) -> None:
        # torch stores module versions in the attribute `_metadata` of the dict; allow only that.
        target = self.stack[-1] if self.stack else None
        if (
            not isinstance(target, _Ordered)
            or not isinstance(state, dict)
            or not state.keys() <= {"_metadata"}
        ):
            self.fail(ForbiddenContent, "the pickle sets attributes of an object", SAVE)

    def storage(self, given: Any) -> Storage:
        if (
            not isinstance(given, _Tuple)
            or len(given) != 5
            or given[0] != "storage"
            or not (isinstance(given[1], Type) and given[1].storage)
            or not (type(given[2]) is str and given[2].isascii() and given[2].isdigit())
            or type(given[3]) is not str
            or type(given[4]) is not int
            or given[4] < 0
        ):
            self.fail(MalformedFile, "a storage is not described as torch does")
        made = Storage(given[2], given[1].dtype, given[4])
        if self.storages.setdefault(made.key, made) != made:
            remedy = "call .clone() on tensors that share memory before torch.save"
            self.fail(AmbiguousFile, f"storage {made.key} has two dtypes or sizes", remedy)
        return made

    def call(self, call: Any, given: Any) -> Any:
        if isinstance(call, Value) and isinstance(given, _Tuple):
            return call
        if not isinstance(call, Call) or not isinstance(given, _Tuple):
            self.fail(ForbiddenContent, "the pickle calls something that is not a function", SAVE)
        match call, tuple(given):
            case Call.ORDERED_DICT, ():
                return _Ordered()
            case Call.PARAMETER, (View() as view, bool(), _Ordered() as hooks) if not hooks:
                return view
            # Attributes that users gave to a parameter are dropped; a tensor among them would leave
            # a storage that no tensor uses, which raises.
            case Call.PARAMETER_WITH_STATE, (View() as view, bool(), _Ordered() as hooks, _) if (
                not hooks
            ):
                return view
            case Call.FROM_TYPE, (
                Call.TENSOR_V2 | Call.TENSOR_V3 | Call.PARAMETER as make,
                Value.TENSOR | Value.TENSOR_CLASS | Value.BUFFER | Value.PARAMETER_CLASS,
                _Tuple() as arguments,
                _,
            ):
                return self.call(make, arguments)
            case (Call.COUNTER, (dict() as items,)):
                return items
            case Call.DEFAULT_DICT, () | (Value(),):
                return {}
            case (Call.SET | Call.FROZEN_SET, (list() as items,)):
                return items  # as a list: no item is hashed
            case (Call.SIZE, (_Tuple() as items,)):
                return items
            case (
                Call.TENSOR_V2,
                (Storage() as storage, offset, shape, strides, bool(), _Ordered() as hooks, *rest),
            ) if storage.dtype is not None and not hooks and len(rest) <= 1:
                return self.view(storage, storage.dtype, offset, shape, strides, rest)
            case (
                Call.TENSOR_V3,
                (
                    Storage(dtype=None) as storage,
                    offset,
                    shape,
                    strides,
                    bool(),
                    _Ordered() as hooks,
                    Type(dtype=np.dtype() as dtype, storage=False),
                    *rest,
                ),
            ) if not hooks and len(rest) <= 1:
                return self.view(storage, dtype, offset, shape, strides, rest)
        if call is Call.TENSOR_V3 and Type(None, False) in given:
            problem = "a tensor has a dtype that NumPy has not, such as complex32"
            self.fail(
                ForbiddenContent, problem, "call .to(torch.complex64) on it before torch.save"
            )
        self.fail(ForbiddenContent, f"unusual arguments for {call.value!r}", SAVE)

    def view(
        self,
        storage: Storage,
        dtype: np.dtype,
        offset: Any,
        shape: Any,
        strides: Any,
        rest: list[Any],
    ) -> View:
        flags = rest[0] if rest and rest[0] is not None else {}
        if not isinstance(flags, dict) or flags.keys() - {"conj", "neg"} or any(flags.values()):
            # Ignoring the flags would give numbers of the wrong sign.
            self.fail(
                ForbiddenContent,
                "a tensor is stored as a lazy conjugate or negative",
                "call .resolve_conj().resolve_neg() on it before torch.save",
            )
        if not isinstance(shape, _Tuple) or not isinstance(strides, _Tuple):
            self.fail(MalformedFile, "a tensor has no shape or strides")
        self._budget.spend("the rank", max(len(shape), len(strides)), self.limits.rank, "data.pkl")
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in numbers):
            self.fail(MalformedFile, "offset, shape or strides of a tensor are not naturals")
        return View(storage, dtype, offset, tuple(shape), tuple(strides))
