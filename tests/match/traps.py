"""Pairs of trees of arrays, drawn with their names, and traps that no names or shapes decide."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float32]]
BLOCK = ("norm1", "query", "key", "value", "out", "norm2", "up", "down")
SOURCES: tuple[tuple[str, dict[str, str]], ...] = (
    ("encoder.layer.{}.", {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "out": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "norm2": "output.LayerNorm", "embed": "embeddings.word_embeddings",
        "pos": "embeddings.position_embeddings", "final": "final_norm", "head": "classifier",
    }),
    ("model.layers.{}.", {
        "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
        "out": "self_attn.o_proj", "norm1": "input_layernorm", "up": "mlp.up_proj", "down": "mlp.down_proj",
        "norm2": "post_attention_layernorm", "embed": "model.embed_tokens", "pos": "model.embed_positions",
        "final": "model.norm", "head": "lm_head",
    }),
    ("blocks.{}.", {
        "query": "attn.wq", "key": "attn.wk", "value": "attn.wv", "out": "attn.wo", "norm1": "norm1",
        "up": "mlp.fc1", "down": "mlp.fc2", "norm2": "norm2", "embed": "tok_emb", "pos": "pos_emb",
        "final": "norm", "head": "head",
    }),
)  # fmt: skip
TARGETS: tuple[tuple[str, dict[str, str]], ...] = (
    ("layers/{}/", {
        "query": "attn/query", "key": "attn/key", "value": "attn/value", "out": "attn/out",
        "norm1": "ln_1", "up": "mlp/up", "down": "mlp/down", "norm2": "ln_2", "embed": "token_embed",
        "pos": "pos_embed", "final": "ln_f", "head": "logits",
    }),
    ("block_{}/", {
        "query": "mha/q", "key": "mha/k", "value": "mha/v", "out": "mha/o", "norm1": "attn_norm",
        "up": "ffn_in", "down": "ffn_out", "norm2": "ffn_norm", "embed": "wte", "pos": "wpe",
        "final": "final_norm", "head": "classifier",
    }),
    ("stack/layer{}/", {
        "query": "attention/to_q", "key": "attention/to_k", "value": "attention/to_v",
        "out": "attention/to_out", "norm1": "pre_attn", "up": "dense1", "down": "dense2",
        "norm2": "pre_mlp", "embed": "embedding_tokens", "pos": "embedding_positions",
        "final": "out_norm", "head": "head",
    }),
)  # fmt: skip


@dataclass
class Drawn:
    """A source, a target of the same architecture, and the right source of each target array."""

    source: Arrays = field(default_factory=dict)
    target: Arrays = field(default_factory=dict)
    right: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    layers: dict[str, tuple[str, str]] = field(default_factory=dict)  # role -> both names


def draw(rng: np.random.Generator) -> Drawn:
    """A transformer of drawn sizes, with the names of two libraries."""
    (block, names), (target_block, target_names) = (
        x[rng.integers(len(x))] for x in (SOURCES, TARGETS)
    )
    d, count = int(rng.choice((8, 12))), int(rng.integers(2, 4))
    f = d if rng.random() < 0.3 else 3 * d
    sizes = {
        "query": (d, d),
        "key": (d, d),
        "value": (d, d),
        "out": (d, d),
        "up": (d, f),
        "down": (f, d),
    }
    made = Drawn()

    def add(role: str, name: str, target_name: str, kind: str, shape: tuple[int, ...]) -> None:
        made.layers[role] = name, target_name
        value = rng.normal(size=shape).astype(np.float32)
        keys = {"linear": "kernel", "embed": "embedding", "norm": "scale"}
        made.source[f"{name}.weight"] = value.T.copy() if kind == "linear" else value
        made.right[f"{target_name}/{keys[kind]}"] = value
        if kind != "embed":
            bias = rng.normal(size=shape[-1:]).astype(np.float32)
            made.source[f"{name}.bias"] = bias
            made.right[f"{target_name}/bias"] = bias

    add("embed", names["embed"], target_names["embed"], "embed", (31, d))
    add("pos", names["pos"], target_names["pos"], "embed", (17, d))
    for i in range(count):
        for role in BLOCK:
            kind = "norm" if role.startswith("norm") else "linear"
            shape = sizes.get(role, (d,))
            add(
                f"{role}{i}",
                block.format(i) + names[role],
                target_block.format(i) + target_names[role],
                kind,
                shape,
            )
    add("final", names["final"], target_names["final"], "norm", (d,))
    add("head", names["head"], target_names["head"], "linear", (d, 5))
    made.target = {name: np.zeros_like(value) for name, value in made.right.items()}
    return made


def _rename(arrays: Arrays, old: str, new: str, separator: str) -> None:
    for name in [n for n in arrays if n.startswith(old + separator)]:
        arrays[new + name.removeprefix(old)] = arrays.pop(name)


def _parent(name: str, separator: str) -> str:
    return name.rpartition(separator)[0] + separator if separator in name else ""


def exchanged(drawn: Drawn, rng: np.random.Generator) -> None:
    """Two layers of one shape lose their names in the target."""
    pair = [("query", "key"), ("key", "value"), ("query", "value"), ("norm1", "norm2")][
        rng.integers(4)
    ]
    terms = [("foo", "bar"), ("left", "right"), ("alpha", "omega"), ("p", "z")][rng.integers(4)]
    chosen = list(zip(pair, rng.permutation(terms), strict=True))
    for role, (_, target_name) in list(drawn.layers.items()):
        for old, new in chosen:
            if role.rstrip("0123456789") == old.rstrip("0123456789") and role.startswith(old):
                _rename(drawn.target, target_name, _parent(target_name, "/") + str(new), "/")


def tied(drawn: Drawn, rng: np.random.Generator) -> None:
    """The target has a head of the table's shape, and the source ties it to the table."""
    name, target_name = drawn.layers["head"]
    _, d = drawn.source[f"{drawn.layers['embed'][0]}.weight"].shape
    del (
        drawn.source[f"{name}.weight"],
        drawn.source[f"{name}.bias"],
        drawn.target[f"{target_name}/bias"],
    )
    drawn.target[f"{target_name}/kernel"] = np.zeros((d, 31), np.float32)
    if rng.random() < 0.5:
        _rename(drawn.source, drawn.layers["embed"][0], "shared", ".")


