# Every figure of the report, in a few nights of two cores: LANES=2 bash runs/small.sh
# Each script runs alone, too, after those that its first lines name.
. "$(dirname "$0")/lib.sh"

for figure in scaling lr_sweep deep sanity text text_w_th16 abcdigits competition passkey \
        ablations ablations_abcdigits latency; do
    run bash runs/$figure.sh
done
