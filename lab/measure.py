"""What do the commands of the lab share? Optional packages, a checkpoint to measure, a table."""
import argparse
import hashlib
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch

from lab.transformer import scale_rope
from train import load_checkpoint


def optional(name):
    """A module of the extra `lab`, or one line that says what to install."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        sys.exit(f'error: {package} is not installed: pip install -e ".[lab]", or {package} alone')
