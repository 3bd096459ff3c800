# Which small Transformer finds most at length, and at which rate? On seeds 20 and 21, which no
# report uses: LANES=2 bash runs/tune_transformers.sh takes half a day of two cores.
OUT=${OUT:-out/tuning}
. "$(dirname "$0")/lib.sh"

for rate in 0.00390625 0.015625 0.0009765625 0.00048828125; do
    for seed in 20 21; do
        for kind in nope local ssmax; do
            echo python train.py --data abcdigits --digits 2 --steps 8000 \
                --model transformer:4,4,96:$kind --lr $rate --seed $seed \
                --out $OUT/${kind}_$rate-$seed
        done
        echo python train.py --data abcdigits --digits 2 --steps 8000 --model transformer:4,4,96 \
            --lr $rate --seed $seed --out $OUT/rope_$rate-$seed
    done | lanes
    for seed in 20 21; do
        for kind in nope local ssmax; do
            echo python abcdigits.py --lengths 256 512 1024 2048 --trials 20 \
                --ckpt $OUT/${kind}_$rate-$seed/ckpt.pt
        done
        echo python abcdigits.py --lengths 256 512 1024 2048 --trials 20 \
            --rope-scale 1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32 --ckpt $OUT/rope_$rate-$seed/ckpt.pt
    done | lanes
done
