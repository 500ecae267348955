"""Traps that an attacker wrote by hand, without having seen the matcher.

Each returns the source, the target with the right values, and True if these can be known; False if
nothing shows them, so that a match must ask or refuse.
"""

# mypy: ignore-errors
import numpy as np

R = np.random.default_rng(0)
a = lambda *s: R.normal(size=s).astype("f")
D = 8
TRAPS = {}


def trap(f):
    TRAPS[f.__name__] = f
    return f


def lin(n, i, o, b=True):
    return {f"{n}.weight": a(o, i), **({f"{n}.bias": a(o)} if b else {})}


def den(src, n, m, b=True):
    return {f"{m}/kernel": src[f"{n}.weight"].T, **({f"{m}/bias": src[f"{n}.bias"]} if b else {})}


def nor(n):
    return {f"{n}.weight": a(D), f"{n}.bias": a(D)}


def lnt(src, n, m):
    return {f"{m}/scale": src[f"{n}.weight"], f"{m}/bias": src[f"{n}.bias"]}


@trap
def student_teacher():
    s = {**lin("student.fc", 4, 5), **lin("teacher.fc", 4, 5)}
    return s, {**den(s, "student.fc", "a/dense"), **den(s, "teacher.fc", "b/dense")}, False


@trap
def bn_unnamed():
    s = {"bn.weight": a(D), "bn.bias": a(D), "bn.running_mean": a(D), "bn.running_var": a(D)}
    return s, {f"bn/p{i}": v for i, v in enumerate(s.values())}, False


@trap
def bn_named():
    s = {"bn.weight": a(D), "bn.bias": a(D), "bn.running_mean": a(D), "bn.running_var": a(D)}
    return (
        s,
        {f"n/{k}": v for k, v in zip(("scale", "bias", "mean", "var"), s.values(), strict=False)},
        True,
    )


@trap
def bn_moving():
    s = {"bn.weight": a(D), "bn.bias": a(D), "bn.running_mean": a(D), "bn.running_var": a(D)}
    return (
        s,
        {
            f"n/{k}": v
            for k, v in zip(
                ("gamma", "beta", "moving_mean", "moving_variance"), s.values(), strict=False
            )
        },
        True,
    )


@trap
def lstm_square():
    s = {"l.weight_ih_l0": a(4 * D, D), "l.weight_hh_l0": a(4 * D, D), "l.bias_ih_l0": a(4 * D)}
    return (
        s,
        {
            "cell/kernel": s["l.weight_hh_l0"].T,
            "cell/recurrent_kernel": s["l.weight_ih_l0"].T,
            "cell/bias": s["l.bias_ih_l0"],
        },
        False,
    )


@trap
def gru_order():
    s = {
        "gru.weight_ih_l0": a(3 * D, 5),
        "gru.weight_hh_l0": a(3 * D, D),
        "gru.bias_ih_l0": a(3 * D),
        "gru.bias_hh_l0": a(3 * D),
    }
    return (
        s,
        {"gru/kernel": a(5, 3 * D), "gru/recurrent_kernel": a(D, 3 * D), "gru/bias": a(2, 3 * D)},
        False,
    )


@trap
def gru_no_bias():
    s = {"gru.weight_ih_l0": a(3 * D, 5), "gru.weight_hh_l0": a(3 * D, D)}
    return s, {"gru/kernel": a(5, 3 * D), "gru/recurrent_kernel": a(D, 3 * D)}, False


@trap
def neox_packed():
    s = lin("attention.query_key_value", D, 3 * D) | lin("attention.dense", D, D)
    return (
        s,
        {
            f"attn/{n}/{k}": a(*sh)
            for n in ("query", "key", "value")
            for k, sh in (("kernel", (D, 2, 4)), ("bias", (2, 4)))
        }
        | {"attn/out/kernel": a(2, 4, D), "attn/out/bias": a(D)},
        False,
    )


@trap
def kv_packed():
    s = lin("attn.q", D, D, 0) | lin("attn.kv", D, 2 * D, 0) | lin("attn.proj", D, D, 0)
    return (
        s,
        {f"attn/{n}/kernel": a(D, 2, 4) for n in ("query", "key", "value")}
        | {"attn/out/kernel": a(2, 4, D)},
        False,
    )


@trap
def gate_up():
    s = lin("mlp.gate_up_proj", D, 24, 0) | lin("mlp.down_proj", 12, D, 0)
    return (
        s,
        {"mlp/up/kernel": a(D, 12), "mlp/gate/kernel": a(D, 12), "mlp/down/kernel": a(12, D)},
        False,
    )


@trap
def w12():
    s = lin("mlp.w12", D, 24, 0) | lin("mlp.w3", 12, D, 0)
    return (
        s,
        {"mlp/value/kernel": a(D, 12), "mlp/gate/kernel": a(D, 12), "mlp/out/kernel": a(12, D)},
        False,
    )


@trap
def padded_vocab():
    s = {"embed.weight": a(32, D)}
    return s, {"embed/embedding": a(31, D)}, False


