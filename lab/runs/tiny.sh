# A check that everything runs, in two minutes on one core. Nothing is learned: its numbers say
# nothing about the paper.
OUT=${OUT:-out/tiny}
. "$(dirname "$0")/lib.sh"
export SEEDS=0 PSI=2 SIZE=2,2,16 TRAIN="--steps 4 --batch-size 2 --kernel definition"

MEASURE="--length 256 --documents 1" run bash lab/runs/text.sh
MEASURE="--lengths 256 --trials 1" run bash lab/runs/abcdigits.sh
run bash lab/runs/latency.sh --psi 2 --models multiscreen transformer:1,2,8 --lengths 256 512 \
    --repeats 1
run python -m lab.benchmarks.cpu $OUT/report/latency.tsv
run python -m lab.passkey --lengths 512 --trials 1 --ckpt $OUT/needles_original-0/ckpt.pt
run python -m lab.scaling $OUT/text_multiscreen-0 $OUT/text_transformer-0 --out $OUT/report
run python -m lab.compare $OUT/text_*-0 --by lr --out $OUT/report
run python -m lab.mechanisms --names softmax screening --out $OUT/report/mechanisms.png
run python -m lab.sample --tokens 4 --ckpt $OUT/text_multiscreen-0/ckpt.pt
