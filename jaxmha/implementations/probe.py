"""Probes kernels: compiles and runs them on small cases, and compares the results with NumPy's.

Each process probes a kernel once per kind of request and kind of device. The environment variable
JAXMHA_PROBE changes this: `0` uses no kernel, `trust` uses kernels without a probe, `strict` raises
if a kernel fails. A probe that takes longer than JAXMHA_PROBE_SECONDS (default 60) has failed, and
stops before it compiles or runs anything more. The processes of a multi-process program exchange
the outcomes of their probes; each waits up to that limit for processes that have begun no probe.
"""

import atexit
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmha.implementations import platforms, probe_cases
from jaxmha.implementations.base import EVERYTHING_LEAKS, Leaks, Request, Result
from jaxmha.implementations.probe_cases import Kind

Attend = Callable[..., Result]
Reason = Callable[[Request], str | None]

# Largest error of a right result against float32, relative to the result's largest absolute value;
# bfloat16 rounds to 2 ** -8.
ALLOWED = 0.03
# Texts in the errors of a busy machine: after such an error a probe runs once more, and an outcome
# with one is not cached.
TRANSIENT = ("RESOURCE_EXHAUSTED", "out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED")
MODES = ("", "0", "trust", "strict")
# When the process ends, it waits up to this many seconds in all for the threads in _LATE: probes
# that did not finish in time. _WAITED: the turns for which `_agreed` has waited once already.
LINGER = 30.0
_LATE: list[threading.Thread] = []
_WAITED: set[str] = set()


class Finding(NamedTuple):
    """The outcome of a probe.

    Attributes:
      reason: why the kernel does not work; None: it works.
      leaks: which unattended keys and values affect its results.
      transient: True if the error may be temporary.
    """

    reason: str | None
    leaks: Leaks = Leaks()
    transient: bool = False


_LOCK = Lock()
_FOUND: dict[tuple[str, ...], Finding] = {}


def forget() -> None:
    """Clears the cached outcomes of all probes."""
    _FOUND.clear()


def failure(
    name: str,
    attend: Attend,
    unsupported: Reason,
    kind: Kind,
    *,
    likely: Leaks = Leaks(),
    agree: bool = True,
) -> str | None:
    """The reason why a kernel does not work here; None: it works, or JAXMHA_PROBE is "trust".

    Probes the kernel if no outcome is cached, and then warns if it fails.

    Args:
      name: the kernel's name in messages and as the key of its outcome.
      attend: runs the kernel; its argument `leaks` says what to zero.
      unsupported: the reason why the kernel cannot compute a case, which is then left out.
      kind: the kind of request to probe.
      likely: the `Leaks` that the probe tries first, since each try compiles the cases anew.
      agree: True if all processes probe the kernel: a failure in one is then one in all.

    Raises:
      RuntimeError: the kernel does not work, and JAXMHA_PROBE is "strict".
    """
    chosen = mode()
    if chosen in ("0", "trust"):
        return disabled()
    key = _key(name, kind)
    turn = _turn(key) if agree and jax.process_count() > 1 else None
    with _LOCK:
        found = _FOUND.get(key)
        if found is None:
            found = _within_limit(attend, unsupported, kind, likely)
            if not found.transient:
                _FOUND[key] = found
            if found.reason is not None and chosen != "strict":
                warnings.warn(
                    f"{name} does not work here in {kind.text}, so the next "
                    f"implementation is used: {found.reason}",
                    RuntimeWarning,
                    stacklevel=3,
                )
    if turn is not None:
        agreed = _agreed(turn, found)
        if not found.transient:
            _FOUND[key] = found._replace(leaks=agreed.leaks)
        found = agreed
    if found.reason is not None and chosen == "strict":
        raise RuntimeError(f"JAXMHA_PROBE=strict: {name} does not work here: {found.reason}")
    return found.reason


def leaks(name: str, kind: Kind) -> Leaks:
    """The unattended keys and values that affect the results of a kernel, as its probe found;
    `Leaks()` without a probe."""
    found = _FOUND.get(_key(name, kind))
    return Leaks() if found is None else found.leaks


def disabled() -> str | None:
    """The reason why programs may have no kernel, here or lowered for another machine; None:
    JAXMHA_PROBE is not 0."""
    return "JAXMHA_PROBE=0 uses no kernel" if mode() == "0" else None


def mode() -> str:
    """The value of JAXMHA_PROBE; "" if it is not set.

    Raises:
      ValueError: the value is unknown.
    """
    chosen = os.environ.get("JAXMHA_PROBE", "")
    if chosen not in MODES:
        raise ValueError(f"JAXMHA_PROBE must be among {MODES[1:]} or unset, got {chosen!r}")
    return chosen


