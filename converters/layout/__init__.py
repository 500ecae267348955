"""Parameter layouts as data, and the transform of arrays between them."""
