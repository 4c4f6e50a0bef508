"""Attention backend for SGLang: ``--attention-backend hopwell``.

SGLang finds :func:`register` through the entry point group ``sglang.srt.plugins`` and calls it in every process. The
environment variable ``HOPWELL_SGLANG_REPLACE`` lists names of SGLang's own backends, with commas between them, that
hopwell serves too: ``trtllm_mha`` and ``trtllm_mla``. SGLang has features that only models with these names get.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

from packaging.version import Version

from hopwell.kernels.jit import settings

__all__ = ["NAME", "OLDEST_SGLANG", "REPLACEABLE", "TESTED_SGLANG", "register"]

OLDEST_SGLANG, TESTED_SGLANG = (0, 5, 22), (0, 5, 23)
NAME = "hopwell"
# Names that HOPWELL_SGLANG_REPLACE takes, and whether they are for models with MLA.
REPLACEABLE = {"trtllm_mha": False, "trtllm_mla": True}

_REPLACE = "HOPWELL_SGLANG_REPLACE"
logger = logging.getLogger(__name__)


def register() -> None:
    """Add hopwell's backend to SGLang's registry and lists. Later calls in the same process change nothing.

    An SGLang older than ``OLDEST_SGLANG`` gets a warning in its log and no backend. An SGLang newer than
    ``TESTED_SGLANG`` gets the backend and a warning.

    Raises:
        ValueError: ``HOPWELL_SGLANG_REPLACE`` has an unknown name. SGLang logs the error.
    """
    version = Version(metadata.version("sglang"))
    tested = "SGLang {} to {}".format(*(".".join(map(str, one)) for one in (OLDEST_SGLANG, TESTED_SGLANG)))
    if version.release[:3] < OLDEST_SGLANG:
        logger.warning("hopwell registers no attention backend: it is tested with %s, not %s.", tested, version)
        return
    replaced = sorted(settings.choices(_REPLACE, tuple(REPLACEABLE)))
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME not in ATTENTION_BACKENDS:
        if version.release[:3] > TESTED_SGLANG:
            logger.warning("hopwell's attention backend is tested with %s, not %s.", tested, version)
        register_attention_backend(NAME)(_create)
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
        choices.add_chunked_prefix_cache_attention_backend(NAME)
    for name in replaced:
        logger.info("hopwell serves SGLang's attention backend %s.", name)
        register_attention_backend(name)(_create_mla if REPLACEABLE[name] else _create_gqa)


def _create(runner: Any) -> Any:
    return _create_mla(runner) if runner.use_mla_backend else _create_gqa(runner)


def _create_gqa(runner: Any) -> Any:
    from hopwell.integrations.sglang.gqa import HopwellAttnBackend

    if runner.use_mla_backend:
        raise ValueError("the attention backend trtllm_mha serves models without MLA")
    return HopwellAttnBackend(runner)


def _create_mla(runner: Any) -> Any:
    from hopwell.integrations.sglang.mla import HopwellMLABackend

    if not runner.use_mla_backend:
        raise ValueError("the attention backend trtllm_mla serves models with MLA")
    return HopwellMLABackend(runner)
