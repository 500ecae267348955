"""`jaxmha bench`: cases, peers, saved benchmarks and the command."""

import doctest
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxmha
from jaxmha import implementations
from jaxmha.bench import case as case_module
from jaxmha.bench import choice, data, decode_peers, exact, jax_peers, peers, programs, run
from jaxmha.bench.case import Case
from jaxmha.bench.program import Program, UnsupportedError
from jaxmha.cli.app import app
from jaxmha.implementations import preferences
from tests import drawn, jit_cache
from tests.promotion import foreign

PLAIN = Case("core", "forward", "plain", 2, 13, 13, 4, 2, 8)
CASES = {
    "window": replace(PLAIN, window=3, direction="backward"),
    "causal window": replace(PLAIN, window=3, causal=True),
    "packed": replace(PLAIN, packed=3, direction="backward"),
    "packed, causal": replace(PLAIN, packed=3, causal=True),
    "packed, by lengths": replace(PLAIN, packed=3, by_lengths=True, direction="backward"),
    "TF32": replace(PLAIN, tf32=True),
    "packed layer": Case("layer", "forward", "causal", 2, 7, 7, 2, 2, 8, packed=2, by_lengths=True),
    "bias": replace(PLAIN, bias=True, direction="backward"),
    "causal bias": replace(PLAIN, bias=True, kind="causal"),
    "Booleans": replace(PLAIN, kind="padded", boolean=True),
    "causal, more keys": replace(PLAIN, T=7, causal=True),
    "causal lengths": replace(PLAIN, kind="padded", causal=True),
    "lengths of other keys": Case("layer", "backward", "padded", 2, 5, 9, 2, 2, 8, boolean=True),
    "h": replace(PLAIN, h=5, direction="backward"),
    "bfloat16": replace(PLAIN, dtype="bfloat16", direction="backward"),
    "bfloat16 layer": Case("layer", "backward", "causal", 2, 7, 7, 2, 2, 8, dtype="bfloat16"),
    "bfloat16 step": Case("layer", "forward", "decode", 2, 1, 11, 2, 2, 8, dtype="bfloat16"),
    "step": Case("layer", "forward", "decode", 2, 1, 70, 2, 2, 8),
    "four queries": Case("core", "forward", "decode", 2, 4, 70, 4, 2, 8),
}
# One of ours computes these in every run, and torch all of them, which takes no time.
COMPILED = ("window", "packed, by lengths", "causal lengths", "bfloat16 layer", "step")
CACHES = ("jaxmha:paged", "jaxmha:paged-int8", "jaxmha:paged-float8")
HERE = ("jaxmha:blocked", "jaxmha:reference", "jax-nn", "flax-linen", "flax-nnx", "keras-jax",
        "torch-sdpa")  # fmt: skip
# Whose values must have as many features as queries.
EQUAL_HEADS = ("jax-nn", "flax-nnx", "keras-jax")
SHAPE: Any = jax.ShapeDtypeStruct
HEADS = SHAPE((2, 13, 4, 8), jnp.float32)


pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture(autouse=True)
def as_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX as users have it, and no benchmark saved yet."""
    monkeypatch.setenv("JAXMHA_PREFERENCES", str(tmp_path / "preferences"))
    preferences.forget()
    with foreign():
        yield
    preferences.forget()


def test_examples() -> None:
    assert doctest.testmod(case_module).failed == 0


@pytest.mark.parametrize("name", CASES)
def test_pairs_are_those_that_attend(name: str) -> None:
    case = CASES[name]
    first, end = np.broadcast_arrays(*case.bounds)
    assert (first <= end).all()
    mask = jaxmha.Mask()
    if case.is_causal:
        mask &= jaxmha.Mask.causal()
    if case.window is not None:
        mask &= jaxmha.Mask.window(case.window, case.window)
    if case.segment_ids is not None:
        ids = case.segment_ids
        assert len(np.unique(ids)) == case.packed
        mask &= jaxmha.Mask.segments(query_ids=ids, key_value_ids=ids)
    if case.lengths is not None:
        mask &= jaxmha.Mask.lengths(key_value=np.array(case.lengths, np.int32))
    allowed = np.broadcast_to(mask.to_array(case.T, case.S, np), (case.B, 1, case.T, case.S))
    assert case.pairs == allowed.sum()
    assert case.keys == allowed.any((1, 2)).sum()


@pytest.mark.everyday(peer=["jaxmha:reference", "torch-sdpa"])
@pytest.mark.slow_variants(*(f"{name}-jaxmha:reference" for name in CASES if name not in COMPILED))
@pytest.mark.parametrize("peer", HERE)
@pytest.mark.parametrize("name", CASES)
def test_peers_are_right_about_every_condition(peer: str, name: str, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "expected.npz"
    inputs = data.make(case)
    try:
        program = programs.program(peer, case, inputs)
    except (UnsupportedError, KeyError):
        pytest.skip("the peer has no such layer")
    exact.write(case, path)
    if case.h and peer in EQUAL_HEADS:
        with pytest.raises((ValueError, TypeError)):
            program.compile()
        return
    program.compile()
    program.run(2)
    outputs = program.outputs(data.only_compared(case, inputs.cotangent))
    found = exact.errors(case, inputs, path, *outputs)
    assert ("gradient_error" in found) == (case.direction == "backward")


@pytest.mark.slow_variants("*-jaxmha:paged-*", "bfloat16 step-*")
@pytest.mark.parametrize("peer", CACHES)
@pytest.mark.parametrize("name", ["step", "four queries", "bfloat16 step"])
def test_caches_are_right_within_what_they_store(peer: str, name: str, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "expected.npz"
    inputs = data.make(case)
    program = programs.program(peer, case, inputs)
    exact.write(case, path)
    program.compile()
    program.run(2)
    stored = peers.CACHES[peer.partition(":")[2]]
    outputs = program.outputs(inputs.cotangent)
    error = exact.errors(case, inputs, path, *outputs, stored=stored)["error"]
    assert stored is None or error > exact.ALLOWED["float32"]
    if stored is not None:
        assert case.bytes_with(stored) < case.nbytes
        with pytest.raises(ValueError, match="wrong output"):
            exact.errors(case, inputs, path, 1.5 * outputs[0], None, stored=stored)


# Saved benchmarks.


def test_a_saved_benchmark_is_preferred_in_such_calls_only() -> None:
    case = replace(PLAIN, K=4, causal=True)
    chosen = choice.explain(case)
    assert chosen["call"] == "B2 T13 S13 N4 K4 H8 h8 float32, causal 0"
    before = jaxmha.explain(HEADS, HEADS, HEADS, is_causal=True)
    assert before.chosen == chosen["chosen"]
    where = preferences.save(chosen["call"], {"order": ["reference", "blocked"]})
    found = jaxmha.explain(HEADS, HEADS, HEADS, is_causal=True)
    assert found.chosen == "reference"
    assert found.rows()[0] == ("reference", "chosen: the fastest in a saved benchmark")
    assert jaxmha.explain(HEADS, HEADS, HEADS).chosen == before.chosen
    assert jaxmha.explain(HEADS, HEADS, HEADS, is_causal=True, platform="h200").saved == ()
    assert jaxmha.explain(HEADS, HEADS, HEADS, is_causal=True, implementation="blocked").rows() == [
        ("blocked", "chosen")
    ]
    assert list(json.loads(where.read_text())) == [chosen["call"]]


def test_a_layer_asks_for_the_call_that_was_saved() -> None:
    """The layer's own call has the key of the case, so that what is saved is preferred."""
    jit_cache.forget()
    case = Case("layer", "forward", "padded", 2, 13, 13, 4, 4, 8)
    preferences.save(choice.explain(case)["call"], {"order": ["ring-of-the-future", "reference"]})
    params = drawn.params(num_heads=4, features=32)
    mask = jaxmha.Mask.lengths(key_value=jnp.array([13, 4], jnp.int32))
    x = jnp.ones((2, 13, 32))
    text = str(jax.make_jaxpr(lambda x: jaxmha.multi_head_attention(params, x, mask=mask))(x))
    assert "f32[2,4,13,13]" in text.replace("2,13,4", "")  # the reference holds all scores


def test_shipped_benchmarks_decide_where_the_user_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preferences, "SHIPPED", tmp_path)
    where = preferences.path()
    assert where is not None
    call = choice.explain(replace(PLAIN, K=4))["call"]
    (tmp_path / where.name).write_text(json.dumps({call: {"order": ["reference"]}}))
    preferences.forget()
    found = jaxmha.explain(HEADS, HEADS, HEADS)
    assert found.rows()[0] == (
        "reference",
        "chosen: the fastest in a benchmark shipped for this device",
    )
    preferences.save(call, {"order": ["blocked"]})
    assert jaxmha.explain(HEADS, HEADS, HEADS).rows()[0][1].endswith("a saved benchmark")
    monkeypatch.setenv("JAXMHA_PREFERENCES", "0")
    assert jaxmha.explain(HEADS, HEADS, HEADS).saved == ()


