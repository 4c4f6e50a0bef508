"""The package as a whole: doctests, exports, and no read of a tensor on the host."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import hopwell.layouts as layouts

MODULES = sorted(info.name for info in pkgutil.iter_modules(layouts.__path__, "hopwell.layouts."))
FUNCTIONS = [name for name in layouts.__all__ if inspect.isfunction(getattr(layouts, name))]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module)
    assert results.failed == 0
    if not name.rpartition(".")[2].startswith("_"):
        assert results.attempted > 0


def test_exports():
    assert len(set(layouts.__all__)) == len(layouts.__all__)
    public = {name for name, value in vars(layouts).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert set(layouts.__all__) == public


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_shows_an_example(name):
    docstring = inspect.getdoc(getattr(layouts, name))
    assert ">>>" in docstring


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


BYTES = meta(4, 8, 16, 32, dtype=torch.uint8)
SCALES = meta(4, 8, 16, 4, dtype=torch.float8_e4m3fn)
ONE = meta(dtype=torch.float32)
I32 = torch.int32
NO_READS = {
    "paged_kv_views": lambda: layouts.paged_kv_views(meta(4, 2, 16, 8, 64), "NHD"),
    "ragged_kv_views": lambda: layouts.ragged_kv_views(meta(9, 8, 64), meta(9, 8, 64)),
    "mla_kv_views": lambda: layouts.mla_kv_views(meta(4, 64, 576), 512),
    "shared_page_table": lambda: layouts.shared_page_table(meta(2, 5, dtype=I32), 2),
    "split_page_table": lambda: layouts.split_page_table(meta(2, 2, 5, dtype=torch.uint32), 2),
    "sequence_lengths": lambda: layouts.sequence_lengths(meta(2, 1, 1, 1, dtype=I32), 2),
    "token_offsets": lambda: layouts.token_offsets(meta(3, dtype=torch.uint32), 2),
    "element_offsets": lambda: layouts.element_offsets(meta(3, dtype=I32), 2, 4096),
    "cumulative_lengths": lambda: layouts.cumulative_lengths(meta(3, dtype=I32)),
    "fmha_v2_inputs": lambda: layouts.fmha_v2_inputs(
        (meta(9, 8, 64), meta(2, 4, 16, 8, 64).unbind(0)), "Q_PAGED_KV_NHD", 2, meta(2, 2, 5, dtype=I32)
    ),
    "tma_violation": lambda: layouts.tma_violation(meta(4, 8, 16, 64)),
    "block_scale_views": lambda: layouts.block_scale_views(
        (SCALES, SCALES), "HND", layouts.paged_kv_views((BYTES, BYTES), "HND")
    ),
    "interleave_v_scales": lambda: layouts.interleave_v_scales(SCALES, "HND"),
    "deinterleave_v_scales": lambda: layouts.deinterleave_v_scales(SCALES, "HND"),
    "swizzle_128x4": lambda: layouts.swizzle_128x4(SCALES[0, 0]),
    "unswizzle_128x4": lambda: layouts.unswizzle_128x4(meta(128, 4, dtype=torch.uint8), 9, 3),
    "fp8": lambda: layouts.quantize_fp8(meta(4, 5), layouts.fp8_scale(meta(4, 5))),
    "dequantize_fp8": lambda: layouts.dequantize_fp8(SCALES, ONE),
    "quantize_nvfp4_kv_cache": lambda: layouts.quantize_nvfp4_kv_cache(
        meta(4, 8, 16, 64), meta(4, 8, 16, 64), "NHD", "interleaved"
    ),
    "dequantize_nvfp4": lambda: layouts.dequantize_nvfp4(BYTES, SCALES, ONE),
    "nvfp4_output": lambda: layouts.dequantize_nvfp4_output(*layouts.quantize_nvfp4_output(meta(9, 8, 64), ONE), ONE),
}


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from tensors(tuple(vars(value).values()))
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)


@pytest.mark.parametrize("name", NO_READS)
def test_no_values_are_read_on_the_host(name):
    """Tensors on the meta device have no values, so reading one raises; and no result may be on another device."""
    assert all(tensor.device.type == "meta" for tensor in tensors(NO_READS[name]()))


def test_the_meta_device_would_tell():
    with pytest.raises((RuntimeError, NotImplementedError)):
        ONE.item()
    assert [t.device.type for t in tensors((layouts.KVViews(ONE, torch.zeros(1)), None, 3))] == ["meta", "cpu"]
