"""Cases of whole models: transformers' ``generate_batch``, and decode steps."""

from __future__ import annotations

from hopwell.perf.decode_step import STEP_CASES
from hopwell.perf.generate_batch import BATCH_CASES
from hopwell.perf.results import Labels

CASES = (*BATCH_CASES, *STEP_CASES)
LABELS = Labels("generate", "new tokens/s", "of all requests together", "", ())
