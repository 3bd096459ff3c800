# The paper's evaluation: each run with its GPUs, seeds and steps. Nobody has run these commands.
#   bash runs/paper.sh                      prints all of them, one a line, as for a Slurm array
#   bash runs/paper.sh scaling lr_sweep     prints those of two figures
# Each needs machines of eight GPUs of 80 GiB; HEAD: the first one. support.prepare makes slimpajama/.
# Scaling comes first. `-h` of each tool shows how to measure the models, under "Paper:".
OUT=${OUT:-out/paper}
. "$(dirname "$0")/lib.sh"

torchrun="torchrun --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint ${HEAD:-localhost}"
two="$torchrun --nnodes 2 train.py --resume"
eight="$torchrun --nnodes 8 train.py --resume"
data="--data slimpajama --tokenizer gpt2 --seq-len 4096 --batch-tokens 4194304 --warmup 4096"
data="$data --log-every 1 --eval-every 4096 --steps"
psi16="--psi 16 --batch-size 32 $data"
transformer_45M="--batch-size 64 $data 65536 --model transformer:45M"

compare="python -m experiments.compare --out $OUT/report --window 256"
ablations="rope nope no-tanhnorm no-gate fixed-r"

scaling() {
    cat <<END
$two --psi 8 --batch-size 64 $data 65536 --seed SEED --out $OUT/psi8-SEED
$two $psi16 65536 --seed SEED --out $OUT/psi16-SEED
$two --model transformer:8M --batch-size 64 $data 65536 --seed SEED --out $OUT/8M-SEED
$two $transformer_45M --seed SEED --out $OUT/45M-SEED
$eight --psi 32 --batch-size 4 $data 65536 --seed SEED --out $OUT/psi32-SEED
$eight --model transformer:353M --batch-size 8 $data 65536 --seed SEED --out $OUT/353M-SEED
$eight --psi 48 --batch-size 2 $data 65536 --seed 0 --out $OUT/psi48-0
$eight --psi 64 --batch-size 1 --shard 8 $data 65536 --seed 0 --out $OUT/psi64-0
$eight --model transformer:1.3B --batch-size 2 $data 65536 --seed 0 --out $OUT/1.3B-0
python -m experiments.scaling --out $OUT/report \
    $OUT/{psi8,psi16,psi32,8M,45M,353M}-{0,1,2} $OUT/{psi48,psi64,1.3B}-0
END
}

lr_sweep() {
    for n in {-14..0}; do
        rate=$(awk "BEGIN { printf \"%.17g\", 2^$n }")
        cat <<END
$two $psi16 65536 --lr $rate --seed SEED --out $OUT/psi16_lr$n-SEED
$two $transformer_45M --lr $rate --seed SEED --out $OUT/45M_lr$n-SEED
$two $transformer_45M:qknorm --lr $rate --seed 0 --out $OUT/qknorm_lr$n-0
END
    done
    cat <<END
$compare --by lr --name lr_sweep 'Transformer=$OUT/45M_lr*-?' \
    'Transformer + QKNorm=$OUT/qknorm_lr*-0' 'Multiscreen=$OUT/psi16_lr*-?'
$compare --name curves_psi16 $OUT/psi16_lr*-0
$compare --name curves_45M $OUT/45M_lr*-0
$compare --name curves_qknorm $OUT/qknorm_lr*-0
END
}

sanity() {
    cat <<END
$two $transformer_45M --weight-decay 0 --seed SEED --out $OUT/no_decay-SEED
$two $transformer_45M --clip 0 --seed SEED --out $OUT/no_clipping-SEED
$compare --name sanity 'Transformer=$OUT/45M-?' 'Transformer, no weight decay=$OUT/no_decay-?' \
    'Transformer, no clipping=$OUT/no_clipping-?' 'Multiscreen=$OUT/psi16-?'
END
}

ablations() {
    echo "$two $psi16 16384 --seed SEED --out $OUT/original-SEED"
    for name in $ablations; do
        echo "$two --model multiscreen:$name $psi16 16384 --seed SEED --out $OUT/$name-SEED"
    done
    echo "$compare --name ablations $OUT/{original,${ablations// /,}}-{0,1,2}"
}

for figure in ${*:-scaling lr_sweep sanity ablations}; do
    $figure
done | each_seed
