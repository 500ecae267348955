"""Are eight heads of 64 the same as one head of 512?"""
