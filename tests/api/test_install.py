"""install() over a stand-in for FlashInfer's modules: what is replaced, what falls back, and what is restored."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hopwell
from hopwell.integrations import flashinfer as integration
from hopwell.kernels.jit import settings
from hopwell.kernels.problem import AttentionProblem

BF16 = torch.bfloat16


class Library:
    """A FlashInfer of a few functions, which record their calls, and an engine that has imported one of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        names = ("", ".prefill", ".decode", ".mla", ".mla._core", ".cudnn", ".cudnn.prefill", ".page")
        self.modules = {f"flashinfer{name}": types.ModuleType(f"flashinfer{name}") for name in names}
        top, prefill, decode, mla, _, cudnn, cudnn_prefill, page = self.modules.values()
        top.__version__, top.__path__, mla.__path__, cudnn.__path__ = "0.9.9", [], [], []  # type: ignore[attr-defined]

        def trtllm_batch_decode_with_kv_cache(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
            backend="auto", kv_layout="HND", new_mode=None, return_lse=False,
        ):  # fmt: skip
            return "decoded by FlashInfer"

        def cudnn_batch_prefill_with_kv_cache(
            q, k_cache, v_cache, scale, workspace_buffer, *, max_token_per_sequence, max_sequence_kv,
            actual_seq_lens_q=None, actual_seq_lens_kv=None, causal, return_lse, lse_base="log2",
        ):  # fmt: skip
            return "prefilled by FlashInfer"

        def append_paged_kv_cache(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices,
                                  kv_indptr, kv_last_page_len, kv_layout="NHD"):  # fmt: skip
            return "appended by FlashInfer"

        self.decode = self.record(trtllm_batch_decode_with_kv_cache)
        self.cudnn = self.record(cudnn_batch_prefill_with_kv_cache)
        self.append = self.record(append_paged_kv_cache)
        decode.trtllm_batch_decode_with_kv_cache = self.decode  # type: ignore[attr-defined]
        for module in (prefill, cudnn, cudnn_prefill):
            module.cudnn_batch_prefill_with_kv_cache = self.cudnn  # type: ignore[attr-defined]
        for module in (top, page):
            module.append_paged_kv_cache = self.append  # type: ignore[attr-defined]
        self.engine = types.ModuleType("engine")
        self.engine.attention = self.decode  # type: ignore[attr-defined]
        self.modules["engine"] = self.engine

    def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate as FlashInfer does, with a wrapper that keeps the signature for ``inspect``."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inspect.signature(function).bind(*args, **kwargs)
            self.calls.append((function.__name__, args, kwargs))
            return function(*args, **kwargs)

        return wrapper

    def functions(self) -> dict[tuple[str, str], Any]:
        """Return all public functions of all modules."""
        return {
            (name, key): value
            for name, module in self.modules.items()
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        }


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(settings.CHECK, "given", False)
    yield made
    hopwell.uninstall()


def decode_arguments(**given: Any) -> dict[str, Any]:
    head_dim = given.pop("head_dim", 128)
    return dict(
        query=torch.zeros(2, 4, head_dim, dtype=BF16),
        kv_cache=torch.zeros(3, 2, 2, 16, head_dim, dtype=BF16),
        workspace_buffer=torch.empty(1 << 24, dtype=torch.uint8),
        block_tables=torch.zeros(2, 3, dtype=torch.int32),
        seq_lens=torch.ones(2, dtype=torch.int32),
        max_seq_len=48,
        **given,
    )


def test_every_holder_gets_the_replacement_and_the_original_back(library: Library) -> None:
    before = library.functions()
    assert hopwell.install() == [
        "flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache",
        "flashinfer.decode.trtllm_batch_decode_with_kv_cache",
        "flashinfer.page.append_paged_kv_cache",
    ]
    installed = library.functions()
    assert installed.keys() == before.keys()
    assert not any(installed[place] is before[place] for place in before)
    assert library.engine.attention is installed["flashinfer.decode", "trtllm_batch_decode_with_kv_cache"]
    for place, function in installed.items():
        assert inspect.signature(function) == inspect.signature(before[place])
        assert function.__name__ == before[place].__name__
    late = types.ModuleType("late")
    late.attention = installed["flashinfer.decode", "trtllm_batch_decode_with_kv_cache"]  # type: ignore[attr-defined]
    sys.modules["late"] = late
    try:
        hopwell.uninstall()
    finally:
        del sys.modules["late"]
    assert library.functions() == before
    assert late.attention is library.decode
    hopwell.uninstall()  # again, without an effect


def test_a_second_install_changes_nothing(library: Library) -> None:
    first = hopwell.install()
    installed = library.functions()
    assert hopwell.install() == first
    assert library.functions() == installed


def test_some_entries(library: Library) -> None:
    names = hopwell.install(["append_paged_kv_cache"])
    assert names == ["flashinfer.page.append_paged_kv_cache"]
    assert library.engine.attention is library.decode
    assert len(hopwell.install()) == 3


