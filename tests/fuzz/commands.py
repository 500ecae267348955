"""More targets than readers: the documents that commands read, and whole commands on a folder."""

import contextlib
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from typer.main import get_command

from jaxmha import checkpoint
from jaxmha.checkpoint import toml_text
from jaxmha.cli.app import app
from jaxmha.converters import matching
from jaxmha.converters.discovery import head_count, hf_config
from jaxmha.converters.migrate import pipeline, plan_toml
from tests.converters.test_every_layout import exported

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
    state = exported("llama", "model.layers.0.self_attn")
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
    sound, matched = folder.with_name("sound.npz"), folder / "match.toml"
    made.write_text(plan_toml.dumps(pipeline.plan(path, to="flax")[0]))
    with checkpoint.open(path) as file:
        checkpoint.write(sound, dict(file))
    matched.write_text(matching.match(path, sound).to_toml())

    def runs(*line: object) -> Callable[[], None]:
        def run() -> None:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                    command.main(list(map(str, line)))
            except SystemExit as error:
                if error.code in (None, 0, 1, 2) and "error: unexpected" not in printed.getvalue():
                    return
                raise Unexpected(f"{line[0]}: {printed.getvalue()[-500:]}") from error
            except Exception as error:
                raise Unexpected(f"{line[0]}: {printed.getvalue()[-500:]}") from error

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
        runs("match", folder, sound, "--save", written.with_suffix(".toml"), "--force"),
        runs("match", sound, path),
    )
    pairs = list(itertools.product(sorted({*folder.iterdir()} - {made, matched}), on_folder))
    plans = [
        (made, runs(*convert, "--plan", made)),
        (matched, runs("match", folder, sound, "--plan", matched, "--to", written, "--force")),
    ]
    return Target([*pairs, *plans], seconds=10.0)


def quantised(folder: Path) -> Target:
    """Weights whose scales are other tensors, in a file for each kind of scale."""
    random = np.random.default_rng(0)
    weight = random.integers(0, 256, (6, 10), np.uint8)
    fp8, scale = weight.view(ml_dtypes.float8_e4m3fn), np.ones((1,), np.float32)
    blocks = random.integers(0, 256, (2, 3, 2, 16), np.uint8)
    kinds: dict[str, dict[str, np.ndarray]] = {
        "fp8.safetensors": {"a.weight": fp8, "a.weight_scale_inv": scale, "b": scale},
        "rows.pt": {"a.weight": weight.view(np.int8), "a.weight_scale": np.ones((6, 1), "f4")},
        "exponents.npz": {"a.weight": weight.view(np.int8), "a.weight_scale": weight[:1, :1]},
        "mxfp4.safetensors": {"e_blocks": blocks, "e_scales": blocks[..., 0]},
    }

    def runs(path: Path) -> Callable[[], None]:
        def run() -> None:
            with (
                contextlib.suppress(checkpoint.CheckpointError),
                checkpoint.open(path, dequantise=True) as file,
            ):
                for name in file:
                    _ = file[name]

        return run

    for name, tensors in kinds.items():
        checkpoint.write(folder / name, tensors)
    return Target([(folder / name, runs(folder / name)) for name in kinds])


def hub(folder: Path) -> Target:
    """The cache of Hugging Face without a network: blobs, links to them, and a reference."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(folder), True
    whole, commit = folder / "models--a--b", "0" * 40
    inside = whole / "snapshots" / commit
    for one in (whole / "refs", whole / "blobs", inside):
        one.mkdir(parents=True)
    (whole / "refs" / "main").write_text(commit)
    model(whole / "blobs")
    for at, file in enumerate(sorted((whole / "blobs").iterdir())):
        blob = file.with_name(f"{at:040x}")
        file.rename(blob)
        (inside / file.name).symlink_to(f"../../blobs/{blob.name}")

    def run() -> None:
        with contextlib.suppress(checkpoint.CheckpointError), checkpoint.open("hf://a/b") as file:
            head_count.in_config(file.path)
            for name in file:
                _ = file[name]

    files = [whole / "refs" / "main", *sorted((whole / "blobs").iterdir())]
    return Target([(file, run) for file in files])


def match(folder: Path) -> Target:
    """The TOML of a plan of `match`, and the names of the arrays that are matched."""
    source = folder / "model.safetensors"
    checkpoint.write(source, {f"layer.{i}.fc.weight": np.ones((2, 3)) for i in range(3)})
    path = folder / "match.toml"
    path.write_text(matching.match(source, source).to_toml())

    def read() -> None:
        with contextlib.suppress(ValueError):
            str(matching.Plan.from_toml(toml_text.read(path)))

    def matched() -> None:
        with contextlib.suppress(ValueError):
            str(matching.match(source, source))

    return Target([(path, read), (source, matched)])


TARGETS: dict[str, Callable[[Path], Target]] = {
    "quantised": quantised, "hub": hub, "match": match, "config.json": config, "plan.toml": plan,
    "commands": commands,
}  # fmt: skip
