# Time of a forward pass by context length. Run it on a quiet machine. Flags are passed on.
. "$(dirname "$0")/lib.sh"

run python -m lab.benchmarks.cpu --what forward --table $OUT/report/latency.tsv "$@"
