"""Common behaviour of both decode entries: lengths, launches, and the workspace."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    DEFAULT,
    FP8,
    FUNCTIONS,
    HEADS,
    MLA,
    PAGE,
    TABLE,
    U8,
    XQA,
    form,
    ints,
    refused,
)

from hopwell.kernels.launch.scratch import own_scratch
from hopwell.kernels.problem import AttentionProblem

Problems = list[AttentionProblem]

CAPACITY = len(TABLE[0]) * PAGE
ENTRIES = (XQA, MLA)
SEVERAL = {XQA: "drafts", MLA: "several-tokens"}
TENSORS = ("query", "kv_cache", "block_tables", "seq_lens", "sinks", "out")

each_entry = pytest.mark.parametrize("entry", ENTRIES)


def within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes


def decode(entry: str, name: str | None = None, **changes: Any) -> torch.Tensor:
    return FUNCTIONS[entry](**{**form(entry, name or DEFAULT[entry]), **changes})


@pytest.mark.parametrize("max_seq_len", [0, 1, 37, 2**31 - 1])
@each_entry
def test_lengths_are_bounded_by_the_table_alone(entry: str, max_seq_len: int, launched: Problems) -> None:
    """The caller's bound must have no effect, because an effective bound could change results."""
    decode(entry, max_seq_len=max_seq_len)
    assert launched[0].max_kv_len == CAPACITY


@pytest.mark.parametrize(("given", "want"), [(None, True), (True, True), (False, False)])
@each_entry
def test_pdl(entry: str, given: bool | None, want: bool, launched: Problems) -> None:
    decode(entry, enable_pdl=given)
    assert launched[0].programmatic_launch is want


@each_entry
def test_sinks_and_unsigned_integers(entry: str, launched: Problems) -> None:
    sinks = torch.zeros(HEADS)
    lengths = form(entry, DEFAULT[entry])["seq_lens"].view(torch.uint32)[:, None]
    decode(entry, sinks=sinks, seq_lens=lengths, block_tables=ints(*TABLE).view(torch.uint32))
    (problem,) = launched
    assert problem.sinks is sinks
    assert problem.kv_lens.shape == (BATCH,)
    assert problem.kv_lens.dtype == problem.page_table.key.dtype == torch.uint32


class TestWorkspace:
    @pytest.mark.parametrize("dtype", [torch.int8, torch.float32, FP8])
    @each_entry
    def test_any_type_of_enough_bytes(self, entry: str, dtype: torch.dtype, launched: Problems) -> None:
        size = form(entry, DEFAULT[entry])["workspace_buffer"].numel()
        workspace = torch.empty(-(-size // dtype.itemsize), dtype=dtype)
        decode(entry, workspace_buffer=workspace)
        decode(entry, workspace_buffer=workspace.view(1, -1))
        scratch = launched[0].scratch
        assert scratch.data_ptr() + scratch.nbytes == workspace.data_ptr() + workspace.nbytes
        assert scratch.nbytes == size

    @each_entry
    def test_the_front_is_left_alone(self, entry: str, launched: Problems) -> None:
        """FlashInfer keeps statistics in the front of the workspace between calls."""
        size = form(entry, DEFAULT[entry])["workspace_buffer"].numel()
        workspace = torch.empty(size + 4096, dtype=U8)
        decode(entry, workspace_buffer=workspace)
        assert launched[0].scratch.data_ptr() == workspace.data_ptr() + 4096

    @pytest.mark.parametrize("names", [DEFAULT, SEVERAL], ids=["one", "several"])
    @each_entry
    def test_too_small(
        self, entry: str, names: dict[str, str], recorded: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A too small workspace is replaced by private memory, the same in all calls of a thread; one
        line reports it.
        """
        name = names[entry]
        own_scratch.cache_clear()
        size = form(entry, name)["workspace_buffer"].numel()
        small = {**form(entry, name), "workspace_buffer": torch.empty(size - 1, dtype=U8)}
        for _ in range(4):
            FUNCTIONS[entry](**small)
        (problem,) = recorded.problems
        assert problem.scratch.numel() == size
        assert not within(problem.scratch, small["workspace_buffer"])
        assert {addresses[-1] for addresses in recorded.addresses} == {problem.scratch.data_ptr()}
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        function = {XQA: "hopwell.decode.xqa_workspace_bytes", MLA: "hopwell.mla.mla_workspace_bytes"}[entry]
        text = f"workspace_buffer is too small for decode scratch ({size:,} bytes, see {function}); allocated a private"
        assert text in caplog.text

    def test_a_warm_call_in_another_thread_names_the_same_function(self, caplog: pytest.LogCaptureFixture) -> None:
        """Sizes differ by entry, and each thread allocates memory of its own."""
        own_scratch.cache_clear()
        scratch = own_scratch(torch.device("cpu"))
        scratch.tensor(100, "first")
        scratch.tensor(200, "second")
        thread = threading.Thread(target=scratch.address, args=(100,))
        thread.start()
        thread.join()
        assert [record.args[:2] for record in caplog.records] == [("100", "first"), ("200", "second"), ("100", "first")]

    def test_threads_have_memory_of_their_own(self) -> None:
        scratch, found = own_scratch(torch.device("cpu")), []

        def address(size: int) -> int:
            return scratch.tensor(size, "size").data_ptr()

        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append((address(100), address(50))))
            thread.start()
            thread.join()
        assert all(first == second for first, second in found)
        assert found[0] != found[1]
        assert address(10**6) != address(10**7)

    @each_entry
    def test_other_refusals(self, entry: str) -> None:
        good = form(entry, DEFAULT[entry])["workspace_buffer"]
        refused(entry, TypeError, "^workspace_buffer must be a torch.Tensor, got None", workspace_buffer=None)
        text = "^workspace_buffer must be on cpu, the device of the query, got meta$"
        refused(entry, ValueError, text, workspace_buffer=good.to("meta"))
        text = r"^workspace_buffer must be contiguous, got strides \(2,\)$"
        refused(entry, ValueError, text, workspace_buffer=torch.empty(2 * good.numel(), dtype=U8)[::2])

    @pytest.mark.parametrize(("entry", "argument"), [*itertools.product(ENTRIES, TENSORS), (XQA, "mask")])
    def test_shares_no_memory(self, entry: str, argument: str) -> None:
        arguments = {**form(entry, SEVERAL[entry]), "sinks": torch.zeros(HEADS)}
        arguments["out"] = torch.empty_like(decode(entry, SEVERAL[entry]))
        if isinstance(arguments["kv_cache"], tuple):
            arguments["kv_cache"] = torch.stack(arguments["kv_cache"], 1)
        size, wanted = arguments["workspace_buffer"].numel(), arguments[argument]
        # The last byte of the workspace is the first byte of the other tensor, or vice versa.
        for start, begin in ((size // 16 * 16 - 16, 0), (0, max(wanted.nbytes // 16 * 16 - 16, 0))):
            buffer = torch.zeros(size + wanted.nbytes, dtype=U8)
            other = buffer[start : start + wanted.nbytes].view(wanted.dtype).view(wanted.shape)
            changes = {"workspace_buffer": buffer[begin : begin + size], argument: other}
            written, read = ("out", "workspace_buffer") if argument == "out" else ("workspace_buffer", argument)
            text = f"^{written} must not share memory with {read}, but"
            refused(entry, ValueError, text, SEVERAL[entry], **{**arguments, **changes})
