"""Matches the arrays of a source with those of a target model of the same architecture.

Layers are compared by shape (in any framework's layout), by the terms in their names, and by the
structure of both trees. Two layers are paired only if every alternative of the same shapes is
excluded; all other layers become questions. `match` makes the plan, `load_into` of, say,
`jaxmha.converters.torch` fills the target, and `prove` compares the result with the source.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from jaxmha.converters.matching.plan import Line, Packing, Question
from jaxmha.converters.matching.plan import MatchPlan as Plan
from jaxmha.converters.matching.proof import Proof

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Line", "Plan", "Proof", "Question", "match", "prove"]


def match(source: Any, target: Any, *, packing: Packing = "ask") -> Plan:
    """Returns the plan that fills a target from a source, with a question per undecided layer.

    Args:
      source: a file, a folder of `save_pretrained`, `hf://org/model[@revision]`, a dict of arrays,
        or a model object.
      target: an nnx module (also of `nnx.eval_shape`), linen variables, an equinox module, a Keras
        or torch model, or any tree of arrays or `jax.ShapeDtypeStruct`.
      packing: order of query, key and value (or gate and up) that are packed in one array, if names
        and shapes do not determine it. "concatenated": one after another, as `(qkv N H)`. "ask":
        the plan has a question, because some models alternate head by head, as `(N qkv H)`.

    Raises:
      ValueError: attention layers of source and target state different head counts or settings, such
        as a soft cap, so that the same arrays would give other outputs; or the source has only an
        adapter, such as LoRA; or it stores parts of a weight that do not determine the weight, or
        normalises a weight at each call, and the target does not.

    >>> import numpy as np
    >>> source = {"fc.weight": np.zeros((3, 5)), "fc.bias": np.zeros(3)}
    >>> print(match(source, {"dense": {"kernel": np.zeros((5, 3)), "bias": np.zeros(3)}}))
    dense/bias <- fc.bias  [o0 -> o0]  certain: the only layers of these shapes
    dense/kernel <- fc.weight  [o0 i0 -> i0 o0]  certain: the only layers of these shapes
    """
    from jaxmha.converters.matching import lines, loading, stored

    mine, theirs = stored.read(source, target)
    try:
        made = lines.plan(mine, theirs, packing)
        _, notes = loading.checked_jobs(made, mine, theirs)
        return replace(made, notes=made.notes + notes)
    finally:
        mine.close()


def prove(
    source: Any,
    model: Any,
    plan: Plan | None = None,
    *,
    inputs: "Callable[[np.random.Generator], Any] | None" = None,
    packing: Packing = "ask",
    seed: int = 0,
    unused: Literal["refuse", "keep"] = "refuse",
    missing: Literal["refuse", "keep"] = "refuse",
) -> Proof:
    """Compares a filled model with its source: every array, and outputs if both can run.

    Outputs with the same key are paired. The rest are paired in order, if both models return as many
    and their sizes agree; otherwise those of equal size that differ least. The pair that differs most
    decides. Axes may have another order in the model (length before batch, channels first or last,
    heads after length) where the sizes show it; `Proof.outputs` names the order. Where axes of equal
    sizes are exchanged, outputs depart: draw inputs with which the sizes of all axes differ.

    Outputs that only one model returns are left out, and so are those that two wrong models share:
    integers, Booleans, inputs that both return unchanged, and equal outputs of numbers that an input has,
    such as a part of it, or that are whole, such as masks, indices and zeros. `Proof.left` names them.
    Arrays in objects other than tuples, lists, dicts and dataclasses, such as a cache of transformers,
    are neither compared nor named.

    Args:
      source: as in `match`; a model object if outputs are compared.
      model: the model that `load_into` filled.
      plan: the plan by which it was filled; None makes it with `match`.
      inputs: takes a NumPy generator and returns the arguments of both models, as a tuple or as a
        dict by name; or `{"source": ..., "target": ...}` with one of these for each. Arguments are
        arrays or pytrees of arrays, such as a `Mask`; other values are passed unchanged. Both
        models run in float64; a Keras model, and one that raises in float64, in float32. None compares
        only arrays.
      packing: as in `match`. seed: seed of the generator.
      unused, missing: "keep" accepts source arrays that the plan does not use, or model arrays that
        it does not fill, also those of questions without candidates, as in `load_into`.

    Raises:
      ValueError: the plan has an open question, or does not fit the models, or head counts or
        settings of attention differ, or a model raises an error on the drawn arguments, or no output
        of both can be compared.
      TypeError: `inputs` is not a function of one generator, or returns neither a tuple nor a dict;
        or the source or the model is not an object that can be run, such as a file.

    >>> import torch
    >>> module = torch.nn.Linear(3, 5)
    >>> arrays = {"kernel": module.weight.detach().numpy().T, "bias": module.bias.detach().numpy()}
    >>> print(prove(module, arrays))
    2 arrays are those of the source, bit by bit
    """
    from jaxmha.converters.matching import proving

    return proving.prove(source, model, plan, inputs, packing, seed, unused, missing)
