# Train on ABCDigits, then find answers at up to 128 times the training length; then the same for
# two models whose keys compete for weight, at up to 32 times. The recipe was tuned on seeds 0 to
# 23. tiny.sh sets SEEDS, PSI, SIZE, TRAIN and MEASURE.
SEEDS=${SEEDS:-24 25 26 27 28 29 30 31}
. "$(dirname "$0")/lib.sh"

# These are the two strongest Transformers, each at its best rate, as tuned on other seeds by
# lab/runs/tune_transformers.sh.
lanes <<END
python train.py --resume --data abcdigits --digits 2 --steps 4800 --w-th 16 --lr 0.015625 \
    --layers 4 --psi ${PSI:-8} --seed SEED $TRAIN --out $OUT/needles_original-SEED
python train.py --resume --data abcdigits --digits 2 --steps 8000 --lr 0.0009765625 \
    --model transformer:${SIZE:-4,4,96}:local --seed SEED $TRAIN --out $OUT/needles_local-SEED
python train.py --resume --data abcdigits --digits 2 --steps 8000 --lr 0.00048828125 \
    --model transformer:${SIZE:-4,4,96} --seed SEED $TRAIN --out $OUT/needles_transformer-SEED
END

lengths="256 512 1024 2048 4096 8192"
lanes <<END
python abcdigits.py --lengths $lengths 16384 32768 $MEASURE \
    --ckpt $OUT/needles_original-SEED/ckpt.pt
python abcdigits.py --lengths $lengths 16384 32768 --swe $MEASURE \
    --ckpt $OUT/needles_original-SEED/ckpt.pt
python abcdigits.py --lengths $lengths $MEASURE --ckpt $OUT/needles_local-SEED/ckpt.pt
python abcdigits.py --lengths 256 512 1024 2048 --rope-scale 1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32 \
    $MEASURE --ckpt $OUT/needles_transformer-SEED/ckpt.pt
python abcdigits.py --lengths 4096 8192 --rope-scale ntk8 ntk16 ntk32 $MEASURE \
    --ckpt $OUT/needles_transformer-SEED/ckpt.pt
END

run python -m lab.retrieval --out $OUT/report/abcdigits.png \
    $OUT/needles_{original,local,transformer}-*/abcdigits.tsv

[ "$PSI" ] && exit    # tiny.sh needs no more
SEEDS=$(echo $SEEDS | cut -d " " -f 1-3)    # the first three
for name in compete softmax; do
    echo python train.py --resume --data abcdigits --digits 2 --steps 4800 --w-th 16 --lr 0.015625 \
        --layers 4 --model multiscreen:$name --seed SEED --out $OUT/needles_$name-SEED
done | lanes
for name in compete softmax; do
    echo python abcdigits.py --ckpt $OUT/needles_$name-SEED/ckpt.pt
    echo python abcdigits.py --swe --ckpt $OUT/needles_$name-SEED/ckpt.pt
done | lanes

tables=$(for name in original compete softmax; do
    echo $OUT/needles_$name-SEED/abcdigits.tsv | each_seed
done)
run python -m lab.retrieval --out $OUT/report/competition.png $tables
