# Which small Transformer finds the most in long contexts, and at which rate? It trains seeds 20 and
# 21, which no report uses. LANES=2 bash lab/runs/tune_transformers.sh takes half a day on two
# cores.
OUT=${OUT:-out/tuning} SEEDS="20 21"
. "$(dirname "$0")/lib.sh"

for rate in 0.00390625 0.015625 0.0009765625 0.00048828125; do
    for kind in rope nope local ssmax; do
        model=transformer:4,4,96:$kind
        echo python train.py --resume --data abcdigits --digits 2 --steps 8000 \
            --model ${model%:rope} --lr $rate --seed SEED --out $OUT/${kind}_$rate-SEED
    done | lanes
    for kind in rope nope local ssmax; do
        scales=
        [ $kind = rope ] && scales="--rope-scale 1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32"
        echo python abcdigits.py --lengths 256 512 1024 2048 --trials 20 $scales \
            --ckpt $OUT/${kind}_$rate-SEED/ckpt.pt
    done | lanes
done
