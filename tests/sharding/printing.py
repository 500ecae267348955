"""Texts of values whose arrays lie on the devices of several processes."""


def texts(_: int) -> list[str]:
    import jax
    import numpy as np

    import jaxmha
    from jaxmha import Mask

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    spec = jax.sharding.PartitionSpec("data")  # type: ignore[no-untyped-call]

    def sharded(whole: np.ndarray) -> jax.Array:
        place = jax.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(whole.shape, place, whole.__getitem__)

    mask = Mask.causal() & Mask.padding(key_value=sharded(np.ones((2, 5), bool)))
    kernel = jaxmha.Projection(sharded(np.ones((6, 3, 7), np.float32)))
    params = jaxmha.MHAParams(kernel, kernel, kernel)
    return [repr(mask), str(mask), mask._repr_html_(), repr(params), params._repr_html_()]
