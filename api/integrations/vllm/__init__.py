"""Attention backends for vLLM: ``--attention-backend HOPWELL``, or ``HOPWELL_MLA`` for DeepSeek models.

vLLM finds :func:`register` through the entry point group ``vllm.general_plugins`` and calls it in every process.
"""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

__all__ = ["BACKENDS", "OLDEST_VLLM", "TESTED_VLLM", "register"]

# vLLM takes backends of new names from 0.32 on. Later releases than the tested one mostly add to the interface.
OLDEST_VLLM, TESTED_VLLM = (0, 32), (0, 33)

_PACKAGE = "hopwell.integrations.vllm"
BACKENDS = {
    "HOPWELL": f"{_PACKAGE}.backend.HopwellBackend",
    "HOPWELL_MLA": f"{_PACKAGE}.mla.HopwellMLABackend",
    "HOPWELL_MLA_SPARSE": f"{_PACKAGE}.mla_sparse.HopwellMLASparseBackend",
}
MLA_PREFILL_BACKENDS = {"HOPWELL": f"{_PACKAGE}.mla_prefill.HopwellMLAPrefillBackend"}


def register() -> None:
    """Add hopwell's backends to vLLM's registries. Later calls in the same process change nothing.

    A vLLM older than ``OLDEST_VLLM`` gets a warning in its log and no backend. A vLLM newer than ``TESTED_VLLM`` gets
    the backends and a warning.
    """
    from vllm.logger import init_logger

    logger = init_logger("vllm.hopwell")  # vLLM prints the messages of loggers below its own name
    version = Version(metadata.version("vllm"))
    tested = "vLLM {}.{} to {}.{}".format(*OLDEST_VLLM, *TESTED_VLLM)
    if version.release[:2] < OLDEST_VLLM:
        logger.warning(
            "hopwell registers no attention backend: it is tested with %s, and this is vLLM %s.", tested, version
        )
        return
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    new = [name for name in BACKENDS if name not in AttentionBackendEnum.__members__]
    if version.release[:2] > TESTED_VLLM and new:
        logger.warning("hopwell's attention backends are tested with %s, and this is vLLM %s.", tested, version)
    for name in new:
        register_backend(name, BACKENDS[name])
    for name, path in MLA_PREFILL_BACKENDS.items():
        if name not in MLAPrefillBackendEnum.__members__:
            register_mla_prefill_backend(name, path)
