"""How scores are cut into blocks: what each choice costs."""
