# What a sceptic asks of the report, in days on two cores: LANES=2 bash runs/controls.sh tuning
#   tuning    which small Transformer is the strongest at length, and at which rate? seeds 20, 21
#   passkey   seeds on which nothing was tuned
# Without a name both, in this order.
OUT=${OUT:-out/controls}
. "$(dirname "$0")/lib.sh"
scales="1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32"

tuning() {
    for rate in 0.00390625 0.015625 0.0009765625 0.00048828125; do
        for seed in 20 21; do
            for kind in nope local ssmax; do
                echo python train.py --data abcdigits --digits 2 --steps 8000 \
                    --model transformer:4,4,96:$kind --lr $rate --seed $seed \
                    --out $OUT/tune_${kind}_$rate-$seed
            done
            echo python train.py --data abcdigits --digits 2 --steps 8000 \
                --model transformer:4,4,96 --lr $rate --seed $seed --out $OUT/tune_rope_$rate-$seed
        done | lanes
        for seed in 20 21; do
            for kind in nope local ssmax; do
                echo python abcdigits.py --lengths 256 512 1024 2048 --trials 20 \
                    --ckpt $OUT/tune_${kind}_$rate-$seed/ckpt.pt
            done
            echo python abcdigits.py --lengths 256 512 1024 2048 --trials 20 \
                --rope-scale $scales --ckpt $OUT/tune_rope_$rate-$seed/ckpt.pt
        done | lanes
    done
}

passkey() {
    for seed in 3 4 5; do
        echo python train.py --data passkey --seq-len 512 --batch-size 4 --steps 6000 --w-th 8192 \
            --layers 4 --lr 0.015625 --seed $seed --out $OUT/keys-$seed
    done | lanes
    for swe in "" --swe; do
        for seed in 3 4 5; do
            echo python -m experiments.passkey --lengths 512 1024 2048 4096 8192 $swe \
                --ckpt $OUT/keys-$seed/ckpt.pt
        done | lanes
    done
}

for part in ${*:-tuning passkey}; do
    $part
done
