from __future__ import annotations

import pathlib
import sys

# Batches and how they are checked are those of decode, the float64 reference is that of prefill.
sys.path += [str(pathlib.Path(__file__).parents[1] / part) for part in ("prefill", "decode")]
