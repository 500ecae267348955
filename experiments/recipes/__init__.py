"""Complete models in flax.nnx on jaxmha's modules; `jaxmha recipes copy llama .` copies one."""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "jaxmha.recipes needs flax, which is not installed: pip install 'jaxmha[flax]'", name="flax"
    ) from error
