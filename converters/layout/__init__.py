"""Parameter layouts as tables, and the transform of arrays between them."""
