# What does each part of the model add to retrieval? Run this after abcdigits.sh.
SEEDS=${SEEDS:-24 25 26}
. "$(dirname "$0")/lib.sh"
task="python train.py --resume --data abcdigits --digits 2 --steps 4800 --w-th 16 --seed SEED"

{
    for name in rope softmax-rope nope no-tanhnorm fixed-r; do
        echo $task --lr 0.015625 --layers 4 --model multiscreen:$name --out $OUT/needles_$name-SEED
    done
    # The model without a gate has five layers, and three rates.
    for rate in 0.0078125 0.015625 0.03125; do
        echo $task --lr $rate --layers 5 --model multiscreen:no-gate \
            --out $OUT/needles_no-gate_$rate-SEED
    done
} | lanes

for swe in "" --swe; do
    for name in nope no-tanhnorm fixed-r no-gate_0.0078125 no-gate_0.015625 no-gate_0.03125; do
        echo python abcdigits.py $swe --ckpt $OUT/needles_$name-SEED/ckpt.pt
    done
    # RoPE at the best of nine scalings.
    for name in rope softmax-rope; do
        echo python abcdigits.py --rope-scale 1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32 $swe \
            --ckpt $OUT/needles_$name-SEED/ckpt.pt
    done
done | lanes

for rate in 0.0078125 0.015625 0.03125; do
    run python -m lab.retrieval --out $OUT/report/no_gate_lr$rate.png \
        $OUT/needles_no-gate_$rate-2?/abcdigits.tsv
done
run python -m lab.retrieval --out $OUT/report/abcdigits_ablations.png \
    $OUT/needles_{original,rope,softmax-rope,nope,no-tanhnorm,fixed-r}-{24,25,26}/abcdigits.tsv \
    $OUT/needles_no-gate_0.015625-{24,25,26}/abcdigits.tsv
