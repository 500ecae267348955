"""Compares the settings and the epsilons of two configurations, key by key.

A configuration omits settings that equal the defaults of its class, and versions of transformers
write the same setting under several keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxmha.checkpoint.errors import listed, shown
from jaxmha.converters.discovery import architectures, hf_config, signs, unconverted
from jaxmha.converters.discovery.hf_config import Json

Way = tuple[str, ...]
# Differences, and notes on values that were not compared.
Found = tuple[list[str], list[str]]
# Settings of how a model is trained, run or saved, and those that `epsilons` compares.
_NOT_COMPARED = frozenset((
    *signs.OF_TRANSFORMERS, *hf_config.EPSILONS, "use_cache",
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "hidden_dropout", "hidden_dropout_prob", "classifier_dropout", "dropout", "dropout_rate",
    "activation_dropout", "embedding_dropout", "layerdrop", "encoder_layerdrop",
    "decoder_layerdrop", "summary_first_dropout",
    "initializer_range", "initializer_factor", "init_std", "gradient_checkpointing",
    "pretraining_tp", "torchscript", "return_dict", "use_return_dict", "output_attentions",
    "output_hidden_states", "output_past", "problem_type", "finetuning_task", "name_or_path",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "do_sample", "max_length", "min_length", "num_beams", "num_beam_groups",
    "num_return_sequences", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "diversity_penalty", "early_stopping", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "remove_invalid_values", "exponential_decay_length_penalty",
    "return_dict_in_generate", "output_scores",
))  # fmt: skip
# Settings that tensors, blocks, masks or another note show: if one configuration alone states them,
# they give no note.
_SHOWN_ELSEWHERE = frozenset((
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim",
    "num_attention_heads", "num_key_value_heads", "attention_bias", "mlp_bias", "qkv_bias",
    "use_bias", "tie_word_embeddings", "is_encoder_decoder", "is_decoder", "add_cross_attention",
    "max_window_layers",
))  # fmt: skip
# Keys of RoPE parameters, which older configurations have at their top or under `rope_scaling`.
_ROPE = "rope_parameters"
_OF_ROPE = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
# Keys without which every class of transformers takes the value given here.
_DEFAULTS = {"rope_type": "default"}
_REMEDY = "compare what it means"
_LONGEST = 200


class _Alone(NamedTuple):
    """A setting that only one configuration states."""

    way: Way
    value: Json
    of: int


def compare(x: Json, y: Json, known: bool) -> Found:
    """Compares the settings of two configurations.

    `known`: True if positions and masks of all blocks are known; otherwise, settings of attention
    that differ count as a difference. So do those that one configuration alone states, if a model
    type is not known. Notes name all other settings.
    """
    stated = _stated(x), _stated(y)
    differing, others, alone = list[str](), list[str](), list[_Alone]()
    for way in dict.fromkeys((*stated[0], *stated[1])):
        one, other = (settings.get(way) for settings in stated)
        of_attention = unconverted.concerns_attention(way)
        if _same(one, other) or (of_attention and known):
            continue
        if way not in stated[0] or way not in stated[1]:
            alone.append(_Alone(way, *((one, 0) if way in stated[0] else (other, 1))))
        elif of_attention:
            differing.append(_differs(way, shown(one), shown(other)))
        else:
            others.append(f"{named(way)} ({shown(one)} and {shown(other)})")
    notes = [f"their configurations also differ in {listed(others)}: {_REMEDY}"] if others else []
    more = _of_one(alone, judged=not _types_known(x, y))
    return [*differing, *more[0]], [*notes, *more[1]]


def _of_one(alone: Sequence[_Alone], judged: bool) -> Found:
    """Compares settings of one configuration alone with the default of the other, if it is known.

    `judged`: True if settings of attention count as a difference.
    """
    differing, rest = list[str](), list[_Alone]()
    for setting in alone:
        key = setting.way[-1]
        if key in _SHOWN_ELSEWHERE or setting.value == _DEFAULTS.get(key, ...):
            continue
        if judged and unconverted.concerns_attention(setting.way) and not _off(setting.value):
            text = shown(setting.value)
            pair = (text, "absent") if setting.of == 0 else ("absent", text)
            differing.append(_differs(setting.way, *pair))
        else:
            rest.append(setting)
    notes = []
    for of, which in enumerate(("first", "second")):
        if own := [f"{named(s.way)} ({shown(s.value)})" for s in rest if s.of == of]:
            notes.append(
                f"only the configuration of the {which} states {listed(own)}, which was not compared "
                f"with the default that holds in the other: {_REMEDY}"
            )
    return differing, notes


def named(way: Way) -> str:
    """The keys that lead to a setting, in words.

    >>> named(("text_config", "rms_norm_eps"))
    'text_config: rms_norm_eps'
    """
    text = ": ".join(way)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _differs(way: Way, first: str, second: str) -> str:
    return f"settings of attention: {named(way)} ({first} and {second})"


def _off(value: Json) -> bool:
    """True for values that turn most settings off: none, false, zero, or layers of full attention."""
    if isinstance(value, list):
        return all(kind == "full_attention" for kind in value)
    return not value or value == "none"


def _types_known(x: Json, y: Json) -> bool:
    """True if all model types are known, or if only one configuration names its own."""
    types = [hf_config.types_in(content) for content in (x, y)]
    known = all(name in architectures.KNOWN for names in types for name in names)
    return bool(types[0]) != bool(types[1]) or (known and bool(types[0]))


def _same(x: Json, y: Json) -> bool:
    return x == y or repr(x) == repr(y)  # NaN is not equal to itself


def _stated(content: Json) -> dict[Way, Json]:
    """The settings of a configuration, by the keys that lead to them in the newest transformers."""
    found: dict[Way, Json] = {}
    for way, settings in unconverted.settings(content):
        for key, value in settings.items():
            of_rope = key in (_ROPE, "rope_scaling")
            if of_rope and not value:
                found.setdefault((*way, _ROPE, "rope_type"), "default")
            elif not (isinstance(value, dict) or key.startswith("_") or key in _NOT_COMPARED):
                found[_renamed((*way, key))] = value
    return found


def _renamed(way: Way) -> Way:
    *above, key = (_ROPE if step == "rope_scaling" else step for step in way)
    if _ROPE in above:
        return *above, "rope_type" if key == "type" else key
    return (*above, _ROPE, _OF_ROPE[key]) if key in _OF_ROPE else (*above, key)


def epsilons(
    x: Mapping[str, Sequence[float]],
    y: Mapping[str, Sequence[float]],
) -> Found:
    """Compares epsilons of norms: by the keys that lead to them, or by layer.

    Without a common key, as of files of two formats, all values are compared as sets. The class
    default of an epsilon that only one source states is not known.
    """
    if not x.keys() & y.keys() and x and y:
        of_all = [[value for values in each.values() for value in values] for each in (x, y)]
        return list(_unlike("epsilon of norms", *of_all)), []
    differing = [text for key in x if key in y for text in _unlike(key, x[key], y[key])]
    notes = []
    for which, own, other in (("first", x, y), ("second", y, x)):
        texts = [f"{key} ({_in_words(own[key])})" for key in own if key not in other]
        if texts:
            notes.append(
                f"only the {which} states {listed(texts)}: these epsilons of norms were not compared; "
                "state them in both configurations"
            )
    return differing, notes


def _unlike(what: str, first: Sequence[float], second: Sequence[float]) -> Iterator[str]:
    if set(first) != set(second):
        yield f"{what}: first {_in_words(first)}; second {_in_words(second)}"


def _in_words(values: Sequence[float]) -> str:
    return " or ".join(f"{value:.3g}" for value in dict.fromkeys(values))
