# Is the Transformer held back by weight decay or by clipping? After scaling.sh.
. "$(dirname "$0")/lib.sh"
recipe="--model transformer:3,4,64 --seed SEED --seq-len 128 --batch-size 8 --steps 2000 --warmup 125"

lanes <<END
python train.py --resume $recipe --log-every 1 --weight-decay 0 --out $OUT/no_decay-SEED
python train.py --resume $recipe --log-every 1 --clip 0 --out $OUT/no_clipping-SEED
END

run python -m experiments.compare --name sanity --window 64 --out $OUT/report \
    "Transformer=$OUT/transformer_3,4,64_lr0.001-?" \
    "Transformer, no weight decay=$OUT/no_decay-?" \
    "Transformer, no clipping=$OUT/no_clipping-?" \
    "Multiscreen=$OUT/multiscreen_psi5_lr0.0625-?"
