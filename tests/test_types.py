"""Types of the public functions, as mypy sees them, and the share of bare `Any` in signatures."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAD = "import jax\nimport jaxmha\nx: jax.Array\nparams: jaxmha.MHAParams\ncache: jaxmha.KVCache\n"
ARRAY, PAIR, STEP = "jax.Array", "tuple[jax.Array, jax.Array]", "tuple[jax.Array, tuple["
CALLS = {
    "jaxmha.multi_head_attention(params, x)": ARRAY,
    "jaxmha.multi_head_attention(params, x, return_weights=True)": PAIR,
    'jaxmha.multi_head_attention(params, x, return_weights="after_dropout")': PAIR,
    "jaxmha.dot_product_attention(x, x, x)": ARRAY,
    "jaxmha.dot_product_attention(x, x, x, return_weights=True)": PAIR,
    "jaxmha.dot_product_attention(x, x, x, return_lse=True)": PAIR,
    "jaxmha.dot_product_attention(x, x, x, return_residual=True)": PAIR,
    "jaxmha.prefill(params, x, cache)": STEP,
    "jaxmha.decode_step(params, x, cache)": STEP,
    "jaxmha.project(params, x)": f"tuple[{ARRAY}, {ARRAY}, {ARRAY}]",
    "jaxmha.combine(params, x)": ARRAY,
    "jaxmha.rope(x, x)": ARRAY,
}
WRONG = (
    "jaxmha.multi_head_attention(params, x).nonsense",
    "jaxmha.multi_head_attention(params, x, return_weights=True).shape",
    "jaxmha.dot_product_attention(x, x, x).nonsense",
    "jaxmha.decode_step(params, x, cache)[1].nonsense",
)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The message of mypy for every line of a user's program."""
    source = tmp_path_factory.mktemp("types") / "program.py"
    lines = [*(f"reveal_type({call})" for call in CALLS), *WRONG]
    source.write_text(HEAD + "\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(source)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    of_line: dict[int, str] = {}
    # mypy repeats the messages of an equal program with the path that it had then.
    for number, text in re.findall(r"program\.py:(\d+): (.*)", done.stdout):
        # Where JAX defines the class depends on its version.
        of_line.setdefault(int(number), re.sub(r"jax\.[\w.]+\.Array\b", "jax.Array", text))
    first = HEAD.count("\n") + 1
    return [of_line.get(first + i, "") for i in range(len(lines))]


def test_results_are_arrays(messages: list[str]) -> None:
    for message, wanted in zip(messages, CALLS.values(), strict=False):
        assert message.startswith(f'note: Revealed type is "{wanted}')
        assert "Any" not in message.replace("ndarray[tuple[Any, ...], numpy.dtype[Any]]", "")


def test_wrong_attributes_are_errors(messages: list[str]) -> None:
    assert all("has no attribute" in message for message in messages[len(CALLS) :])


def signatures(path: Path) -> Iterator[list[ast.expr | None]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            several = [x for x in (given.vararg, given.kwarg) if x is not None]
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, *several]
            yield [*(x.annotation for x in parameters), node.returns]


def test_few_signatures_have_a_bare_any() -> None:
    paths = [*ROOT.glob("jaxmha/*.py"), *ROOT.glob("jaxmha/[!c]*/**/*.py")]
    paths += [*ROOT.glob("jaxmha/checkpoint/**/*.py"), *ROOT.glob("jaxmha/cli/**/*.py")]
    found = [
        any(isinstance(x, ast.Name) and x.id == "Any" for x in signature)
        for path in paths
        for signature in signatures(path)
    ]
    assert len(found) > 1000
    assert sum(found) <= 0.1 * len(found)
