"""Finds tensors that look like attention by their names, but form no block of a known layout.

A conversion copies these tensors unchanged and reports them: converted as linear layers, they would
get other names and axes, and could be mistaken for a known layout.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from jaxmha.checkpoint.errors import listed
from jaxmha.converters.discovery import other_forms
from jaxmha.converters.discovery.attention_blocks import Block, natural
from jaxmha.converters.discovery.role_names import role_of
from jaxmha.converters.layout import latent

# Sets of roles that can form attention; `_is_attention` also checks where they occur, since a
# packed `in_proj` alone may belong to Mamba.
_TOGETHER = (
    {"query", "key", "value"},
    {"query", "key value"},
    {"key", "value"},
    {"query key", "value"},
    {"key value"},
    {"query key value"},
)
_PLACE = re.compile(r"att|mha|transformer|resampler|perceiver|pool|mixer", re.IGNORECASE)
_CALLED = re.compile(
    r"((self|cross|encoder|multi_?head)_?)?(attn|attention|mha|mhsa|msa)", re.IGNORECASE
)
# The output layer of attention in a parallel block, whose `in_proj` packs the feed-forward layer too.
_PART = re.compile(r"[./](attn|attention)_(out|proj)\w*[./]")
_MAMBA = re.compile(r"A_log|conv1d|dt_bias|x_proj|dt_proj")
_LATENT = "; it is latent attention: jaxmha.converters.huggingface.import_latent_params reads each"


def find(
    shapes: Mapping[str, Sequence[int]], found: Sequence[Block], damaged: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Prefixes that look like attention of an unknown layout, and the tensors under each.

    `found`: the blocks of known layouts. `damaged`: prefixes of damaged blocks, which are left out.

    >>> shapes = {f"a.{x}_lin9.weight": (6, 6) for x in "qkv"} | {"a.out_lin9.weight": (6, 6)}
    >>> list(find(shapes, []))
    ['a']
    """
    taken = {name for block in found for name in (*block.keys.values(), *block.unknown)}
    roles: dict[str, dict[str, str]] = {}
    for name, shape in shapes.items():
        if len(shape) < 2 or name in taken:
            continue
        path = re.split("[./]", name)
        for i, part in enumerate(path):
            if (role := role_of(part)) is not None:
                roles.setdefault(name[: sum(len(p) + 1 for p in path[:i])][:-1], {})[role] = name
                break
    refused = {*filter(None, damaged)}
    near = {prefix for one in refused for prefix in (one, *_above(one)) if prefix in roles}
    # Prefixes are compared with dots: a conversion may change the separator of the tensors that it
    # renames, but not of the tensors that it copies.
    mamba = {p.replace("/", ".") for name in shapes if _MAMBA.search(name) for p in _above(name)}
    parallel = {name[: m.start()].replace("/", ".") for name in shapes if (m := _PART.search(name))}
    prefixes = {
        prefix: list[str]()
        for prefix, own in sorted(roles.items(), key=lambda item: natural(item[0]))
        if any(needed <= own.keys() for needed in _TOGETHER)
        and prefix not in near
        and refused.isdisjoint(_above(prefix))
        and (
            _is_attention(prefix, own, prefix.replace("/", ".") in mamba)
            or prefix.replace("/", ".") in parallel
        )
    }
    prefixes |= _called(shapes, found, taken, [*prefixes, *refused])
    for name in shapes:
        for prefix in _above(name) if name not in taken else ():
            if prefix in prefixes:
                prefixes[prefix].append(name)
    return {
        prefix: tuple(names)
        for prefix, names in prefixes.items()
        if not prefix or prefixes.keys().isdisjoint(_above(prefix))
    }


def _called(
    shapes: Mapping[str, Sequence[int]],
    found: Sequence[Block],
    taken: Collection[str],
    known: Collection[str],
) -> dict[str, list[str]]:
    """Prefixes that end in a name of attention and hold several matrices that no block takes.

    Prefixes inside or around a block, or one of `known`, are left out.
    """
    matrices: dict[str, int] = {}
    for name, shape in shapes.items():
        if len(shape) >= 2 and name not in taken:
            for prefix in _above(name):
                last = prefix[max(prefix.rfind("."), prefix.rfind("/")) + 1 :]
                if _CALLED.fullmatch(last) and not _squeezes(name, prefix, shape):
                    matrices[prefix] = matrices.get(prefix, 0) + 1
    near = [*known, *(block.prefix for block in found)]
    return {
        prefix: []
        for prefix, count in matrices.items()
        if count > 1
        and not any(one == prefix or one.startswith((f"{prefix}.", f"{prefix}/")) for one in near)
        and set(near).isdisjoint(_above(prefix))
    }


def _squeezes(name: str, prefix: str, shape: Sequence[int]) -> bool:
    """True for a 1x1 convolution in a numbered sublayer: mostly a gate of channels, not attention."""
    after = re.split("[./]", name[len(prefix) :].lstrip("./"))[0]
    return after.isdigit() and len(shape) == 4 and {*shape[2:]} == {1}


def _is_attention(prefix: str, own: Mapping[str, str], mamba: bool) -> bool:
    """True if the roles `own` at a prefix form attention.

    `mamba`: some names under the prefix are of a state space model, so `in_proj` may be its own.
    """
    if {"key", "value"} <= own.keys() or {"query", "key value"} <= own.keys():
        return True
    if own.keys() == {"query key value"} and "in_proj" in own["query key value"]:
        return bool(_PLACE.search(prefix)) and not mamba
    return bool(_PLACE.search(prefix)) or {"query key value"} <= own.keys()


def _above(name: str) -> Iterator[str]:
    """Yields all prefixes of a name, the empty one first.

    >>> list(_above("a.b/c"))
    ['', 'a', 'a.b']
    """
    yield ""
    yield from (name[: found.start()] for found in re.finditer("[./]", name))


def notes(unknown: Mapping[str, Sequence[str]], model_types: Collection[str] = ()) -> Iterator[str]:
    """Yields a note on attention of an unknown layout, one for all layers of a stack.

    `model_types`: the model types in the configuration.
    """
    kinds: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for prefix, names in unknown.items():
        ends = tuple(name[len(prefix) + 1 if prefix else 0 :] for name in names)
        kinds.setdefault((re.sub(r"\d+", "{i}", prefix), ends), []).append(prefix)
    for (place, ends), prefixes in kinds.items():
        yield (
            f"not converted: attention of no known layout, {len(prefixes)} x {place or '(top)'}, "
            f"carried over as it is: tensors {listed(ends, 6)}{_LATENT * _is_latent(ends)}"
            + (f"; {why}" if (why := other_forms.of_unknown(ends, model_types)) else "")
        )


def _is_latent(ends: Collection[str]) -> bool:
    """True if `import_latent_params` reads a block with these keys, without leaving out any."""
    return latent.SIGN in ends and latent.known_keys(ends).issuperset(ends)
