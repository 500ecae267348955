"""Latent attention of published models: weights, behaviour and outputs as in transformers."""

import copy
import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmha import checkpoint, latent
from jaxmha.converters import huggingface
from jaxmha.converters.discovery import unknown_attention
from jaxmha.converters.verify import load_block
from tests import drawn
from tests.drawn import to_jax
from tests.test_rotary_arguments import ODD

B, T, C, FEATURES = 2, 29, 23, 48  # C of T positions are computed at once
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 32, "beta_slow": 1,
    "llama_4_scaling_beta": 0.3,  # mistral4 alone reads it
}  # fmt: skip
# Model type -> name of its classes, and whether its output passes an attention mask by name.
MODELS = {
    "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite",
    "youtu": "Youtu", "axk1": "AXK1", "minicpm3": "MiniCPM3", "mistral4": "Mistral4",
}  # fmt: skip
_BETA, _FLOOR = "llama_4_scaling_beta", "original_max_position_embeddings"
_MISTRAL = {"model_type": "mistral4", "qk_nope_head_dim": 4, "qk_rope_head_dim": 8}


def layer(kind: str, **settings: Any) -> tuple[Any, Any, Any]:
    """A random layer of transformers in float64, its configuration, and its output for an input."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = getattr(transformers, f"{MODELS[kind]}Config")(
        hidden_size=FEATURES, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=20,
        q_lora_rank=28, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
        max_position_embeddings=64, attn_implementation="sdpa", **copy.deepcopy(settings),
    )  # fmt: skip
    torch.manual_seed(0)
    attention = getattr(module, f"{MODELS[kind]}Attention")(config, 0).eval()
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = torch.randn(B, T, FEATURES)
    rotary = getattr(module, f"{MODELS[kind]}RotaryEmbedding")(config)
    angles = rotary(x, torch.arange(T)[None])
    causal = torch.full((T, T), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        out = attention(
            x, position_embeddings=angles, attention_mask=causal, position_ids=torch.arange(T)[None]
        )[0]
    return attention, config, (x.numpy(), out.numpy())


@pytest.mark.slow_variants("*", "!deepseek_v2-settings0")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (kind, settings)
        for kind in MODELS
        for settings in ({}, {"rope_parameters": YARN, "attention_bias": True})
    ],
)
def test_a_layer_is_that_of_transformers(kind: str, settings: dict[str, Any]) -> None:
    module, config, (x, want) = layer(kind, **settings)
    state = module.state_dict()
    params = huggingface.import_latent_params(
        {f"a.b.{k}": v for k, v in state.items()}, prefix="a.b"
    )
    semantics, rotate = huggingface.latent_behaviour(config.to_dict())
    assert semantics.scale == pytest.approx(module.scaling, rel=1e-12)
    options: dict[str, Any] = {"semantics": semantics, "rotate": rotate}
    scale = np.abs(want).max()
    got = latent.latent_attention(params, x, is_causal=True, **options)
    assert np.abs(got - want).max() / scale < 3e-6
    cache = latent.LatentCache.empty(params, B, T)
    out, cache = latent.prefill(params, x[:, :C], cache, **options)
    assert np.abs(out - want[:, :C]).max() / scale < 3e-6
    for t in range(C, T):
        out, cache = latent.decode_step(params, x[:, t : t + 1], cache, **options)
        assert np.abs(out[:, 0] - want[:, t]).max() / scale < 3e-6, t
    back = huggingface.export_latent_params(params, prefix="c")
    assert {f"c.{key}" for key in state} == back.keys()
    for key, tensor in state.items():
        np.testing.assert_array_equal(back[f"c.{key}"], tensor.numpy())


def exact(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Keeps transformers in float64 where it computes in float32."""
    torch = pytest.importorskip("torch")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")

    def norm(self: Any, x: Any) -> Any:
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    def turned(query: Any, key: Any, angles: Any) -> Any:
        def one(x: Any) -> Any:
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * angles.unsqueeze(1)).flatten(3)

        return one(query), one(key)

    monkeypatch.setattr(getattr(module, f"{MODELS[kind]}RMSNorm"), "forward", norm)
    if kind == "deepseek_v2":
        monkeypatch.setattr(module, "apply_rotary_emb", turned)


