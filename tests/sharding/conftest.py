"""These tests need eight devices: `JAX_NUM_CPU_DEVICES=8 python -m pytest tests/sharding`.

`tests/test_many_devices.py` runs them so; in a process with one device they are not collected.
"""

import os

collect_ignore_glob = [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["test_*.py"]
