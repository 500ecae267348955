"""Dropout keys from the rng streams of flax's nnx."""

from flax import nnx
from jaxtyping import PRNGKeyArray


def dropout_key(
    module: nnx.Module, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
) -> PRNGKeyArray | None:
    """The next key of `rngs`, or of the module's own stream; None if there is no dropout.

    Raises:
      ValueError: neither call nor module sets `deterministic`, or there is no stream.
      TypeError: `rngs` is not callable.
    """
    if not module.semantics.dropout_rate:
        return None
    deterministic = module.deterministic if deterministic is None else deterministic
    if deterministic is None:
        raise ValueError(
            "deterministic: give it in the constructor or in the call, since dropout may act"
        )
    if deterministic:
        return None
    if not (rngs is None or callable(rngs)):
        raise TypeError(f"rngs must be nnx.Rngs or an nnx.RngStream, got {type(rngs).__name__}")
    stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
    stream = module.rngs if stream is None else stream
    if stream is None:
        raise ValueError(
            "rngs: dropout needs them in the call where keep_rngs=False, or where the module "
            "was constructed without dropout"
        )
    key: PRNGKeyArray = stream()
    return key
