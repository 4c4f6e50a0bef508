from __future__ import annotations

import pathlib
import sys

# Batches, the float64 reference and what stands for all kernels: shared with the tests of the kernels.
sys.path += [str(pathlib.Path(__file__).parents[1] / part) for part in ("prefill", "decode", "mla", "kernels")]
