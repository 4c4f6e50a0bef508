"""The setting that makes every entry batch invariant: its forms and its effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.calls.valid_calls import FUNCTIONS, MLA, form

import hopwell
from hopwell._calls import switches
from hopwell.kernels import registry
from hopwell.kernels.config.mla import shipped_mla_configs
from hopwell.kernels.config.splitting import ROWS
from hopwell.kernels.jit import settings


@pytest.fixture(autouse=True)
def unswitched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", None)
    monkeypatch.delenv("HOPWELL_BATCH_INVARIANT", raising=False)


def many_rows() -> dict[str, Any]:
    """Make a call of more than 16 rows; calls of fewer rows are always batch invariant."""
    arguments = form(MLA, "dense")
    return {**arguments, "query": arguments["query"].repeat(1, 1, 17, 1)}


def kernel(recorded: Any) -> str:
    return str(registry.resolve(recorded.problems[-1], "sm_90a").name)


def test_switching(recorded: Any) -> None:
    """Later calls take the other kernel, known calls included."""
    arguments = many_rows()
    names = []
    for enable in (None, True, False):
        if enable is not None:
            hopwell.batch_invariant(enable)
        before = len(recorded.problems)
        for _ in range(2):
            FUNCTIONS[MLA](**arguments)
        assert len(recorded.problems) == before + 1, "the second call is known"
        names.append(kernel(recorded))
    assert names == [names[0], names[0].replace("causal", "causal_invariant"), names[0]]
    with pytest.raises(TypeError, match="enable"):
        hopwell.batch_invariant(1)  # type: ignore[arg-type]


def test_environment(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = many_rows()
    monkeypatch.setenv("HOPWELL_BATCH_INVARIANT", "1")
    switches.forget_calls()
    FUNCTIONS[MLA](**arguments)
    assert "_invariant" in kernel(recorded)
    monkeypatch.setenv("HOPWELL_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="HOPWELL_BATCH_INVARIANT must be one of 0, 1"):
        kernel(recorded)


def test_what_is_compiled_ahead() -> None:
    """A deployment without a compiler must also set the variable while it compiles ahead.

    Without the variable, requests with uneven numbers of new tokens are split by their own lengths.
    """
    usual = set(shipped_mla_configs())
    hopwell.batch_invariant(True)
    assert set(shipped_mla_configs()) == {
        replace(config, batch_invariant=config.rows == ROWS, shares_dequant=False) for config in usual
    }
    others = [config for config in usual if config.rows == ROWS and not config.sparse]
    assert {replace(config, batch_invariant=not config.batch_invariant) for config in others} == set(others)
