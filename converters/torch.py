"""Imports and exports torch.nn.MultiheadAttention.

The layer is called as (query, key, value), by default with the length first: `(T, B, Dq)`, while
jaxmha always has `(B, T, Dq)`. True in its Boolean masks means blocked. A state dict does not hold
`num_heads`, `add_zero_attn`, `dropout` and `batch_first`; a module does.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.discovery import live_model
from jaxmha.converters.discovery.layer_semantics import torch_semantics
from jaxmha.converters.discovery.live_model import torch as tensors_of
from jaxmha.converters.discovery.own_forward import refuse_own_forward
from jaxmha.converters.discovery.torch_hooks import COMPUTING, refuse_hooks
from jaxmha.converters.layout import shared, states, transform
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.arrays import NDArray, framework_of, to_numpy, to_torch
from jaxmha.converters.layout.torch import LAYOUTS, PACKED, SEPARATE
from jaxmha.converters.layout.validation import one_dtype
from jaxmha.converters.masks.torch import export_masks, import_masks, path_of
from jaxmha.converters.matching.load_into import make_load_into
from jaxmha.extras import needed
from jaxmha.params import check

if TYPE_CHECKING:
    import torch

__all__ = [
    "LAYOUTS",
    "PACKED",
    "SEPARATE",
    "Imported",
    "attention_layers",
    "export_masks",
    "export_params",
    "from_module",
    "import_masks",
    "import_params",
    "load_into",
    "path_of",
    "tensors_of",
    "to_module",
]

_import_copies, export_params = make_api(LAYOUTS)
load_into = make_load_into(
    "into_torch",
    "a torch module",
    "Copies the arrays of the source into a torch module.",
)


def import_params(
    state: Mapping[str, Any],
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
    copy: bool = True,
) -> tuple[MHAParams, Semantics]:
    """Parameters from a dict of tensors by one of the layouts torch, torch-separate.

    A state dict does not hold `batch_first`. If the module has `batch_first=False`, torch's default,
    swap the first two axes of its inputs and outputs: jaxmha takes `(B, T, Dq)`.

    Args:
      state: arrays or tensors by key; `prefix` and `.` stand before each key. In a nested dict, the
        names on the way to a tensor make its key.
      layout: its name; default: the first whose required keys are all present.
      num_heads: needed, since no shape holds the head count.
      prefix: takes only the keys below it.
      copy: True: leaves are NumPy arrays of their own. False: leaves are arrays of JAX on the CPU,
        in the memory of the tensors, which JAX keeps alive. Nothing is copied, and any later change
        of a tensor in place (an optimiser's step, `load_state_dict`, `copy_`) changes the parameters
        too, even while JAX computes with them: do this only with frozen weights. The tensors of a
        `state_dict()` do not show whether torch trains them; `from_module` checks it.

    Raises:
      TypeError: the state is not a dict, but a live layer, for example; without a copy: a value is no
        torch tensor.
      ValueError: a key, shape or head count does not fit; without a copy: a tensor is not on the
        CPU, dense, contiguous and aligned to 64 bytes, or it requires a gradient.

    >>> import torch
    >>> state = torch.nn.MultiheadAttention(16, 2).state_dict()
    >>> params, _ = import_params(state, num_heads=2, copy=False)
    >>> _ = state["out_proj.bias"].fill_(3.0)
    >>> params.out.bias[0].item()
    3.0
    """
    if copy or not isinstance(state, Mapping):
        return _import_copies(state, layout=layout, num_heads=num_heads, prefix=prefix)
    return transform.import_params(
        LAYOUTS,
        states.flat(state, "."),
        layout=layout,
        num_heads=num_heads,
        prefix=prefix,
        take=shared.source,
        put=shared.leaf,
    )


_Child: TypeAlias = tuple[jax.tree_util.GetAttrKey, MHAParams | Semantics]


class _Pair(NamedTuple):
    params: MHAParams
    semantics: Semantics


@jax.tree_util.register_pytree_with_keys_class
class Imported(_Pair):
    """`(params, semantics)` of a module, with `batch_first`, the order of its input axes.

    Attributes:
      batch_first: False (torch's default) if the module takes and returns `(T, B, Dq)`. `params` do
        not show this, and jaxmha takes `(B, T, Dq)`: swap the first two axes of such arrays.
    """

    batch_first: bool

    def __new__(  # noqa: PYI034
        cls, params: MHAParams, semantics: Semantics, batch_first: bool
    ) -> "Imported":
        """Creates a tuple of two, which unpacks into `params, semantics`."""
        made = super().__new__(cls, params, semantics)
        made.batch_first = batch_first
        return made

    def __getnewargs__(self) -> tuple[MHAParams, Semantics, bool]:
        return (*self, self.batch_first)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "Imported":  # type: ignore[override]
        # That of the parent leaves out `batch_first`, whose value two items do not show.
        return cls(*iterable)

    def _replace(
        self,
        *,
        params: MHAParams | None = None,
        semantics: Semantics | None = None,
        batch_first: bool | None = None,
    ) -> "Imported":
        given = params or self.params, semantics or self.semantics
        return Imported(*given, self.batch_first if batch_first is None else batch_first)

    __replace__ = _replace

    def tree_flatten_with_keys(self) -> tuple[tuple[_Child, _Child], bool]:
        """The children with their keys; `batch_first` is static."""
        params, semantics = map(jax.tree_util.GetAttrKey, self._fields)
        return ((params, self.params), (semantics, self.semantics)), self.batch_first

    @classmethod
    def tree_unflatten(cls, batch_first: bool, children: tuple[MHAParams, Semantics]) -> "Imported":
        """The tuple of these children."""
        return cls(*children, batch_first)


_OTHER_ORDER = (
    "the module has batch_first=False, torch's default, so it takes arrays (T, B, {features}), while "
    "jaxmha expects (B, T, {features}) and cannot see the difference: swap the first two axes of "
    "inputs and outputs. from_module(module, batch_first=False) silences this warning"
)


def from_module(
    module: "torch.nn.Module",
    variables: None = None,
    *,
    copy: bool = True,
    batch_first: bool | None = None,
) -> Imported:
    """Parameters and semantics of a `torch.nn.MultiheadAttention`, as copies.

    jaxmha takes `(B, T, Dq)`. A module with `batch_first=False`, torch's default, takes `(T, B,
    Dq)`, and neither raises an error for the other order: swap the first two axes of the inputs and
    outputs of such a module. `batch_first` of the result gives the order of the module.

    Args:
      copy: False: shares the memory of a frozen module instead, as `import_params` says.
      batch_first: that of the module. It states that the caller knows the order, and False thus
        silences the warning.

    Raises:
      TypeError: the module is of another class.
      ValueError: its parameters do not determine its output: it has a forward of its own, or hooks;
        without a copy: a parameter requires a gradient, or its memory cannot be shared;
        `batch_first` is not that of the module.

    Warns:
      UserWarning: the module has `batch_first=False`, and the call does not say so.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)
    >>> params, semantics = from_module(layer)
    >>> params.out.kernel.shape, semantics.dropout_rate
    ((2, 3, 6), 0.1)
    >>> from_module(torch.nn.MultiheadAttention(6, 2), batch_first=False).batch_first
    False
    """
    with needed("torch"):
        import torch

    if not isinstance(module, torch.nn.MultiheadAttention):
        instead = ""
        if framework_of(module) == "keras":
            instead = "for a layer of Keras call from_module of jaxmha.converters.keras"
        elif isinstance(module, torch.nn.Module):
            instead = live_model.by_hand(lambda: tensors_of(module), "module.state_dict()")
        raise TypeError(
            f"expected a torch.nn.MultiheadAttention, got {type(module).__name__}: "
            + (
                instead
                or "for the layers inside a model take model.named_modules(), for a state dict "
                "import_params"
            )
        )
    instead = "import_params(module.state_dict(), num_heads=...)"
    refuse_own_forward(module, (torch.nn.MultiheadAttention,), ("merge_masks", *COMPUTING), instead)
    refuse_hooks(module, "module")
    imported = weights_of(module, copy=copy)
    own = imported.batch_first
    if batch_first not in (None, own):
        raise ValueError(
            f"batch_first: the module has batch_first={own}, got {batch_first!r}: "
            f"pass {own}, or leave it out"
        )
    if not own and batch_first is None:
        warnings.warn(_OTHER_ORDER.format(features=module.embed_dim), stacklevel=2)
    return imported


def weights_of(module: "torch.nn.MultiheadAttention", *, copy: bool = True) -> Imported:
    """Parameters and semantics of a layer, even if it overrides forward or has hooks.

    The weights are those that forward reads: of a parametrized layer, the values that the
    parametrization computes.
    """
    keys = {entry.key for layout in LAYOUTS for entry in layout.entries}
    found = {key: attrgetter(key)(module) for key in sorted(keys)}
    state = {key: tensor for key, tensor in found.items() if tensor is not None}
    params, semantics = import_params(state, num_heads=module.num_heads, copy=copy)
    return Imported(params, torch_semantics(module, semantics), bool(module.batch_first))


def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    kind: None = None,
    like: "torch.nn.MultiheadAttention | None" = None,
    batch_first: bool | None = None,
) -> "torch.nn.MultiheadAttention":
    """A `torch.nn.MultiheadAttention` in eval mode with these weights.

    By default it takes `(B, T, Dq)`, as jaxmha does; torch's own default is `(T, B, Dq)`, which
    `batch_first=False` gives. To keep the order of a module, pass
    `batch_first=module.batch_first`, or the module as `like`.

    `like`: a `torch.nn.MultiheadAttention` from which the mode (train or eval) is copied, and
      `batch_first` unless it is given.

    Raises:
      ValueError: torch's layer cannot hold the parameters or the behaviour; the message says why.
    """
    with needed("torch"):
        import torch

    sizes = check(params)
    one_dtype(params)
    if batch_first is None:
        batch_first = True if like is None else like.batch_first
    packed = sizes["Dq"] == sizes["Dk"] == sizes["Dv"]
    own = PACKED if packed else SEPARATE
    arrays = export_params(params, semantics, layout=own.name)
    state = {key: to_torch(array) for key, array in arrays.items()}
    module = torch.nn.MultiheadAttention(
        sizes["Dq"],
        sizes["N"],
        dropout=semantics.dropout_rate,
        bias=params.query.bias is not None,
        add_bias_kv=params.bias_k is not None,
        add_zero_attn=semantics.add_zero_attn,
        kdim=sizes["Dk"],
        vdim=sizes["Dv"],
        batch_first=batch_first,
        dtype=state["out_proj.weight"].dtype,
    )
    module.load_state_dict(state, strict=True)
    return module.train(like is not None and like.training)


def attention_layers(
    model: "torch.nn.Module",
) -> Iterator[tuple[str, "torch.nn.MultiheadAttention"]]:
    """Path and layer of every `torch.nn.MultiheadAttention` in a model; "" for the model itself."""
    with needed("torch"):
        import torch

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            yield name, module


def forward(
    module: "torch.nn.MultiheadAttention",
    query: NDArray,
    key: NDArray,
    value: NDArray,
    mask: NDArray | None = None,
) -> NDArray:
    """Runs the module on `(B, T, Dq)`, `(B, S, Dk)`, `(B, S, Dv)`, without dropout.

    `mask` is canonical: Boolean `(B, N or 1, T or 1, S)`, True = attend.
    """
    with needed("torch"):
        import torch

    inputs = [to_torch(x) for x in (query, key, value)]
    masks: dict[str, Any] = {}
    if mask is not None and mask.shape[1:3] == (1, 1):
        masks["key_padding_mask"] = to_torch(~mask[:, 0, 0])
    elif mask is not None:
        full = np.broadcast_to(mask, (len(query), module.num_heads, query.shape[1], key.shape[1]))
        masks["attn_mask"] = to_torch(~full.reshape(-1, *full.shape[2:]))
    if not module.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            out = module(*inputs, need_weights=False, **masks)[0]
    finally:
        module.train(training)
    return to_numpy(out if module.batch_first else out.transpose(0, 1))
