"""Runs the zoo: `python -m tests.zoo [TYPE ...] [--workers 2] [--again CLASS ...]`.

Every type is checked in a process that is replaced when it takes too long. Results are kept in
build/zoo.json after each type, so that an interrupted run goes on.
"""

import argparse
import json
import time

from tests.zoo import other_results
from tests.zoo.page import write
from tests.zoo.pool import RESULTS, results, summary, titles, types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="default: all that have no result")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", nargs="*", default=[], help="classes to check again")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--write", action="store_true", help="write expected classes and the page")
    parser.add_argument("--others", action="store_true", help="models of other libraries")
    parser.add_argument("--quick", action="store_true", help="jaxmha itself computes no block")
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() and not given.fresh else {}
    todo = given.types or [
        t
        for t in (titles() if given.others else types())
        if t not in found or found[t]["class"] in given.again
    ]
    start = time.monotonic()
    if todo:
        results(todo, given.workers, found, not given.quick)
    print(summary(found))
    if others := {t: one["class"] for t, one in found.items() if "/" in t}:
        print(other_results.counts(others))
    if given.write and others:
        other_results.write(found)
    if given.write and (of_types := {t: one for t, one in found.items() if "/" not in t}):
        write(of_types)
    print(f"{len(todo)} types in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
