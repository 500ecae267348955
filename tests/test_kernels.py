"""Fused kernels behind the contract: what surrounds them, exactly; splash and tokamax where they run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, implementations
from jaxmha.implementations import probe
from jaxmha.implementations.base import Leaks
from jaxmha.implementations.fused import adapter, splash, tokamax
from tests import conformance, jit_cache
from tests.cases import POISONED, Case
from tests.kernel_cases import ALL, BY_NAME, check
from tests.promotion import foreign


@pytest.fixture
def splash_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel itself, interpreted; in float32 too, where errors show."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(splash, "DTYPES", ("bfloat16", "float32"))
    with jaxmha.lowering_for("tpu"):
        yield


@pytest.mark.usefixtures("splash_here")
def test_splash_values() -> None:
    conformance.values(replace(BY_NAME["window_and_lengths"], K=1), "splash", "float32", jit=True)


@pytest.mark.slow
@pytest.mark.usefixtures("splash_here")
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splash(case: Case, dtype: str) -> None:
    check(case, "splash", dtype, lse=dtype == "float32" and case.logits_soft_cap is None)


@pytest.mark.slow
@pytest.mark.usefixtures("splash_here")
@pytest.mark.parametrize("case", [POISONED[0], POISONED[1], POISONED[2]])
def test_splash_poisoned(case: Case) -> None:
    bare = replace(case, bias=None, logits_soft_cap=None)
    conformance.poisoned_padding(bare, "splash", "float32")


@pytest.mark.parametrize(
    ("device", "backends"), [("a100", ("triton",)), ("h100", ("mosaic", "triton"))]
)
def test_tokamax_has_a_gradient_by_triton_below_hopper(
    device: str, backends: tuple[str, ...]
) -> None:
    with jaxmha.lowering_for(device):
        assert tokamax._backends() == backends


@pytest.mark.parametrize(
    ("leaks", "alone", "with_gradient"),
    [((0, 0), "", ""), ((0, 1), "", "v"), ((1, 2), "v", "kv"), ((2, 2), "kv", "kv")],
)
@pytest.mark.parametrize("kernel", ["cudnn", "tokamax"])
def test_what_leaks_is_zeroed_and_no_more(
    kernel: str, leaks: Any, alone: str, with_gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: adapter.KernelInputs, *_: Any, **__: Any) -> Any:
        out = jnp.concatenate([inputs.key, inputs.value], 3)
        return out if kernel == "tokamax" else (out, None)

    module = implementations.IMPLEMENTATIONS[kernel]
    monkeypatch.setattr(module, "_run", run)
    x, mask = jnp.full((1, 5, 1, 8), jnp.nan), Mask.lengths(key_value=np.asarray([3]))

    def out(x: Any) -> Any:
        request = implementations.Request(x, x, x, None, mask, jaxmha.Semantics(), None, False)
        return module.attend(request, leaks=Leaks(*leaks)).out

    runs = (out, alone), (lambda x: jax.vjp(out, x)[0], with_gradient)
    for run_once, expected in runs:
        found = np.asarray(jax.jit(run_once)(x))
        dead = np.isnan(found[0, :, 0, 7:9])
        assert dead[:3].all()
        assert "".join("kv"[n] for n in (0, 1) if not dead[3:, n].any()) == expected


@pytest.fixture
def tokamax_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its public function, by the plain implementation that it has for every device."""
    pytest.importorskip("tokamax")
    monkeypatch.setattr(tokamax, "BACKENDS", ("xla",))
    monkeypatch.setattr(tokamax, "traceable", lambda: None)
    with jaxmha.lowering_for("h200"), foreign():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("tokamax_here")
@pytest.mark.parametrize("case", ALL)
def test_tokamax(case: Case) -> None:
    check(case, "tokamax", "bfloat16", lse=False)


# Leaks that a probe of tokamax finds in calls with a dense mask or a bias, and with lengths where tiles are cut.
DENSE, LENGTHS = Leaks(1, 2), Leaks()
POISONED_BY_MASKS = (
    Case("poisoned_padding", mask="B11S", dead_keys=True, logits_soft_cap=1.1),
    Case("poisoned_segments", segments="pair"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("tokamax_here")
@pytest.mark.parametrize("case", [*POISONED, *POISONED_BY_MASKS])
def test_tokamax_poisoned(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks select logits, and a bias is added: NaN gets through where the probe, which has masks, is clean."""
    found = LENGTHS if case in POISONED_BY_MASKS else DENSE
    monkeypatch.setattr(probe, "leaks", lambda *_: found)
    jit_cache.forget()  # other tests trace such calls without leaks
    capped = case if case.bias is None else replace(case, logits_soft_cap=None)
    conformance.poisoned_padding(capped, "tokamax", "bfloat16", lse=False)
