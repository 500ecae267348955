"""Nonsense in a config.json or a plan: every command refuses it in words, or does without."""

import contextlib
import json
import os
import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import Semantics, checkpoint
from jaxmha.converters.discovery import (
    all_positions,
    architectures,
    head_count,
    hf_config,
    positions,
)
from jaxmha.converters.migrate import pipeline, plan_toml
from tests import pace
from tests.converters.test_every_layout import exported, model_file
from tests.rewrite import rewrite

KEYS = (
    *head_count.CONFIG_KEYS, *hf_config.BEHAVIOUR, "layer_norm_eps", "layer_norm_epsilon",
    "rms_norm_eps", "model_type", "text_config",
)  # fmt: skip
# One of each reader: counts of heads, behaviour, norms, the type, and a part of the model.
EVERYDAY = ["n_head", "attn_logit_softcapping", "rms_norm_eps", "model_type", "text_config"]
NASTY = {
    "digits": "9" * 4000,
    "too_many_digits": "9" * 5000,
    "beyond_a_float": "1e400",
    "negative": "-1",
    "negative_zero": "-0.0",
    "nan": "NaN",
    "infinity": "-Infinity",
    "true": "true",
    "text": '"12"',
    "unicode_digits": '"\u0661\u0662"',
    "empty": "[]",
    "list": "[1, [2, {}]]",
    "object": '{"num_attention_heads": {"a": []}}',
    "surrogate": '"\\ud800"',
    "control": '"\\u001b[31m"',
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention and a norm of Llama, whose head count and epsilon only a configuration says."""
    state = exported("llama", "model.layers.0.self_attn")
    state["model.norm.weight"] = np.ones(13, np.float32)
    return model_file(tmp_path_factory.mktemp("model") / "a.npz", state)


@pytest.mark.everyday(key=EVERYDAY)
@pytest.mark.parametrize("key", KEYS)
def test_values_of_a_configuration(key: str, source: Path) -> None:
    config = source.with_name("config.json")
    for value in NASTY.values():
        more = "" if key == "num_attention_heads" else '"num_attention_heads": 6, '
        rewrite(config, f'{{{more}"{key}": {value}}}')
        info = pipeline.inspect(source)
        assert len(str(info.blocks[0].num_heads_from)) < 2000
        with contextlib.suppress(ValueError):
            pipeline.plan(source, to="flax")
        for found in hf_config.epsilons(source).values():
            assert all(0 < epsilon < np.inf for epsilon in found)


def test_scales_that_no_float_holds() -> None:
    with pytest.raises(ValueError, match=r"scale must be finite and at most 1.8e308, got inf"):
        Semantics(scale=10**5000)


VALUES = (
    *NASTY.values(),
    *(str(2**53), str(10**9), "null", "6", "0.5", '"yarn"', "[1]", '["full_attention"]'),
    *('{"rope_type": "yarn", "factor": 2.0}', '{"rope_type": "llama3", "rope_theta": 7}'),
)


@pytest.mark.everyday(count=[40])
@pytest.mark.parametrize("count", [40, 6000])
def test_nonsense_in_the_settings_of_every_model_type(count: int, source: Path) -> None:
    """Several settings at once, of all that the readers of model types ask for."""
    chosen = random.Random(0)
    keys = sorted(
        {
            key
            for path in Path(positions.__file__).parent.glob("*.py")
            for key in re.findall(r'"([a-z][a-z0-9_]{2,40})"', path.read_text())
        }
        - {"num_attention_heads", "model_type"}
    )
    types = sorted(architectures.KNOWN)
    for _ in range(count):
        named = {"model_type": f'"{chosen.choice(types)}"', "num_attention_heads": "6"}
        named |= {"num_key_value_heads": "3", "head_dim": "4", "hidden_size": "13"}
        named |= {key: chosen.choice(VALUES) for key in chosen.sample(keys, 12)}
        text = ", ".join(f'"{key}": {value}' for key, value in named.items())
        source.with_name("config.json").write_text(f"{{{text}}}")
        for read in (
            pipeline.inspect,
            all_positions.positions_of,
            partial(pipeline.plan, to="flax"),
        ):
            with contextlib.suppress(ValueError):
                read(source)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"head_dim": 2**53}, "heads of 9007199254740992 features do not fit"),
        (
            {"model_type": "glm", "head_dim": 4, "partial_rotary_factor": 1e15},
            "of 4 features cannot be rotary",
        ),
        (
            {"model_type": "gptj", "head_dim": 4, "rotary_dim": 2**40},
            "of 4 features cannot be rotary",
        ),
    ],
)
def test_sizes_of_rotary_positions_fit_the_tensors(
    setting: dict[str, Any], why: str, source: Path
) -> None:
    """No array is made for a size that a configuration alone says."""
    config = {"model_type": "llama", "num_attention_heads": 6, **setting}
    source.with_name("config.json").write_text(json.dumps(config))
    (found,) = all_positions.positions_of(source).values()
    assert found.scheme == "unknown"
    assert why in found.why


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 340_000 + "0]",
        "[" + '{"n_head":1},' * 75_000 + "0]",
        '{"a":' * 900 + "[" + "[]," * 200_000 + "0]" + "}" * 900,
        "{" + ",".join(f'"{i:05}":{i}' for i in range(60_000)) + "}",
        "[" + '{"layer_norm_eps":1e-5},' * 5_000 + "0]",
    ],
    ids=["lists", "heads", "nested", "keys", "epsilons"],
)
def test_a_megabyte_of_configuration_costs_little(text: str, source: Path) -> None:
    source.with_name("config.json").write_text(text)
    start = time.process_time()
    head_count.in_config(source)
    for read in (hf_config.epsilons, hf_config.offset_norms, hf_config.refuse_behaviour):
        with contextlib.suppress(checkpoint.CheckpointError):
            read(source)
    assert pace.within(time.process_time() - start, 0.6)


def test_a_configuration_of_more_than_a_megabyte_is_not_read(source: Path) -> None:
    source.with_name("config.json").write_text(json.dumps({"a": "b" * (1 << 20)}))
    found = head_count.in_config(source)
    assert found is not None
    assert "the limit is 1,048,576" in found.wrong


@pytest.mark.parametrize("labels", [12_000, 40_000])
def test_a_configuration_that_is_too_large_is_not_passed_over(labels: int, source: Path) -> None:
    """It may say that attention is another function; head counts that are given do not change that."""
    printed = {"attn_logit_softcapping": 30.0, "id2label": {str(i): f"l{i}" for i in range(labels)}}
    printed["label2id"] = {f"l{i}": i for i in range(labels)}
    source.with_name("config.json").write_text(json.dumps(printed))
    with pytest.raises(ValueError, match=r"config\.json.*(too large to be read|softcapping=30)"):
        pipeline.convert(source, source.with_name("out.npz"), to="flax", num_heads=4)
    assert not source.with_name("out.npz").exists()


PLAN = '[plan]\nversion = 1\nto = "flax"\n[[module]]\nkind = "other"\nfrom = "a"\nto = "b"\n'


@pytest.mark.parametrize(
    "text",
    [
        PLAN + 'tensors = [{"a".b.c.d.e.f.g.h.i.j.k = 1}]',
        PLAN + "tensors = 1979-05-27",
        PLAN.replace("[[module]]", "[module]"),
        PLAN.replace("[plan]", "[[plan]]"),
        PLAN.replace("version = 1", "version = nan"),
        PLAN.replace('"flax"', "['flax']"),
        PLAN + 'tensors = ["a"]\n[other]\n',
    ],
)
def test_plans_of_nonsense(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=r"plan|module") as caught:
        plan_toml.loads(text)
    assert len(str(caught.value)) < 1000
    assert pace.within(time.process_time() - start, 1)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _gibibyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)  # sparse: no disk


@pytest.mark.parametrize("make", [_fifo, _device, _loop, Path.mkdir, _gibibyte])
@pytest.mark.parametrize("name", ["config.json", "plan.toml"])
def test_side_files_that_are_no_text(
    name: str, make: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    here = tmp_path / source.name
    here.write_bytes(source.read_bytes())
    make(tmp_path / name)
    start = time.process_time()
    if name == "config.json":
        found = head_count.in_config(here)
        assert found is not None
        assert found.wrong
        assert not hf_config.epsilons(here)
    else:
        with pytest.raises(ValueError, match=r"plan\.toml"):
            plan_toml.read(tmp_path / name)
    assert pace.within(time.process_time() - start, 1)


def test_a_configuration_that_is_a_link_is_not_read(source: Path, tmp_path: Path) -> None:
    """A folder from a stranger could let it lead to any file of the user."""
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "key": "secret"}')
    config = source.with_name("config.json")
    config.unlink(missing_ok=True)
    config.symlink_to(tmp_path / "config.json")
    try:
        found = head_count.in_config(source)
        assert found is not None
        assert "is a link" in found.wrong
        with pytest.raises(ValueError, match="is a link"):
            hf_config.refuse_behaviour(source)
        assert hf_config.epsilons(source) == {}
    finally:
        config.unlink()
