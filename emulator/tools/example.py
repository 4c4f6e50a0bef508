"""Runs a script that needs a GPU, such as a CUTLASS example, in the emulator."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from ..host.runtime import take_error
from ..options import use


def run_script(arch: str, script: Path, arguments: list[str], sms: int = 2, **settings: object) -> list:
    """Run ``script`` as __main__ with ``arguments``; return the reports of its launches.

    The folders above the script go on sys.path, up to a folder named ``python`` or ``examples``, because examples
    import their neighbours.
    """
    from . import fake_cuda

    script = script.resolve()
    with use(arch, **settings):
        os.environ["HOPWELL_EMULATE"] = arch
        kernels = fake_cuda.install(sms)
        above = list(script.parents)
        stop = next((k for k, p in enumerate(above) if p.name in ("python", "examples")), 1)
        sys.path[:0] = [str(p) for p in above[:stop]]
        sys.argv = [str(script), *arguments]
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Exception as e:
            pending = take_error()
            if pending is not None:
                raise pending from e
            raise
    return kernels.reports
