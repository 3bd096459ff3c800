# Is the Transformer held back by weight decay or by clipping? After scaling.sh.
. "$(dirname "$0")/lib.sh"

for seed in 0 1 2; do
    echo python train.py --model transformer:3,4,64 --seed $seed --seq-len 128 --batch-size 8 \
        --steps 2000 --warmup 125 --log-every 1 --weight-decay 0 --out $OUT/no_decay-$seed
    echo python train.py --model transformer:3,4,64 --seed $seed --seq-len 128 --batch-size 8 \
        --steps 2000 --warmup 125 --log-every 1 --clip 0 --out $OUT/no_clipping-$seed
done | lanes

run python -m experiments.compare --name sanity --window 64 --out $OUT/report \
    "Transformer=$OUT/transformer_3,4,64_lr0.001-?" \
    "Transformer, no weight decay=$OUT/no_decay-?" \
    "Transformer, no clipping=$OUT/no_clipping-?" \
    "Multiscreen=$OUT/multiscreen_psi5_lr0.0625-?"
