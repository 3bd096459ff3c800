# ABCDigits: train on it, then find answers at up to 128 times the training length. The recipe was
# tuned on seeds 0 to 23. tiny.sh sets the variables in capitals.
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

# The two strongest Transformers, each at its rate: runs/tune_transformers.sh tunes them on other
# seeds.
for seed in ${SEEDS:-24 25 26 27 28 29 30 31}; do
    echo python train.py --data abcdigits --digits 2 --steps 8000 --seed $seed \
        --model transformer:${SIZE:-4,4,96}:local --lr 0.0009765625 $TRAIN \
        --out $OUT/needles_local-$seed
    echo python train.py --data abcdigits --digits 2 --steps 8000 --seed $seed \
        --model transformer:${SIZE:-4,4,96} --lr 0.00048828125 $TRAIN \
        --out $OUT/needles_transformer-$seed
done | lanes
for seed in ${SEEDS:-24 25 26 27 28 29 30 31}; do
    echo python abcdigits.py --lengths 256 512 1024 2048 4096 8192 $MEASURE \
        --ckpt $OUT/needles_local-$seed/ckpt.pt
    echo python abcdigits.py --lengths 256 512 1024 2048 $MEASURE \
        --rope-scale 1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32 \
        --ckpt $OUT/needles_transformer-$seed/ckpt.pt
    echo python abcdigits.py --lengths 4096 8192 $MEASURE --rope-scale ntk8 ntk16 ntk32 \
        --ckpt $OUT/needles_transformer-$seed/ckpt.pt
done | lanes

run python -m experiments.retrieval --out $OUT/report/abcdigits.png \
    $OUT/needles_{original,local,transformer}-*/abcdigits.tsv
