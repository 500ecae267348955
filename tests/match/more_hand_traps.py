"""More traps that an attacker wrote by hand."""

# mypy: ignore-errors
import numpy as np

from tests.match.hand_traps import D, R, a, den, lin, trap


@trap
def t5_wi():
    s = lin("D.wi_0", D, 12, 0) | lin("D.wi_1", D, 12, 0) | lin("D.wo", 12, D, 0)
    return (
        s,
        {
            "mlp/gate/kernel": s["D.wi_0.weight"].T,
            "mlp/up/kernel": s["D.wi_1.weight"].T,
            "mlp/down/kernel": s["D.wo.weight"].T,
        },
        True,
    )


@trap
def learned_attn_bias_lost():
    s = lin("h.0.attn.c", D, D) | {"h.0.attn.bias": a(4, 7, 7)}
    return s, den(s, "h.0.attn.c", "h/0/attn/dense"), False


@trap
def learned_attn_bias_1():
    s = lin("h.0.attn.c", D, D) | {"h.0.attn.bias": a(1, 4, 7, 7)}
    return s, den(s, "h.0.attn.c", "h/0/attn/dense"), False


@trap
def mask_parameter_lost():
    s = lin("fc", D, D) | {"mask": a(D)}
    return s, den(s, "fc", "dense"), False


@trap
def freqs_learned_lost():
    s = lin("fc", D, D) | {"rope.freqs": a(2, D)}
    return s, den(s, "fc", "dense"), False


@trap
def inv_freq_learned_lost():
    s = lin("fc", D, D) | {"filter.inv_freq": a(D, 3)}
    return s, den(s, "fc", "dense"), False


@trap
def int8_without_scale():
    s = {"fc.weight": R.integers(-128, 127, (5, 4)).astype(np.int8)}
    return s, {"dense/kernel": a(4, 5)}, False


@trap
def weight_norm():
    s = {"fc.weight_g": a(5, 1), "fc.weight_v": a(5, 4), "fc.bias": a(5)}
    return s, {"dense/kernel": a(4, 5), "dense/bias": a(5)}, False


@trap
def weight_norm_new():
    s = {
        "fc.parametrizations.weight.original0": a(5, 1),
        "fc.parametrizations.weight.original1": a(5, 4),
        "fc.bias": a(5),
    }
    return s, {"dense/kernel": a(4, 5), "dense/bias": a(5)}, False


@trap
def spectral_norm():
    s = {"fc.weight_orig": a(5, 4), "fc.weight_u": a(5), "fc.weight_v": a(4), "fc.bias": a(5)}
    return s, {"dense/kernel": a(4, 5), "dense/bias": a(5)}, False


@trap
def lora_left():
    s = lin("fc", D, D) | {"fc.lora_A.weight": a(2, D), "fc.lora_B.weight": a(D, 2)}
    return s, den(s, "fc", "dense"), False


@trap
def conv_cube():
    s = {"conv.weight": a(3, 3, 3, 3), "conv.bias": a(3)}
    return (
        s,
        {"conv0/kernel": s["conv.weight"].transpose(2, 3, 1, 0), "conv0/bias": s["conv.bias"]},
        True,
    )


@trap
def conv_transpose():
    s = {"up.weight": a(8, 8, 2, 2), "up.bias": a(8)}
    return s, {"conv_transpose/kernel": a(2, 2, 8, 8), "conv_transpose/bias": a(8)}, False


@trap
def haiku_square():
    s = lin("fc", D, D)
    return s, {"net/~/linear/w": s["fc.weight"].T, "net/~/linear/b": s["fc.bias"]}, True


@trap
def onehot_dense():
    s = {"embed.weight": a(D, D)}
    return s, {"embed/kernel": s["embed.weight"]}, False


@trap
def gemma_einsum():
    s = (
        lin("self_attn.q_proj", D, 8, 0)
        | lin("self_attn.k_proj", D, 4, 0)
        | lin("self_attn.v_proj", D, 4, 0)
        | lin("self_attn.o_proj", 8, D, 0)
    )
    return (
        s,
        {
            "attn/q_einsum/w": a(4, D, 2),
            "attn/kv_einsum/w": a(2, 2, D, 2),
            "attn/attn_vec_einsum/w": a(4, 2, D),
        },
        False,
    )


