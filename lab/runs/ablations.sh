# What each part of the model adds to the loss, and to perplexity at 32 times the training length.
. "$(dirname "$0")/lib.sh"
recipe="--psi 6 --seq-len 128 --batch-size 8 --steps 1000 --warmup 250 --log-every 50"

for name in original rope nope no-tanhnorm no-gate fixed-r compete softmax; do
    model=multiscreen:$name
    echo python train.py --resume --model ${model%:original} $recipe --seed SEED \
        --out $OUT/loss_$name-SEED
done | lanes

for name in original rope nope no-tanhnorm no-gate fixed-r compete softmax; do
    echo python -m lab.perplexity --length 4096 --ckpt $OUT/loss_$name-SEED/ckpt.pt
done | lanes
lanes <<END
python -m lab.perplexity --length 4096 --rope-scale 4 16 ntk4 \
    --ckpt $OUT/loss_rope-SEED/ckpt.pt
END

run python -m lab.compare --name ablations --out $OUT/report \
    "Original=$OUT/loss_original-?" \
    "MiPE → RoPE=$OUT/loss_rope-?" \
    "MiPE → NoPE=$OUT/loss_nope-?" \
    "w/o TanhNorm=$OUT/loss_no-tanhnorm-?" \
    "w/o Gate=$OUT/loss_no-gate-?" \
    "Fixed r = 1=$OUT/loss_fixed-r-?" \
    "Keys compete=$OUT/loss_compete-?" \
    "Softmax=$OUT/loss_softmax-?"
run python -m lab.perplexity --out $OUT/report/long_context_ablations.png \
    $OUT/loss_{original,rope,nope,no-tanhnorm,no-gate,fixed-r,compete,softmax}-?/perplexity.tsv
