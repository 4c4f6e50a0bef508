from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from selection import core, functions

# A busy machine takes longer than Hypothesis's 200 ms for some examples.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=int, default=1500, help="calls that tests/api/test_api_seeded_fuzz.py makes")
    parser.addoption("--threads", type=int, default=4, help="threads of tests/emulator/test_threads.py")
    parser.addoption("--rounds", type=int, default=1, help="how often each of them makes all calls")
    parser.addoption("--problems", type=int, default=8, help="problems of test_kernels_random_problems.py")
    parser.addoption("--seed", type=int, default=0, help="number of the first of these calls or problems")
    sets = {
        "--core": "run the core set of tests only, see selection.py",
        "--functions": "run what the core set leaves of the set of functions; neither set has tests that take a GPU",
    }
    for option, meaning in sets.items():
        parser.addoption(option, action="store_true", help=meaning)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Compiling a kernel rewrites functions of its parts in place; they no longer run as Python afterwards. Workers of
    # pytest-xdist take tests in this order too.
    items.sort(key=lambda item: item.get_closest_marker("traced") is None)
    for marker in ("slow_emulator", "clients"):  # these tests run only on request
        if marker not in config.option.markexpr:
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    only_core, only_functions = (config.getoption(option) for option in ("--core", "--functions"))
    if only_core and only_functions:
        raise pytest.UsageError("--core and --functions leave no test: give one of them, or neither for all")
    if only_core or only_functions:
        without_gpu = [item for item in items if not item.get_closest_marker("gpu")]
        members = set(core(without_gpu))
        if only_functions:
            members = set(functions(without_gpu)) - members
        config.hook.pytest_deselected(items=[item for item in items if item not in members])
        items[:] = [item for item in items if item in members]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.emulator)],
    ids=["gpu", "emulator"],
)
def device(request: pytest.FixtureRequest) -> str:
    """Return the device of a call's tensors. With CPU tensors, the same kernel runs in the emulator."""
    return request.param


@pytest.fixture
def sm120_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give CPU tensors the kernels of sm_120."""
    monkeypatch.setenv("HOPWELL_EMULATE", "sm_120a")
