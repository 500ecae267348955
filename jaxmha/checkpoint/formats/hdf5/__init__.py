"""A reader of HDF5 that opens no other file: one module per structure of the format."""