def test_calls_run_in_hopwell(library: Library, launched: list[AttentionProblem]) -> None:
    hopwell.install()
    arguments = decode_arguments(new_mode=None, backend="xqa")
    out = library.engine.attention(*list(arguments.values())[:5], **dict(list(arguments.items())[5:]))
    assert out.shape == (2, 4, 128)
    assert len(launched) == 1
    assert library.calls == []


def test_their_defaults_count(library: Library, launched: list[AttentionProblem]) -> None:
    """FlashInfer's LSE is of base 2 by default here, and hopwell's is natural. Lengths are optional here only."""
    hopwell.install()
    q = torch.zeros(3, 4, 128, dtype=BF16)
    prefill = sys.modules["flashinfer.prefill"].cudnn_batch_prefill_with_kv_cache
    lengths = dict(actual_seq_lens_q=torch.tensor([3]), actual_seq_lens_kv=torch.tensor([3]))
    given = dict(max_token_per_sequence=3, max_sequence_kv=3, causal=True, return_lse=True)
    for choice, natural in (({}, False), (dict(lse_base="ln"), True)):
        prefill(q, q, q, 1.0, torch.empty(1), **given, **lengths, **choice)
        lse = launched.pop().lse
        assert lse is not None
        assert lse.natural is natural
    with pytest.raises(TypeError):
        prefill(q, q, q, 1.0, torch.empty(1), causal=True, return_lse=True)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(head_dim=264), "head_dim"),  # ValueError
        (dict(kv_layout="HND", head_dim=272), "272"),  # ValueError
        (dict(new_mode="fast"), "hopwell has no argument new_mode"),
        (dict(kv_layout="DNH"), "kv_layout must be one of"),
    ],
)
def test_refused_calls_run_in_flashinfer(
    given: dict[str, Any], reason: str, library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    hopwell.install()
    arguments = decode_arguments(**given)
    with caplog.at_level(logging.WARNING, logger="hopwell"):
        for _ in range(2):
            assert library.engine.attention(**arguments) == "decoded by FlashInfer"
    (name, positional, keywords), _ = library.calls
    assert (name, positional) == ("trtllm_batch_decode_with_kv_cache", ())
    assert keywords.keys() == arguments.keys()
    assert all(keywords[key] is arguments[key] for key in arguments)
    (record,) = [one for one in caplog.records if "runs calls that hopwell refuses" in one.message]
    assert reason in record.message


def test_calls_without_a_kernel(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fall back under HOPWELL_CHECK=1 as well, which finds mistakes of callers only."""
    monkeypatch.setattr(settings.CHECK, "given", True)
    replaced = integration._replacement(lambda x: x + 1, lambda x: _raise(NotImplementedError("no kernel")))
    assert replaced(2) == replaced(x=2) == 3


def test_errors_of_both(library: Library) -> None:
    """If FlashInfer refuses the call as well, its error comes with hopwell's reason."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not on this GPU")

    replaced = integration._replacement(refuse, lambda **given: _raise(NotImplementedError("no kernel")))
    with pytest.raises(RuntimeError, match="not on this GPU") as caught:
        replaced()
    assert str(caught.value.__context__) == "no kernel"


def _raise(error: Exception) -> None:
    raise error


def test_errors_that_do_not_fall_back(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    hopwell.install()
    with pytest.raises(TypeError, match="bmm1_scale must be a float"):
        library.engine.attention(**decode_arguments(bmm1_scale="1"))
    with pytest.raises(TypeError, match="no_such"):
        library.engine.attention(**decode_arguments(no_such=1))
    with pytest.raises(TypeError, match="multiple values"):
        library.engine.attention(torch.zeros(2, 4, 128), **decode_arguments())
    monkeypatch.setattr(settings.CHECK, "given", True)
    with pytest.raises(ValueError, match="kv_layout must be one of"):
        library.engine.attention(**decode_arguments(kv_layout="DNH"))
    assert library.calls == []


def test_each_entry_is_logged_once(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hopwell"):
        hopwell.install()
        hopwell.install(["append_paged_kv_cache"])
    lines = [record.message for record in caplog.records]
    assert "hopwell replaces append_paged_kv_cache of FlashInfer 0.9.9 in flashinfer, flashinfer.page" in lines
    assert "FlashInfer 0.9.9 does not have xqa_batch_decode_with_kv_cache" in lines
    assert len(lines) == len(integration.MODULES)


def test_wrong_entries(library: Library) -> None:
    with pytest.raises(ValueError, match=r"entries must be names out of trtllm_batch_context.*got 'softmax'"):
        hopwell.install(["softmax"])
    with pytest.raises(ValueError, match=r"entries: FlashInfer 0\.9\.9 does not have xqa_batch_decode_with_kv_cache"):
        hopwell.install(["append_paged_kv_cache", "xqa_batch_decode_with_kv_cache"])
    with pytest.raises(TypeError, match="entries must be a sequence of names or None"):
        hopwell.install("append_paged_kv_cache")


def test_without_flashinfer() -> None:
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("FlashInfer is installed")
    with pytest.raises(ImportError, match="flashinfer"):
        hopwell.install()


def test_all_entries_are_hopwells() -> None:
    for name, module in integration.MODULES.items():
        assert getattr(importlib.import_module(f"hopwell.{module}"), name) is getattr(hopwell, name)
