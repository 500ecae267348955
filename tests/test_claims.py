"""Every claim of the three documents is checked, and its verdict is what the check finds."""

import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest

from experiments.claims import __main__ as command
from experiments.claims import elsewhere, page
from experiments.claims.claims import CLAIMS, DOCUMENTS, Found, verdict
from experiments.report import registry

(RESULTS,) = (registry.found(e) for e in registry.EXPERIMENTS if e.name == "claims")


def test_every_claim_has_a_check_of_its_own() -> None:
    assert CLAIMS.keys() == DOCUMENTS.keys()
    checks = [claim.check for claims in CLAIMS.values() for claim in claims]
    texts = [claim.text for claims in CLAIMS.values() for claim in claims]
    assert len(set(checks)) == len(checks) == len(set(texts)) >= 65


@pytest.mark.parametrize("name", ["one_head", "blog", "similarity", "modules", "elsewhere"])
def test_every_check_is_asked_for(name: str) -> None:
    module = import_module(f"experiments.claims.{name}")
    checks = {
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and inspect.signature(function).return_annotation is Found
    }
    asked = {claim.check for claims in CLAIMS.values() for claim in claims}
    assert checks
    assert checks <= asked


def test_verdicts() -> None:
    assert RESULTS is not None
    rows = {row[0]: row[1:] for rows in page.tables(RESULTS).values() for row in rows[1:]}
    assert len(rows) == sum(map(len, CLAIMS.values()))
    verdicts = {
        "In PyTorch, True in a Boolean mask means attend": "true with a condition",
        "The examples run as printed": "false",
        "What is left after seeding is due to implementation and numerics": "true with a condition",
        "They can have a significant impact on convergence and performance": "not shown",
        "The literature calls lengths tgt_seq_len and src_seq_len": "not shown",
        "Eight heads of 64 give the same tensor as one head of 512": "true with a condition",
        "The same seed in both reduces the variance": "true with a condition",
        "Seed and random state cause small variations of the weights": "true with a condition",
        "A mask of (B, T) with one more axis masks padding": "true with a condition",
        "SDPA takes a faster kernel such as flash where it is available": "true",
        "Keys may be of another number than queries, and values of another width than keys": "true",
        "These differences significantly alter the output": "false",
        "That may be the opposite in other frameworks, such as JAX": "false",
        "In SDPA's Boolean mask True means attend": "true",
        "The code calls lengths tgt_seq_len and src_seq_len": "false",
        "A dot product is cheaper than the cosine": "true",
        "Unused keyword arguments are None": "true",
        "A head's logits sum over a subset of the components": "true",
    }
    assert {text: rows[text][0] for text in verdicts} == verdicts
    assert all("{" not in evidence for _, evidence in rows.values())


LONG = {"jax_is_opposite", "materialised", "module_is_function"}  # half of the time of the blog's


@pytest.mark.everyday(left_out=[LONG], document=["blog"])
@pytest.mark.parametrize("left_out", [LONG, set()], ids=["short", "all"])
@pytest.mark.parametrize("document", ["blog", "one_head"])
def test_checks_find_what_is_stored(document: str, left_out: set[str]) -> None:
    assert RESULTS is not None
    for claim in CLAIMS[document]:
        if claim.check in left_out or hasattr(elsewhere, claim.check):
            continue
        found = command.check_of(document, claim.check)()
        assert found.holds == RESULTS["documents"][document][claim.check]["holds"], claim.text
        assert claim.evidence.format(**found.numbers)


@pytest.mark.slow
def test_everything_again() -> None:
    """In a process of its own, whose Keras runs on TensorFlow."""
    command = [sys.executable, "-m", "experiments.claims", "--json"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=registry.HERE.parent
    )
    assert RESULTS is not None
    for document, checks in json.loads(done.stdout)["documents"].items():
        for check, found in checks.items():
            stored = RESULTS["documents"][document][check]
            assert verdict(found["holds"]) == verdict(stored["holds"]), check


def test_sentences_say_when() -> None:
    claim = CLAIMS["one_head"][0]._replace(evidence="{a:.0e} and {b:.0e}")
    check = {"holds": {"here": True, "there": False}, "numbers": {"a": 2e-7, "b": 0.0}}
    assert page.sentence(claim._replace(evidence="so"), {**check, "holds": {"": True}}) == "So."
    assert page.sentence(claim, check) == "True for *here*; not for *there*. 2e-7 and 0."
