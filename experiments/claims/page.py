"""Functions for page.md: the verdict and the evidence of every claim."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from experiments.claims import elsewhere
from experiments.claims.claims import CLAIMS, DOCUMENTS, Claim, Found, verdict
from experiments.pages import Rows

NAME = re.compile(r"\w+[._]\w")  # of code, at the start of a sentence
SHORTER = re.compile(r"(\d)e\+?(-?)0*(\d)")  # 2e-07 as 2e-7


def verdicts(found: dict[str, Any]) -> Counter[str]:
    """Verdict -> number of claims."""
    return Counter(row[1] for rows in tables(found).values() for row in rows[1:])


def tables(found: dict[str, Any]) -> dict[str, Rows]:
    """Title -> rows of claim, verdict, evidence."""
    return {
        DOCUMENTS[name]: [
            ["claim", "verdict", "evidence"],
            *(
                [claim.text, verdict(check["holds"]), sentence(claim, check)]
                for claim in CLAIMS[name]
                for check in [referred(claim) or checks[claim.check]]
            ),
        ]
        for name, checks in found["documents"].items()
    }


def referred(claim: Claim) -> dict[str, Any] | None:
    """The findings of another experiment that checks the claim; None if this one checks it."""
    check: Callable[[], Found] | None = getattr(elsewhere, claim.check, None)
    return check()._asdict() if check else None


def sentence(claim: Claim, check: dict[str, Any]) -> str:
    """The evidence, and under which conditions the claim holds."""
    evidence: str = SHORTER.sub(r"\1e\2\3", claim.evidence.format(**check["numbers"]))
    evidence = evidence.replace("0e0", "0")
    evidence += "."
    if not NAME.match(evidence):
        evidence = evidence[0].upper() + evidence[1:]
    holds = check["holds"]
    if len(set(holds.values())) == 1:
        return evidence
    fine, wrong = (
        ", ".join(f"*{condition}*" for condition, value in holds.items() if value == wanted)
        for wanted in (True, False)
    )
    if None in holds.values():
        return evidence
    return f"True for {fine}; not for {wrong}. {evidence}"
