# ABCDigits again, by two models whose keys compete for weight. After abcdigits.sh.
. "$(dirname "$0")/lib.sh"

for name in compete softmax; do
    for seed in 24 25 26; do
        echo python train.py --data abcdigits --digits 2 --steps 4800 --seed $seed --w-th 16 \
            --lr 0.015625 --layers 4 --model multiscreen:$name --out $OUT/needles_$name-$seed
    done
done | lanes
for swe in "" --swe; do
    for name in compete softmax; do
        for seed in 24 25 26; do
            echo python abcdigits.py $swe --ckpt $OUT/needles_$name-$seed/ckpt.pt
        done
    done | lanes
done

run python -m experiments.retrieval --out $OUT/report/competition.png \
    $OUT/needles_{original,compete,softmax}-{24,25,26}/abcdigits.tsv
