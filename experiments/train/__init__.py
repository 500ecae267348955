"""Does a Flax model train the same with this attention, and faster?"""
