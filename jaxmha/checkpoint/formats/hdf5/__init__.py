"""A reader of HDF5 with one module per structure of the format; it opens no external files."""
