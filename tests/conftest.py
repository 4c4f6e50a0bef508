from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from helpers.device import schedules
from hypothesis import settings
from selection import SETS, asks_for_gpu, members, shard

# A busy machine takes longer than Hypothesis's 200 ms for some examples.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=int, default=1500, help="calls that tests/api/test_seeded_fuzz.py makes")
    parser.addoption("--threads", type=int, default=4, help="threads of tests/emulator/test_threads.py")
    parser.addoption("--rounds", type=int, default=1, help="how often each of them makes all calls")
    parser.addoption("--problems", type=int, default=8, help="problems of tests/kernels/test_random_problems.py")
    parser.addoption("--per-kernel", type=int, default=1, help="problems in a row of one kind that have one kernel")
    parser.addoption("--seed", type=int, default=0, help="number of the first of these calls or problems")
    for option, meaning in SETS.items():
        parser.addoption(option, dest="set", action="append_const", const=option, help=meaning)
    parser.addoption("--shard", type=shard, metavar="INDEX/NUMBER", help="run one of NUMBER parts of the chosen tests")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HOPWELL_EMULATE_CHECKS", "sync")  # of every emulated launch of the tests
    names = sorted(set(config.getoption("set") or ()))
    if len(names) > 1:
        raise pytest.UsageError(f"{' and '.join(names)}: give one of them, or none for all tests")
    schedules.only_one = names in (["--core"], ["--functions"])


def keep(config: pytest.Config, items: list[pytest.Item], kept: Sequence[pytest.Item]) -> None:
    """Deselect the tests that are not in ``kept``."""
    members_of_kept = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in members_of_kept])
    items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Compiling a kernel rewrites functions of its parts in place; they no longer run as Python afterwards. Workers of
    # pytest-xdist take tests in this order too.
    items.sort(key=lambda item: item.get_closest_marker("traced") is None)
    for marker in ("slow_emulator", "clients"):  # these tests run only on request
        if marker not in config.option.markexpr:
            keep(config, items, [item for item in items if not item.get_closest_marker(marker)])
    for name in set(config.getoption("set") or ()):
        keep(config, items, members(name, items, on_gpu=asks_for_gpu(config.option.markexpr)))
    if config.getoption("--shard"):
        index, number = config.getoption("--shard")
        keep(config, items, items[index - 1 :: number])
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
