# The loss at six learning rates, and its curves at three of them. Then, with one seed: are models
# of 16 layers stable at the rates 2^-4 and 2^-3?
. "$(dirname "$0")/lib.sh"
recipe="--seq-len 128 --batch-size 8"
short="$recipe --seed SEED --steps 1000 --warmup 62 --log-every 2"
long="$recipe --seed 0 --steps 6000 --warmup 188 --log-every 1"

for rate in 0.0009765625 0.00390625 0.015625 0.0625 0.25 1; do
    cat <<END
python train.py --resume --psi 5 --lr $rate $short --out $OUT/multiscreen_lr$rate-SEED
python train.py --resume --model transformer:8,4,48 --lr $rate $short \
    --out $OUT/transformer_lr$rate-SEED
python train.py --resume --model transformer:8,4,48:qknorm --lr $rate $short \
    --out $OUT/qknorm_lr$rate-SEED
END
done | lanes

run python -m lab.compare --by lr --name lr_sweep --out $OUT/report \
    "Transformer=$OUT/transformer_lr*-?" \
    "Transformer + QKNorm=$OUT/qknorm_lr*-?" \
    "Multiscreen=$OUT/multiscreen_lr*-?"
run python -m lab.compare --name curves --out $OUT/report \
    "Multiscreen, 2^-8=$OUT/multiscreen_lr0.00390625-0" \
    "Transformer, 2^-8=$OUT/transformer_lr0.00390625-0" \
    "Multiscreen, 2^-4=$OUT/multiscreen_lr0.0625-0" \
    "Transformer, 2^-4=$OUT/transformer_lr0.0625-0" \
    "Multiscreen, 1=$OUT/multiscreen_lr1-0" \
    "Transformer, 1=$OUT/transformer_lr1-0"

for rate in 0.0625 0.125; do
    echo python train.py --resume --psi 5 --layers 16 --lr $rate $long \
        --out $OUT/deep_multiscreen$rate
    echo python train.py --resume --model transformer:16,4,48 --lr $rate $long \
        --out $OUT/deep_transformer$rate
done | lanes

run python -m lab.compare --by lr --name deep --window 64 --out $OUT/report \
    "Transformer, 16 layers=$OUT/deep_transformer*" \
    "Multiscreen, 16 layers=$OUT/deep_multiscreen*"