@pytest.mark.parametrize(
    "file", sorted(preferences.SHIPPED.glob("*.json")), ids=lambda file: file.stem
)
def test_shipped_benchmarks_are_those_of_the_command(file: Path) -> None:
    """Each order is that of its times, and names implementations that may be chosen."""
    entries = preferences._parsed(file)
    assert entries
    for entry in entries.values():
        times = [entry["milliseconds"][f"jaxmha:{name}"] for name in entry["order"]]
        assert times == sorted(times)
        assert set(entry["order"]) <= set(implementations.IMPLEMENTATIONS)
        assert {"measured", "date", "versions"} <= entry.keys()


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}', '{"a": {"order": [1]}}'])
def test_damaged_files_are_ignored_with_a_warning(text: str) -> None:
    where = preferences.path()
    assert where is not None
    where.parent.mkdir(parents=True)
    where.write_text(text)
    with pytest.warns(RuntimeWarning, match="a saved benchmark is ignored"):
        assert jaxmha.explain(HEADS, HEADS, HEADS).chosen
    with pytest.raises(ValueError, match="json"):
        preferences.save("a", {"order": []})


# Results and the command.


def test_arrays_are_read_and_written_once() -> None:
    """Keys that no query attends are not read; a gradient adds a cotangent and gradients of all keys."""
    case = Case("core", "forward", "causal", 2, 5, 97, 3, 3, 8)
    heads = 4 * 2 * (5 + 5) * 3 * (8 + 8)
    assert case.nbytes == heads
    gradients = 4 * 2 * (5 + 97) * 3 * (8 + 8)
    assert replace(case, direction="backward").nbytes == heads + gradients
    assert replace(case, kind="plain", window=2).keys == 2 * (5 + 2)


