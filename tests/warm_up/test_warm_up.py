"""After a warm-up, the calls of the model compile nothing, and the warm-up has compiled no kernel without a call."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hopwell
from hopwell.__main__ import main
from hopwell._warm_up.model import LatentLayer, Layer, read
from hopwell.kernels import registry
from hopwell.kernels.append import plan as append_plan
from hopwell.kernels.jit import settings, toolchain
from hopwell.kernels.launch import plan

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LLAMA = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=512, torch_dtype="bfloat16")
GPT_OSS = dict(
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=64,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"],
    dtype="bfloat16",
)
DEEPSEEK = dict(
    num_attention_heads=16,
    num_key_value_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    torch_dtype="bfloat16",
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Engine:
    """Calls of a serving engine. Batches, lengths, strides and page tables differ from the warm-up."""

    def __init__(self, config: dict[str, Any], kv: torch.dtype, page_size: int, query: torch.dtype | None = None):
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config.get("hidden_size", 0) // self.heads
        self.dtype = {"bfloat16": BF16, "float16": FP16}[config.get("dtype") or config["torch_dtype"]]
        self.query, self.page_size = query or self.dtype, page_size
        self.cache = torch.empty(6, 2, page_size, self.kv_heads, self.dim, dtype=kv)  # NHD, stacked

    def context(self, q_lens: list[int], **given: Any) -> None:
        starts = ints(0, *torch.tensor(q_lens).cumsum(0).tolist())
        hopwell.trtllm_batch_context_with_kv_cache(
            torch.zeros(sum(q_lens), self.heads, self.dim).to(self.query),
            self.cache,
            torch.empty(8, dtype=torch.uint8),
            torch.zeros(len(q_lens), 64, dtype=torch.int32),
            ints(*q_lens),
            max(q_lens),
            64 * self.page_size,
            self.dim**-0.5,
            1.0,
            len(q_lens),
            starts,
            starts,
            kv_layout="NHD",
            **{"out_dtype": self.dtype, **given},
        )

    def decode(self, batch: int, q_len: int = 1, masked: bool = False, **given: Any) -> None:
        hopwell.trtllm_batch_decode_with_kv_cache(
            torch.zeros(batch * q_len, self.heads, self.dim).to(self.query),
            self.cache,
            torch.empty(8, dtype=torch.uint8),
            torch.zeros(batch, 3, dtype=torch.int32),
            torch.full((batch,), q_len, dtype=torch.int32),
            3 * self.page_size,
            self.dim**-0.5,
            kv_layout="NHD",
            q_len_per_req=q_len,
            mask=torch.zeros(batch, q_len, 2, dtype=torch.uint16) if masked else None,
            **{"out_dtype": self.dtype, **given},
        )

    def append(self, tokens: int) -> None:
        new = torch.zeros(tokens, self.kv_heads, self.dim, dtype=self.dtype)
        request, at = torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
        hopwell.append_paged_kv_cache(new, new, request, at, self.cache, ints(0, 1), ints(0, 2), None, kv_layout="NHD")


def mla(config: dict[str, Any], kv: torch.dtype, batch: int, q_len: int, **given: Any) -> None:
    hopwell.trtllm_batch_decode_with_kv_cache_mla(
        torch.zeros(batch, q_len, config["num_attention_heads"], 576, dtype=BF16),
        torch.empty(6, 16, 576, dtype=kv),
        torch.empty(8, dtype=torch.uint8),
        128,
        512,
        64,
        torch.zeros(batch, 5, dtype=torch.int32),
        torch.full((batch,), q_len, dtype=torch.int32),
        80,
        **given,
    )


def mla_prefill(config: dict[str, Any], q_len: int, causal: bool) -> None:
    heads = config["num_attention_heads"]
    query, key = (torch.zeros(2 * q_len, heads, 192, dtype=BF16) for _ in "qk")
    hopwell.cudnn_batch_prefill_with_kv_cache(
        query,
        key,
        torch.zeros(2 * q_len, heads, 256, dtype=BF16)[..., :128],
        1.0,
        torch.empty(8, dtype=torch.uint8),
        max_token_per_sequence=q_len,
        max_sequence_kv=q_len,
        actual_seq_lens_q=None,
        actual_seq_lens_kv=None,
        causal=causal,
        return_lse=True,
        batch_offsets_q=ints(0, q_len, 2 * q_len),
        batch_offsets_k=ints(0, q_len, 2 * q_len),
        batch_offsets_units="tokens",
    )


@pytest.fixture
def compiled(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Return the names of the kernels that are compiled. No code is generated, and no kernel is launched."""
    names: set[str] = set()

    def write(config: Any, target: toolchain.Artifact) -> None:
        target.path.mkdir(parents=True)
        for file in (target.object_file, target.ptx, target.cubin):
            file.touch()
        (target.path / toolchain.META).write_text(json.dumps({"sha256": target.digests()}))
        names.add(config.name)

    def bind(config: Any, device: torch.device) -> Callable[..., None]:
        toolchain.artifact(config)
        used.add(config.name)
        return lambda *arguments: None

    used: set[str] = set()
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("HOPWELL_JIT", raising=False)
    monkeypatch.setattr(toolchain, "_compile", write)
    for module in (plan, append_plan):
        monkeypatch.setattr(module, "bind", bind)
    yield names
    assert used == names, "all kernels, and only these, have a call"


