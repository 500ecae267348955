"""At most one function in ten has a bare `Any` in its signature."""

import pytest

from tests import any_share


@pytest.mark.parametrize("room", any_share.ROOMS)
def test_few_signatures_have_a_bare_any(room: str) -> None:
    found = list(any_share.functions(any_share.ROOT / room))
    bare = [place for place, has in found if has]
    assert len(bare) <= 0.1 * len(found), bare


@pytest.mark.parametrize(
    ("source", "bare"),
    [
        ("def f(a: int) -> Any: ...", True),
        ("def f(*a: Any): ...", True),
        ("def f(a: 'str', *, b: Any | None = None): ...", True),
        ("def f(a: list[Any]) -> dict[str, Any]: ...", False),
        ("class A:\n    async def f(self, a: Any): ...", True),
    ],
)
def test_a_bare_any_is_counted(source: str, bare: bool) -> None:
    assert [has for _, has in any_share.in_source(source)] == [bare]
