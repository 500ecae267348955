"""More targets than readers: the documents that commands read, and whole commands on a folder."""

import contextlib
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typer.main import get_command

from jaxmha import checkpoint
from jaxmha.cli.app import app
from jaxmha.converters.discovery import attention_blocks, head_count, hf_config
from jaxmha.converters.layout import transform
from jaxmha.converters.migrate import pipeline, plan_toml
from tests.converters.test_every_layout import params_of

CONFIG = (
    '{"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, '
    '"hidden_size": 13, "rms_norm_eps": 1e-5, "text_config": {"n_head": 6}, "clip_qkv": null, '
    '"query_pre_attn_scalar": null, "architectures": ["LlamaForCausalLM"], "rope_scaling": {}}'
)


class Target(NamedTuple):
    """Files that damage is done to, each with what is then run, and more inputs to begin with.

    The first byte of an input says which pair it is for.
    """

    pairs: list[tuple[Path, Callable[[], None]]]
    seconds: float = 1.0
    seeds: tuple[bytes, ...] = ()


class Unexpected(Exception):  # noqa: N818
    """A command that ends otherwise than with one message."""


def model(folder: Path) -> Path:
    """Two shards of attention of Llama and a norm, with their index and a configuration."""
    layout = attention_blocks.named("llama")
    state = transform.export_params(
        layout, params_of(layout), layout.semantics, prefix="model.layers.0.self_attn"
    )
    path = folder / "model.safetensors.index.json"
    state |= {"model.norm.weight": np.ones(13, np.float32)}
    checkpoint.write(path, state, shard_size=2000, resume="the same names")
    (folder / "config.json").write_text(CONFIG)
    return path


def config(folder: Path) -> Target:
    """The config.json of a model."""
    path = model(folder)

    def run() -> None:
        head_count.in_config(path)
        for read in (
            pipeline.inspect,
            lambda path: pipeline.plan(path, to="flax"),
            hf_config.epsilons,
            hf_config.offset_norms,
            hf_config.refuse_behaviour,
        ):
            with contextlib.suppress(ValueError):
                read(path)

    return Target([(folder / "config.json", run)])


def plan(folder: Path) -> Target:
    """The TOML of a plan."""
    path = folder / "plan.toml"
    path.write_text(plan_toml.dumps(pipeline.plan(model(folder), to="flax")[0]))

    def run() -> None:
        with contextlib.suppress(ValueError):
            plan_toml.dumps(plan_toml.read(path))

    return Target([(path, run)])


def commands(folder: Path) -> Target:
    """Every file of a folder, under every command that reads one."""
    path, command = model(folder), get_command(app)
    made, written = folder / "plan.toml", folder.with_name("out.npz")
    sound = folder.with_name("sound.npz")
    made.write_text(plan_toml.dumps(pipeline.plan(path, to="flax")[0]))
    with checkpoint.open(path) as file:
        checkpoint.write(sound, dict(file))

    def runs(*line: object) -> Callable[[], None]:
        def run() -> None:
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    command.main(list(map(str, line)))
            except SystemExit as error:
                if error.code in (None, 0, 1, 2) and "error: unexpected" not in said.getvalue():
                    return
                raise Unexpected(f"{line[0]}: {said.getvalue()[-500:]}") from error
            except Exception as error:
                raise Unexpected(f"{line[0]}: {said.getvalue()[-500:]}") from error

        return run

    convert = ("convert", folder, written, "--force")
    on_folder = (
        runs("inspect", folder),
        runs("inspect", folder, "--json"),
        runs("plan", folder, "--to", "flax"),
        runs(*convert, "--to", "flax", "--check", "weights"),
        runs(*convert, "--to", "llama", "--dtype", "float16"),
        runs("verify", folder, sound),
        runs("diff", folder, sound),
        runs("describe", folder),
    )
    pairs = list(itertools.product(sorted({*folder.iterdir()} - {made}), on_folder))
    return Target([*pairs, (made, runs(*convert, "--plan", made))], seconds=10.0)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "config.json": config,
    "plan.toml": plan,
    "commands": commands,
}
