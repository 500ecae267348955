"""Folders that orbax's CheckpointManager writes."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import CheckpointError


@pytest.mark.parametrize(
    ("names", "items"), [(["default"], "default"), (["opt", "params"], "opt, params")]
)
def test_items_of_a_managed_checkpoint_are_named(
    names: list[str], items: str, tmp_path: Path
) -> None:
    saved = {name: ocp.args.StandardSave({"w": np.ones(3, np.float32)}) for name in names}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.Composite(**saved))
        manager.wait_until_finished()
    with pytest.raises(CheckpointError, match=f"of items: {items}; .*such as .*7/{names[0]}"):
        checkpoint.open(tmp_path / "7")
    with pytest.raises(CheckpointError, match=f"its folders 7/{names[0]}.*such as .*7/{names[0]}"):
        checkpoint.open(tmp_path)
    with checkpoint.open(tmp_path / "7" / names[-1]) as file:
        np.testing.assert_array_equal(file["w"], np.ones(3))
