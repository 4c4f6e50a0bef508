"""Every example runs, on the GPU or through the emulator, and computes what it says."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import pytest
import torch
from oracles import check_attention, check_generation

FOLDER = pathlib.Path(__file__).parents[2] / "examples"


def run(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the names of an example are at its end."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def test_paged_cache(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("paged_cache", device, monkeypatch)
    cache = names["kv_cache"], names["block_tables"]
    check_attention(*names["prefilled"], *cache, names["q_lens"], names["kv_lens"])
    assert names["seq_lens"].tolist() == [n + 3 for n in names["kv_lens"]]
    check_attention(names["query"], names["out"], *cache, [1, 1, 1], names["seq_lens"].tolist())


def test_warm_up_and_graphs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("warm_up_and_graphs", device, monkeypatch)
    assert len(names["steps"]) == 2
    for query, tables, lengths, out in names["steps"]:
        check_attention(query, out, names["kv_cache"], tables, [1] * len(lengths), lengths)


def test_model(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    names = run("model", device, monkeypatch)
    assert len(names["tokens"]) == 1 + (64 if device == "cuda" else 4)
    check_generation(names["model"], names["prompts"], names["logits"], names["tokens"])
