# ABCDigits: train on it, then find answers at up to 128 times the training length. The recipe was
# tuned on seeds 0 to 23. tiny.sh sets what is in capitals.
. "$(dirname "$0")/lib.sh"

for seed in ${SEEDS:-24 25 26 27 28 29 30 31}; do
    echo python train.py --data abcdigits --digits 2 --steps 4800 --seed $seed --w-th 16 \
        --lr 0.015625 --layers 4 --psi ${PSI:-8} $TRAIN --out $OUT/needles_original-$seed
done | lanes
for swe in "" --swe; do
    for seed in ${SEEDS:-24 25 26 27 28 29 30 31}; do
        echo python abcdigits.py --lengths 256 512 1024 2048 4096 8192 16384 32768 $swe $MEASURE \
            --ckpt $OUT/needles_original-$seed/ckpt.pt
    done | lanes
done

for seed in ${SEEDS:-24 25 26}; do
    echo python train.py --data abcdigits --digits 2 --steps 4800 --seed $seed \
        --model transformer:${SIZE:-4,4,96} --lr 0.001953125 $TRAIN \
        --out $OUT/needles_transformer-$seed
done | lanes
for seed in ${SEEDS:-24 25 26}; do
    echo python abcdigits.py --lengths 256 512 1024 2048 --trials 20 --rope-scale 1 2 4 ntk2 ntk4 \
        $MEASURE --ckpt $OUT/needles_transformer-$seed/ckpt.pt
done | lanes

run python -m experiments.retrieval --out $OUT/report/abcdigits.png \
    $OUT/needles_original-*/abcdigits.tsv $OUT/needles_transformer-*/abcdigits.tsv
