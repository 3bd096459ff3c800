# Loss against size, four Multiscreens and four Transformers. The second rate is the paper's.
. "$(dirname "$0")/lib.sh"

for psi in 3 4 5 6; do
    for rate in 0.015625 0.0625 0.25; do
        for seed in 0 1 2; do
            echo python train.py --psi $psi --lr $rate --seed $seed --seq-len 128 --batch-size 8 \
                --steps 2000 --warmup 125 --log-every 1 \
                --out $OUT/multiscreen_psi${psi}_lr$rate-$seed
        done
    done
done | lanes

for size in 2,2,28 2,2,48 3,4,64 4,4,80; do
    for rate in 0.00025 0.001 0.00390625 0.015625; do
        for seed in 0 1 2; do
            echo python train.py --model transformer:$size --lr $rate --seed $seed --seq-len 128 \
                --batch-size 8 --steps 2000 --warmup 125 --log-every 1 \
                --out $OUT/transformer_${size}_lr$rate-$seed
        done
    done
done | lanes

run python -m experiments.scaling --out $OUT/report \
    $OUT/multiscreen_psi?_lr*-? $OUT/transformer_?,?,??_lr*-?
