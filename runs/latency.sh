# Time of a forward pass by context length. Give it a quiet machine; flags go to the command.
. "$(dirname "$0")/lib.sh"

run python -m experiments.latency --out $OUT/report/latency.png "$@"
