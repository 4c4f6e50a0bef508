from __future__ import annotations

import pathlib
import sys

# Batches and the float64 reference are those of prefill.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "prefill"))