def test_a_layer_projects_attended_keys_and_values_of_their_own_width() -> None:
    case = Case("layer", "forward", "causal", 2, 5, 97, 3, 1, 8, h=11)
    E, pairs = 3 * 8, 2 * (1 + 2 + 3 + 4 + 5)
    query, key, value, out = 3 * 8, 8, 11, 3 * 11
    projections = 2 * (5 * 2) * E * (query + key + value + out)  # 5 of 97 keys, in 2 rows
    assert case.flop == projections + 2 * 3 * pairs * (8 + 11)
    weights = E * (query + key + value + out)
    assert case.nbytes == 4 * (weights + 2 * (5 + 5 + 5) * E)
    assert replace(case, direction="backward").nbytes == 4 * (
        2 * weights + 2 * (5 + 5 + 5) * E + 2 * (5 + 5 + 97) * E
    )


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (PLAIN, "highest"),
        (replace(PLAIN, tf32=True), "tensorfloat32"),
        (replace(PLAIN, dtype="bfloat16"), None),
        (CASES["step"], "highest"),
    ],
)
def test_all_peers_multiply_in_one_precision(
    case: Case, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, XLA rounds float32 to TF32 on a GPU, which torch and jaxmha do not."""
    seen = []

    def build() -> None:
        seen.append(jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]

    for module in (jax_peers, decode_peers):
        monkeypatch.setattr(
            module, "program", lambda *_: Program(build, build, lambda x: (x, None))
        )
    with jax.default_matmul_precision(None):
        programs.program("jax-nn", case, data.make(case)).compile()
    assert seen == [precision]


def test_rates_are_shares_of_the_limits() -> None:
    case = Case("core", "forward", "decode", 1, 1, 103, 2, 1, 64)
    limits = {"tflops": 1.0, "gb_per_second": 52.224}
    found = run.row(
        case, "jaxmha:blocked", {"seconds": [2e-6] * 3, "error": 1e-7, "compile": 1.0}, limits,
        {"chosen": "blocked"},
    )  # fmt: skip
    assert found["chosen"]
    assert found["share"] == pytest.approx(0.5)
    assert found["gb_per_second"] == pytest.approx(26.112)
    rows = [found, {"peer": "jaxmha:native", "failed": "x"}, found | {"peer": "torch-sdpa"}]
    assert run.order({"rows": rows}) == ["blocked"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("attention -N 2 -H 8", "needs -T"),
        ("decode -N 2 -H 8", "needs -S"),
        ("decode -N 2 -H 8 -S 64 --causal", "decode is not timed with --causal"),
        ("decode -N 2 -H 8 -S 64 -T 2 --layer", "leave -T out"),
        ("layer -T 8 -N 2 -H 8 --bias", "layer is not timed with --bias"),
        ("layer -T 8 -N 2 -H 8 --layer", "belongs to decode"),
        ("layer -T 8 -N 2 -H 8 -h 4", "leave -h out"),
        ("attention -T 8 -N 3 -K 2 -H 8", "multiple of -K"),
        ("attention -T 8 -S 9 -N 2 -H 8 --packed 2", "as many keys as queries"),
        ("attention -T 8 -N 2 -H 8 --dtype int8", "--dtype must be"),
        ("attention -T 8 -N 2 -H 8 --tf32", "needs --dtype float32"),
        ("attention -T 8 -N 2 -H 8 --plot a.txt", "pictures are .png"),
        ("attention -T 8 -N 2 -H 8 --plot no/a.png", "no/a.png: there is no such folder"),
        ("attention -T 8 -N 2 -H 8 --save --peer torch-sdpa", "--save needs a --peer of jaxmha"),
        ("decode -S 8 -N 2 -H 8 --save --layer", "leave out --layer or --save"),
        ("attention -T 8 -N 2 -H 8 --plot /proc/a.png", "/proc/a.png: no file can be written"),
        ("attention -T 8 -N 2 -H 8 --peer torhc", "'torhc' is unknown"),
        ("attention -T 8 -N 2 -H 8 --peer jaxmha:natvie", "'jaxmha:natvie' is unknown: it may be"),
        ("attention -T 8 -N 2 -H 8 --peer torch-sdpa:", "'torch-sdpa:' is unknown: it may be"),
        ("attention -T 8 -N 2 -H 8 --peer keras-jax:x", "it may be keras-jax alone"),
        ("attention -T 8 -N 2 -H 8 --threads 9999", "--threads must be between 1 and "),
    ],
)
def test_wrong_arguments_are_one_message(arguments: str, message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize("peer", CACHES)
def test_caches_are_timed_in_decode_only(peer: str) -> None:
    run.check([peer], 1)
    run.check_caches([peer], CASES["step"])
    with pytest.raises(ValueError, match=f"--peer {peer} is a cache, which only decode"):
        run.check_caches([peer], PLAIN)


def test_saving_is_refused_before_timing_or_after_printing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"rows": [{"peer": "jaxmha:blocked", "failed": "it is too large"}]}
    monkeypatch.setattr(run, "run", lambda *_, **__: found)
    command = ["bench", "attention", "-T", "8", "-N", "2", "-H", "8", "--save", "--json"]
    monkeypatch.setenv("JAXMHA_PREFERENCES", "0")
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "JAXMHA_PREFERENCES=0 forbids" in done.stderr
    assert preferences.path() is None
    monkeypatch.setenv("JAXMHA_PREFERENCES", str(tmp_path))
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, json.loads(done.stdout)) == (2, found)
    assert "no implementation of jaxmha was timed" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_the_command_measures_saves_and_draws(tmp_path: Path) -> None:
    arguments = "attention -T 64 -N 2 -H 16 --rounds 2 --save --json --peer jaxmha:blocked"
    picture = tmp_path / "a.png"
    more = ["--peer", "jaxmha:reference", "--peer", "jax-nn", "--plot", str(picture)]
    done = CliRunner().invoke(app, ["bench", *arguments.split(), *more])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["peer"] for row in found["rows"]] == [
        "jaxmha:blocked",
        "jaxmha:reference",
        "jax-nn",
    ]
    assert all(row["error"] < 1e-5 and row["seconds"] > 0 for row in found["rows"])
    assert picture.stat().st_size > 1000
    preferences.forget()
    x = SHAPE((1, 64, 2, 16), jnp.float32)
    assert jaxmha.explain(x, x, x).chosen == run.order(found)[0]


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_backends_of_torch_are_chosen_by_name(backend: str) -> None:
    import torch.backends.cuda

    from jaxmha.bench import torch_peers

    cuda: Any = torch.backends.cuda
    enabled = {"cudnn": cuda.cudnn_sdp_enabled, "flash": cuda.flash_sdp_enabled}
    with torch_peers._by(backend):
        assert enabled.get(backend, cuda.mem_efficient_sdp_enabled)()
        assert not cuda.math_sdp_enabled()
    assert cuda.math_sdp_enabled()