def layer_in_float64(
    kind: str, monkeypatch: pytest.MonkeyPatch, *, low_rank: bool = True
) -> tuple[Any, Any, Any]:
    """The same as `layer`, computed in float64, with YaRN."""
    torch = pytest.importorskip("torch")
    module, config, (x, _) = layer(kind, rope_parameters=YARN)
    if not low_rank:
        config.q_lora_rank = None
        module = type(module)(config, 0).eval()
    exact(monkeypatch, kind)
    module, x = module.double(), x.astype("float64")
    _, rotate = huggingface.latent_behaviour(config.to_dict())
    frequencies = rotate.keywords["frequencies"]  # type: ignore[union-attr]
    angles = np.arange(T)[:, None] * np.asarray(frequencies.values)
    cos, sin = (frequencies.factor * f(angles)[None] for f in (np.cos, np.sin))
    given: Any = torch.from_numpy(cos + 1j * sin)
    if kind == "deepseek_v3":
        given = tuple(torch.from_numpy(np.concatenate([y, y], -1)) for y in (cos, sin))
    causal = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        want = module(torch.from_numpy(x), position_embeddings=given, attention_mask=causal)[0]
    return module, config, (x, want.numpy())


@pytest.mark.slow_variants("*", "!False-deepseek_v3")
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("low_rank", [True, False])
def test_in_float64(kind: str, low_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, config, (x, want) = layer_in_float64(kind, monkeypatch, low_rank=low_rank)
    semantics, rotate = huggingface.latent_behaviour(config.to_dict())
    with jax.enable_x64(True):
        params = huggingface.import_latent_params(module.state_dict())
        options: dict[str, Any] = {"semantics": semantics, "rotate": rotate}
        got = latent.latent_attention(params, x, is_causal=True, **options)
        cache = latent.LatentCache.empty(params, B, T)
        out, cache = latent.prefill(params, to_jax(x[:, :C]), cache, **options)
        outs = [np.asarray(out)]
        for t in range(C, T):
            out, cache = latent.decode_step(params, x[:, t : t + 1], cache, **options)
            outs.append(np.asarray(out))
    for found in (got, np.concatenate(outs, 1)):
        assert np.abs(np.asarray(found) - want).max() / np.abs(want).max() < 1e-14


def test_the_rotation_is_static() -> None:
    sizes = {"model_type": "deepseek_v3", "qk_nope_head_dim": 4, "qk_rope_head_dim": 8}
    part = {"partial_rotary_factor": 0.5}  # of a head, which is not that of the rotary features
    one, other = (
        huggingface.latent_behaviour({**sizes, name: YARN | part})
        for name in ("rope_parameters", "rope_scaling")
    )
    assert len(one.rotate.keywords["frequencies"].values) == 4  # type: ignore[union-attr]
    assert one.rotate.keywords == other.rotate.keywords  # type: ignore[union-attr]
    assert hash(one.rotate.keywords["frequencies"])  # type: ignore[union-attr]


def state(**change: Any) -> dict[str, Any]:
    params = drawn.latent_params(num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5,
        value_head_dim=7, query_latent_dim=9,
    )  # fmt: skip
    found = huggingface.export_latent_params(params) | change
    return {key: x for key, x in found.items() if x is not None}


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"kv_b_proj.weight": None}, r"kv_b_proj.weight missing"),
        ({"indexer.wk.weight": np.zeros(1)}, r"unknown indexer.wk.weight"),
        ({"o_proj.weight": np.zeros((8, 20), "f")}, r"do not fit: expected \(N \(H \+ R\), \.\)"),
        (
            {"q_a_proj.weight": np.zeros((9, 7), "f")},
            r"query_latent.kernel: expected axes \(Dq, P\)",
        ),
        ({"kv_a_proj_with_mqa.bias": np.zeros(3, "f")}, r"latent.bias: expected axes \(L\)"),
    ],
)
def test_wrong_states(change: dict[str, Any], printed: str) -> None:
    with pytest.raises(ValueError, match=printed):
        huggingface.import_latent_params(state(**change))


