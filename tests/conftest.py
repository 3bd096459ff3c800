"""Fixtures of several files."""
import sys

import pytest


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(script, *flags) runs its main() in a folder of this test."""
    monkeypatch.chdir(tmp_path)

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main()

    return run
