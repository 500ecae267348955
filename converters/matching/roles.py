"""Infers roles of layers from the structure of a tree: output projections and norms of blocks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxmha.converters.matching.layers import MAIN
from jaxmha.converters.matching.templates import Template, by_number
from jaxmha.converters.matching.terms import IN_MLP, TOGETHER, terms

_QKV = ("query", "key", "value")
_PLACES = {"attn", "cross", "mlp", "self", "in", "out", "final"}
# A block with this many norms has one before and one after attention, and so for the MLP. Only terms
# such as "post" tell them apart, and are kept.
_SANDWICH = 4
_PAIR = 2
_OUT = {"o", "wo", "out", "output"}


def assigned(templates: Sequence[Template]) -> list[Template]:
    """Returns the templates with the terms of their roles, and without terms that mislead."""
    named = [_of_projection(t) for t in _halves(_together(templates))]
    with_out = _outputs(named)
    return _places(with_out)


def _matrix(template: Template) -> bool:
    return len(template.first.slots[MAIN].shape) > 1


def _of_projection(template: Template) -> Template:
    """Adds "in" to `up` and "out" to `down` of an MLP; removes both terms from query, key and value."""
    packed = template.terms.intersection(_QKV)
    if "mlp" in template.terms:
        named = {IN_MLP[w] for w in terms(template.path[-1]) if w in IN_MLP}
        template = replace(template, terms=template.terms | named)
    if _matrix(template) and packed:
        return replace(template, terms=template.terms - {"out", "in"} | {"attn"})
    return template


def _together(templates: Sequence[Template]) -> list[Template]:
    """Adds the terms of names that have a role only together, such as w1, w2 and w3."""
    siblings: dict[tuple[str, ...], dict[str, Template]] = defaultdict(dict)
    for template in templates:
        siblings[template.path[:-1]][template.path[-1]] = template
    found: dict[tuple[str, ...], str] = {}
    for parent, named in siblings.items():
        for names, rows in TOGETHER.items():
            if named.keys() >= {*names}:
                parts = [named[name] for name in names]
                fitting = [own for own in rows if len(rows) == 1 or _gated(own, parts)]
                if len(fitting) == 1:
                    found |= {(*parent, n): r for n, r in zip(names, fitting[0], strict=True)}
    return [
        replace(t, terms=t.terms - {"in", "out", *_QKV} | {found[t.path]}) if t.path in found else t
        for t in templates
    ]


def _gated(roles: Sequence[str], parts: Sequence[Template]) -> bool:
    """True if shapes allow these roles: "gate" and "in" have one shape, and "out" has it transposed."""
    shapes = {r: t.first.slots[MAIN].shape for r, t in zip(roles, parts, strict=True)}
    gate = shapes["gate"]
    return gate == shapes["in"] and sorted(gate) == sorted(shapes["out"])


def _halves(templates: Sequence[Template]) -> list[Template]:
    """Sets `halves` of a matrix if its module has one other, which reads half of its outputs."""
    siblings: dict[tuple[str, ...], list[Template]] = defaultdict(list)
    for template in templates:
        if _matrix(template):
            siblings[template.path[:-1]].append(template)
    pairs = [two for two in siblings.values() if len(two) == len({t.path for t in two}) == _PAIR]
    found = {a.path for two in pairs for a, b in (two, two[::-1]) if _reads_half(b, a)}
    return [replace(t, halves=t.path in found) for t in templates]


def _reads_half(reader: Template, wide: Template) -> bool:
    """True if `reader` has half as many inputs as `wide` outputs, and as many outputs as it inputs."""
    packed = reader.first.part or wide.first.part
    return not packed and any(
        2 * ins == wide_outs and outs == wide_ins != ins
        for wide_ins, wide_outs in _widths(wide)
        for ins, outs in _widths(reader)
    )


def _widths(template: Template) -> list[tuple[int, int]]:
    """Returns the possible (inputs, outputs) of a matrix: both ways if its axis order is unknown."""
    form, shape = template.first.form, template.first.slots[MAIN].shape
    (a, b) = shape[:2] if form == "oi" else shape[-2:]
    return [*[(a, b)] * (form in ("io", "")), *[(b, a)] * (form != "io")]


def _outputs(templates: Sequence[Template]) -> list[Template]:
    """Adds "out" and "attn" to output projections of attention.

    They are so named, or are the only other matrix next to query, key and value.
    """
    below: dict[tuple[str, ...], list[Template]] = defaultdict(list)
    for template in templates:
        if _matrix(template) and "relative" not in template.terms:
            for n in range(len(template.path)):
                below[template.path[:n]].append(template)
    outputs: set[tuple[str, ...]] = set()
    attention: set[tuple[str, ...]] = set()
    for path in sorted(below, key=len, reverse=True):
        inside = below[path]
        roles = [name for t in inside for name in t.terms.intersection(_QKV)]
        others = [t for t in inside if not t.terms.intersection(_QKV)]
        if sorted(roles) == sorted(_QKV) and len(others) == 1:
            outputs.add(others[0].path)
            attention.update(t.path for t in inside)
    made = []
    for template in templates:
        named = terms(template.path[-1])
        by_name = "attn" in template.terms and _OUT.intersection(named) and _matrix(template)
        if template.path in outputs or by_name:
            template = replace(template, terms=template.terms - {"in", "mlp"} | {"out", "attn"})
        made.append(template)
    return made


def _places(templates: Sequence[Template]) -> list[Template]:
    """Adds to each norm of a block the term of the layer it belongs to: "attn", "cross" or "mlp".

    Removes ambiguous terms, such as "post", from norms for which that is unknown.
    """
    groups: dict[tuple[object, ...], list[Template]] = defaultdict(list)
    for template in templates:
        block = _block(template)
        if len([n for n in template.first.slots[MAIN].shape if n > 1]) <= 1 and block:
            groups[block, frozenset(template.first.slots), _size(template)].append(template)
    crossed = {t.path[:n] for t in templates if "cross" in t.terms for n in range(len(t.path))}
    attended = {t.path[:n] for t in templates if "attn" in t.terms for n in range(len(t.path))}
    found: dict[tuple[str, ...], str] = {}
    for (place, _, _), several in groups.items():
        several = [t for t in several if not t.terms.intersection(_QKV)]
        order = ("attn", "cross", "mlp") if place in crossed else ("attn", "mlp")
        if len(several) == len(order) and place in attended:
            found |= _ordered(several, order, templates)
    made = []
    for t in templates:
        if t.path in found:
            t = replace(t, terms=t.terms - _PLACES | {found[t.path]})
        elif not _matrix(t) and _vectors_at_parent(t, templates) < _SANDWICH:
            # A "post" norm is ambiguous: it precedes the MLP in Llama, and follows attention in
            # OLMo 2 and whole blocks elsewhere.
            first = terms(t.path[-1])[:1]
            ambiguous = {"post", "pre"} | ({"in"} if first == ["input"] else set())
            if first == ["post"]:
                ambiguous |= {"attn", "mlp", "self", "cross"}
            t = replace(t, terms=t.terms - ambiguous)
        made.append(t)
    return made


def _block(template: Template) -> tuple[str, ...]:
    """Returns the path of the innermost block that holds a template; () if there is none.

    The last part of a repeated block has "#". In a path without "#", the first number counts as that
    of a block, the only one of its list.
    """
    path = template.path
    ends = [n for n, part in enumerate(path) if "#" in part][-1:]
    ends = ends or [n for n, part in enumerate(path) if part.isdigit()]
    return path[: ends[0] + 1] if ends else ()


def _vectors_at_parent(template: Template, templates: Sequence[Template]) -> int:
    """Counts layers under the same parent whose main array is a vector, such as norms."""
    return sum(t.path[:-1] == template.path[:-1] and not _matrix(t) for t in templates)


def _size(template: Template) -> int:
    return max((n for n in template.first.slots[MAIN].shape), default=1)


def _ordered(
    several: Sequence[Template], order: Sequence[str], templates: Sequence[Template]
) -> Mapping[tuple[str, ...], str]:
    """Maps the path of each norm to its role in `order`: by number, else by name; {} if in doubt."""
    ranked = by_number(several)
    if ranked is not None:
        return {several[n].path: name for n, name in zip(ranked, order, strict=True)}
    given: dict[tuple[str, ...], str] = {}
    for template in several:
        if named := _place(template, several, templates):
            given[template.path] = named
    left = [t for t in several if t.path not in given]
    if len(set(given.values())) == len(given) == len(order) - len(left):
        free = [name for name in order if name not in given.values()]
        if len(left) == len(free) <= 1:
            return given | {t.path: name for t, name in zip(left, free, strict=True)}
    return {}


def _place(template: Template, several: Sequence[Template], templates: Sequence[Template]) -> str:
    last = terms(template.path[-1])
    if last[:2] in (["post", "attn"], ["post", "attention"]):
        others = [terms(t.path[-1]) for t in several if t is not template]
        # Llama's post_attention_layernorm precedes the MLP; if there is another "post" norm, as in
        # OLMo 2, it follows attention.
        after = any(o[:1] == ["post"] for o in others)
        return "attn" if after else "mlp"
    if "cross" in template.terms:
        return "cross"
    if template.terms & {"attn", "self"}:
        return "attn"
    if "mlp" in template.terms:
        return "mlp"
    if last[:1] in (["input"], ["pre"]) and any("post" in t.terms for t in several):
        return "attn"
    if last[:1] == ["final"]:
        return "mlp"
    near = frozenset[str]().union(
        *(t.terms for t in templates if t.path[:-1] != template.path and _within(t, template))
    )
    named = [w for w in ("cross", "attn", "mlp") if w in near]
    return named[0] if named in (["cross", "attn"], ["attn"], ["mlp"]) else ""


def _within(other: Template, template: Template) -> bool:
    """True if `other` is inside the parent of `template`, and that parent is not a whole block."""
    parent = template.path[:-1]
    whole = parent[-1].endswith("#") or parent == _block(template)
    return not whole and other.path[: len(parent)] == parent
