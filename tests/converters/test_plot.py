"""Heat maps show the weights that they are given; statistics are those of loops; the command."""

import json
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers

import jaxmha
from jaxmha import checkpoint
from jaxmha.converters import plot_attention, torch
from jaxmha.introspect.head_statistics import head_statistics
from jaxmha.introspect.heatmaps import picture
from jaxmha.introspect.text_weights import text_weights
from tests import drawn
from tests.converters import live_model
from tests.converters.command_line import cli, fails, succeeds
from tests.promotion import foreign

B, N, T, S = 2, 5, 3, 7
QUERIES = ["ein", "rotes", "$x_1$"]
KEYS = ["[CLS]", "one", "red", "fat cat", "red", "x" * 40, "[SEP]"]


def weights(*shape: int) -> Any:
    return np.random.default_rng(0).dirichlet(np.full(shape[-1], 0.4), shape[:-1]).astype("f")


def maps(figure: Any) -> list[Any]:
    return [axes for axes in figure.axes if axes.get_images()]


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_values_drawn_are_the_weights() -> None:
    given = weights(N, T, S)
    figure = plot_attention(given, QUERIES, KEYS)
    drawn = maps(figure)
    assert len(drawn) == N
    assert len(figure.axes) == N + 1
    for axes, head in zip(drawn, given, strict=True):
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), head)
        assert image.get_clim() == (0.0, given.max())
    assert [axes.get_title() for axes in drawn] == [f"head {n}" for n in range(N)]
    assert figure.axes[-1].get_ylabel() == "weight of the key"


def test_tokens_label_the_maps() -> None:
    drawn = maps(plot_attention(weights(N, T, S), QUERIES, KEYS, columns=2))
    assert labels(drawn[0].yaxis) == ["ein", "rotes", r"\$x_1\$"]  # no formula
    assert labels(drawn[-1].xaxis)[:5] == KEYS[:5]
    assert labels(drawn[-1].xaxis)[5] == "x" * 23 + "…"
    inner = drawn[1]  # it shares the labels of its row and column
    assert not any(t.get_visible() for t in inner.get_yticklabels())
    assert not any(t.get_visible() for t in drawn[0].get_xticklabels())
    assert all(t.get_visible() for t in drawn[-1].get_xticklabels())


def test_self_attention_has_one_list_of_tokens() -> None:
    (axes,) = maps(plot_attention(weights(T, T), QUERIES))
    assert labels(axes.xaxis) == labels(axes.yaxis)
    (axes,) = maps(plot_attention(weights(T, S), QUERIES))
    assert labels(axes.xaxis) == [str(s) for s in range(S)]


def test_heads_and_batch_are_chosen() -> None:
    given = weights(B, N, T, S)
    figure = plot_attention(given, heads=[3, 0], batch=1, titles=["a", "b"], title="both")
    drawn = maps(figure)
    for axes, n, name in zip(drawn, (3, 0), "ab", strict=True):
        np.testing.assert_array_equal(axes.get_images()[0].get_array(), given[1, n])
        assert axes.get_title() == name
    assert figure.get_suptitle() == "both"
    (axes,) = maps(plot_attention(given, heads=[2], batch=-1))
    np.testing.assert_array_equal(axes.get_images()[0].get_array(), given[-1, 2])


def test_labels_of_long_sequences_do_not_overlap() -> None:
    figure = plot_attention(weights(1, 200, 100), [f"token{i}" for i in range(200)])
    figure.draw_without_rendering()
    (axes,) = maps(figure)
    shown = [label for label in axes.get_yticklabels() if label.get_visible()]
    assert 10 < len(shown) < 200
    assert min(label.get_fontsize() for label in shown) >= 8
    spans = sorted((box.y0, box.y1) for label in shown for box in [label.get_window_extent()])
    assert all(low[1] <= high[0] for low, high in pairwise(spans))
    assert all(text.get_window_extent().x0 >= 0 for text in shown)


def test_other_dtypes() -> None:
    import ml_dtypes

    given = weights(N, T, S)
    for other in (given.astype(ml_dtypes.bfloat16), jax.numpy.asarray(given)):
        (image,) = maps(plot_attention(other, heads=[1]))[0].get_images()
        np.testing.assert_array_equal(image.get_array(), np.asarray(other[1], "f"))


