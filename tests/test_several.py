"""What the commands that train several variants have in common."""

from collections.abc import Callable
from typing import Any

import pytest

from experiments.heads.__main__ import parsed as heads
from experiments.initialisation.__main__ import parsed as initialisation


@pytest.mark.parametrize("parsed", [heads, initialisation], ids=["heads", "initialisation"])
@pytest.mark.parametrize("wrong", ["--steps=7", "--steps=0", "--seeds=1", "--seed=3", "--steps=x"])
def test_bad_arguments_end_with_a_message(
    parsed: Callable[[list[str]], Any], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed([wrong])
    assert ended.value.code == 2
    assert wrong.split("=")[0] in capsys.readouterr().err
