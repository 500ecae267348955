"""Do whole migrated encoders compute what torch computes? `python -m experiments.encoders`."""
