"""Weights and masks in and out of other frameworks: one module per framework, the same verbs.

`import_params`, `export_params`: flat dicts of arrays. `from_module`, `to_module`: live layers.
Importing a module of this package loads no framework; its functions that take or make live
objects do.
"""