def test_rows_with_nothing_left_are_hatched() -> None:
    given = weights(N, T, S)
    given[0, 1] = np.nan
    figure = plot_attention(given)
    assert figure.axes[0].patch.get_hatch()
    drawn: Any = figure.axes[0].get_images()[0].get_array()
    assert np.ma.getmaskarray(drawn)[1].all()
    (image,) = maps(plot_attention(np.full((1, T, S), np.nan, "f")))[0].get_images()
    assert image.get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.ones((B, N, T, S)),), {}, r"batch=.*|2 batch rows"),
        ((np.ones((B, N, T, S)),), {"batch": 2}, "expected batch from 0 to 1, got 2"),
        ((np.ones((N, T, S)),), {"batch": 0}, "no batch"),
        ((np.ones(S),), {}, r"\(N, T, S\).*\(7,\)"),
        ((np.ones((N, 0, S)),), {}, r"\(5, 0, 7\)"),
        ((-np.ones((N, T, S)),), {}, "logits"),
        ((np.full((N, T, S), -np.inf),), {}, "logits"),
        ((np.full((N, T, S), 5 / S),), {}, "a row of keys sums to 1, .* got 5"),
        ((np.ones((N, T, S), complex),), {}, "complex"),
        ((np.full((N, T, S), 1 / S), ["a"]), {}, "T=3 strings.*got 1"),
        ((np.full((N, T, S), 1 / S), None, ["a"]), {}, "S=7 strings.*got 1"),
        ((np.full((N, T, S), 1 / S),), {"heads": [5]}, "from 0 to 4"),
        ((np.full((N, T, S), 1 / S),), {"heads": []}, "from 0 to 4"),
        ((np.full((N, T, S), 1 / S),), {"titles": ["a"]}, "expected 5"),
        ((np.full((N, T, S), 1 / S),), {"columns": 0}, "columns"),
    ],
)
def test_wrong_arguments(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_attention(*arguments, **options)


def test_pictures() -> None:
    figure = plot_attention(weights(1, T, S), QUERIES, KEYS)
    drawing = picture(figure, ".svg").decode()
    assert "rotes" in drawing  # text stays text
    assert "prefers-color-scheme" in drawing
    assert "#010203" not in drawing
    again = plot_attention(weights(1, T, S), QUERIES, KEYS)
    assert drawing == picture(again, ".svg").decode()
    assert picture(figure, ".png").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.gif"):
        picture(figure, ".gif")


def test_matplotlib_is_optional(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxmha\[plot\]'"):
        plot_attention(weights(T, S))
    bench = ("bench", "attention", "-T", 8, "-N", 2, "-H", 8, "--plot", folder / "x.png")
    for command in (("plot", folder / "no.npz", "-o", folder / "x.png"), bench):
        assert "jaxmha[plot]" in fails(folder, *command)  # before anything is read or timed


def test_statistics_are_those_of_loops() -> None:
    given, tokens = weights(N, S, S), KEYS
    found = head_statistics(given, tokens, named=["[CLS]", "[SEP]"])
    for head, row in zip(given.astype(float), found, strict=True):
        entropies = [-sum(w * math.log(w) for w in line if w) for line in head]
        assert row.entropy == pytest.approx(np.mean(entropies))
        assert row.itself == pytest.approx(np.mean([head[i, i] for i in range(S)]))
        assert row.previous == pytest.approx(np.mean([head[i, i - 1] for i in range(1, S)]))
        assert row.next == pytest.approx(np.mean([head[i, i + 1] for i in range(S - 1)]))
        assert row.first == pytest.approx(np.mean([line[0] for line in head]))
        assert row.named == pytest.approx(np.mean([line[0] + line[6] for line in head]))
        assert row.same == pytest.approx((head[2, 4] + head[4, 2]) / 2)


def test_statistics_of_cross_attention_know_no_other_layers() -> None:
    (row,) = head_statistics(weights(1, T, S), QUERIES, KEYS, named=["[SEP]"])
    assert (row.itself, row.previous, row.next, row.same) == (None,) * 4
    assert row.named is not None
    with pytest.raises(ValueError, match="tokens of the keys"):
        head_statistics(weights(1, T, S), QUERIES, named=["[SEP]"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights alone, several arrays, a torch layer and inputs for it."""
    np.savez(tmp_path / "weights.npz", w=weights(N, T, S))
    np.savez(tmp_path / "batch.npz", a=weights(B, N, S, S), b=weights(N, S, S))
    params = drawn.params(num_heads=4, features=20)
    checkpoint.write(tmp_path / "layer.safetensors", torch.export_params(params, prefix="a"))
    rng = np.random.default_rng(1)
    mask = np.ones((T, S), bool)
    mask[:, 4] = False
    arrays: dict[str, Any] = {"query": rng.normal(size=(T, 20)), "key": rng.normal(size=(S, 20))}
    arrays = {name: x.astype("f") for name, x in arrays.items()}
    np.savez(tmp_path / "inputs.npz", mask=mask, **arrays)
    return tmp_path


def test_command_draws_stored_weights(folder: Path) -> None:
    out = folder / "heads.svg"
    arguments = ("plot", folder / "batch.npz", "--array", "a", "--batch", 1, "--heads", "3,0")
    (folder / "tokens.txt").write_text("\n".join(KEYS))  # of which one line has a space
    more = ("--tokens", f"@{folder}/tokens.txt", "--output", out)
    done = succeeds(*arguments, *more)
    assert all(token in done.stdout for token in ("[CLS]", "[SEP]"))
    assert "head 3" in out.read_text()
    assert "fat cat" in out.read_text()
    assert "head 1" not in out.read_text()
    assert "heads.svg" in fails(folder, *arguments, *more)
    found = json.loads(cli(*arguments, *more, "--force", "--json").stdout)
    with np.load(folder / "batch.npz") as arrays:
        stored = arrays["a"][1]
    expected = head_statistics(stored, KEYS, named=["[CLS]", "[SEP]"])
    assert found["heads"] == {str(n): expected[n]._asdict() for n in (3, 0)}


def test_command_draws_a_block(folder: Path) -> None:
    out = folder / "block.png"
    arguments = ("plot", folder / "layer.safetensors", "--inputs", folder / "inputs.npz")
    done = succeeds(*arguments, "--num-heads", 4, "--output", out, "--json")
    with np.load(folder / "inputs.npz") as arrays:
        inputs = dict(arrays)
    with checkpoint.open(folder / "layer.safetensors") as file:
        state = {name: file[name] for name in file}
    params, semantics = torch.import_params(state, num_heads=4, prefix="a")
    _, expected = jaxmha.multi_head_attention(
        params,
        inputs["query"],
        inputs["key"],
        mask=inputs["mask"],
        semantics=semantics,
        return_weights=True,
    )
    assert float(expected[..., 4].max()) == 0.0
    found = json.loads(done.stdout)["heads"]
    entropies = [row.entropy for row in head_statistics(expected)]
    np.testing.assert_allclose([row["entropy"] for row in found.values()], entropies, rtol=1e-5)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no.npz",), "no.npz"),
        (("weights.npz", "--array", "x"), "no array 'x'; there are w"),
        (("weights.npz", "--tokens", "a b"), "T=3 strings"),
        (("weights.npz", "--tokens", ""), "--tokens"),
        (("weights.npz", "--heads", "a"), "--heads"),
        (("weights.npz", "--heads", "7"), "from 0 to 4"),
        (("weights.npz", "--batch", "0"), "no batch"),
        (("no.npz", "--output", "{}/x.gif"), ".gif"),
        (("no.npz", "--output", "{}/no/x.png"), "no such folder"),
        (("weights.npz", "--causal"), "--inputs"),
        (("batch.npz",), "a (2, 5, 7, 7), b (5, 7, 7)"),
        (("batch.npz", "--array", "a"), "2 batch rows by --batch"),
        (("batch.npz", "--array", "a", "--batch", "5"), "expected batch from 0 to 1, got 5"),
        (("layer.safetensors",), "--inputs"),
        (("layer.safetensors", "--inputs", "{}/weights.npz", "--num-heads", "4"), "query"),
        (("layer.safetensors", "--inputs", "{}/inputs.npz"), "--num-heads"),
        (("layer.safetensors", "--inputs", "{}/inputs.npz", "--array", "w"), "--array"),
        (("weights.npz", "--tokens", "@no.txt"), "no.txt: there is no such file; check the path"),
        (("weights.npz", "--tokens", "@{}/weights.npz"), "weights.npz: expected UTF-8 text"),
    ],
)
def test_wrong_options(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    name, *options = (argument.format(folder) for argument in arguments)
    more = () if "--output" in options else ("--output", folder / "x.png")
    assert message in fails(folder, "plot", folder / name, *options, *more)


def close(done: Any, exact: Any) -> None:
    """The command printed the statistics of these weights."""
    assert done.exit_code == 0, done.output
    heads = json.loads(done.stdout)["heads"].values()
    for head, right in zip(heads, head_statistics(exact), strict=True):
        for name in ("entropy", "itself", "previous"):
            np.testing.assert_allclose(head[name], getattr(right, name), rtol=1e-5)


VOCABULARY = ["the", "cat", "sat", "[UNK]"]


def tokenizer(folder: Path) -> Path:
    """A tokenizer of vocabulary, saved as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def others_rules() -> Iterator[None]:
    with foreign():
        yield


class Split:
    """A tokenizer by spaces."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [VOCABULARY.index(word) for word in text.split()]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [VOCABULARY[one] for one in ids]


@pytest.mark.usefixtures("others_rules")
def test_weights_of_a_live_model() -> None:
    model = live_model.ours()
    found = text_weights(model, Split(), "cat sat the", layer=-1)
    assert found.tokens == ["cat", "sat", "the"]
    np.testing.assert_allclose(found.weights, by_hand(model), rtol=1e-5)
    with pytest.raises(ValueError, match="no layer 2: the model called 2 layers"):
        text_weights(model, Split(), "cat", layer=2)
    with pytest.raises(ValueError, match="makes no token of the text ''"):
        text_weights(model, Split(), "")
    with pytest.raises(TypeError, match="expected a model of transformers or nnx, got dict"):
        text_weights({}, Split(), "cat")


def by_hand(model: Any) -> Any:
    """The weights of the second layer for `cat sat the`."""
    x = model.embedding(np.array([[1, 2, 0]]))
    x += model.first(x)
    kernels = [one.kernel.get_value() for one in (model.second.query, model.second.key)]
    q, k = (np.einsum("btd,dnh->bnth", x, kernel) for kernel in kernels)
    return np.asarray(jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2.0))[0]


@pytest.mark.slow
@pytest.mark.usefixtures("others_rules")
def test_command_with_a_live_model(tmp_path: Path) -> None:
    vocabulary, output = tokenizer(tmp_path / "vocabulary"), tmp_path / "a.svg"
    text = ("--text", "cat sat the", "--tokenizer", vocabulary, "--output", output, "--force")
    for name in ("ours", "theirs"):
        done = cli("plot", f"{live_model.__name__}:{name}", *text, "--layer", "1", "--json")
        model = getattr(live_model, name)()
        close(done, by_hand(model))
    assert "sat" in output.read_text()
    for more, message in (
        (("--layer", "2"), "there is no layer 2: the model called 2 layers"),
        (("--array", "x"), "leave out --array"),
    ):
        assert message in fails(tmp_path, "plot", f"{live_model.__name__}:ours", *text, *more)
    assert "need --tokenizer FOLDER" in fails(
        tmp_path, "plot", f"{live_model.__name__}:ours", *text[:2]
    )


@pytest.mark.slow
def test_a_folder_without_tokenizer_or_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    text = ("--text", "cat", "--output", tmp_path / "a.svg")
    for folder, held in ((tmp_path / "empty", "it has no file"), (tmp_path, "it has config.json")):
        shown = fails(tmp_path, "plot", folder, *text)
        assert "transformers loads no tokenizer from it: expected files of save_pretrained" in shown
        assert held in shown
        assert "give its folder by --tokenizer FOLDER" in shown
    shown = fails(tmp_path, "plot", tmp_path, *text, "--tokenizer", tmp_path / "none")
    assert "none: transformers loads no tokenizer" in shown
    assert "there is no such folder" in shown
    vocabulary = tokenizer(tmp_path / "vocabulary")
    shown = fails(tmp_path, "plot", tmp_path / "empty", *text, "--tokenizer", vocabulary)
    assert "transformers loads no model from it" in shown


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Bert", "GPT2", "T5"])
def test_command_with_a_folder_of_transformers(kind: str, tmp_path: Path) -> None:
    import torch as pytorch

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 4}
    sizes |= {"d_kv": 4} if kind == "T5" else {}
    model = getattr(transformers, f"{kind}Model")(
        getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="eager")
    ).eval()
    model.save_pretrained(tokenizer(tmp_path))
    output = tmp_path / "a.svg"
    done = cli(
        "plot", tmp_path, "--text", "cat sat the", "--layer", "-1", "--output", output, "--json"
    )
    encoder = model.get_encoder() if kind == "T5" else model
    with pytorch.no_grad():
        exact = encoder(pytorch.tensor([[1, 2, 0]]), output_attentions=True).attentions[-1][0]
    close(done, exact.numpy())
