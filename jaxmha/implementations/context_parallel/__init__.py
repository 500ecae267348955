"""Context parallelism: queries, keys and values sharded over devices by position."""