def transposed(drawn: Drawn, rng: np.random.Generator) -> None:
    """The source's matrices bear a key of no framework, and no bias shows their axes."""
    for name in [n for n in drawn.source if n.endswith(".weight")]:
        value = drawn.source.pop(name)
        drawn.source[name.removesuffix("weight") + "matrix"] = value
    for arrays in (drawn.source, drawn.target):
        for name in [n for n in arrays if n.endswith("bias")]:
            del arrays[name]
    assert rng


def missing_bias(drawn: Drawn, rng: np.random.Generator) -> None:
    """A layer of one side has no bias."""
    roles = [role for role in drawn.layers if role not in ("embed", "pos")]
    name, target_name = drawn.layers[roles[rng.integers(len(roles))]]
    if rng.random() < 0.5:
        del drawn.source[f"{name}.bias"]
    else:
        del drawn.target[f"{target_name}/bias"]


def extra_head(drawn: Drawn, rng: np.random.Generator) -> None:
    """One side has a second head of the same shape."""
    name, target_name = drawn.layers["head"]
    word = str(rng.choice(["aux", "second", "teacher", "ema"]))
    if rng.random() < 0.5:
        for key in ("weight", "bias"):
            drawn.source[f"{_parent(name, '.')}{word}_head.{key}"] = (
                drawn.source[f"{name}.{key}"] + 1
            )
    else:
        for key in ("kernel", "bias"):
            drawn.target[f"{_parent(target_name, '/')}{word}_head/{key}"] = drawn.target[
                f"{target_name}/{key}"
            ]