@trap
def opt_positions():
    s = {"wte.weight": a(31, D), "embed_positions.weight": a(19, D)}
    return s, {"tok/embedding": a(31, D), "pos/embedding": a(17, D)}, False


@trap
def same_tables():
    s = {"a.weight": a(31, D), "b.weight": a(31, D)}
    return s, {"x/embedding": a(31, D), "y/embedding": a(31, D)}, False


@trap
def cls_mask():
    s = {"tok_1": a(1, 1, D), "tok_2": a(1, 1, D)}
    return s, {"special_a": a(1, 1, D), "special_b": a(1, 1, D)}, False


@trap
def cls_mask_named():
    s = {"cls_token": a(1, 1, D), "mask_token": a(1, 1, D)}
    return s, {"class_embedding": s["cls_token"], "masked_embedding": s["mask_token"]}, True


@trap
def annotated_norm():
    s = nor("n")
    return s, {"n/a_2": s["n.weight"], "n/b_2": s["n.bias"]}, True


@trap
def anonymous_norm():
    s = nor("n")
    return s, {"n/x": s["n.weight"], "n/y": s["n.bias"]}, False


@trap
def unknown_key_square():
    s = {"l.weight": a(D, D)}
    return s, {"l/m": a(D, D)}, False


@trap
def embed_head_square():
    s = {"one.weight": a(D, D), "two.weight": a(D, D)}
    return s, {"p/embedding": a(D, D), "q/kernel": a(D, D)}, False


@trap
def heads_two():
    s = lin("head", D, 5) | lin("head_dist", D, 5)
    return s, den(s, "head", "logits_a") | den(s, "head_dist", "logits_b"), False


@trap
def heads_named():
    s = lin("head", D, 5) | lin("head_dist", D, 5)
    return s, den(s, "head", "head") | den(s, "head_dist", "distillation_head"), True


@trap
def enc_dec_stacks():
    s = {}
    [s.update(lin(f"{p}.{i}.fc", D, D)) for p in ("encoder", "decoder") for i in range(2)]
    t = {}
    [
        t.update(den(s, f"{p}.{i}.fc", f"{q}/{i}/dense"))
        for p, q in (("encoder", "stack_a"), ("decoder", "stack_b"))
        for i in range(2)
    ]
    return s, t, False


@trap
def attn12():
    s = {}
    [
        s.update(lin(f"{p}.{n}", D, D, 0))
        for p in ("attn1", "attn2")
        for n in ("to_q", "to_k", "to_v", "to_out")
    ]
    t = {
        f"{q}/{m}/kernel": s[f"{p}.{n}.weight"].T
        for p, q in (("attn1", "self_attention"), ("attn2", "cross_attention"))
        for n, m in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out", "out"))
    }
    return s, t, True


@trap
def attn12_reversed_names():
    s = {}
    [
        s.update(lin(f"{p}.{n}", D, D, 0))
        for p in ("attn1", "attn2")
        for n in ("to_q", "to_k", "to_v", "to_out")
    ]
    t = {
        f"{q}/{m}/kernel": a(D, D)
        for q in ("mha_b", "mha_a")
        for m in ("query", "key", "value", "out")
    }
    return s, t, False


@trap
def gemma_norms():
    N = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    s = {f"l.{n}.weight": a(D) for n in N}
    return (
        s,
        {
            f"l/{m}/scale": s[f"l.{n}.weight"]
            for n, m in zip(
                N,
                ("pre_attention_norm", "post_attention_norm", "pre_ffw_norm", "post_ffw_norm"),
                strict=False,
            )
        },
        True,
    )


@trap
def llama_norms_to_attn_mlp():
    s = {f"l.{n}.weight": a(D) for n in ("input_layernorm", "post_attention_layernorm")}
    return (
        s,
        {
            "l/mlp_norm/scale": s["l.post_attention_layernorm.weight"],
            "l/attn_norm/scale": s["l.input_layernorm.weight"],
        },
        True,
    )


@trap
def meta_swiglu():
    s = (
        lin("feed_forward.w1", D, 12, 0)
        | lin("feed_forward.w2", 12, D, 0)
        | lin("feed_forward.w3", D, 12, 0)
    )
    return (
        s,
        {
            "mlp/gate/kernel": s["feed_forward.w1.weight"].T,
            "mlp/down/kernel": s["feed_forward.w2.weight"].T,
            "mlp/up/kernel": s["feed_forward.w3.weight"].T,
        },
        True,
    )


@trap
def xformers_swiglu():
    s = lin("mlp.w1", D, 12, 0) | lin("mlp.w2", D, 12, 0) | lin("mlp.w3", 12, D, 0)
    return (
        s,
        {
            "mlp/gate/kernel": s["mlp.w1.weight"].T,
            "mlp/up/kernel": s["mlp.w2.weight"].T,
            "mlp/down/kernel": s["mlp.w3.weight"].T,
        },
        True,
    )
