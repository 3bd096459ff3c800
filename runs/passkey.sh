# Passkey: train on it until it is learned, then find keys at up to 16 times the training length.
. "$(dirname "$0")/lib.sh"

# The recipe was tuned on seeds 0 to 2.
for seed in 0 1 2 3 4 5; do
    echo python train.py --data passkey --seq-len 512 --batch-size 4 --steps 6000 --w-th 8192 \
        --layers 4 --lr 0.015625 --seed $seed --out $OUT/keys_multiscreen-$seed
done | lanes
for seed in 0 1 2; do
    echo python train.py --model transformer:4,4,96 --data passkey --seq-len 512 --batch-size 4 \
        --steps 6000 --lr 0.001953125 --seed $seed --out $OUT/keys_transformer-$seed
done | lanes

for swe in "" --swe; do
    for seed in 0 1 2 3 4 5; do
        echo python -m experiments.passkey --lengths 512 1024 2048 4096 8192 $swe \
            --ckpt $OUT/keys_multiscreen-$seed/ckpt.pt
    done | lanes
done
for seed in 0 1 2; do
    echo python -m experiments.passkey --lengths 512 1024 2048 4096 8192 --rope-scale 1 4 16 \
        --ckpt $OUT/keys_transformer-$seed/ckpt.pt
done | lanes

run python -m experiments.retrieval --out $OUT/report/passkey.png \
    $OUT/keys_multiscreen-?/passkey.tsv $OUT/keys_transformer-?/passkey.tsv
