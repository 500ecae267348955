"""Checks of the third document: a walk through MHA for those who implement it."""

import inspect
import warnings
from typing import Any

import jax
import numpy as np
import torch

from experiments.claims.claims import SAME, Found, found
from experiments.claims.printed import apart
from jaxmha import Semantics
from jaxmha.converters import torch as convert
from jaxmha.converters.verify import oracle

F = torch.nn.functional
B, T, S, N, H, VALUE = 2, 5, 7, 4, 8, 3
D = N * H


def heads(v: int = H, n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, key, value of SDPA."""
    torch.manual_seed(0)
    return torch.randn(B, N, T, H), torch.randn(B, n, S, H), torch.randn(B, n, S, v)


def layer(**options: Any) -> torch.nn.MultiheadAttention:
    """With biases that are not zero."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(D, N, **{"batch_first": True, **options})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def definition(q: Any, k: Any, v: Any) -> np.ndarray:
    """softmax(q k / sqrt d) v, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    return np.asarray(((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).numpy())


def formula() -> Found:
    """SDPA and the formula."""
    q, k, v = heads()
    away = apart(F.scaled_dot_product_attention(q, k, v).numpy(), definition(q, k, v))
    return found({"SDPA": away < SAME}, apart=away)


def minus_infinity() -> Found:
    """Weights of masked keys, and of a row without keys."""
    logits = torch.randn(T, S)
    some, nothing = logits.clone(), logits.clone()
    some[:, 3:], nothing[0] = -torch.inf, -torch.inf
    zero = bool((some.softmax(-1)[:, 3:] == 0).all())
    rest = nothing.softmax(-1)[0]
    holds = {"some keys masked": zero, "all keys masked": bool((rest == 0).all())}
    return found(holds, row="NaN" if rest.isnan().all() else "a number")


def lookups() -> Found:
    """A query's output depends on no other query, and is a weighted mean of values."""
    q, k, v = heads()
    out = F.scaled_dot_product_attention(q, k, v)
    alone = F.scaled_dot_product_attention(q[:, :, :1], k, v)
    inside = (out <= v.amax(2, keepdim=True) + 1e-6) & (out >= v.amin(2, keepdim=True) - 1e-6)
    holds = {
        "queries are independent": apart(alone.numpy(), out[:, :, :1].numpy()) < SAME,
        "outputs are means of values": bool(inside.all()),
    }
    return found(holds, apart=apart(alone.numpy(), out[:, :, :1].numpy()))


def own_lengths() -> Found:
    """Another number of keys and another width of values, in SDPA and in the module."""
    q, k, v = heads(VALUE)
    shape = list(F.scaled_dot_product_attention(q, k, v).shape)
    module = layer(vdim=VALUE)
    out = module(torch.randn(B, T, D), torch.randn(B, S, D), torch.randn(B, S, VALUE))[0]
    params, _ = convert.from_module(module)
    holds = {
        "number of keys, SDPA and module": out.shape[1] == T and shape[2] == T,
        "width of values, SDPA": shape[-1] == VALUE,
    }
    return found(holds, head=params.value.kernel.shape[-1], shape=str(shape))


def same_widths() -> Found:
    """Tests SDPA with another query width and with one value too few; the module takes kdim."""
    q, k, v = heads()
    module, x = layer(kdim=S), torch.randn(B, T, D)
    out = module(x, torch.randn(B, S, S), torch.randn(B, S, D))[0]
    fewer = _refused(q, k, v[:, :, :-1])  # a view, so that what is read beyond it is ours
    holds = {"widths in SDPA": _refused(q[..., 1:], k, v), "numbers in SDPA": fewer}
    assert out.shape == x.shape
    return found(holds, query=D, key=S, fewer="raises" if fewer else "raises nothing")


def _refused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    try:
        F.scaled_dot_product_attention(q, k, v)
    except RuntimeError:
        return True
    return False


def shapes_of_nodes() -> Found:
    """Of the products, the softmax and the output, for one head."""
    q, k, v = (x[0, 0] for x in heads(VALUE))
    logits = q @ k.mT
    weights = (logits / H**0.5).softmax(-1)
    holds = {
        "A, A_scaled, A_probs": logits.shape == weights.shape == (T, S),
        "output": (weights @ v).shape == (T, VALUE),
    }
    return found(holds, weights=str(list(weights.shape)), out=str(list((weights @ v).shape)))


def steps() -> Found:
    """torch's layer, and projections, heads, SDPA, projection."""
    module = layer().eval()
    x = torch.randn(B, T, D)
    with torch.no_grad():
        out = module(x, x, x, need_weights=False)[0].numpy()
    params, _ = convert.from_module(module)
    away = apart(out, oracle.run(params, Semantics(), *[x.numpy()] * 3).output)
    return found({"nn.MultiheadAttention": away < SAME}, apart=away)


def heads_are_batch() -> Found:
    """Heads as an axis of their own, and as rows of the batch."""
    q, k, v = heads()
    out = F.scaled_dot_product_attention(q, k, v).flatten(0, 1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    rows = F.scaled_dot_product_attention(q, k, v)
    away = apart(rows.numpy(), out.numpy())
    return found({"SDPA": away < SAME}, apart=away)


def grouped() -> Found:
    """Fewer key and value heads, and repeated ones."""
    q, k, v = heads(n=N // 2)
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    away = apart(out.numpy(), F.scaled_dot_product_attention(q, k, v).numpy())
    return found({"SDPA": away < SAME}, apart=away)


def flash_where_available() -> Found:
    """The kernel that SDPA picks on CPU: 1 is flash, which needs H = h there; 0 is the plain one."""
    q, k, v = heads()
    same = torch._fused_sdp_choice(q, k, v)
    wide = torch._fused_sdp_choice(*heads(VALUE))
    return found({"flash supports the shapes": same == 1}, same=same, wide=wide)


def sdpa_true() -> Found:
    """A Boolean mask, and fewer keys."""
    q, k, v = heads()
    keep = torch.arange(S) < 3
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[None])
    away = apart(out.numpy(), definition(q, k[:, :, :3], v[:, :, :3]))
    return found({"SDPA": away < SAME}, apart=away)


def jax_is_opposite() -> Found:
    """The same mask in jax.nn, and in torch's own module."""
    q, k, v = (x.transpose(1, 2).numpy() for x in heads())
    keep = np.arange(S) < 3
    out = np.asarray(jax.nn.dot_product_attention(q, k, v, mask=keep[None, None, None]))
    exact = definition(*(torch.tensor(x).transpose(1, 2) for x in (q, k[:, :3], v[:, :3])))
    away = apart(out, np.moveaxis(exact, 1, 2))
    return found({"jax.nn": away > SAME}, apart=away)


def batch_is_second() -> Found:
    """Tests that the layer reads axis 1 as the batch; the wrong order raises no error."""
    module, x = layer(batch_first=False).eval(), torch.randn(T, B, D)
    other = layer().eval()
    with torch.no_grad():
        out = module(x, x, x)[0]
        swapped = other(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)
        wrong = other(x, x, x)[0]
    holds = {"batch_first=True swaps": apart(swapped.numpy(), out.numpy()) < SAME}
    return found(holds, wrong=apart(wrong.numpy(), out.numpy()))


def returns_weights() -> Found:
    """Second output and the softmax, in eval and in training with dropout."""
    module, x = layer(dropout=0.5).eval(), torch.randn(B, T, D)
    params, semantics = convert.from_module(module)
    exact = oracle.run(params, semantics, *[x.numpy()] * 3).probabilities
    with torch.no_grad():
        plain = module(x, x, x, average_attn_weights=False)[1].numpy()
        dropped = module.train()(x, x, x, average_attn_weights=False)[1]
    holds = {
        "in eval": apart(plain, exact) < SAME,
        "in training": apart(dropped.numpy(), exact) < SAME,
    }
    sums = dropped.sum(-1)
    return found(holds, least=sums.min(), most=sums.max())


def averaged() -> Found:
    """The default, and the mean over heads."""
    module, x = layer().eval(), torch.randn(B, T, D)
    with torch.no_grad():
        mean, each = (module(x, x, x, average_attn_weights=a)[1] for a in (True, False))
    away = apart(mean.numpy(), each.mean(1).numpy())
    return found({"average_attn_weights=True": away < SAME}, shape=str(list(mean.shape)))


def weights_are_default() -> Found:
    """By the signature."""
    default = inspect.signature(torch.nn.MultiheadAttention.forward).parameters["need_weights"]
    return found({"need_weights": default.default is True}, default=str(default.default))


def off_in_production() -> Found:
    """Does leaving the weights out change nothing else?"""
    module, x = layer(), torch.randn(B, T, D)
    blocked = torch.zeros(B, T, dtype=torch.bool)
    with torch.no_grad():
        away = apart(*(module(x, x, x, need_weights=w)[0].numpy() for w in (False, True)))
        blocked[0] = True
        masked = {"key_padding_mask": blocked}
        out = [module(x, x, x, need_weights=w, **masked)[0][0] for w in (True, False)]
    holds = {
        "every row has a key": away < SAME,
        "a row without keys": bool(out[0].isnan().any() == out[1].isnan().any()),
    }
    rows = ["NaN" if o.isnan().all() else "the bias of the output" for o in out]
    return found(holds, apart=away, on=rows[0], off=rows[1])


def nested() -> Found:
    """A nested tensor on the fast path, and off it."""
    module = layer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: nested tensors are a prototype
        x = torch.nested.nested_tensor([torch.randn(n, D) for n in (T, S)])
    outcomes = []
    for training in (True, False):
        module.train(training)
        try:
            with torch.no_grad():
                module(x, x, x, need_weights=False)
            outcomes.append("")
        except AssertionError as error:
            outcomes.append(type(error).__name__)
    holds = {"refused off it": bool(outcomes[0]), "taken on it": not outcomes[1]}
    return found(holds, error=outcomes[0])


def lengths_names() -> Found:
    """Names of lengths in torch's own code."""
    source = inspect.getsource(F.multi_head_attention_forward)
    longer = ("tgt_seq_len", "src_seq_len")
    holds = {name: name in source for name in longer}
    return found(
        holds,
        longer=sum(source.count(name) for name in longer),
        names=source.count("tgt_len") + source.count("src_len"),
    )


def literature_names() -> Found:
    """Papers are not read by any check here."""
    return found({"literature": None})


def spelling() -> Found:
    """Names in torch.nn."""
    holds = {"torch.nn.MultiHeadAttention": hasattr(torch.nn, "MultiHeadAttention")}
    return found(holds, there=torch.nn.MultiheadAttention.__name__)
