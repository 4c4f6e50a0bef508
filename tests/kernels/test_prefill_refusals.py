"""Problems without a Hopper prefill kernel are refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.cases.kernel_problems import cache, contiguous, empty, paged

from hopwell._checks.features import require_problem
from hopwell.kernels.config.base import (
    KvFetch,
)
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.problem import (
    AttentionProblem,
    BlockScales,
)
from hopwell.kernels.registry import resolve
from hopwell.kernels.support import (
    ARCHS,
    COMMON_HEAD_DIMS,
    CONTEXT,
    NVFP4_HEAD_DIMS,
    PREFILL_HEAD_DIMS,
    REGISTER_HEAD_DIMS,
)

ARCH = "sm_90a"
HEAD_DIMS = (*COMMON_HEAD_DIMS, *REGISTER_HEAD_DIMS)


class TestRefusals:
    """A problem without a kernel raises NotImplementedError, which names the request and the alternatives."""

    @staticmethod
    def refusal(problem: AttentionProblem, arch: str = ARCH) -> str:
        with pytest.raises(NotImplementedError) as caught:
            resolve(problem, arch)
        return str(caught.value)

    @pytest.mark.parametrize("arch", ARCHS)
    def test_scales_of_each_head_of_a_16_bit_cache(self, arch: str) -> None:
        scales = empty(2, dtype=torch.float32)
        for name in ("softmax_scale", "output_scale"):
            message = self.refusal(paged(*cache("tuple-HND", 16, (128, 128)), **{name: scales}), arch)
            assert message == f"scales of each KV head have no prefill kernel on {arch} with a 16-bit cache"

    @pytest.mark.parametrize("arch", ["sm_80", "sm_120", "sm_90", "sm_100"])
    def test_other_archs(self, arch: str) -> None:
        message = self.refusal(paged(*cache("tuple-HND", 16, (128, 128))), arch)
        assert arch in message
        assert "supported: sm_90a, sm_100a, sm_103a, sm_120a" in message

    @pytest.mark.parametrize(
        "dims",
        [
            *((dim, dim) for dim in (4, 12, 100, 264, 1024)),
            # Widths that exist, but not together.
            *((64, 32), (32, 64), (128, 64), (128, 192), (192, 64), (256, 128), (576, 512)),
        ],
        ids=str,
    )
    def test_other_head_dims(self, dims: tuple[int, int]) -> None:
        message = self.refusal(paged(*cache("tuple-HND", 16, dims)))
        assert f"{dims[0]}/{dims[1]}" in message
        for qk, v in HEAD_DIMS:
            assert f"{qk}/{v}" in message

    @pytest.mark.parametrize(
        ("role", "dtype"),
        [
            *(("query", dtype) for dtype in (torch.float32, torch.float8_e5m2, torch.uint8)),
            *(("out", dtype) for dtype in (torch.float32, torch.float8_e5m2, torch.uint8)),
        ],
        ids=str,
    )
    def test_other_dtypes(self, role: str, dtype: torch.dtype) -> None:
        operand = {role: empty(600, 4, 128, dtype=dtype)}
        message = self.refusal(paged(*cache("tuple-HND", 16, (128, 128)), **operand))
        assert f"{'output' if role == 'out' else role} dtype {dtype}" in message
        assert "torch.bfloat16, torch.float16" in message

    def test_queries_of_8_bits_over_nvfp4(self) -> None:
        """If kernels do not dequantize the queries, entries do: e4m3 cannot represent elements times their scales."""
        scales = BlockScales(*(empty(5, 2, 16, 8, dtype=torch.float8_e4m3fn) for _ in "kv"))
        query = empty(600, 4, 128, dtype=torch.float8_e4m3fn)
        key, value = cache("tuple-HND", 16, (64, 64), dtype=torch.uint8)
        problem = paged(key, value, query=query, kv_scales=scales)
        config = resolve(problem, "sm_90a")
        assert (config.dequantizes_q, config.dtype, config.out_dtype) == (True, "fp16", "e4m3")
        message = self.refusal(problem, "sm_120a")
        assert "query dtype torch.float8_e4m3fn has no kernel" in message
        assert "with NVFP4 K and V; supported: torch.bfloat16, torch.float16" in message

    def test_queries_of_8_bits_beside_wider_keys(self) -> None:
        query = empty(600, 4, 128, dtype=torch.float8_e4m3fn)
        message = self.refusal(paged(*cache("tuple-HND", 16, (128, 128)), query=query))
        assert "key dtype torch.bfloat16" in message
        assert "with query dtype torch.float8_e4m3fn; supported: torch.float8_e4m3fn" in message

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("dims", PrefillConfig.all_tiles(), ids=str)
    def test_head_dims_with_operands_of_8_bits(self, dims: tuple[int, int], dtype: torch.dtype) -> None:
        """8-bit operands have all head dims of 16-bit operands on every architecture."""
        views = cache("tuple-HND", 16, dims, dtype=torch.float8_e4m3fn)
        problem = paged(*views, query=empty(600, 4, dims[0], dtype=dtype))
        for arch in ARCHS:
            require_problem(CONTEXT, problem, arch)
            assert resolve(problem, arch).kv_bytes == 1

    @pytest.mark.parametrize("dims", [dims for dims in PREFILL_HEAD_DIMS if dims[0] % 64 == 0], ids=str)
    def test_head_dims_with_nvfp4(self, dims: tuple[int, int]) -> None:
        """The table refuses head dims without a kernel, with the entry's name, before kernel selection."""
        dim_qk, dim_v = dims
        key, value = (empty(5, 2, 16, dim // 2, dtype=torch.uint8) for dim in dims)
        scales = BlockScales(*(empty(5, 2, 16, dim // 16, dtype=torch.float8_e4m3fn) for dim in dims))
        problem = paged(key, value, query=empty(600, 4, dim_qk), kv_scales=scales)
        if dims in NVFP4_HEAD_DIMS:
            require_problem(CONTEXT, problem, "sm_90a")
        else:
            with pytest.raises(NotImplementedError, match=f"^{CONTEXT} on sm_90a supports .* with NVFP4 caches: "):
                require_problem(CONTEXT, problem, "sm_90a")
            assert f"{dim_qk}/{dim_v} have no prefill kernel on sm_90a with NVFP4" in self.refusal(problem)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str)
    @pytest.mark.parametrize("role", ["key", "value"])
    def test_keys_and_values_of_another_dtype(self, role: str, dtype: torch.dtype) -> None:
        """The kernels read the cache in the query's dtype, so another dtype would give wrong results."""
        problem = paged(*cache("tuple-HND", 16, (128, 128)))
        message = self.refusal(replace(problem, **{role: getattr(problem, role).to(dtype)}))
        assert f"{role} dtype {dtype}" in message
        assert "torch.bfloat16" in message

    def test_contiguous_keys_of_any_number(self) -> None:
        """Contiguous K is one page of all tokens, which is not a page size."""
        for tokens in (3, 24, 5000):
            key, value = (empty(tokens, 2, 128).transpose(0, 1)[None] for _ in range(2))
            assert resolve(contiguous(key, value), ARCH).kv_fetch is KvFetch.CONTIGUOUS
