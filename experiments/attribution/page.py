"""The page of this experiment, with every number from its results."""

from typing import Any

from jaxmha.converters.verify.attribution import percent

QUESTION = "Why do two hand-written layers of PyTorch and TensorFlow give different results?"
COMMAND = "python -m experiments.attribution --write"


def conclusion(found: dict[str, Any]) -> str:
    """In one or two sentences."""
    first, last = found["steps"][0], found["steps"][-1]
    weights, mask = _split(first)
    return (
        f"Weights that were never shared ({percent(weights)} of the difference) and a mask that means "
        f"the opposite ({percent(mask)}); with both repaired {last['relative']:.0e} of the output is "
        "left, which is rounding"
    )


def text(found: dict[str, Any]) -> str:
    """Markdown."""
    steps, first = found["steps"], found["steps"][0]
    weights, mask = _split(first)
    errors = "\n".join(f"| {name} | `{what}` |" for name, what in found["errors"].items())
    parts = "\n".join(
        f"| {part['name']} | {percent(part['share'])} | {part['size']:.2g} | {part['sentence']} |"
        for part in first["parts"]
    )
    states = "\n".join(
        f"| {step['name']} | {step['total']:.1e} | {step['away'][0]:.1e} | {step['away'][1]:.1e} | "
        f"{step['parts'][0]['name']} |"
        for step in steps
    )
    printed = "\n".join(
        f"| {row['weights']} | {row['mask']} | {row['sum']:.3g} | {row['largest']:.2g} |"
        for row in found["printed"]
    )
    idle = "; ".join(first["idle"])
    rounding = next(p["rms"] for p in first["parts"] if p["name"] == "rounding") / first["total"]
    floors = steps[-1]["total"] / steps[-1]["floor"]
    return f"""{conclusion(found)}.

![What the difference comes from](waterfall.svg)

Every bar is one factor that differs between the two layers, changed from PyTorch's to TensorFlow's
while the others are as they are, averaged over every order of changing them; so the bars sum to the
difference. All weights together are {percent(weights)} of it, what the mask means is {percent(mask)}.
The order of floating-point operations, which the text holds responsible in the end, moves the output
by {percent(rounding)} of it.

## What was asked

A text sets two classes side by side, one for PyTorch and one for TensorFlow, gives both the same
seed, the same input and the same mask, and finds their outputs to differ. Here the classes run as
they are written there.

## As they are written, they do not run

With a batch of {found["sizes"]["written"]} and {found["sizes"]["N"]} heads, as in the text, both stop:

| | ends with |
|---|---|
{errors}

A mask `(batch, seq)` gets one axis in front of `seq`, where attention has two (heads and queries): so
`batch` meets heads. They run if the batch is 1, or as large as the number of heads, and then **row b of
the mask is applied to head b**, in silence. That is the smallest repair, and the first row below.

## Repaired step by step

![What is left after every repair](repairs.svg)

| repaired | RMS difference | PyTorch from what is meant | TensorFlow from what is meant | mostly from |
|---|---|---|---|---|
{states}

Sequences are ragged ({", ".join(map(str, found["sizes"]["lengths"]))} of {found["sizes"]["T"]} tokens).
"What is meant" is exact attention with each layer's own weights to the tokens that are there, and the
distances from it are relative to the output. Both are wrong until the mask has its axis, and their
difference does not tell: comparing two layers cannot show a mistake that they share. In the end the difference is {floors:.0f} times what rounding the output
to float32 costs.

The parts of the first row (a is PyTorch's class, b TensorFlow's):

| part | share | size (RMS) | what |
|---|---|---|---|
{parts}

These differ too, and do nothing on these inputs: {idle}. In float32 a logit of ordinary size
vanishes beside 1e9, so that adding is filling.

## The number that the text prints

Its sum of absolute differences, with its mask of ones (given the missing axis), two sequences:

| weights | mask | sum | largest |
|---|---|---|---|
{printed}

- A mask of ones is no neutral test: TensorFlow's class blocks every key, and answers with the mean of
  the values for every query.
- One seed does not make weights alike: the generators have nothing in common. And
  `tf.random.set_seed(42)` does not even fix Keras' weights: three builds after it
  {"all differ" if found["builds"] == 3 else f"have {found['builds']} different weights"}.
- Copied weights and one meaning of the mask leave rounding.

## How it was done

`jaxmha.converters.attribute` on weights as they were imported, on masks as they were read by
`jaxmha.converters.masks.handwritten`, and on the outputs of the classes themselves; mixtures of factors in
float64. Shares are lengths along the whole difference: they may be negative, and sum to 1.
"""


def _split(step: dict[str, Any]) -> tuple[float, float]:
    """Shares of all weights, and of what the mask means."""
    weights = sum(
        part["share"]
        for part in step["parts"]
        if part["name"].endswith("weights")
        or part["name"] in ("biases", "dropped bias", "zero bias")
    )
    return weights, _share(step, "mask polarity")


def _share(step: dict[str, Any], name: str) -> float:
    return float(sum(part["share"] for part in step["parts"] if part["name"] == name))
