from __future__ import annotations

import pathlib
import sys

# Kernels that stand for others are those that kernel tests compile.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "kernels"))
