# Time of a forward pass by context length. Give it a quiet machine; flags go to the command.
. "$(dirname "$0")/lib.sh"

run python -m lab.benchmarks.cpu --what forward --table $OUT/report/latency.tsv "$@"
