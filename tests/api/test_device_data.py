"""Checks of device data on request: an error names the argument, the index and the value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.calls import valid_calls
from helpers.calls.valid_calls import CONTEXT, CUDNN, FMHA, FORMS, FUNCTIONS, MLA, XQA, Form, form

import hopwell
from hopwell.kernels.jit import settings


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HOPWELL_CHECK", "1")


def changed(value: torch.Tensor, place: Any, to: float) -> torch.Tensor:
    value = value.clone()
    value[place] = to
    return value


NAN = math.nan
BAD: list[tuple[str, str, str, Any, float, str]] = [
    (CONTEXT, "stacked-HND", "seq_lens", 1, -1, r"seq_lens\[1\] must be 0 or more, got -1"),
    (CONTEXT, "stacked-HND", "seq_lens", 1, 65, r"seq_lens\[1\] must be at most 64, .*, got 65"),
    (
        CONTEXT,
        "stacked-HND",
        "block_tables",
        (2, 1),
        -1,
        r"block_tables\[2, 1\] must be a page id in \[0, 11\).*got -1",
    ),
    (CONTEXT, "stacked-HND", "block_tables", (2, 2), 11, r"block_tables\[2, 2\].*request 2 has 37 keys.*got 11"),
    (CONTEXT, "stacked-HND", "block_tables", (2, 2), 2**31 - 1, r"block_tables\[2, 2\].*from 32 on, got 2147483647"),
    (CONTEXT, "stacked-HND", "cum_seq_lens_q", 2, 1, r"cum_seq_lens_q\[2\] must be at least the one before"),
    (CONTEXT, "stacked-HND", "cum_seq_lens_q", 3, 9, r"cum_seq_lens_q\[3\] must be at most 5"),
    (FMHA, "contiguous", "cum_seq_lens_kv", 3, 59, r"cum_seq_lens_kv\[2\] must be a place for the 38 tokens"),
    (FMHA, "paged-NHD", "cum_seq_lens_kv", 3, 200, r"cum_seq_lens_kv\[3\] must be at most 64"),
    (CUDNN, "ragged", "batch_offsets_k", 1, 20 * 384 + 1, r"batch_offsets_k\[1\] must be a multiple of 384"),
    (CUDNN, "ragged", "batch_offsets_v", 2, 22 * 256, r"batch_offsets_v\[2\] must be a place for the 37 tokens"),
    (CUDNN, "ragged", "actual_seq_lens_q", 0, 6, r"actual_seq_lens_q\[0\] must be at most 5"),
    (CUDNN, "ragged", "batch_offsets_o", 0, -512, r"batch_offsets_o\[0\] must be a place"),
    (XQA, "stacked-NHD", "block_tables", (0, 1), 11, r"block_tables\[0, 1\] must be a page id"),
    (XQA, "ragged", "q_cu_seq_lens", 3, 9, r"q_cu_seq_lens\[3\] must be"),
    (CUDNN, "ragged", "actual_seq_lens_kv", 1, -3, r"actual_seq_lens_kv\[1\] must be 0 or more, got -3"),
    (MLA, "dense", "seq_lens", 2, 1000, r"seq_lens\[2\] must be at most 64"),
    (MLA, "counted", "sparse_mla_top_k_lens", (1, 1), -2, r"sparse_mla_top_k_lens\[3\] must be 0 or more, got -2"),
    (MLA, "sparse", "block_tables", (1, 0, 3), PAGES_TOKENS := 11 * 16, rf"block_tables\[2, 3\].*got {PAGES_TOKENS}"),
    (MLA, "ranks", "seq_lens", 1, 0, r"seq_lens\[1\] must be 1, because rank 1 of 2 .* 2 keys, got 0"),
    (MLA, "ranks", "causal_seqlens_kv_global", 2, -1, r"causal_seqlens_kv_global\[2\] must be 0 or more, got -1"),
    (CONTEXT, "nvfp4-NHD", "kv_block_scales", (5, 0, 15, 1, 3), NAN, r"kv_block_scales\[5, 1, 15, 3\].*page 5"),
    (
        CONTEXT,
        "nvfp4-HND",
        "kv_block_scales",
        (9, 1, 0, 8, 2),
        NAN,
        r"kv_block_scales.*\[9, 0, 8, 2\] must be a number",
    ),
    (XQA, "nvfp4", "kv_cache_sf", (2, 1, 3, 1, 0), NAN, r"kv_cache_sf.*\[2, 1, 3, 0\] must be a number, .*page 2"),
]
SCALES: list[tuple[str, str, str, float, str]] = [
    *((CUDNN, "e4m3", f"{name}_scale", NAN, "finite") for name in "qkv"),
    *((CUDNN, "e4m3", f"{name}_scale", -1.0, "finite and not negative") for name in "qk"),
    *((XQA, "stacked-NHD", name, math.inf, "finite") for name in ("bmm1_scale", "bmm2_scale", "o_scale")),
    *((MLA, "dense", name, math.inf, "finite") for name in ("bmm1_scale", "bmm2_scale")),
    *((CONTEXT, "stacked-HND", name, NAN, "finite") for name in ("bmm1_scale", "bmm2_scale")),
]
NOT_READ = [
    (CONTEXT, "nvfp4-NHD", "kv_block_scales", (3, 0, 5, 1, 3)),  # behind the last of 37 keys
    (CONTEXT, "nvfp4-NHD", "kv_block_scales", (3, 1, 5, 1, 3)),
    (CONTEXT, "nvfp4-HND", "kv_block_scales", (0, 0, 0, 0, 0)),  # of a request without new tokens
    (XQA, "nvfp4", "kv_cache_sf", (2, 1, 4, 1, 0)),
]


@pytest.mark.parametrize(("entry", "name", "argument", "place", "value", "text"), BAD)
def test_what_is_wrong_is_named(
    entry: str, name: str, argument: str, place: Any, value: float, text: str, recorded: Any
) -> None:
    found = next(f for f in FORMS if f.function.__name__.startswith(entry) and f.name == name)
    arguments = found.build()
    if (entry, name) == (MLA, "sparse"):
        arguments["seq_lens"] = valid_calls.ints(*[37] * valid_calls.BATCH)
    for _ in range(3):
        found.function(**arguments)
    launches = len(recorded.addresses)
    with pytest.raises(ValueError, match=f"^{text}"):
        found.function(**{**arguments, argument: changed(arguments[argument], place, value)})
    assert len(recorded.addresses) == launches


@pytest.mark.parametrize(("entry", "name", "argument", "value", "text"), SCALES)
def test_scales_are_named(entry: str, name: str, argument: str, value: float, text: str) -> None:
    """One wrong scale among correct ones; kernels may receive a product of them."""
    arguments = e4m3_cudnn() if name == "e4m3" else form(entry, name)
    FUNCTIONS[entry](**{**arguments, argument: torch.ones(1)})
    with pytest.raises(ValueError, match=rf"^{argument}\[0\] must be {text}.*, got {value}$"):
        FUNCTIONS[entry](**{**arguments, argument: torch.tensor([value])})


def e4m3_cudnn() -> dict[str, Any]:
    arguments = valid_calls.cudnn_ragged(128, 128)
    low = {name: arguments[name].to(torch.float8_e4m3fn) for name in ("q", "k_cache", "v_cache")}
    return {**arguments, **low, "return_lse": False, **{f"{name}_scale": torch.ones(1) for name in "qkv"}}


def test_a_product_of_scales_that_overflows_is_named() -> None:
    large = torch.full((1,), 1e30)
    with pytest.raises(ValueError, match=r"^scale \* q_scale \* k_scale\[0\] must be finite"):
        FUNCTIONS[CUDNN](**{**e4m3_cudnn(), "q_scale": large, "k_scale": large})


def test_scales_of_a_cache_have_the_name_that_the_caller_used() -> None:
    arguments = form(CONTEXT, "nvfp4-NHD")
    scales = arguments.pop("kv_block_scales")
    scales[5, 0, 15, 1, 3] = NAN
    with pytest.raises(ValueError, match=r"^kv_cache_sf\[5, 1, 15, 3\] must be a number"):
        FUNCTIONS[CONTEXT](**arguments, kv_cache_sf=scales)
    with pytest.raises(ValueError, match=r"^kv_cache_sf\[1\]\[5, 1, 15, 3\] must be a number"):
        FUNCTIONS[CONTEXT](**arguments, kv_cache_sf=(torch.zeros_like(scales[:, 1]), scales[:, 0]))


def test_linear_scales_of_values_belong_to_one_token_each() -> None:
    """Token 4 of page 3 is the last of 37. Interleaved, its row holds scales of the tokens behind it as well."""
    arguments = form(CONTEXT, "nvfp4-NHD")
    arguments["kv_block_scales"] = changed(arguments["kv_block_scales"], (3, 1, 4, 1, 3), NAN)
    FUNCTIONS[CONTEXT](**arguments)
    with pytest.raises(ValueError, match=r"^kv_block_scales.*\[3, 1, 4, 3\] must be a number"):
        FUNCTIONS[CONTEXT](**arguments, v_scale_layout="linear")


@pytest.mark.parametrize("entry", [CONTEXT, XQA, MLA])
def test_sinks(entry: str) -> None:
    sinks = torch.tensor([0.0, -math.inf, NAN, 1.0])
    arguments = form(entry, valid_calls.DEFAULT[entry])
    FUNCTIONS[entry](**arguments, sinks=sinks[:2].repeat(2))
    with pytest.raises(ValueError, match=r"^sinks\[2\] must be a number, got nan"):
        FUNCTIONS[entry](**arguments, sinks=[sinks])


def test_rows_of_a_log_sum_exp() -> None:
    """Rows past its end are not written."""
    arguments = form(CUDNN, "ragged") | dict(lse=torch.zeros(valid_calls.TOKENS, valid_calls.HEADS))
    starts = valid_calls.cumulative(valid_calls.Q_LENS, valid_calls.HEADS)
    FUNCTIONS[CUDNN](**arguments, batch_offsets_stats=starts)
    for place in (-4, 16):
        with pytest.raises(ValueError, match=rf"^batch_offsets_stats\[2\] must be a place for the 5 .*, got {place}"):
            FUNCTIONS[CUDNN](**arguments, batch_offsets_stats=changed(starts, 2, place))


def refusal_of(case: Form, arguments: dict[str, Any]) -> str:
    """Return the message of a call's refusal, or "" if it is launched."""
    try:
        case.function(**arguments)
    except ValueError as error:
        return str(error)
    return ""