def check_environment() -> None:
    """Raises ValueError for an unknown value of JAXMHA_PROBE or JAXMHA_PROBE_SECONDS, even where no
    kernel would be probed, so that a typo is found before the program moves to a GPU."""
    mode()
    seconds()


def seconds() -> float:
    """The time limit of a probe, from JAXMHA_PROBE_SECONDS.

    Raises:
      ValueError: the value is not a number from 0 to `threading.TIMEOUT_MAX`.
    """
    given = os.environ.get("JAXMHA_PROBE_SECONDS", "60")
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not 0 <= found <= threading.TIMEOUT_MAX:
        raise ValueError(f"JAXMHA_PROBE_SECONDS must be a number of seconds, got {given!r}")
    return found


def _key(name: str, kind: Kind) -> tuple[str, ...]:
    return name, kind.text, platforms.current().device


def _within_limit(attend: Attend, unsupported: Reason, kind: Kind, likely: Leaks) -> Finding:
    """Runs the probe on each of `platforms.devices()`, in a daemon thread and with one time limit.

    Returns the worst finding, with the leaks of all devices. The caller's trace and contexts do not
    apply in the thread. A hanging thread does not keep the process from exiting; one that compiles
    during the exit would abort it, so `_linger` waits for it.
    """
    devices = platforms.devices()
    found: list[Finding] = []

    def once() -> Finding:
        try:
            return _tried(attend, unsupported, kind, likely)
        except Exception as error:  # noqa: BLE001  building a case may raise any error too
            return _of(error)

    def run() -> None:
        each = []
        for device in devices:
            with jax.default_device(device):
                finding = once()
                if finding.transient:
                    time.sleep(1)
                    finding = once()
            each.append(finding)
        worst = max(each, key=lambda x: (x.reason is not None, not x.transient))
        found.append(worst._replace(leaks=_most(*(x.leaks for x in each))))

    thread = threading.Thread(target=run, name="jaxmha-probe", daemon=True)
    thread.start()
    try:
        thread.join(seconds())
    finally:
        if thread.is_alive():
            _LATE.append(thread)
    if found:
        return found[0]
    return Finding(f"it did not finish within {seconds():g} s (JAXMHA_PROBE_SECONDS)")


@atexit.register  # runs before JAX's handler, which was registered earlier
def _linger() -> None:
    until = time.monotonic() + LINGER
    for thread in _LATE:
        thread.join(max(0.0, until - time.monotonic()))


def _in_time() -> None:
    """Raises TimeoutError in the thread of a probe whose time limit has passed."""
    if threading.current_thread() in _LATE:
        raise TimeoutError


def _client() -> Any:
    """JAX's key-value store of a multi-process program; None: there is none."""
    from jax._src import distributed

    return distributed.global_state.client


def _turn(key: tuple[str, ...]) -> str | None:
    """Records that this process has begun its probe, and returns the prefix of the names under
    which processes exchange their outcomes. Returns None if there is no store.

    A transient outcome ends the use of a prefix, so that no process reads this outcome again.
    """
    client = _client()
    if client is None:
        return None
    turns = (f"jaxmha/probe/{'/'.join(key)}/{n}" for n in itertools.count())
    turn = next(x for x in turns if _get(client, f"{x}/over") is None)
    client.key_value_set(f"{turn}/begun/{jax.process_index()}", "", allow_overwrite=True)
    return turn


def _agreed(turn: str, found: Finding) -> Finding:
    """The worst of this process's finding and those of others, with the leaks of all: processes that
    run one program must choose the same implementation. `turn`: the prefix that `_turn` returned. A
    process that does not begin its probe in time is ignored: it seems to run another program."""
    client = _client()
    mine = f"{turn}/{jax.process_index()}"
    client.key_value_set(mine, json.dumps(found), allow_overwrite=True)
    until = time.monotonic() + (0 if turn in _WAITED else seconds())
    _WAITED.add(turn)
    for process in range(jax.process_count()):
        report = _get(client, f"{turn}/{process}", until - time.monotonic())
        if report is None and _get(client, f"{turn}/begun/{process}") is not None:
            # The other probe ends within its time limit, or within twice that on a busy machine.
            report = _get(client, f"{turn}/{process}", 2 * seconds())
        if report is None:
            continue
        reason, leaks, transient = json.loads(report)
        both = _most(found.leaks, Leaks(*leaks))
        found = found._replace(leaks=both, transient=found.transient or transient)
        if reason is not None and found.reason is None:
            found = found._replace(reason=f"it fails in process {process}: {reason}")
    if found.transient:
        client.key_value_set(f"{turn}/over", "", allow_overwrite=True)
    return found


