# Are 16 layers stable at the rates 2^-4 and 2^-3? One seed.
. "$(dirname "$0")/lib.sh"
recipe="--seed 0 --seq-len 128 --batch-size 8 --steps 6000 --warmup 188 --log-every 1"

for rate in 0.0625 0.125; do
    echo python train.py --resume --psi 5 --layers 16 --lr $rate $recipe --out $OUT/deep_multiscreen$rate
    echo python train.py --resume --model transformer:16,4,48 --lr $rate $recipe \
        --out $OUT/deep_transformer$rate
done | lanes

run python -m experiments.compare --by lr --name deep --window 64 --out $OUT/report \
    "Transformer, 16 layers=$OUT/deep_transformer*" \
    "Multiscreen, 16 layers=$OUT/deep_multiscreen*"
