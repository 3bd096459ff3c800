#!/usr/bin/env bash
# Gradescope runs this once, as root, to build the image: a virtual environment with the versions of
# constraints.txt, and PyTorch without CUDA. Python must be 3.11 or later, which Ubuntu 22.04 has
# beside its python3.
set -euo pipefail
root=${AUTOGRADER_ROOT:-/autograder}
python=python3
python3 -c "import sys; sys.exit(sys.version_info < (3, 11))" || python=python3.11
apt-get update
apt-get install -y "$python" "$python-venv"
"$python" -m venv "$root/venv"
pip="$root/venv/bin/pip install --no-cache-dir"
$pip -e "$root/source[test]" -c "$root/source/constraints.txt" --extra-index-url https://download.pytorch.org/whl/cpu