def _get(client: Any, name: str, wait: float = 0) -> str | None:
    """Reads a value of the store, after at most `wait` seconds; None: it is not set yet."""
    milliseconds = int(1000 * wait)
    try:
        if milliseconds > 0:
            found: str = client.blocking_key_value_get(name, milliseconds)
        else:  # a blocking call with a short limit could miss a value that is set
            found = client.key_value_try_get(name)
    except Exception as error:
        if not any(text in str(error) for text in ("NOT_FOUND", "DEADLINE_EXCEEDED")):
            raise
        return None
    return found


def _most(*leaks: Leaks) -> Leaks:
    return Leaks(*map(max, zip(*leaks, strict=True)))


def _tried(attend: Attend, unsupported: Reason, kind: Kind, likely: Leaks = Leaks()) -> Finding:
    """Runs all cases of a kernel. As long as a case with NaN in unattended keys and values has a wrong
    result, runs all cases again with more of these zeroed, up to all of them."""
    leaks: Leaks | None = likely
    while leaks is not None:
        found, leaks = _once(attend, unsupported, kind, leaks)
    return found


def _once(
    attend: Attend, unsupported: Reason, kind: Kind, leaks: Leaks
) -> tuple[Finding, Leaks | None]:
    """Runs the supported cases, up to the first that fails, with unattended keys and values zeroed as
    `leaks` says. Returns the finding, and the `Leaks` to try next (None: the finding is final)."""
    for case in probe_cases.cases(kind):
        if unsupported(case.request) is not None:
            continue
        try:
            _in_time()
            wrong = _wrong(attend, case, leaks)
        except Exception as error:  # noqa: BLE001  drivers and compilers raise any
            return _of(error), None
        if wrong is not None:
            more = case.poisoned and leaks != EVERYTHING_LEAKS
            gradient = wrong.startswith("the gradient")
            found = Finding(f"{wrong} of the largest value ({case.name})")
            return found, _more(leaks, gradient=gradient) if more else None
    return Finding(None, leaks), None


def _more(leaks: Leaks, *, gradient: bool) -> Leaks:
    """The `Leaks` to try next, if a result is wrong: one level more for gradients if it is a
    `gradient`, else for the output, and then gradients have at least the level of the output. If
    gradients have the highest level already, everything is zeroed."""
    if gradient and leaks.gradients < EVERYTHING_LEAKS.gradients:
        return leaks._replace(gradients=leaks.gradients + 1)
    output = EVERYTHING_LEAKS.output if gradient else leaks.output + 1
    return Leaks(output, max(output, leaks.gradients))


def _wrong(attend: Attend, case: probe_cases.Case, leaks: Leaks) -> str | None:
    """Says which result of a case is wrong, and by how much; None: no result is wrong."""
    request = case.request

    def run(*operands: jax.Array) -> tuple[Any, ...]:
        def value(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[Any, ...]:
            these = request._replace(query=query, key=key, value=value)
            found = attend(these, leaks=leaks)
            return (found.out, found.lse) if request.return_lse else (found.out,)

        *heads, d_out, d_lse = operands
        pull = jax.vjp(value, *heads)[1]
        # Outputs are computed again: without a gradient, cuDNN may run another kernel.
        return *value(*heads), *pull((d_out, d_lse) if request.return_lse else (d_out,))

    operands = *request[:3], *case.cotangents
    compiled = jax.jit(run).lower(*operands).compile()
    _in_time()  # after the time limit the caller runs its own programs: start none next to them
    found = compiled(*operands)
    expected = case.expected()
    for what, x in zip(expected, found, strict=True):
        y = expected[what]
        x, finite = np.asarray(x, np.float32), np.isfinite(y)
        error = np.abs(x[finite] - y[finite]).max() / np.abs(y[finite]).max()
        same = np.array_equal(x[~finite], y[~finite])  # -inf in the log-sum-exp
        if not (error <= ALLOWED and same):  # unlike `error > ALLOWED`, true if error is NaN
            return f"{what} is wrong by {error:.1e}"
    return None


def _of(error: Exception) -> Finding:
    line = (str(error).strip().splitlines() or [""])[0][:200]
    transient = isinstance(error, MemoryError) or any(text in str(error) for text in TRANSIENT)
    return Finding(f"{type(error).__name__}: {line}", transient=transient)
