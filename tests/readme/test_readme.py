"""The README says what is true: its table is the code's, its examples run."""

from __future__ import annotations

import itertools
import math
import pathlib
import re
from typing import Any

import pytest
import torch

from hopwell.kernels.support import support_matrix

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def example(heading: str) -> str:
    """The Python code under a heading."""
    section = re.search(rf"^## {heading}\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    assert section is not None
    code = re.search(r"```python\n(.*?)```", section[1], re.DOTALL)
    assert code is not None
    return code[1]


def run(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    return namespace


def test_support_matrix_is_up_to_date() -> None:
    found = re.search(r"<!-- support matrix.*?-->\n(.*?)<!-- end", README, re.DOTALL)
    assert found is not None
    assert found[1].strip() == support_matrix().strip(), "paste the output of `python -m hopwell support`"


def check_paged_cache_example() -> None:
    names = run(example("A paged cache"))
    begin = 0
    for request, (q_len, kv_len) in enumerate(zip(names["q_lens"], names["kv_lens"], strict=True)):
        pages = names["block_tables"][request, : math.ceil(kv_len / names["page_size"])].long()
        key, value = names["kv_cache"][pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len].double()
        query = names["query"][begin : begin + q_len].double().transpose(0, 1)
        visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
        want = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
        got = names["out"][begin : begin + q_len].double().transpose(0, 1)
        assert (got - want).norm() < 5e-3 * want.norm()
        begin += q_len


@pytest.mark.gpu
def test_paged_cache_example() -> None:
    check_paged_cache_example()


@pytest.mark.emulator
@pytest.mark.skipif(torch.cuda.is_available(), reason="the example uses the GPU where there is one")
def test_paged_cache_example_without_a_gpu() -> None:
    check_paged_cache_example()


@pytest.mark.gpu
def test_model_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's logits are as good as with torch's attention, and the next tokens are the same."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    names = run(example("In a model"))
    model, starts = names["model"], names["batch"].starts.tolist()
    model.set_attn_implementation("sdpa")

    def alone(prompt: bytes) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor(list(prompt), device="cuda")[None], use_cache=False).logits[0].float()

    theirs = [alone(prompt) for prompt in names["prompts"]]
    model.float()
    exact = [alone(prompt) for prompt in names["prompts"]]
    for index, (begin, end) in enumerate(itertools.pairwise(starts)):
        ours = names["logits"][begin:end].float()
        noise = (theirs[index] - exact[index]).norm()
        assert (ours - exact[index]).norm() < 1.1 * noise, "further from float32 than torch's attention in bf16"
        assert (ours - theirs[index]).norm() < 1.5 * noise
        assert names["next_tokens"][index] == theirs[index][-1].argmax()
