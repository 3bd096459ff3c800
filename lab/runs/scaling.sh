# The loss by size, for four Multiscreens and four Transformers. The second rate of each is the
# paper's. Then a check: is the Transformer held back by weight decay or by clipping?
. "$(dirname "$0")/lib.sh"
recipe="--seed SEED --seq-len 128 --batch-size 8 --steps 2000 --warmup 125 --log-every 1"

for psi in 3 4 5 6; do
    for rate in 0.015625 0.0625 0.25; do
        echo python train.py --resume --psi $psi --lr $rate $recipe \
            --out $OUT/multiscreen_psi${psi}_lr$rate-SEED
    done
done | lanes

for size in 2,2,28 2,2,48 3,4,64 4,4,80; do
    for rate in 0.00025 0.001 0.00390625 0.015625; do
        echo python train.py --resume --model transformer:$size --lr $rate $recipe \
            --out $OUT/transformer_${size}_lr$rate-SEED
    done
done | lanes

run python -m lab.scaling --out $OUT/report \
    $OUT/multiscreen_psi?_lr*-? $OUT/transformer_?,?,??_lr*-?

lanes <<END
python train.py --resume --model transformer:3,4,64 $recipe --weight-decay 0 \
    --out $OUT/no_decay-SEED
python train.py --resume --model transformer:3,4,64 $recipe --clip 0 \
    --out $OUT/no_clipping-SEED
END

run python -m lab.compare --name sanity --window 64 --out $OUT/report \
    "Transformer=$OUT/transformer_3,4,64_lr0.001-?" \
    "Transformer, no weight decay=$OUT/no_decay-?" \
    "Transformer, no clipping=$OUT/no_clipping-?" \
    "Multiscreen=$OUT/multiscreen_psi5_lr0.0625-?"