def test_what_the_layout_cannot_hold() -> None:
    params = huggingface.import_latent_params(state())
    zeros = np.zeros(6, "f")
    wrong = [
        (params._replace(latent_norm=None), "latent_norm"),
        (params._replace(latent=params.latent._replace(bias=zeros)), "one bias for latent and"),
        (params._replace(query=params.query._replace(bias=np.zeros((3, 9), "f"))), "no bias"),
    ]
    for given, printed in wrong:
        with pytest.raises(ValueError, match=printed):
            huggingface.export_latent_params(given)


@pytest.mark.parametrize(
    ("config", "printed"),
    [
        ({"model_type": "longcat_flash"}, "model_type 'longcat_flash': known latent attention"),
        ({"model_type": "deepseek_v2"}, "qk_nope_head_dim and qk_rope_head_dim, got None"),
        (_MISTRAL | {"rope_parameters": {_BETA: 0.1}}, "original_max_position_embeddings"),
        (_MISTRAL | {"rope_scaling": {_BETA: 0.1, _FLOOR: 0}}, f"{_FLOOR} must be above 0"),
        (_MISTRAL | {"rope_parameters": {_BETA: "much", _FLOOR: 8}}, _BETA),
    ],
)
def test_wrong_configurations(config: dict[str, Any], printed: str) -> None:
    with pytest.raises((TypeError, ValueError), match=printed):
        huggingface.latent_behaviour(config)


@pytest.mark.parametrize("mscale", [0.7, None])
def test_an_odd_value_of_a_configuration_is_named(mscale: float | None) -> None:
    sizes = {"model_type": "deepseek_v3", "qk_nope_head_dim": 4, "qk_rope_head_dim": 8}
    given = {**sizes, "attention_dropout": 0.1, **YARN, "mscale": mscale}
    for key in given:
        for value in ODD:
            try:
                found = huggingface.latent_behaviour({**given, key: value})
            except (TypeError, ValueError) as error:
                parts = {key, "rope", "head_dim", "scale", "dropout_rate"}
                assert any(part in str(error) for part in parts), (key, value)  # noqa: PT017
            else:
                assert found.semantics.scale is not None
                assert 0 < found.semantics.scale < np.inf, (key, value)


def test_files_with_latent_attention_name_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    names = {f"model.layers.{i}.self_attn.{key}": x for i in range(2) for key, x in state().items()}
    checkpoint.write(path, names)
    shapes = {name: x.shape for name, x in names.items()}
    notes = list(unknown_attention.notes(unknown_attention.find(shapes, [])))
    assert len(notes) == 1
    assert "huggingface.import_latent_params reads each" in notes[0]
    assert "2 x model.layers.{i}.self_attn, carried over as it is" in notes[0]
    shapes |= {f"model.layers.{i}.self_attn.indexer.wk.weight": (4, 4) for i in range(2)}
    (note,) = unknown_attention.notes(unknown_attention.find(shapes, []))
    assert "import_latent_params" not in note  # which raises for what it does not know
    assert "an indexer chooses the keys" in note
    with pytest.raises(ValueError, match="no attention block found, and latent attention"):
        load_block.read(path)
    with checkpoint.open(path) as file:
        read = huggingface.import_latent_params(
            {k: np.asarray(file[k]) for k in file.info}, prefix="model.layers.1.self_attn"
        )
    assert read.key.kernel.shape == (6, 3, 5)
