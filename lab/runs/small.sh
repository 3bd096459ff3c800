# Every figure of the paper's evaluation, in a few nights on two cores:
#     LANES=2 bash lab/runs/small.sh
# Each script also runs alone, after those named in its first lines.
. "$(dirname "$0")/lib.sh"

for figure in scaling lr_sweep text abcdigits passkey ablations ablations_abcdigits latency; do
    run bash lab/runs/$figure.sh
done
