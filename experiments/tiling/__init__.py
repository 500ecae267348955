"""How scores are tiled: what each choice costs."""
