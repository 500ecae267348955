"""`jaxmha convert`: writes a checkpoint in another layout and compares it with its source."""

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from jaxmha import checkpoint
from jaxmha.cli import functions
from jaxmha.cli import like as like_target
from jaxmha.cli.console import (
    byte_bar,
    check_text,
    err,
    finite,
    items,
    one_message,
    out,
    print_json,
    put_text,
)
from jaxmha.cli.convert_output import print_conversion
from jaxmha.cli.match import Concatenated, KeepUnused, print_plan, refuse_rest
from jaxmha.cli.options import Json, NumHeads, Source, option, parse_bytes, suffixes
from jaxmha.cli.plan import (
    AttentionOnly,
    Choices,
    Dtype,
    FillBias,
    FoldScale,
    From,
    Others,
    To,
    files_of,
)
from jaxmha.converters import matching
from jaxmha.converters.migrate import multiprocess, pipeline, plan_toml
from jaxmha.converters.verify import report

EXAMPLES = (
    "Examples:\n\n  jaxmha convert model.safetensors flax.safetensors --to flax\n\n"
    "  jaxmha convert model.safetensors model.npz\n\n"
    "  jaxmha convert encoder.pt encoder.weights.h5 --to keras --num-heads 8\n\n"
    "  jaxmha convert model.safetensors half.npz --to flax --dtype float16 --report report.json\n\n"
    "  jaxmha convert model.safetensors flax.safetensors --plan plan.toml\n\n"
    "  jaxmha convert checkpoints/llama/ flax.safetensors --to flax --shard-size 5GB --resume\n\n"
    "  jaxmha convert model.safetensors mine.safetensors --like my_model.py:build\n\n"
    "  jaxmha convert model.safetensors.index.json flax.orbax --to flax --digest sha256"
)
CheckName = Enum("CheckName", {x: x for x in ("all", "weights", "none")}, type=str)  # type: ignore[misc]
DigestName = Enum(  # type: ignore[misc]
    "DigestName", {x: x for x in ("fast", *checkpoint.ALGORITHMS, "none")}, type=str
)
Destination = Annotated[
    Path,
    typer.Argument(
        help=f"The file to write; its suffix names the format: {suffixes(to_write=True)}.",
        show_default=False,
    ),
]
ByPlan = Annotated[
    Path | None, option("--plan", "Do exactly what this plan says (see jaxmha plan).")
]
Check = Annotated[
    CheckName,
    option(
        "--check",
        "Comparison afterwards: all compares every tensor and runs every block, weights compares "
        "every tensor, none relies on the writer, which reads back what it wrote.",
    ),
]
ReportTo = Annotated[
    Path | None,
    option(
        "--report",
        "Write the comparison as JSON. Replaces an earlier report on the destination; others by --force.",
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="BYTES",
        help="Write shards of at most this size, headers included, such as 5GB or 500MiB, and their "
        "index. A tensor that does not fit has a shard of its own.",
    ),
]
Resume = Annotated[
    bool,
    option(
        "--resume",
        "For shards: keep the complete ones if interrupted; the same command continues there, and if "
        "all is done, checks it and writes nothing.",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="I/N",
        help="With --resume: write every N-th shard from the I-th on, and no index. Other processes "
        "write the other parts meanwhile, on any machine with access to both files; the same command "
        "without --part then completes and checks the whole.",
    ),
]
Processes = Annotated[
    int,
    option(
        "--processes",
        "For shards: write this many parts at once, each in a process of its own, then the whole; "
        "implies --resume.",
        min=1,
    ),
]
Digest = Annotated[
    DigestName,
    option(
        "--digest",
        "Kept for every tensor and checked on reading: fast is xxh3_128 if xxhash is installed; "
        "sha256 also withstands deliberate collisions.",
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="TARGET",
        help="Instead of --to: a file of the target model, or MODULE:FUNCTION that builds it (the "
        "module is imported and the function is run), whose arrays are filled as by `jaxmha match`. "
        "With --to and .weights.h5: a file that the Keras model saved; every layer is written to "
        "the group that the layer of the same name has there.",
        show_default=False,
    ),
]


