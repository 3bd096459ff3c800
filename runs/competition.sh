# ABCDigits again, by two models whose keys compete for weight. After abcdigits.sh.
SEEDS=${SEEDS:-24 25 26}
. "$(dirname "$0")/lib.sh"

for name in compete softmax; do
    echo python train.py --resume --data abcdigits --digits 2 --steps 4800 --w-th 16 --lr 0.015625 \
        --layers 4 --model multiscreen:$name --seed SEED --out $OUT/needles_$name-SEED
done | lanes
for name in compete softmax; do
    echo python abcdigits.py --ckpt $OUT/needles_$name-SEED/ckpt.pt
    echo python abcdigits.py --swe --ckpt $OUT/needles_$name-SEED/ckpt.pt
done | lanes

run python -m experiments.retrieval --out $OUT/report/competition.png \
    $OUT/needles_{original,compete,softmax}-{24,25,26}/abcdigits.tsv