def permuted_blocks(drawn: Drawn, rng: np.random.Generator) -> None:
    """The target's blocks have names without an order, or the source's numbers have a gap."""
    count = sum(role.startswith("query") for role in drawn.layers)
    if rng.random() < 0.5 and count > 2:
        gap = int(rng.integers(1, 9))
        for name in list(drawn.source):
            for role, (own, _) in drawn.layers.items():
                if role.endswith(str(count - 1)) and name.startswith(own + "."):
                    moved = own.replace(f".{count - 1}.", f".{count - 1 + gap}.", 1)
                    drawn.source[moved + name.removeprefix(own)] = drawn.source.pop(name)
        return
    terms = rng.permutation(["red", "blue", "green"])[:count]
    for role, (_, target_name) in drawn.layers.items():
        if role[-1].isdigit():
            parts = target_name.split("/")
            place = next(n for n, part in enumerate(parts) if part[-1:].isdigit())
            new = [*parts[:place], str(terms[int(role[-1])]), *parts[place + 1 :]]
            _rename(drawn.target, target_name, "/".join(new), "/")


PACKED_NAMES = ("qkv", "Wqkv", "wqkv", "to_qkv", "qkv_proj", "w_qkv", "c_attn")


def pack(drawn: Drawn, name: str, *, by_head: bool, in_target: bool = False) -> None:
    """Packs query, key and value of the source, or of the target, in one layer of this name."""
    arrays, separator = (drawn.target, "/") if in_target else (drawn.source, ".")
    for role, names in list(drawn.layers.items()):
        if not role.startswith("query"):
            continue
        number = role.removeprefix("query")
        parts = [drawn.layers[f"{part}{number}"][in_target] for part in ("query", "key", "value")]
        place = _parent(names[in_target], separator) + name + separator
        for key in ("kernel", "bias") if in_target else ("weight", "bias"):
            values = [arrays.pop(f"{part}{separator}{key}") for part in parts]
            axis = 1 if key == "kernel" else 0
            if by_head:
                heads = [np.split(value, 2, axis) for value in values]
                values = [heads[part][head] for head in range(2) for part in range(3)]
            arrays[place + key] = np.concatenate(values, axis)


def packed(drawn: Drawn, rng: np.random.Generator) -> None:
    """A packed projection with a usual name alternates between query, key and value by head."""
    pack(drawn, str(rng.choice(PACKED_NAMES[:-1])), by_head=True, in_target=rng.random() < 0.5)


TRAPS: dict[str, Callable[[Drawn, np.random.Generator], None]] = {
    x.__name__: x
    for x in (exchanged, tied, transposed, missing_bias, extra_head, permuted_blocks, packed)
}


NEUTRAL = [
    "alpha", "mixer", "foo", "main", "side", "branch", "res", "skip", "core", "tap", "left",
    "right", "mid", "post", "pre", "proj", "lin", "x", "z", "ax", "bx", "fuse", "merge", "apply",
    "transform", "body", "unit", "node", "cell", "path", "flow", "shared", "extra", "adapter",
    "scale", "shift",
]  # fmt: skip


def without_names(drawn: Drawn, rng: np.random.Generator) -> None:
    """Some layers of the target have names that tell nothing, or less than they seem to."""
    share, terms = rng.choice((0.1, 0.3, 0.6)), list(rng.permutation(NEUTRAL))
    kinds = {
        kind: terms.pop()
        for kind in (*BLOCK, "embed", "pos", "final", "head")
        if rng.random() < share
    }
    for role, (_, target_name) in drawn.layers.items():
        kind = max(
            (k for k in (*BLOCK, "embed", "pos", "final", "head") if role.startswith(k)), key=len
        )
        if kind in kinds:
            for arrays in (drawn.target, drawn.right):
                _rename(arrays, target_name, _parent(target_name, "/") + str(kinds[kind]), "/")
