"""A reader of HDF5 that follows nothing: one module per structure of the format."""
