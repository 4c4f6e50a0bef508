"""Requirements under every release in the ranges of pyproject.toml: kernels compile, are correct and are loaded.

Kernels load with and without orcjit. CI runs these tests under both ends of the ranges.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hopwell.kernels.jit import toolchain
from hopwell.kernels.registry import shipped_configs

ROOT = Path(__file__).parents[2]

# Packages of vLLM 0.33.0 and SGLang 0.5.23, with their own requirements.
PINNED_BY_ENGINES = {"nvidia-cutlass-dsl": "4.8.0", "apache-tvm-ffi": "0.1.11"}
RESOLVED_WITH_ENGINES = {"numpy": "2.3.5", "torch": "2.14.0", "cuda-python": "13.4.4"}


def requirements() -> dict[str, Requirement]:
    """Return the requirements of an installation without extras."""
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    found = [Requirement(line) for line in re.findall(r'"([^"]+)"', listed)]
    return {requirement.name: requirement for requirement in found}


@pytest.mark.parametrize(("package", "version"), (PINNED_BY_ENGINES | RESOLVED_WITH_ENGINES).items())
def test_serving_engines_are_installable_beside(package: str, version: str) -> None:
    assert requirements()[package].specifier.contains(version)


def test_lower_ends_are_what_engines_pin() -> None:
    """The tests under the lower ends are therefore tests beside these engines."""
    for package, version in PINNED_BY_ENGINES.items():
        assert f">={version}" in str(requirements()[package].specifier).split(",")


def test_loaders_of_newer_releases_are_no_requirement() -> None:
    assert "apache-tvm-ffi-orcjit" not in requirements()


def test_orcjit_is_not_installable_beside_engines() -> None:
    """orcjit's metadata requires a newer tvm-ffi than the engines pin."""
    if importlib.util.find_spec("tvm_ffi_orcjit") is None:
        pytest.skip("apache-tvm-ffi-orcjit is not installed")
    needed = map(Requirement, importlib.metadata.requires("apache-tvm-ffi-orcjit") or [])
    (tvm_ffi,) = [one for one in needed if one.name == "apache-tvm-ffi"]
    assert not tvm_ffi.specifier.contains(PINNED_BY_ENGINES["apache-tvm-ffi"])


@pytest.mark.compile
@pytest.mark.parametrize("orcjit", [True, False])
def test_compiled_kernels_are_loaded(orcjit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loaders load them, and neither needs a GPU."""
    if orcjit and importlib.util.find_spec("tvm_ffi_orcjit") is None:
        pytest.skip("apache-tvm-ffi-orcjit is not installed")
    monkeypatch.setattr(toolchain, "_has_orcjit", lambda: orcjit)
    monkeypatch.setattr(toolchain, "_functions", {})
    config = next(iter(shipped_configs()))
    function = toolchain.function(config)
    assert type(function).__module__.startswith("tvm_ffi")
    assert toolchain.function(config) is function


@pytest.mark.compile
def test_a_driver_without_a_gpu_is_not_asked_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSL's error message about a failed detection of the architecture detects it again."""
    from cutlass.base_dsl.runtime import cuda
    from cutlass.cutlass_dsl import CuTeDSL

    asked: list[int] = []
    status = cuda.cuda.CUresult

    def no_device(flags: int) -> tuple[object]:
        asked.append(flags)
        return (status.CUDA_ERROR_NO_DEVICE,)

    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda.cuda, "cuInit", no_device)
    monkeypatch.setattr(cuda.cuda, "cuGetErrorName", lambda error: (status.CUDA_SUCCESS, b"CUDA_ERROR_NO_DEVICE"))
    monkeypatch.setattr(toolchain, "_finds_no_gpu", lambda: True)
    del CuTeDSL._get_dsl().envar.arch  # what was detected
    assert toolchain.artifact(next(iter(shipped_configs()))).is_sound()
    assert not asked


@pytest.mark.emulator
def test_three_kernels_are_right() -> None:
    """Prefill, decode and MLA decode are compared with float64."""
    done = subprocess.run([sys.executable, "-m", "hopwell", "demo"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": right\n") == 3, done.stdout
