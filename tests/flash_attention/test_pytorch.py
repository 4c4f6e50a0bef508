"""hopwell behind PyTorch's FlashAttention operators."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention

from hopwell.flash_attn import flash_attn_func, flash_attn_varlen_func
from hopwell.integrations import pytorch

if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("this PyTorch has no registry of FlashAttention implementations", allow_module_level=True)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Register the functions for CPU tensors, which run on the emulator; PyTorch has no others there."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, function in pytorch.KERNELS.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def test_registration_activation_and_removal() -> None:
    def is_replaced() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")

    before = is_replaced()  # a PyTorch with CUDA has a function of its own
    assert pytorch.register() == pytorch.register() == "hopwell"
    assert "hopwell" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("hopwell")
    assert attention.current_flash_attention_impl() == "hopwell"
    assert is_replaced()
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert is_replaced() == before


def test_every_operator_exists() -> None:
    """PyTorch 2.11 does not have the operator that writes into a given tensor."""
    missing = {name for name in pytorch.KERNELS if not hasattr(torch.ops.aten, name)}
    added = {"_flash_attention_forward_no_dropout_inplace"} if torch.__version__.startswith("2.11.") else set()
    assert missing == added


def test_other_arguments_are_refused(on_cpu: None) -> None:
    q = data(1, 2, 4, 64)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True)
    with pytest.raises(NotImplementedError, match="no backward pass"):
        torch.ops.aten._flash_attention_backward(q, q, q, q, q, q, q, q, 1, 1, 0.0, False, q, q)


@pytest.mark.emulator
def test_scaled_dot_product(on_cpu: None) -> None:
    """The output has the memory order of the query, as from PyTorch's own function."""
    q, k = data(2, 9, 4, 64).transpose(1, 2), data(2, 2, 9, 64)
    out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True, scale=0.2)
    args = (x.transpose(1, 2) for x in (q, k, k))
    want = flash_attn_func(*args, causal=True, softmax_scale=0.2, return_softmax_lse=True)
    assert out.stride() == q.stride()
    assert torch.equal(out.transpose(1, 2), want[0])
    assert torch.equal(lse, want[1])
    assert rest[:4] == [None, None, 9, 9]
    reference = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), k.double(), is_causal=True, scale=0.2, enable_gqa=True
    )
    assert (out.double() - reference).norm() < 5e-3 * reference.norm()


@pytest.mark.emulator
def test_varlen_attn(on_cpu: None) -> None:
    """``torch.nn.attention.varlen`` calls the operators with its own arguments."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("varlen_attn of this PyTorch has no block_table")
    varlen_attn, varlen_attn_out = varlen.varlen_attn, varlen.varlen_attn_out
    q, k, starts = data(11, 4, 64), data(11, 2, 64), torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    options = {"window_size": (-1, 0), "enable_gqa": True, "return_aux": varlen.AuxRequest(lse=True)}
    out, lse = varlen_attn(q, k, k, starts, starts, 7, 7, **options)
    want = flash_attn_varlen_func(q, k, k, starts, starts, 7, 7, causal=True, return_softmax_lse=True)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    given = torch.full_like(q, math.nan)
    varlen_attn_out(given, q, k, k, starts, starts, 7, 7, window_size=(-1, 0), enable_gqa=True)
    assert torch.equal(given, out)
    pool, table = data(4, 16, 2, 64), torch.tensor([[3, 1], [-1, -1], [0, -1]], dtype=torch.int32)
    used = torch.tensor([20, 0, 16], dtype=torch.int32)
    paged = varlen_attn(
        q, pool, pool, starts, None, 7, 20, block_table=table, seqused_k=used, window_size=(-1, 0), enable_gqa=True
    )
    want = flash_attn_varlen_func(q, pool, pool, starts, None, 7, 20, causal=True, block_table=table, seqused_k=used)
    assert torch.equal(paged, want)
