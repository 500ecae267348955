"""Complete models in flax.nnx on jaxmha's modules; `jaxmha recipes copy llama .` gives one away."""