UNREAD = {(CONTEXT, "cum_seq_lens_kv"), (FMHA, "seq_lens")}  # other arguments replace them


@pytest.mark.parametrize("case", [case for case in FORMS if case.runs], ids=str)
def test_upper_halves_of_64_bits_are_looked_at(case: Form, recorded: Any) -> None:
    """The check covers every argument of lengths, offsets, ids and top-k indices."""
    arguments = case.build()
    name_of = next(name for name in valid_calls.NAMES if case.function.__name__.startswith(name))
    wide = {
        name: value.long()
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.int32 and (name_of, name) not in UNREAD
    }
    if "sparse_mla_top_k_lens" in wide:
        del wide["seq_lens"]
    case.function(**{**arguments, **wide})
    for name, value in wide.items():
        places = {int(value.argmax()), min(2, value.numel() - 1)}  # what is largest is read, or what request 2 has
        for distance in (2**32, -(2**32)):
            messages = []
            for place in places:
                other = value.clone()
                other.view(-1)[place] += distance
                messages.append(refusal_of(case, {**arguments, **wide, name: other}))
            assert {message.partition("[")[0] for message in messages} - {""} == {name}


@pytest.mark.parametrize(("entry", "name", "argument", "place"), NOT_READ)
def test_scales_of_tokens_that_are_not_read(entry: str, name: str, argument: str, place: Any) -> None:
    arguments = form(entry, name)
    FUNCTIONS[entry](**{**arguments, argument: changed(arguments[argument], place, NAN)})


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_scales_in_rows(sparse: bool) -> None:
    """The check reads scales only in rows that kernels read, and names the row."""
    arguments = form(MLA, "packed")
    if sparse:
        lists = torch.full((valid_calls.BATCH, 1, 8), -1, dtype=torch.int32)
        lists[2, 0, 1] = 9 * valid_calls.PAGE + 3
        arguments |= dict(block_tables=lists, sparse_mla_top_k=8)
    cache = arguments["kv_cache"]
    scales = cache[..., 512:528].view(torch.float32)
    scales[(9, 4, 2) if sparse else (10, 3, 2)] = math.inf
    FUNCTIONS[MLA](**arguments)
    scales[9, 3, 2] = math.inf
    with pytest.raises(
        ValueError, match=r"^kv_cache\[9, 0, 3, 2\] must be finite as a scale .*page 9 is read, got inf"
    ):
        FUNCTIONS[MLA](**arguments)