@trap
def stack_cube():
    s = {}
    [s.update(lin(f"layers.{i}.fc", 4, 4, 0)) for i in range(4)]
    return s, {"layers/fc/kernel": np.stack([s[f"layers.{i}.fc.weight"].T for i in range(4)])}, True


@trap
def distilled_half():
    s = {}
    [s.update(lin(f"layers.{i}.fc", 4, 4)) for i in range(4)]
    t = {}
    [t.update(den(s, f"layers.{2 * i}.fc", f"layers/{i}/fc")) for i in range(2)]
    return s, t, False


@trap
def ema_copy():
    s = lin("model.fc", D, 5) | lin("ema.fc", D, 5)
    return s, den(s, "ema.fc", "fc"), False


@trap
def ema_copy_diff():
    s = lin("model.fc", D, 5) | lin("model_ema.fc", D, 5)
    return s, den(s, "model.fc", "net/fc"), False


@trap
def optimizer_state():
    s = lin("model.fc", D, 5) | {"optimizer.fc.exp_avg": a(5, D)}
    return s, den(s, "model.fc", "fc"), False


@trap
def untied_head_lost():
    s = {"embed.weight": a(31, D), "lm_head.weight": a(31, D)}
    return s, {"embed/embedding": a(31, D)}, False


@trap
def scalars():
    s = {"logit_scale": a(1), "logit_bias": a(1)}
    return s, {"t": a(1), "b": a(1)}, False


@trap
def scalars_named():
    s = {"logit_scale": a(1), "logit_bias": a(1)}
    return s, {"temperature_scale": s["logit_scale"], "offset_bias": s["logit_bias"]}, True


@trap
def layer_scale_vs_norm():
    s = {"norm1.weight": a(D), "norm1.bias": a(D), "ls1.gamma": a(D)}
    return (
        s,
        {"ln/scale": s["norm1.weight"], "ln/bias": s["norm1.bias"], "layer_scale": s["ls1.gamma"]},
        True,
    )


@trap
def one_based():
    s = {}
    [s.update(lin(f"l.{i}.fc", 4, 4)) for i in range(3)]
    t = {}
    [t.update(den(s, f"l.{i}.fc", f"block{i + 1}/fc")) for i in range(3)]
    return s, t, True


@trap
def lexicographic():
    s = {}
    [s.update(lin(f"l.{i}.fc", 4, 4)) for i in range(12)]
    t = {}
    [t.update(den(s, f"l.{i}.fc", f"block_{i}/fc")) for i in sorted(range(12), key=str)]
    return s, t, True


@trap
def letters_blocks():
    s = {}
    [s.update(lin(f"l.{i}.fc", 4, 4)) for i in range(3)]
    t = {}
    [t.update(den(s, f"l.{i}.fc", f"{n}/fc")) for i, n in enumerate(("early", "middle", "late"))]
    return s, t, False


@trap
def downward_numbers():
    s = {}
    [s.update(lin(f"up_blocks.{i}.fc", 4, 4)) for i in range(3)]
    t = {}
    [t.update(den(s, f"up_blocks.{i}.fc", f"up_{4 >> i}/fc")) for i in range(3)]
    return s, t, False


@trap
def q_is_not_query():
    s = lin("quantizer.q", D, D) | lin("quantizer.k", D, D)
    return (
        s,
        den(s, "quantizer.q", "codebook/first") | den(s, "quantizer.k", "codebook/second"),
        False,
    )


@trap
def value_head_vs_value_proj():
    s = lin("actor.policy", D, D) | lin("actor.value", D, D) | lin("attn.v", D, D)
    return (
        s,
        den(s, "actor.policy", "heads/action")
        | den(s, "actor.value", "heads/value")
        | den(s, "attn.v", "mixing/v"),
        True,
    )


@trap
def interleaved_pair():
    s = {}
    [s.update(lin(f"net.{i}", D, D)) for i in (0, 2, 4)]
    t = {}
    [t.update(den(s, f"net.{i}", m)) for i, m in ((0, "out"), (2, "hidden"), (4, "in"))]
    return s, t, False


@trap
def mean_std_heads():
    s = lin("fc_mu", D, 4) | lin("fc_var", D, 4)
    return s, den(s, "fc_mu", "mean") | den(s, "fc_var", "logvar"), True


@trap
def real_imag():
    s = {"w_re": a(D, D), "w_im": a(D, D)}
    return s, {"u": a(D, D), "v": a(D, D)}, False
