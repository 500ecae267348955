"""The result of comparing two sources, as data and text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxmha.checkpoint.errors import printable
from jaxmha.converters.verify.other_tensors import Left
from jaxmha.converters.verify.weights import Difference, Relation


@dataclass(frozen=True)
class BlockReport:
    """The comparison of one pair of blocks.

    Attributes:
      a, b: name of the block in each source ("" for a single layer); `layouts` holds their layouts.
      num_heads: head count N.
      dtypes: dtype of each source's weights. compute_dtypes: the same, or the dtype of the outputs
        of a layer object where that is narrower.
      differences: weight leaves that differ; empty if all bits are identical.
      behaviour: fields of `Semantics` that differ.
      errors: mask -> RMS error of each source's forward against the float64 oracle on its own
        weights, divided by the RMS error of rounding the exact output to the source's compute dtype
        (`oracle.rounding_floor`).
      departs: the first stage of the computation that differs, or why no output can be compared;
        None if nothing differs.
      explanation: the single known conversion error that turns one block into the other, or None.
      same: True if weights (except biases of zeros) and behaviour are identical, and the errors of
        both forwards are similar.
      not_finite: names of the leaves with NaN or infinity; if there are any, no output is compared,
        and a layer object is not the same as another source.
    """

    a: str
    b: str
    layouts: tuple[str, str]
    num_heads: int
    dtypes: tuple[str, str]
    compute_dtypes: tuple[str, str]
    differences: tuple[Difference, ...]
    behaviour: tuple[str, ...]
    errors: dict[str, tuple[float, float]]
    departs: str | None
    explanation: str | None
    same: bool
    not_finite: str = ""

    def __str__(self) -> str:
        name = (
            self.a
            if self.a == self.b
            else f"{self.a or self.layouts[0]} / {self.b or self.layouts[1]}"
        )
        lines = [f"{printable(name) or 'layer'}: {'same' if self.same else 'DIFFERENT'}"]
        weights = ": identical (0 ULP)" if not self.differences else " differ:"
        if self.differences and all(difference.harmless for difference in self.differences):
            weights = ": the same, but for zeros that change nothing:"
        lines.append(f"  weights{weights}")
        lines += [f"    {difference}" for difference in self.differences]
        lines += [f"  behaviour: {text}" for text in self.behaviour]
        lines += [f"  {text}" for text in self._narrow()]
        if self.not_finite and self.departs is None:
            bad = f"{self.not_finite} holds NaN or infinity"
            lines.append(f"  {bad}: bits were compared, outputs were not")
        lines += [
            f"  forward, {mask}: error {a:.3g} and {b:.3g} rounding floors of the output"
            for mask, (a, b) in self.errors.items()
        ]
        if self.departs is not None:
            lines.append(f"  first departs at: {self.departs}")
        if self.explanation is not None:
            lines.append(f"  explained by: {self.explanation}")
        return "\n".join(lines)

    def _narrow(self) -> Iterator[str]:
        """Describes each source that computes in a narrower dtype than that of its weights."""
        sources = zip(("first", "second"), self.dtypes, self.compute_dtypes, strict=True)
        for which, weights, compute in sources:
            if weights != compute:
                yield f"the {which} computes in {compute}, narrower than its weights in {weights}"


@dataclass(frozen=True)
class Report:
    """The comparison of two sources; `bool(report)` is True if they are the same.

    Attributes:
      blocks: pairs of attention blocks. only_a, only_b: names of blocks without a counterpart.
      outside: tensors outside attention that differ: name in the first source -> the difference.
      not_compared: tensors that have no counterpart, or are not numeric.
      unproven: facts that no tensor shows, such as the order of layers in a Keras file.
      facts: facts of the models in no tensor that differ: positions, masks, norms (`model_facts`).
      dtype: dtype to which the first source was rounded before the comparison; None: it was not.
      relations: names in `outside` -> how two tensors of different dtypes are related.
      unlike: the names in each source of the tensors in `outside`.
    """

    blocks: tuple[BlockReport, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    outside: Mapping[str, str] = field(default_factory=dict)
    not_compared: tuple[Left, ...] = ()
    unproven: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    dtype: str | None = None
    relations: Mapping[str, Relation] = field(default_factory=dict)
    unlike: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def different(self) -> bool:
        """True if a compared tensor or fact differs, or a block is in one source only."""
        alike = not (self.only_a or self.only_b or self.outside or self.facts)
        return not (alike and all(block.same for block in self.blocks))

    @property
    def same(self) -> bool:
        """True if all tensors of both sources were compared and equal, and `unproven` is empty."""
        return not self.different and not self.not_compared and not self.unproven

    def __bool__(self) -> bool:
        return self.same

    @property
    def verdict(self) -> str:
        """The result as text: "the same", "different", or the number of tensors not compared."""
        found = verdict(self.same, self.different, len(self.not_compared), self.unproven)
        return found if self.dtype is None else f"the first rounded to {self.dtype}: {found}"

    @property
    def only_rounded(self) -> bool:
        """True if nothing differs but that tensors of the second source are rounded."""
        if self.only_a or self.only_b or self.facts or self.not_compared or self.unproven:
            return False
        if any(not block.differences or block.behaviour for block in self.blocks if not block.same):
            return False
        weights = [x.relation for b in self.blocks for x in b.differences if not x.harmless]
        found = {*weights, *map(self.relations.get, self.outside)}
        return Relation.ROUNDED in found and found <= {Relation.ROUNDED, Relation.SAME_VALUES}

    def __str__(self) -> str:
        lines = [] if self.dtype is None else [f"the first source was rounded to {self.dtype}"]
        lines += [str(block) for block in self.blocks]
        lines += [f"{printable(name)}: only in the first" for name in self.only_a]
        lines += [f"{printable(name)}: only in the second" for name in self.only_b]
        lines += [
            printable(f"{name}: differs, outside attention: {how}")
            for name, how in self.outside.items()
        ]
        lines += [f"differs, in no tensor: {fact}" for fact in self.facts]
        lines += [printable(f"not compared: {left}") for left in self.not_compared]
        return "\n".join([*lines, *self.notes, *self.unproven])

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-compatible data."""
        return {"same": self.same, "different": self.different, **asdict(self)}


def verdict(same: bool, different: bool, left: int, unproven: Sequence[str] = ()) -> str:
    """Describes the result of a comparison; `left` is the number of tensors not compared.

    >>> verdict(False, False, 2)
    'not fully compared: 2 tensors were not compared, and nothing else differs'
    """
    if same:
        return "the same"
    if unproven:
        rest = verdict(not (different or left), different, left)
        return f"not fully compared: tensors by name: {rest}; {'; '.join(unproven)}"
    tensors = f"{left} tensor{' was' if left == 1 else 's were'} not compared"
    if different:
        return f"different; {tensors}" if left else "different"
    return f"not fully compared: {tensors}, and nothing else differs"