def calls_of_llama(engine: Engine, drafts: int, **given: Any) -> None:
    for q_lens in ([1], [5, 1, 700], [64, 64], [100], [20] * 5, [300, 300]):
        engine.context(q_lens, **given)
    for batch in (1, 5):
        engine.decode(batch, **given)
        with contextlib.suppress(NotImplementedError):  # append does not take all page sizes
            engine.append(batch)
        for q_len in range(2, drafts + 2):
            engine.decode(batch, q_len, **given)
            engine.decode(batch, q_len, masked=True, **given)
    for most in range(2, drafts + 2):  # requests with fewer tokens than the bound
        engine.decode(5, 1, max_q_len=most, cum_seq_lens_q=ints(0, 1, 2, 3, 4, 5), **given)


class TestCalls:
    @pytest.mark.parametrize(
        ("kv_dtype", "kv", "query"), [("auto", BF16, None), ("fp8_e4m3", FP8, None), ("fp8", FP8, FP8)]
    )
    @pytest.mark.parametrize("page_size", [16, 24, 64])
    def test_gqa(
        self,
        kv_dtype: str,
        kv: torch.dtype,
        query: torch.dtype | None,
        page_size: int,
        compiled: set[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        warmed = hopwell.warm_up(
            LLAMA,
            page_size=page_size,
            kv_dtype=kv_dtype,
            query_dtype="auto" if query is None else query,
            max_drafts=8,
            jobs=1,
        )
        assert set(warmed) == compiled
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        calls_of_llama(Engine(LLAMA, kv, page_size, query), 8)

    @pytest.mark.parametrize("out_dtype", ["fp8_e4m3", "nvfp4"])
    def test_narrow_outputs(self, out_dtype: str, compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        hopwell.warm_up(LLAMA, page_size=64, kv_dtype="fp8", query_dtype="fp8", out_dtype=out_dtype, jobs=1)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        engine = Engine(LLAMA, FP8, 64, FP8)
        wide = dict(out_dtype=FP8) if out_dtype == "fp8_e4m3" else {}
        for q_lens in ([1], [5, 1, 700], [64, 64], [300, 300]):
            engine.context(q_lens, **wide or dict(out_dtype="nvfp4", o_sf_scale=0.5))
        engine.decode(3, **wide)
        engine.append(3)

    def test_skip_softmax(self, compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        hopwell.warm_up(LLAMA, page_size=64, skip_softmax=True, jobs=1)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        engine = Engine(LLAMA, BF16, 64)
        for q_lens in ([1], [5, 1, 700], [64, 64], [300, 300]):
            engine.context(q_lens, skip_softmax_threshold_scale_factor=50.0)
        engine.decode(3)
        engine.append(3)

    def test_windows_and_sinks(self, compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        hopwell.warm_up(GPT_OSS, page_size=64, jobs=1)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        for window in (-1, 127):
            calls_of_llama(Engine(GPT_OSS, BF16, 64), 0, window_left=window, sinks=torch.zeros(8))

    @pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
    def test_mla(self, kv_dtype: str, compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        hopwell.warm_up(DEEPSEEK, kv_dtype=kv_dtype, max_drafts=7, jobs=1)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        kv = FP8 if kv_dtype == "fp8_e4m3" else BF16
        for batch, q_len in ((1, 1), (7, 1), (3, 2), (5, 8)):
            mla(DEEPSEEK, kv, batch, q_len)
        hopwell.trtllm_batch_decode_with_kv_cache_mla(  # ragged, with few tokens of many
            torch.zeros(3, 16, 576, dtype=BF16),
            torch.empty(6, 16, 576, dtype=kv),
            torch.empty(8, dtype=torch.uint8),
            128,
            512,
            64,
            torch.zeros(3, 5, dtype=torch.int32),
            ints(1, 1, 1),
            80,
            cum_seq_lens_q=ints(0, 1, 2, 3),
            max_q_len=8,
        )
        for q_len in (3, 500):
            mla_prefill(DEEPSEEK, q_len, True)
            mla_prefill(DEEPSEEK, q_len, False)

    def test_dcp(self, compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        hopwell.warm_up(LLAMA, max_drafts=2, context_parallel=2, jobs=1)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        engine = Engine(LLAMA, BF16, 16)
        calls_of_llama(engine, 2)
        for q_len in (1, 2, 3):
            lengths = torch.full((5,), 9, dtype=torch.int32)
            engine.decode(5, q_len, cp_world=2, cp_rank=1, causal_seqlens_kv_global=lengths, return_lse=True)

    @pytest.mark.parametrize(
        "field", [dict(attn_logit_softcapping=30.0), dict(attention_chunk_size=64), dict(alibi=True)]
    )
    def test_fmha_v2(self, field: dict[str, Any], compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        kind = "chunked_attention" if "attention_chunk_size" in field else "full_attention"
        config = {**LLAMA, **field, "layer_types": [kind]}
        hopwell.warm_up(config, jobs=1)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        engine = Engine(config, BF16, 16)
        engine.append(3)
        for q_lens in ([1, 1, 1], [60], [40, 500]):
            starts = ints(0, *torch.tensor(q_lens).cumsum(0).tolist())
            hopwell.trtllm_fmha_v2_prefill(
                (torch.zeros(sum(q_lens), 8, 64, dtype=BF16), engine.cache),
                "Q_PAGED_KV_NHD",
                torch.empty(8, dtype=torch.uint8),
                ints(*q_lens),
                max(q_lens),
                max(q_lens),
                0.125,
                1.0,
                len(q_lens),
                starts,
                starts,
                torch.zeros(len(q_lens), 40, dtype=torch.int32),
                pos_encoding_mode="alibi" if "alibi" in field else None,
                logits_soft_cap_scale=field.get("attn_logit_softcapping"),
                chunked_attention_size=field.get("attention_chunk_size", 0),
            )

    def test_a_second_warm_up_compiles_nothing(self, compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        lines: list[str] = []
        first = hopwell.warm_up(LLAMA, jobs=1)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        assert hopwell.warm_up(LLAMA, say=lines.append) == first
        assert lines == [f"{len(first)} kernels, all of them compiled"]
        calls_of_llama(Engine(LLAMA, BF16, 16), 0)

    def test_a_missing_kernel(self, compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        with pytest.raises(RuntimeError, match=r"is not in .*HOPWELL_JIT=allow python -m hopwell compile --kernel"):
            hopwell.warm_up(LLAMA, jobs=1)


@pytest.mark.emulator
def test_real_kernels_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels run: a model whose query heads have a KV head each has one prefill kernel."""
    config = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=64, dtype="bfloat16")
    monkeypatch.delenv("HOPWELL_JIT", raising=False)
    assert len(hopwell.warm_up(config, jobs=1)) == 3
    monkeypatch.setenv("HOPWELL_JIT", "forbid")
    engine = Engine(config, BF16, 16)
    engine.cache.zero_()
    engine.append(3)
    engine.context([3])
    engine.decode(1)


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``compile --model`` selects the kernels of a warm-up."""
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    selection = ["--model", str(tmp_path), "--arch", "sm_120a", "--kv-dtype", "fp8_e4m3", "--page-size", "64"]
    assert main(["compile", "--list", *selection]) == 0
    names = capsys.readouterr().out.splitlines()
    assert "append_sm_120a_fp16_e4m3" in names
    assert all("sm_120a_fp16" in name for name in names)
    assert main(["compile", "--list", *selection, "--match", "^decode"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in names if name.startswith("decode")]
    narrow = ["--query-dtype", "fp8_e4m3", "--out-dtype", "nvfp4", "--skip-softmax", "--match", "^prefill"]
    assert main(["compile", "--list", *selection, *narrow]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names
    assert all("to_nvfp4" in name and "skip" in name for name in names)


class TestModels:
    """Configurations of models, in the form of their files."""

    def test_gqa(self) -> None:
        assert read(LLAMA).layers == (Layer(8, 2, 64, 64),)
        assert read(LLAMA).dtype == "bfloat16"

    def test_two_kinds_of_layers(self) -> None:
        assert read(GPT_OSS).layers == (Layer(8, 1, 64, 64, window_left=127), Layer(8, 1, 64, 64))

    def test_a_window_without_a_list_of_layers(self) -> None:
        windowed = {**LLAMA, "sliding_window": 100}
        assert read(windowed).layers == (Layer(8, 2, 64, 64), Layer(8, 2, 64, 64, window_left=99))
        assert read({**windowed, "use_sliding_window": False}).layers == (Layer(8, 2, 64, 64),)
        assert read({**LLAMA, "sliding_window": None}).layers == (Layer(8, 2, 64, 64),)

    def test_other_head_dims_in_full_layers(self) -> None:
        config = {**GPT_OSS, "global_head_dim": 512, "num_global_key_value_heads": 2, "v_head_dim": None}
        assert read(config).layers == (Layer(8, 1, 64, 64, window_left=127), Layer(8, 2, 512, 512))

    def test_parts_of_multimodal_models(self) -> None:
        found = read({"text_config": {**LLAMA, "attn_logit_softcapping": 50.0}, "vision_config": {"num_heads": 3}})
        assert found.layers == (Layer(8, 2, 64, 64, soft_cap=50.0),)

    def test_mla(self) -> None:
        assert read({**DEEPSEEK, "index_topk": 2048}).layers == (LatentLayer(16, 512, 64, 128, 128, 2048),)

    def test_objects_and_files(self, tmp_path: pathlib.Path) -> None:
        class Config:
            def to_dict(self) -> dict[str, Any]:
                return {**LLAMA, "dtype": BF16}

        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        for model in (Config(), tmp_path, str(tmp_path / "config.json")):
            assert read(model) == read(LLAMA)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "the model's configuration has no num_attention_heads; .*AutoConfig"),
            ({"num_attention_heads": 8}, "the model's configuration has no head_dim"),
            (
                {**LLAMA, "num_key_value_heads": -1},
                "num_key_value_heads of the model must be a positive integer, got -1",
            ),
            ({**LLAMA, "head_dim": "64"}, "head_dim of the model must be a positive integer, got '64'"),
        ],
    )
    def test_wrong_fields(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            hopwell.warm_up(config)

    def test_a_file_that_is_not_json(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json is not JSON"):
            hopwell.warm_up(tmp_path)


class TestArguments:
    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (dict(page_size=0), ValueError, r"page_size must be in \[1, .*got"),
            (dict(kv_dtype="fp4"), ValueError, "kv_dtype must be one of 'auto', 'bfloat16'"),
            (dict(query_dtype=torch.int8), ValueError, "query_dtype must be one of torch.bfloat16, .*got torch.int8"),
            (dict(out_dtype="int8"), ValueError, "out_dtype must be one of 'auto', 'bfloat16'.*got str 'int8'"),
            (dict(skip_softmax=1), TypeError, "skip_softmax must be"),
            (
                dict(model=DEEPSEEK, out_dtype="nvfp4"),
                ValueError,
                "out_dtype must be 'auto' or .* with MLA",
            ),
            (dict(model=DEEPSEEK, skip_softmax=True), ValueError, "skip_softmax must be False for a model with MLA"),
            (dict(tensor_parallel=3), ValueError, "tensor_parallel must divide the 8 query heads of a layer, got 3"),
            (dict(arch="sm_80"), ValueError, "arch must be one of 'sm_90a'"),
            (dict(arch="sm_90a", device="cpu"), ValueError, "device must be None with arch='sm_90a'"),
            (dict(model={**LLAMA, "dtype": "float32"}), ValueError, "dtype of the model must be one of"),
            (dict(model=3), TypeError, "model must be a path, a dict or a configuration of transformers, got"),
            (
                dict(model={**LLAMA, "head_dim": 1000}),
                NotImplementedError,
                "head_dim=1000: no kernel for prefill of 1 tokens: .*got head_dim=1000",
            ),
        ],
    )
    def test_wrong_ones(self, given: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            hopwell.warm_up(**{"model": LLAMA, **given})

    def test_calls_without_a_kernel_are_reported(self, compiled: set[str]) -> None:
        config = {**LLAMA, "layer_types": ["linear_attention", "full_attention"]}
        lines: list[str] = []
        names = hopwell.warm_up(config, kv_dtype="int8", say=lines.append, jobs=1)
        assert [registry.Family(name.split("_")[0]) for name in names] == [registry.Family.DECODE]
        assert lines[0] == "hopwell has no kernels for layers of type 'linear_attention'"
        assert lines[1].startswith("8 query heads, 2 KV heads, head_dim=64: no kernel for prefill of 1 tokens: ")
        Engine(config, torch.int8, 16).decode(1)

    @pytest.mark.parametrize(
        ("config", "given"),
        [
            (LLAMA, dict(context_parallel=2)),
            (LLAMA, dict(kv_dtype="nvfp4")),
            (GPT_OSS, dict(page_size=2)),
            (DEEPSEEK, dict(context_parallel=3)),
            ({**DEEPSEEK, "index_topk": 64}, {}),
        ],
    )
    def test_calls_have_valid_device_data(
        self, config: dict[str, Any], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The check of device data finds no fault, which would be reported as a call without a kernel."""
        monkeypatch.setattr(settings.CHECK, "given", True)
        monkeypatch.setattr(toolchain, "compile_ahead", lambda configs, jobs: [])
        lines: list[str] = []
        names = hopwell.warm_up(config, arch="sm_90a", max_drafts=3, say=lines.append, **given)
        assert not [line for line in lines if "no kernel for" in line]
        assert names

    def test_both_orders_of_block_scales(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "compile_ahead", lambda configs, jobs: [])
        names = {name for name in hopwell.warm_up(LLAMA, arch="sm_90a", kv_dtype="nvfp4") if "prefill" in name}
        linear = {name for name in names if "linear_v_scales" in name}
        assert {name.replace("_linear_v_scales", "") for name in linear} == names - linear

    def test_ranks_share_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """8 ranks have one query head and one KV head each, and no packed prefill kernel."""
        monkeypatch.setattr(toolchain, "compile_ahead", lambda configs, jobs: [])
        one, eight = (hopwell.warm_up(LLAMA, arch="sm_90a", tensor_parallel=ranks) for ranks in (1, 8))
        assert {name for name in one if "packed" in name} == set(one) - set(eight)
