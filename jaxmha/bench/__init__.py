"""Times attention, layers and decoding steps on this machine, next to other libraries.

Every library works in a process of its own on the same arrays, in rounds that begin with another
one each; every output is compared with float64 before it is timed. `jaxmha bench` measures one case,
`experiments/benchmarks` lists of cases.
"""