def command(
    source: Source,
    destination: Destination,
    to: Annotated[str | None, To] = None,
    by_plan: ByPlan = None,
    from_: From = None,
    num_heads: NumHeads = None,
    dtype: Dtype = None,
    others: Others = None,
    attention_only: AttentionOnly = False,
    fold_scale: FoldScale = False,
    fill_bias: FillBias = None,
    check: Check = CheckName("all"),
    report_to: ReportTo = None,
    shard_size: ShardSize = None,
    resume: Resume = False,
    part: Part = None,
    processes: Processes = 1,
    digest: Digest = DigestName("fast"),
    like: Like = None,
    unused: KeepUnused = False,
    concatenated: Concatenated = False,
    force: Annotated[bool, option("--force", "Overwrite the destination and the report.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in another framework's layout: attention and the other layers.

    Without --to, --plan and --like, every tensor is copied under its name to another format.
    Tensors that are not understood are carried over, or refused; nothing is dropped. Both files are
    compared afterwards; exit code 1 if anything differs.
    """
    with one_message():
        choices = Choices(
            to, from_, num_heads, dtype, others, attention_only, fold_scale, fill_bias
        )
        if like is not None and to is None and by_plan is None:
            other_modes: dict[str, object] = {"--report": report_to, "--part": part}
            other_modes |= {"--resume": resume, "--processes": processes > 1, "--from": from_}
            other_modes |= {"--num-heads": num_heads, "--others": others}
            other_modes |= {"--attention-only": attention_only, "--fold-scale": fold_scale}
            other_modes |= {"--fill-bias": fill_bias}
            _refuse_other_modes(other_modes)
            writing: dict[str, Any] = {"dtype": dtype and dtype.value, "force": force}
            writing["digest"] = None if digest.value == "none" else digest.value
            writing["shard_size"] = None if shard_size is None else parse_bytes(shard_size)
            target = _Target(like, unused, "concatenated" if concatenated else "ask")
            _fill(source, destination, target, writing, check.value != "none", as_json)
            return
        if like is not None and by_plan is not None and (unused or concatenated):
            raise ValueError("--plan says where all tensors go: leave out --plan or --like")
        if unused or concatenated:
            raise ValueError("--keep-unused and --concatenated are for --like without --to")
        _check_combination(choices, by_plan, report_to, check, part, resume, processes)
        share = None if part is None else multiprocess.parsed(part)
        size = None if shard_size is None else parse_bytes(shard_size)
        destination, again = _index_of_shards(destination, size, processes), False
        if report_to is not None:
            again = force or _is_report(report_to, destination)
            check_text(report_to, again, [*files_of(source), destination, *filter(None, [by_plan])])
        writing = {"shard_size": size, "part": share, "force": force}
        writing["like"] = None if like is None else Path(like)
        writing["digest"] = None if digest.value == "none" else digest.value
        writing["resume"] = resume or processes > 1
        options = {"--plan": by_plan, "--shard-size": shard_size, "--digest": digest.value}
        options |= choices.arguments() | {"--force": force}
        failed = _run_parts(processes, source, destination, options, as_json)
        done = _convert(source, destination, choices, by_plan, writing, as_json)
        for number, code in failed.items():
            err.print(f"note: part {number} of {processes} ended with code {code}: done here")
        checked = None
        if check.value != "none" and part is None:
            checked = _compare(source, destination, done, check.value == "all", as_json)
        try:
            if report_to is not None and checked is not None:
                content = checked.to_json() | {"unchecked": list(done.unchecked)}
                text = json.dumps(finite(content), indent=1) + "\n"
                put_text(report_to, text, again, [*files_of(source), *map(Path, done.files)])
        finally:  # after the report, since a closed pipe ends the command; even if it failed
            if as_json:
                found = None if checked is None else checked.to_json()
                print_json(done.to_json() | {"report": found})
            else:
                print_conversion(destination, done, checked)
    if checked is not None and not checked.same:
        raise typer.Exit(1)


def _is_report(path: Path, destination: Path) -> bool:
    """True if a file is a report of this command on the destination, which a new one replaces."""
    if not path.is_file():  # reading a pipe would wait forever
        return False
    start = f"{{\n {json.dumps('same')}: ".encode()
    try:
        with path.open("rb") as file:
            if file.read(len(start)) != start:
                return False
        target = Path(json.loads(path.read_bytes())["target"]["path"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return target.absolute() == destination.absolute()


def _refuse_other_modes(options: Mapping[str, object]) -> None:
    """Raises ValueError if an option is set that --like without --to does not support.

    `options`: name of an option -> its value.
    """
    if wrong := [name for name, value in options.items() if value]:
        raise ValueError(f"{', '.join(wrong)} cannot be combined with --like without --to")


class _Target(NamedTuple):
    """The target model of --like, and how its arrays are matched with those of the source."""

    name: str
    unused: bool
    packing: Literal["ask", "concatenated"]


def _fill(
    source: Path,
    destination: Path,
    target: _Target,
    writing: Mapping[str, Any],
    check: bool,
    as_json: bool,
) -> None:
    """Fills the arrays of the target model from the source, and writes them as a file."""
    destination = _index_of_shards(destination, writing["shard_size"], 1)
    policy: Literal["keep", "refuse"] = "keep" if target.unused else "refuse"
    with like_target.template(functions.built(target.name), destination) as model:
        plan = matching.match(source, model, packing=target.packing)
        print_plan(plan, as_json)
        refuse_rest(plan, target.unused)
        done = like_target.write(
            source, destination, model, plan, quiet=as_json, unused=target.unused, **writing
        )
        if check:
            proof = matching.prove(source, destination, plan, unused=policy)
            like_target.show(proof, as_json)
    if not as_json:
        for name, loss in done.losses.items():
            if not loss.exact:
                out.print(f"rounded: {name}", highlight=False)


def _check_combination(
    choices: Choices,
    by_plan: Path | None,
    report_to: Path | None,
    check: CheckName,
    part: str | None,
    resume: bool,
    processes: int,
) -> None:
    """Raises ValueError if options contradict each other."""
    if choices.to is not None and by_plan is not None:
        raise ValueError("--to and --plan exclude each other: a plan names its layout")
    if choices.to is None and by_plan is None and replace(choices, dtype=None).beyond_layout:
        raise ValueError(
            "name a layout with --to, a plan with --plan, or a target model with --like: without "
            "them every tensor is copied as it is, and --dtype alone changes it"
        )
    if by_plan is not None and choices.beyond_layout:
        raise ValueError("a plan says it all: edit it instead of passing other options")
    if report_to is not None and check.value == "none":
        raise ValueError("--report requires a comparison: leave out --check none")
    if report_to is not None and part is not None:
        raise ValueError("--report is of the whole: pass it without --part, which compares nothing")
    if part is not None and (not resume or processes > 1):
        raise ValueError("--part requires --resume and cannot be combined with --processes")


def _index_of_shards(destination: Path, size: int | None, processes: int) -> Path:
    """The path of the index if shards are written, else the destination itself.

    Raises:
        ValueError: several processes would write a single file.
    """
    if size is not None and destination.suffix in (".safetensors", ".bin"):
        destination = destination.with_name(f"{destination.name}.index.json")
    if processes > 1 and not destination.name.endswith(".index.json"):
        raise ValueError(
            f"--processes writes shards, and {destination} is one file: give --shard-size, or name "
            "an index, such as model.safetensors.index.json"
        )
    return destination


def _run_parts(
    processes: int, source: Path, destination: Path, options: Mapping[str, Any], quiet: bool
) -> Mapping[int, int]:
    """Runs processes that each write a part; returns the exit code of each part that failed."""
    if processes == 1:
        return {}
    if not quiet:
        err.print(f"{processes} processes write a part each, then all is checked")
    return multiprocess.convert(processes, source, destination, options)


def _convert(
    source: Path,
    destination: Path,
    choices: Choices,
    by_plan: Path | None,
    writing: Mapping[str, Any],
    quiet: bool,
) -> pipeline.Conversion:
    with byte_bar("writing and reading back", quiet, passes=2) as progress:
        return pipeline.convert(
            source,
            destination,
            **choices.keywords(),
            plan=plan_toml.read(by_plan) if by_plan else None,
            **writing,
            progress=progress,
        )


def _compare(
    source: Path, destination: Path, done: pipeline.Conversion, forward: bool, quiet: bool
) -> report.ConversionReport:
    assert done.plan is not None
    return report.check(
        source,
        destination,
        done.plan,
        forward=forward,
        progress=items("comparing", quiet),
        notes=done.notes,
        losses=done.losses,
    )
