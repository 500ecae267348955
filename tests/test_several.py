"""Common behaviour of the commands that train several variants."""

import pytest

from experiments import frame
from experiments.heads.__main__ import EXPERIMENT as HEADS
from experiments.initialisation.__main__ import EXPERIMENT as INITIALISATION


@pytest.mark.parametrize("experiment", [HEADS, INITIALISATION], ids=lambda e: e.name)
@pytest.mark.parametrize("wrong", ["--steps=7", "--steps=0", "--seeds=1", "--seed=3", "--steps=x"])
def test_bad_arguments_end_with_a_message(
    experiment: frame.Experiment, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        frame.run(experiment, [wrong])
    assert ended.value.code == 2
    assert wrong.split("=")[0] in capsys.readouterr().err
