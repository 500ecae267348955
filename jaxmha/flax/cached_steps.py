"""Methods of flax modules over a cache that the caller keeps: `prefill`, `extend`, `decode_step`."""

from typing import Any, TypeVar

import jax
from jaxtyping import Float, Integer

from jaxmha import decoding
from jaxmha.arrays import Array
from jaxmha.decoding import Positions
from jaxmha.flax.settings import cast, read_mask, require_features, widened
from jaxmha.kv_cache import KVCache
from jaxmha.latent import LatentCache, LatentParams
from jaxmha.latent import decoding as latent_decoding
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ScoreMod
from jaxmha.paged_cache import PagedKVCache
from jaxmha.params import MHAParams
from jaxmha.semantics import Semantics

AnyCache = TypeVar("AnyCache", KVCache, PagedKVCache, LatentCache)


class CachedSteps:
    """Steps over a cache of jaxmha, with the parameters and settings of a flax module.

    There is no dropout. `LatentAttention` takes a `LatentCache`, or a `PagedKVCache` of
    `jaxmha.latent.paged_cache`; the other modules take a `KVCache` or a `PagedKVCache`. Arguments
    and errors are those of `jaxmha.prefill`, `extend` and `decode_step`, and of the same functions
    in `jaxmha.latent`.

    In nnx, call the methods of the layer:

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxmha import KVCache
    >>> from jaxmha.flax.nnx import MultiHeadAttention
    >>> layer, x = MultiHeadAttention(2, 6, rngs=nnx.Rngs(0)), jnp.ones((3, 5, 6))
    >>> out, cache = layer.prefill(x, KVCache.empty(layer.to_params()[0], 3, 8))
    >>> out, cache = layer.decode_step(x[:, :1], cache)
    >>> out.shape, cache.lengths.tolist()
    ((3, 1, 6), [6, 6, 6])

    In linen, name the method in `apply`, and initialise the layer without it:

    >>> from jaxmha.flax import linen
    >>> layer = linen.MultiHeadAttention(num_heads=2)
    >>> variables = layer.init(jax.random.key(0), x)
    >>> cache = KVCache.empty(layer.to_params(variables)[0], 3, 8)
    >>> out, cache = layer.apply(variables, x, cache, method="prefill")
    >>> out, cache = layer.apply(variables, x[:, :1], cache, method="decode_step")
    >>> out.shape, cache.lengths.tolist()
    ((3, 1, 6), [6, 6, 6])
    """

    def prefill(
        self,
        inputs: Float[Array, "B T Dq"],
        cache: AnyCache,
        *,
        mask: Array | Mask | None = None,
        positions: Positions | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> tuple[Float[jax.Array, "B T Do"], AnyCache]:
        """`jaxmha.prefill`: causal self-attention over prompts, and a cache that holds them."""
        more = {"positions": positions, "score_mod": score_mod, "mask_mod": mask_mod}
        chosen = getattr(self, "implementation", None)
        return _with_cache(self, "prefill", inputs, cache, mask, **more, implementation=chosen)

    def decode_step(
        self,
        inputs: Float[Array, "B T Dq"],
        cache: AnyCache,
        *,
        mask: Array | Mask | None = None,
        positions: Positions | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> tuple[Float[jax.Array, "B T Do"], AnyCache]:
        """`jaxmha.decode_step`: appends tokens to the cache and attends to all tokens in it.

        `implementation` does not apply: a step has an implementation of its own.
        """
        return self.extend(
            inputs,
            cache,
            mask=mask,
            positions=positions,
            score_mod=score_mod,
            mask_mod=mask_mod,
        )

    def extend(
        self,
        inputs: Float[Array, "B T Dq"],
        cache: AnyCache,
        *,
        q_lengths: Integer[Array, "B"] | None = None,
        mask: Array | Mask | None = None,
        positions: Positions | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> tuple[Float[jax.Array, "B T Do"], AnyCache]:
        """`jaxmha.extend`: appends the first `q_lengths`, `(B,)`, tokens of each row."""
        more = {"positions": positions, "score_mod": score_mod, "mask_mod": mask_mod}
        return _with_cache(self, "extend", inputs, cache, mask, **more, q_lengths=q_lengths)


def _with_cache(
    module: Any,
    name: str,
    inputs: Array,
    cache: AnyCache,
    mask: Array | Mask | None,
    **more: object,
) -> tuple[jax.Array, AnyCache]:
    params, semantics = module.to_params()
    return with_cache(module, params, semantics, name, inputs, cache, mask, **more)


def with_cache(
    module: Any,
    params: MHAParams | LatentParams,
    semantics: Semantics,
    name: str,
    inputs: Array,
    cache: AnyCache,
    mask: Array | Mask | None,
    **more: object,
) -> tuple[jax.Array, AnyCache]:
    """Runs the function `name` of `jaxmha`, or of `jaxmha.latent`, with the settings of a module.

    `more`: further keyword arguments of the function.
    """
    require_features(inputs=inputs)
    function = getattr(latent_decoding if isinstance(params, LatentParams) else decoding, name)
    params, inputs = cast((params, inputs), module.dtype)
    if getattr(module, "force_fp32_for_softmax", False):
        params, inputs = widened((params, inputs))
    out, longer = function(
        params,
        inputs,
        cache,
        semantics=semantics,
        mask=read_mask(mask, getattr(module, "local_window_size", None)),
        rotate=module.rotate,
        **more,
    )
    return cast(out, module.dtype), longer
