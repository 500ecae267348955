"""Compares the blocks that jaxmha converts with the modules of a run, and classes the model type."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange

from jaxmha import MHAParams
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.positions import Positions
from jaxmha.converters.layout.arrays import NDArray
from tests.zoo import compared, latent
from tests.zoo.capture import Call, Run, Softmax
from tests.zoo.masked import FREE, Given
from tests.zoo.overrides import NO_ATTENTION

# Words of notes on what happens after the softmax, and on what happens before it.
AFTER = (
    "a gate", "clipped", "factors on the inputs", "another form", "sinks", "another head count",
)  # fmt: skip
BEFORE = (
    "relative positions", "norms of queries", "a scale of", "a soft cap", "a factor of the logits",
    "windows", "a mask of its own",
)  # fmt: skip
UNKNOWN = "the model may compute more around its projections (positions, biases of the logits"
POSITIONS = ("rotary", "ALiBi", "relative")
# Order of severity: the class of a type is that of its worst block.
CLASSES = (
    "silently wrong", "not found", "misleading", "refused", "carried, said", "parts said",
    "positions said", "masks said", "not run", "right",
)  # fmt: skip


class Owner(NamedTuple):
    """The modules that hold the projections of a block; "" where none was found."""

    query: str
    key: str
    value: str
    out: str


class Rows:
    """The rows and columns of the matrices of a model, by their lengths, first and last numbers."""

    def __init__(self, model: Any) -> None:
        self.of_length: dict[int, list[tuple[NDArray, NDArray, str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=True):
            array = parameter.detach().numpy()
            if array.ndim < 2 or not 0 < array.size <= 8_000_000:
                continue
            flat = array.reshape(array.shape[0], -1)
            for way in (flat, flat.T):
                row = way[:, 0], way[:, -1], name.rpartition(".")[0]
                self.of_length.setdefault(way.shape[1], []).append(row)

    def holder(self, length: int, first: float, last: float) -> str | None:
        """The path of the first module that holds such a row; None: none does."""
        for firsts, lasts, path in self.of_length.get(length, ()):
            if ((firsts == first) & (lasts == last)).any():
                return path
        return None


def owners(block: Block, params: MHAParams, rows: Rows) -> Owner:
    """The modules of a model in memory that hold the kernels of a block, found by their numbers."""
    query, key, value = (
        _held((x := np.asarray(one.kernel)).reshape(x.shape[0], -1).T, rows) for one in params[:3]
    )
    if params.out is None:
        return Owner(query, key, value, "")
    kernel = np.asarray(params.out.kernel)
    return Owner(query, key, value, _held(kernel.reshape(-1, kernel.shape[-1]).T, rows))


def _held(matrix: NDArray, rows: Rows) -> str:
    for one in (matrix[0], matrix[:, 0]):
        if name := rows.holder(len(one), float(one[0]), float(one[-1])):
            return name
    return ""


def judge(
    run: Run,
    blocks: Any,
    owned: list[Owner | None],
    said: dict[str, Any],
    held: Rows,
    whole: bool,
    alone: Collection[str] = (),
) -> dict[str, Any]:
    """The class of a model, and of every block and softmax.

    `alone`: prefixes of blocks whose modules were called alone.
    """
    notes = " ".join(
        n
        for n in (*said["notes"], *said.get("notes_converted", ()))
        if n.startswith("not converted") or UNKNOWN in n
    )
    places, masks = said.pop("places"), said.pop("masks")
    used = [s for s in run.softmaxes if s.used]
    owned = [None if own is None else _running(own, run) for own in owned]
    outcomes, matched = _outcomes(run, used, blocks, owned, (places, masks), whole)
    rows: list[dict[str, Any]] = []
    for i, (block, params, _, why) in enumerate(blocks):
        found = outcomes.get(i, [])
        row = {"prefix": block.prefix, "layout": block.layout.name, "ran": len(found)}
        if params is None:
            row |= {"class": "refused", "why": why}
        elif why:
            row |= {"class": "silently wrong", "why": why}
        elif not found and _ran_without(run, owned[i]):
            why = "its projections ran, and no softmax over keys"
            row |= {"class": "silently wrong", "why": why}
        else:
            scheme, mask = _scheme(places.get(block.prefix)), str(masks.get(block.prefix, ""))
            row |= _of_outcomes(found, notes, scheme, mask, block.prefix in alone)
        rows.append(row | ({"alone": True} if found and block.prefix in alone else {}))
    for one in said.pop("latents"):
        module = (held.holder(*one.row) or "").rpartition(".")[0]
        given = Given(masks.get(one.prefix), run.paddings)
        row, explained = latent.judged(one, run, module, given)
        rows.append(row)
        matched |= explained
    missed = sorted({s.module for s in used if id(s) not in matched})
    missed = [m for m in missed if not re.search(NO_ATTENTION, m)]
    label, lost = _label(run, rows, said, missed, held, notes, bool(alone))
    return {"class": label, "blocks": rows, "missed": lost, "softmaxes": len(used),
            "unmatched": len(missed), **said}  # fmt: skip


def _outcomes(
    run: Run,
    used: list[Softmax],
    blocks: Any,
    owned: list[Owner | None],
    converted: tuple[dict[str, Any], dict[str, Any]],
    whole: bool,
) -> tuple[dict[int, list[compared.Outcome]], set[int]]:
    """Returns the outcomes of the softmaxes of each block, and the ids of all softmaxes in a block.

    `converted`: the positions and masks that were found, by prefix.
    """
    places, masks = converted
    found: dict[int, list[compared.Outcome]] = {}
    matched: set[int] = set()
    chunk, last, module = 0, None, ""
    computed: set[Any] = set()  # kinds of blocks that jaxmha has computed: one of each suffices
    for before, softmax in zip([None, *used], used, strict=False):
        best = _block_of(softmax, 0 if before is None else before.time, run, owned)
        chunk = chunk + 1 if best is None and last is not None and softmax.module == module else 0
        best = last if chunk else best  # a sequence of several parts, one after the other
        last, module = best, softmax.module
        if best is None:
            continue
        matched.add(id(softmax))
        block, params, semantics, _ = blocks[best]
        if block.layout.cyclic:  # the heads of its logits, in the order of those of `params`
            K = params.key.kernel.shape[-2]
            softmax.logits = rearrange(softmax.logits, "... (g K) T S -> ... (K g) T S", K=K)
        new = (block.layout.name, softmax.logits.shape) not in computed
        computed.add((block.layout.name, softmax.logits.shape))
        given = Given(None if softmax.alone else masks.get(block.prefix), run.paddings)
        outcome = _outcome(
            run, owned[best], softmax, params, semantics, places.get(block.prefix), chunk,
            whole and new and not chunk, given,
        )  # fmt: skip
        found.setdefault(best, []).append(outcome)
    return found, matched


def _of_outcomes(
    outcomes: list[compared.Outcome], notes: str, scheme: str, mask: str, alone: bool
) -> dict[str, Any]:
    """The class of a block that was converted, and why."""
    if alone and any(o.kind != "equal" for o in outcomes):
        return {"class": "not run", "why": "its module alone lacks positions or masks"}
    if any(o.why == compared.NOT_FINITE for o in outcomes):
        return {"class": "not run", "why": compared.NOT_FINITE}
    if not outcomes:
        return {"class": "not run"}
    worst = max(outcomes, key=lambda o: compared.KINDS.index(o.kind))
    row = {"class": _class(worst.kind, notes, scheme, worst.why), "kind": worst.kind,
           "error": worst.error, "why": worst.why, "scheme": scheme, "mask": mask}  # fmt: skip
    told = next((o.mask for o in outcomes if o.mask), "")
    if told and row["class"] == "right":
        row |= {"class": "masks said" if told.startswith(FREE) else "silently wrong", "why": told}
    if alone and row["class"] == "right" and scheme.startswith("unknown"):  # it ran without any
        row |= {"class": "positions said", "why": "positions, without which it was run"}
    return row


def _label(
    run: Run,
    rows: list[dict[str, Any]],
    said: dict[str, Any],
    missed: list[str],
    held: Rows,
    notes: str,
    alone: bool,
) -> tuple[str, list[str]]:
    """The class of a model, and its softmaxes that nothing speaks of."""
    claimed, apart = (
        {path for row in said.pop(kind) if (path := held.holder(*row)) is not None}
        for kind in ("claims", "apart")
    )
    carried = [m for m in missed if _touches(m, apart)]
    lost = [m for m in missed if not _touches(m, claimed) and m not in carried]
    classes = {r["class"] for r in rows}
    if said.get("back", "") not in ("", "same") and not said["back"].startswith("refused"):
        classes.add("silently wrong")  # the file that was converted there and back
    if lost:
        classes.add("not found")
    if any(path in run.calls for path in apart) or (apart and alone):
        classes.add("carried, said")
    if carried:
        classes.add("carried, said" if "attention of no known layout" in notes else "not found")
    if any("looks like layout" in one for one in said["damaged"]):  # and nothing is damaged
        classes.add("misleading")
    elif said["damaged"]:
        classes.add("refused")
    converted = {"right", "positions said", "parts said", "silently wrong"}
    if not said["to"] and (classes & converted or (rows and classes == {"not run"})):
        classes = classes - converted - {"not run"} | {"refused"}
    return next((c for c in CLASSES if c in classes), "no attention"), lost


def not_reached(run: Run, owned: list[Owner | None]) -> list[int]:
    """Blocks whose query projection was not called."""
    running = [None if own is None else _running(own, run) for own in owned]
    return [i for i, own in enumerate(running) if own and own.query and own.query not in run.calls]


def _running(own: Owner, run: Run) -> Owner:
    """The owner itself, or the module around it that projects with its arrays, uncalled."""
    around = own.query.rpartition(".")[0]
    uncalled = own.query and own.query not in run.calls
    return Owner(around, around, around, own.out) if uncalled and around in run.calls else own


def _ran_without(run: Run, own: Owner | None) -> bool:
    """True if the projections of a block ran, in a module without a softmax over keys."""
    if own is None or own.query not in run.calls:
        return False
    return not _touches(own.query.rpartition(".")[0], run.narrow)


def _scheme(places: Positions | None) -> str:
    return "" if places is None else f"{places.scheme} {places.why}".strip()


def _touches(module: str, others: set[str]) -> bool:
    return any(
        o == module or o.startswith(f"{module}.") or module.startswith(f"{o}.") for o in others if o
    )


def _class(kind: str, notes: str, scheme: str, why: str) -> str:
    if kind == "equal":
        return "right"
    if kind in ("rotary", "bias"):
        if not scheme.startswith("unknown"):  # told, and told wrong
            return "silently wrong"
        said = any(word in notes for word in (*POSITIONS, UNKNOWN))
        return "positions said" if said else "silently wrong"
    words = AFTER if why.startswith("values") else (*AFTER, *BEFORE, UNKNOWN)
    said = any(word in notes for word in words) and "positions_of" not in why
    return "parts said" if said else "silently wrong"


def _block_of(softmax: Softmax, since: int, run: Run, owned: list[Owner | None]) -> int | None:
    """The block whose query was projected last before a softmax, and after the softmax before."""
    best, when = None, since
    for i, own in enumerate(owned):
        if own is None or not own.query:
            continue
        call = _call(run, own.query, softmax.time)
        if call is not None and call.end > when and call.start < softmax.time:
            best, when = i, call.end
    if best is not None:
        return best
    for i, own in enumerate(owned):  # a module that projects by itself, and is still running
        if own is not None and own.query and softmax.module == own.query:
            return i
    return None


def _call(run: Run, path: str, before: int) -> Call | None:
    calls = _calls(run, path, before)
    return calls[-1] if calls else None


def _calls(run: Run, path: str, before: int) -> list[Call]:
    return [c for c in run.calls.get(path, ()) if c.start < before]


def _of_contents(calls: list[list[Call]]) -> list[Call]:
    """The last calls for query, key and value; earlier ones of layers that project positions, too.

    DeBERTa projects its vectors of positions by the layers of queries and keys, after the contents.
    """
    sizes = [[_first(c.args, c.kwargs).shape[:-1].numel() for c in one] for one in calls]
    keys, values = sizes[1], sizes[2]
    again = len(keys) > 1 and keys[-1] != values[-1] == keys[-2] and len(sizes[0]) > 1
    return [one[-2] if again and i < 2 else one[-1] for i, one in enumerate(calls)]


def _outcome(
    run: Run,
    own: Owner | None,
    softmax: Softmax,
    params: Any,
    semantics: Any,
    places: Positions | None,
    chunk: int,
    whole_too: bool,
    masks: Given,
) -> compared.Outcome:
    assert own is not None
    found_calls = [_calls(run, path, softmax.time) for path in own[:3]]
    if lacking := [path for path, calls in zip(own, found_calls, strict=False) if not calls]:
        return compared.Outcome("other", float("inf"), f"no input of {lacking[0]}")
    inputs = _of_contents(found_calls)
    whole = inputs[0].end > softmax.time
    given = _given(inputs, whole)
    path = own.out
    after = [
        c
        for c in run.calls.get(path, ())
        if c.end > softmax.time and (whole or c.start > softmax.time)
    ]
    parent = path
    while path and not after and parent:
        parent = parent.rpartition(".")[0]
        after = [c for c in run.calls.get(parent, ()) if c.start < softmax.time < c.end]
    out = after[0].output if after else None
    while isinstance(out, list | tuple):
        out = out[0]
    out = out if hasattr(out, "detach") else None
    found = compared.compare(params, semantics, given, softmax.logits, out, places, chunk, masks)
    if (
        found.kind != "equal"
        and places is not None
        and places.scheme in ("rotary", "axial", "alibi", "relative")
    ):
        plain = compared.compare(params, semantics, given, softmax.logits, out, None, chunk, masks)
        if plain.kind == "equal":
            return plain._replace(
                kind="other", why="positions_of tells positions that are not there"
            )
        if plain.kind != "other":
            told = f"not as positions_of has them ({found.why})"
            return plain._replace(why=f"{plain.why}; {told}")
    if found.kind == "equal" and whole_too and out is not None:
        error = compared.with_jaxmha(params, semantics, given, softmax.logits, out, places, masks)
        if compared.TOLERANCE < error < float("inf"):
            return compared.Outcome("other", error, "jaxmha's own output")
    return found


def _given(calls: list[Call], whole: bool) -> list[Any]:
    """Inputs of query, key and value projections; of one module that has them all, its arguments."""
    if not whole:
        return [_first(c.args, c.kwargs) for c in calls]
    args, kwargs = calls[0].args, calls[0].kwargs
    names = ("query", "key", "value")
    found: list[Any] = [
        kwargs.get(n, args[i] if i < len(args) else None) for i, n in enumerate(names)
    ]
    first = found[0] if found[0] is not None else _first(args, kwargs)
    tensor = [
        x if hasattr(x, "is_floating_point") and x.is_floating_point() and x.ndim > 1 else first
        for x in found
    ]
    return tensor


def _first(args: Any, kwargs: Any) -> Any:
    return next(x for x in (*args, *kwargs.values()) if hasattr(x, "shape"))
