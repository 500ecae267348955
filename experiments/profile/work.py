"""What a layer computes, as data: products and softmaxes of the shapes into which `blocked` cuts."""

from typing import Literal, NamedTuple

from experiments.benchmarks.cases import Case
from jaxmha.implementations import bands, blocks

ITEMSIZE = 4  # of float32
PARTS = ("projections", "scores", "weighted sums", "softmax")


class Product(NamedTuple):
    """`left @ right`, so many times.

    Attributes:
      times: how often.
      left, right: shapes.
      turned: the operand whose array has its last two axes the other way round.
      many: the operand that is another one each time.
    """

    times: int
    left: tuple[int, ...]
    right: tuple[int, ...]
    turned: Literal["left", "right"] | None = None
    many: Literal["left", "right"] = "left"


class Softmax(NamedTuple):
    """Of scores of a shape, so many times; in the gradient the weights and slopes again."""

    times: int
    shape: tuple[int, ...]
    gradient: bool = False


class Block(NamedTuple):
    """So many blocks of scores: cells of rows and keys."""

    times: int
    cells: int
    rows: int
    keys: int

    def of(self, *sizes: int) -> tuple[int, ...]:
        """A shape; one cell is no axis."""
        return sizes if self.cells == 1 else (self.cells, *sizes)


def parts(case: Case) -> dict[str, list[Product | Softmax]]:
    """What the layer of a case takes, by part.

    >>> from experiments.benchmarks.cases import select
    >>> found = parts(select(["layer-forward-plain-B1-T2048-E512"])[0])
    >>> found["softmax"], found["scores"][0].left
    ([Softmax(times=16, shape=(1024, 2048), gradient=False)], (1024, 64))
    """
    backward = case.direction == "backward"
    found: dict[str, list[Product | Softmax]] = {part: [] for part in PARTS}
    queries, keys, into = case.B * case.T, case.B * case.S, case.K * case.H
    for rows, a, b in ((queries, case.E, case.E), (keys, case.E, into), (keys, case.E, into),
                       (queries, case.E, case.E)):  # fmt: skip
        found["projections"].append(Product(1, (rows, a), (a, b)))
        if backward:
            found["projections"].append(Product(1, (rows, b), (b, a), "right"))
            found["projections"].append(Product(1, (a, rows), (rows, b), "left"))
    for block in cut(case):
        n, _, r, s = block
        found["scores"].append(Product(n, block.of(r, case.H), block.of(case.H, s)))
        found["softmax"].append(Softmax(n, block.of(r, s)))
        found["weighted sums"].append(Product(n, block.of(r, s), block.of(s, case.H), many="right"))
    for block in cut(case, gradient=True) if backward else ():
        n, _, r, s = block
        scores = Product(n, block.of(s, case.H), block.of(case.H, r))
        sums = Product(n, block.of(s, r), block.of(r, case.H), many="right")
        found["scores"] += [scores, scores._replace(turned="right")]
        found["softmax"].append(Softmax(n, block.of(s, r), gradient=True))
        found["weighted sums"] += [sums, sums._replace(turned="right")]
        found["weighted sums"].append(Product(n, block.of(case.H, s), block.of(s, r)))
    return found


def cut(case: Case, *, gradient: bool = False) -> list[Block]:
    """The blocks of scores of one way through; forward is as without a gradient, or beside one."""
    alone = case.direction == "forward"
    skips = case.kind in ("causal", "padded")
    plan = blocks.plan(
        case.B, case.K, _group(case), case.T, case.S,
        skips=skips, plain=not skips, gradient=gradient,
    )  # fmt: skip
    if case.kind == "causal" and alone and bands.rows_leave_out(plan, above=0):
        return _bands_of_rows(case, plan)
    if case.kind == "padded" and alone:
        return _bands_of_keys(case, bands.widths(plan))
    rows = _group(case) * plan.rows
    if plan.chunks == 1:
        return [Block(plan.steps * plan.blocks, plan.cells, rows, case.S)]
    lengths = case.lengths or (case.S,) * case.B
    seen = sum(
        j * plan.keys < (min((i + 1) * plan.rows, length) if case.kind == "causal" else length)
        for length in lengths
        for i in range(plan.blocks)
        for j in range(plan.chunks)
    )
    return [Block(seen * plan.groups, plan.heads, rows, plan.keys)]


def _bands_of_rows(case: Case, whole: blocks.Plan) -> list[Block]:
    size, heads = bands.cut(whole, ITEMSIZE)
    found = []
    for t in range(0, case.T, size):
        rows, S = min(size, case.T - t), min(case.T, t + size)
        least = bands.least_rows(whole, size, S, ITEMSIZE)
        plan = blocks.plan(1, heads, _group(case), rows, S, least_rows=least)
        steps = case.B * case.K // heads
        found.append(
            Block(steps * plan.steps * plan.blocks, plan.cells, _group(case) * plan.rows, S)
        )
    return found


def _bands_of_keys(case: Case, of: list[int]) -> list[Block]:
    assert case.lengths is not None
    rows, widths = case.B, of
    if len(of) > 1:
        rows, widths = 1, [next(width for width in of if width >= n) for n in case.lengths]
    found = []
    for width in widths:
        plan = blocks.plan(rows, case.K, _group(case), case.T, width, plain=True)
        found.append(Block(plan.steps * plan.blocks, plan.cells, _group(case) * plan.rows, width))
    return found


def _group(case: Case) -> int:
    return case.N // case.K
