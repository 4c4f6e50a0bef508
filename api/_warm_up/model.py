"""Attention layers of a model, read from its Hugging Face configuration (``config.json``)."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # values of layer_types
# Fields that replace others in layers of one type, in configurations that have them (Gemma 4, MiMo).
REPLACED = {
    FULL: {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    SLIDING: {
        "head_dim": "swa_head_dim",
        "v_head_dim": "swa_v_head_dim",
        "num_attention_heads": "swa_num_attention_heads",
        "num_key_value_heads": "swa_num_key_value_heads",
    },
    CHUNKED: {},
}
TEXT_PARTS = ("text_config", "llm_config", "language_config")  # of multimodal models


@dataclass(frozen=True)
class Layer:
    """Attention over K and V. Sinks are not listed, because the same kernels serve layers with and without them.

    Attributes:
        window_left: keys to the left of a row's own key, or -1.
        chunk: keys of a chunk, or 0.
        soft_cap: cap of the logits, or 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window_left: int = -1
    chunk: int = 0
    soft_cap: float = 0.0
    alibi: bool = False

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        extras = [f"window_left={self.window_left}"] * (self.window_left >= 0) + [f"chunk={self.chunk}"] * bool(
            self.chunk
        )
        extras += [f"soft_cap={self.soft_cap}"] * bool(self.soft_cap) + ["ALiBi"] * self.alibi
        return ", ".join([f"{self.heads} query heads", f"{self.kv_heads} KV heads", f"head_dim={dims}", *extras])


@dataclass(frozen=True)
class LatentLayer:
    """Multi-head latent attention. ``top_k`` is the number of top-k indices of sparse attention, or 0."""

    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    top_k: int = 0

    def __str__(self) -> str:
        dims = f"{self.kv_lora_rank + self.qk_rope_head_dim}/{self.kv_lora_rank}"
        return f"MLA, {self.heads} query heads, head_dim={dims}" + f", top_k={self.top_k}" * bool(self.top_k)


@dataclass(frozen=True)
class Model:
    """The kinds of attention layers of a model, each once, and the name of its dtype, if any.

    ``others`` has the values of ``layer_types`` for layers that hopwell has no part in, such as linear attention.
    """

    layers: tuple[Layer | LatentLayer, ...]
    dtype: str | None
    others: tuple[str, ...]


def configuration(model: Any) -> dict[str, Any]:
    """Return the configuration of the language model as a dict.

    ``model`` is a path of a ``config.json`` or of its folder, a mapping, or an object with ``to_dict``, such as a
    configuration of transformers.
    """
    if isinstance(model, (str, os.PathLike)):
        path = pathlib.Path(model)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"model must be a config.json or a folder with one, got {str(model)!r}")
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    elif isinstance(model, Mapping):
        found = model
    elif callable(getattr(model, "to_dict", None)):
        found = model.to_dict()
    else:
        raise TypeError(
            f"model must be a path, a dict or a configuration of transformers, got an object of type "
            f"{type(model).__name__}"
        )
    if not isinstance(found, Mapping):
        raise ValueError(f"model must have a dict as its configuration, got a {type(found).__name__}")
    parts = [found[name] for name in TEXT_PARTS if isinstance(found.get(name), Mapping)]
    return {**found, **parts[0]} if parts else dict(found)


def read(model: Any) -> Model:
    """Return the attention layers of ``model``, which is as in :func:`configuration`."""
    config = configuration(model)
    dtype = config.get("dtype") or config.get("torch_dtype")
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if config.get("kv_lora_rank"):
        return Model((_latent(config),), name, ())
    kinds, others = _layer_types(config)
    return Model(tuple(dict.fromkeys(_layer(config, kind) for kind in kinds)), name, others)


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(
            f"the model's configuration has no {field}; if its file leaves out defaults of transformers, pass "
            "transformers.AutoConfig.from_pretrained(folder) to hopwell.warm_up"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} of the model must be a positive integer, got {value!r}")
    return value


def _layer_types(config: Mapping[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """Return the types of attention layers, and the other layer types.

    A configuration without ``layer_types`` can have a window in some layers only, by rules of the model's own code.
    Both types are returned then.
    """
    listed = config.get("layer_types")
    if listed:
        found = list(dict.fromkeys(map(str, listed)))
        return [kind for kind in found if kind in REPLACED], tuple(kind for kind in found if kind not in REPLACED)
    slides = config.get("sliding_window") and config.get("use_sliding_window") is not False
    return [FULL] + [SLIDING] * bool(slides) + [CHUNKED] * bool(config.get("attention_chunk_size")), ()


def _layer(config: Mapping[str, Any], kind: str) -> Layer:
    replaced = {name: config[other] for name, other in REPLACED[kind].items() if config.get(other) is not None}
    config = {**config, **replaced}
    heads = _positive(config, "num_attention_heads")
    hidden = config.get("hidden_size")
    head_dim = _positive(config, "head_dim", hidden // heads if isinstance(hidden, int) else None)
    return Layer(
        heads,
        _positive(config, "num_key_value_heads", heads),
        head_dim,
        _positive(config, "v_head_dim", head_dim),
        window_left=_positive(config, "sliding_window") - 1 if kind == SLIDING else -1,
        chunk=_positive(config, "attention_chunk_size") if kind == CHUNKED else 0,
        soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
        alibi=config.get("alibi") is True,
    )


def _latent(config: Mapping[str, Any]) -> LatentLayer:
    fields = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    heads, rank, rope, nope, v_head_dim = (_positive(config, field) for field in fields)
    top_k = _positive(config, "index_topk") if config.get("index_topk") else 0
    return LatentLayer(heads, rank, rope, nope, v_head_dim, top_k)
