"""Times attention, layers and decoding steps on this machine, next to other libraries.

Every library works in its own process on the same arrays, in rounds that each begin with another
library; every output is compared with float64 before it is timed. `jaxmha bench` measures one case,
`experiments/benchmarks` measures lists of cases.
"""
