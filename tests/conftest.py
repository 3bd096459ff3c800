"""Fixtures that several test files use."""
import signal
import sys

import pytest

import train


@pytest.fixture(scope="session", autouse=True)
def hear_ctrl_c():
    """A shell's background job ignores Ctrl-C, and so would all processes that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_samples():
    """Training in a test's own process ends without a sample, which would take longer than it."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, "sample", lambda model, data, tokenizer: "")
        yield


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(script, *flags) runs its main() in the test's own folder."""
    monkeypatch.chdir(tmp_path)

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main()

    return run