@pytest.mark.parametrize("case", [case for case in FORMS if case.runs], ids=str)
def test_valid_data_passes(case: Form, recorded: Any) -> None:
    for _ in range(3):
        case.function(**case.build())
    assert len(recorded.problems) == 3


@pytest.mark.parametrize("entry", [CONTEXT, XQA, MLA])
@pytest.mark.parametrize(
    ("name", "value"), [("bmm1_scale", -1.0), ("bmm1_scale", torch.nan), ("bmm2_scale", torch.inf)]
)
def test_scales(entry: str, name: str, value: float) -> None:
    arguments = {**form(entry, valid_calls.DEFAULT[entry]), name: torch.tensor([value])}
    with pytest.raises(ValueError, match=rf"^{name}\[0\] must be finite.*got {value}"):
        FUNCTIONS[entry](**arguments)


def test_pages_that_no_row_sees_are_not_looked_at() -> None:
    """The check skips these pages, because engines free the pages behind a window."""
    arguments = form(CONTEXT, "stacked-HND")
    arguments["block_tables"] = changed(arguments["block_tables"], (2, 0), -1)
    FUNCTIONS[CONTEXT](**arguments, window_left=8)
    with pytest.raises(ValueError, match=r"block_tables\[2, 0\]"):
        FUNCTIONS[CONTEXT](**arguments, window_left=18)


def test_switching(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, later calls skip all checks; switched on, every call is checked, known calls included."""
    monkeypatch.delenv("HOPWELL_CHECK")
    monkeypatch.setattr(settings.CHECK, "given", None)
    arguments = form(CONTEXT, "stacked-HND")
    bad = {**arguments, "seq_lens": changed(arguments["seq_lens"], 0, -5)}
    for _ in range(3):
        FUNCTIONS[CONTEXT](**bad)
    assert len(recorded.problems) == 1
    hopwell.check_device_data(True)
    with pytest.raises(ValueError, match=r"seq_lens\[0\]"):
        FUNCTIONS[CONTEXT](**bad)
    hopwell.check_device_data(False)
    FUNCTIONS[CONTEXT](**bad)
    with pytest.raises(TypeError, match="enable"):
        hopwell.check_device_data(1)  # type: ignore[arg-type]
    monkeypatch.setattr(settings.CHECK, "given", None)
    monkeypatch.setenv("HOPWELL_CHECK", "yes")
    with pytest.raises(ValueError, match="HOPWELL_CHECK must be one of 0, 1"):
        FUNCTIONS[CONTEXT](**{**arguments, "window_left": 3})
