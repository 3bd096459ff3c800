# What each part of the model adds: losses, and perplexity at 32 times the training length.
. "$(dirname "$0")/lib.sh"
ablations="rope nope no-tanhnorm no-gate fixed-r compete softmax"

for seed in 0 1 2; do
    echo python train.py --psi 6 --seq-len 128 --batch-size 8 --steps 1000 --warmup 250 \
        --log-every 50 --seed $seed --out $OUT/loss_original-$seed
    for name in $ablations; do
        echo python train.py --model multiscreen:$name --psi 6 --seq-len 128 --batch-size 8 \
            --steps 1000 --warmup 250 --log-every 50 --seed $seed --out $OUT/loss_$name-$seed
    done
done | lanes

for seed in 0 1 2; do
    for name in original $ablations; do
        echo python -m experiments.perplexity --length 4096 --ckpt $OUT/loss_$name-$seed/ckpt.pt
    done
done | lanes
for seed in 0 1 2; do
    echo python -m experiments.perplexity --length 4096 --rope-scale 4 16 ntk4 \
        --ckpt $OUT/loss_rope-$seed/ckpt.pt
done | lanes

run python -m experiments.compare --name ablations --out $OUT/report \
    "Original=$OUT/loss_original-?" \
    "MiPE → RoPE=$OUT/loss_rope-?" \
    "MiPE → NoPE=$OUT/loss_nope-?" \
    "w/o TanhNorm=$OUT/loss_no-tanhnorm-?" \
    "w/o Gate=$OUT/loss_no-gate-?" \
    "Fixed r = 1=$OUT/loss_fixed-r-?" \
    "Keys compete=$OUT/loss_compete-?" \
    "Softmax=$OUT/loss_softmax-?"
run python -m experiments.perplexity --out $OUT/report/long_context_ablations.png \
    $OUT/loss_{original,rope,nope,no-tanhnorm,no-gate,fixed-r,compete,softmax}-?/perplexity.tsv
