"""The README says what is true: its table is the code's, its examples run."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hopwell import _demo, emulator
from hopwell.__main__ import main
from hopwell.kernels.support import support_matrix

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DEMO = (_demo.Prefill, _demo.Decode, _demo.MlaDecode)
ENTRIES = [batch.ENTRY for batch in DEMO]


def examples(heading: str) -> list[str]:
    """The blocks of Python code under a heading."""
    section = re.search(rf"^## {heading}\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    assert section is not None
    return re.findall(r"```python\n(.*?)```", section[1], re.DOTALL)


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "README.md", "exec"), names)


def test_support_matrix_is_up_to_date() -> None:
    found = re.search(r"<!-- support matrix.*?-->\n(.*?)<!-- end", README, re.DOTALL)
    assert found is not None
    assert found[1].strip() == support_matrix().strip(), "paste the output of `python -m hopwell support`"


def check_demo(capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert main(["demo", "--device", device]) == 0
    shown = capsys.readouterr().out
    assert shown.count(": right\n") == len(DEMO)
    assert [line for line in shown.splitlines() if line in ENTRIES] == ENTRIES


@pytest.mark.gpu
def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    check_demo(capsys, "cuda")


@pytest.mark.emulator
def test_demo_on_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    check_demo(capsys, "cpu")


@pytest.mark.emulator
@pytest.mark.parametrize("wrong", DEMO)
def test_demo_says_what_is_wrong(
    wrong: type[_demo.Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a batch whose last tokens are not attended to."""
    attend = wrong.attend

    def attend_to_fewer(batch: _demo.Batch, out: torch.Tensor | None = None) -> torch.Tensor:
        batch.seq_lens -= 1
        return attend(batch, out)

    monkeypatch.setattr(wrong, "attend", attend_to_fewer)
    assert main(["demo", "--device", "cpu"]) == 1
    verdicts = re.findall(r"of the largest output: (\w+)\n", capsys.readouterr().out)
    assert verdicts == ["WRONG" if batch is wrong else "right" for batch in DEMO]


def test_demo_says_what_has_no_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    with emulator.use("sm_89"):
        assert main(["demo", "--device", "cpu"]) == 0
    assert re.findall(r"(\w+): .* is not supported on sm_89;", capsys.readouterr().out) == ENTRIES


def test_demo_rates() -> None:
    """In a nanosecond."""
    prefill = _demo.Prefill("cpu", [37, 300], 4, 2, q_lens=[5, 130])  # whose tokens see 33 to 37 and 171 to 300 keys
    visible = sum(range(33, 38)) + sum(range(171, 301))
    assert prefill.rate(1e-6) == f"{2 * 4 * (128 + 128) * visible / 1e3:.0f} TFLOP/s"
    assert _demo.Decode("cpu", [38, 301], 4, 2).rate(1e-6) == f"{339 * 2 * (128 + 128) * 2} GB/s of keys and values"
    assert _demo.MlaDecode("cpu", [38, 301], 16).rate(1e-6) == f"{2 * 16 * (576 + 512) * 339 / 1e3:.0f} TFLOP/s"


@pytest.mark.parametrize(("arch", "status"), [("sm_90a", 1), ("sm_100a", 1), ("sm_120a", 2), (None, 2)])
def test_demo_is_emulated_without_kernels_for_the_gpu(
    arch: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arch_of(device: torch.device) -> str:
        if arch is None:
            raise NotImplementedError(f"{device} is too old")
        return arch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_demo.support, "arch_of", arch_of)
    monkeypatch.setattr(_demo, "_on_gpu", lambda: 1)
    monkeypatch.setattr(_demo, "_on_emulator", lambda: 2)
    assert main(["demo"]) == status


def check_attention(names: dict[str, Any], q_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
    """The example's output is the attention of its queries over its cache."""
    begin = 0
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        pages = names["block_tables"][request, : math.ceil(kv_len / names["page_size"])].long()
        key, value = names["kv_cache"][pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len].double()
        query = names["query"][begin : begin + q_len].double().transpose(0, 1)
        visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
        want = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
        got = names["out"][begin : begin + q_len].double().transpose(0, 1)
        assert (got - want).norm() < 5e-3 * want.norm()
        begin += q_len


def check_paged_cache_example() -> None:
    context, decode = examples("A paged cache")
    names: dict[str, Any] = {}
    run(context, names)
    check_attention(names, names["q_lens"], names["kv_lens"])
    run(decode, names)
    assert names["seq_lens"].tolist() == [n + 3 for n in names["kv_lens"]]
    check_attention(names, [1, 1, 1], names["seq_lens"].tolist())


@pytest.mark.gpu
def test_paged_cache_example() -> None:
    check_paged_cache_example()


@pytest.mark.emulator
@pytest.mark.skipif(torch.cuda.is_available(), reason="the example uses the GPU where there is one")
def test_paged_cache_example_without_a_gpu() -> None:
    check_paged_cache_example()


def check_generation(model: Any, prompts: Sequence[bytes], logits: Sequence[Any], tokens: Sequence[Any]) -> None:
    """Logits are as good as with torch's attention in bf16, and tokens those of float32 unless bf16 cannot tell.

    torch gets each request's prompt and the tokens that were chosen for it at a time.
    """
    model.set_attn_implementation("sdpa")
    prompt_logits = logits[0].split([len(prompt) for prompt in prompts])
    chosen = torch.stack(list(tokens), 1)
    texts = [[*prompt, *ids] for prompt, ids in zip(prompts, chosen[:, :-1].tolist(), strict=True)]
    ours = [torch.cat([first, *(step[i : i + 1] for step in logits[1:])]) for i, first in enumerate(prompt_logits)]

    def alone(text: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor(text, device=model.device)[None], use_cache=False).logits[0].float()

    theirs = [alone(text) for text in texts]
    model.float()
    exact = [alone(text) for text in texts]
    decided = 0
    for i, prompt in enumerate(prompts):
        for rows in (slice(len(prompt)), slice(len(prompt), None)):
            our_error, their_error = (x[i][rows].float() - exact[i][rows] for x in (ours, theirs))
            noise = their_error.norm()
            assert our_error.norm() < 1.2 * noise, "further from float32 than torch's attention in bf16"
            assert (our_error - their_error).norm() < 1.5 * noise
        # The noise of a logit; two of them that are further apart than this keep their order.
        margin = 8 * (theirs[i] - exact[i]).square().mean().sqrt()
        best, second = exact[i][len(prompt) - 1 :].topk(2).values.unbind(1)
        clear = best - second > margin
        assert torch.equal(chosen[i][clear], exact[i][len(prompt) - 1 :].argmax(1)[clear])
        decided += int(clear.sum())
    assert decided > chosen.numel() / 4, "the tokens were hardly compared"


@pytest.mark.gpu
def test_model_example(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for code in examples("In a model"):
        run(code, names)
    assert len(names["tokens"]) == 1 + 64
    check_generation(names["model"], names["prompts"], names["logits"], names["tokens"])


@pytest.mark.emulator
def test_model_example_on_the_emulator() -> None:
    """The example's code with a small model."""
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    run(examples("In a model")[0], names)
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    config = names["LlamaConfig"](
        **sizes, vocab_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128
    )
    options = dict(dtype=torch.bfloat16, attn_implementation="hopwell")
    model = names["LlamaForCausalLM"]._from_config(config, **options).eval()
    text = (ROOT / "LICENSE").read_bytes()
    prompts = [text[1000 : 1000 + n] for n in (47, 64, 30)]
    logits, tokens = zip(*names["generate"](model, prompts, steps=4), strict=True)
    check_generation(model, prompts, logits, tokens)
