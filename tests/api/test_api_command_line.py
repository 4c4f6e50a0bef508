"""What the commands refuse they refuse in words, not with a traceback."""

from __future__ import annotations

import pytest
import torch

from hopwell.__main__ import main


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--match", "[", "'[' is no regular expression"),
        ("--jobs", "-1", "it must be from 1 to"),
        ("--jobs", "0", "it must be from 1 to"),
        ("--jobs", "x", "it must be from 1 to"),
        ("--arch", "sm_77", "invalid choice: 'sm_77'"),
        ("--prefill-types", "fp4", "invalid choice: 'fp4'"),
    ],
)
def test_options_of_compile(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compile", f"{option}={value}"])
    assert caught.value.code == 2
    assert f"argument {option}: {message}" in capsys.readouterr().err.splitlines()[-1]


def test_a_name_that_no_kernel_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--match", "nothing"]) == 1
    assert capsys.readouterr().err == (
        "no kernel for sm_90a with --prefill-types 16bit has a name that matches 'nothing'\n"
    )


def test_the_demo_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "hopwell: --device cuda needs a GPU, and torch finds none; --device cpu runs on the emulator\n"
    )


def test_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_EMULATE_SEED", "x")
    assert main(["demo", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("hopwell: HOPWELL_EMULATE_SEED must be an integer of at least 0")
