from __future__ import annotations

import pathlib
import sys

# What outputs are held against.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
