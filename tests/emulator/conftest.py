from __future__ import annotations

import pathlib
import sys

# The batches and the float64 reference of the kernels' own tests.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "prefill"))
