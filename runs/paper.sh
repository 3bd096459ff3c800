# The paper's evaluation: each run with its GPUs, seeds and steps. Nobody has run these commands.
#   bash runs/paper.sh                      prints all of them, one a line, as for a Slurm array
#   bash runs/paper.sh scaling lr_sweep     prints those of two figures
# The first four figures train, in this order, on machines of eight GPUs of 80 GiB; HEAD: the first
# one. The others measure these models on one GPU. support.prepare makes slimpajama/ and pg19/.
OUT=${OUT:-out/paper}
. "$(dirname "$0")/lib.sh"

torchrun="torchrun --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint ${HEAD:-localhost}"
two="$torchrun --nnodes 2 train.py"
eight="$torchrun --nnodes 8 train.py"
data="--data slimpajama --tokenizer gpt2 --seq-len 4096 --batch-tokens 4194304 --warmup 4096"
data="$data --log-every 1 --eval-every 4096 --steps"
psi16="--psi 16 --batch-size 32 $data"
transformer_45M="--batch-size 64 $data 65536 --model transformer:45M"

perplexity="python -m experiments.perplexity"
books="--data pg19 --documents 5747 --length 131072 --window 0.1"
grid="--lengths 4096 8192 16384 32768 65536 131072 --trials 1000"
abcdigits="python abcdigits.py --digits 6 $grid"
passkey="python -m experiments.passkey $grid"
factors="--rope-scale 1 2 4 8 16 32 64"
compare="python -m experiments.compare --out $OUT/report --window 256"
ablations="rope nope no-tanhnorm no-gate fixed-r"
each_ablation="$OUT/{original,${ablations// /,}}-{0,1,2}"

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
    echo "$compare --name ablations $each_ablation"
}

# Perplexity and retrieval of the ablations.
variants() {
    for name in original $ablations; do
        more=
        [ $name = rope ] && more=" $factors"
        echo "$perplexity $books$more --ckpt $OUT/$name-SEED/ckpt.pt"
        echo "$abcdigits$more --ckpt $OUT/$name-SEED/ckpt.pt"
        echo "$abcdigits --swe --ckpt $OUT/$name-SEED/ckpt.pt"
    done
    echo "$perplexity --out $OUT/report/long_context_ablations.png" "$each_ablation/perplexity.tsv"
    echo "python -m experiments.retrieval --out $OUT/report/abcdigits_ablations.png" \
        "$each_ablation/abcdigits.tsv"
}

perplexity() {
    cat <<END
$perplexity $books --ckpt $OUT/psi48-0/ckpt.pt
$perplexity $books --ckpt $OUT/psi32-SEED/ckpt.pt
$perplexity $books $factors --ckpt $OUT/1.3B-0/ckpt.pt
$perplexity $books $factors --ckpt $OUT/353M-SEED/ckpt.pt
$perplexity --out $OUT/report/long_context.png \
    $OUT/{psi48-0,psi32-{0,1,2},1.3B-0,353M-{0,1,2}}/perplexity.tsv
END
}

retrieval() {
    for task in "$abcdigits" "$passkey"; do
        for name in psi8-SEED psi16-SEED psi32-SEED psi48-0; do
            echo "$task --ckpt $OUT/$name/ckpt.pt"
            echo "$task --swe --ckpt $OUT/$name/ckpt.pt"
        done
        for name in 8M-SEED 45M-SEED 353M-SEED 1.3B-0; do
            echo "$task $factors --ckpt $OUT/$name/ckpt.pt"
        done
    done
    for task in abcdigits passkey; do
        echo "python -m experiments.retrieval --out $OUT/report/$task.png" \
            "$OUT/{{psi8,psi16,psi32,8M,45M,353M}-{0,1,2},psi48-0,1.3B-0}/$task.tsv"
    done
}

latency() {
    echo "python -m benchmarks.gpu train decode forward"
    for name in psi8-SEED psi16-SEED psi32-SEED psi48-0 psi64-0; do
        echo "python -m benchmarks.cpu --what forward-compiled --models multiscreen --repeats 100" \
            "--lengths {1024,4096,16384,65536,131072} --device cuda --ckpt $OUT/$name/ckpt.pt"
    done
}

maps() {
    echo "python -m experiments.tiles --ckpt $OUT/psi8-0/ckpt.pt"
    echo "python -m experiments.tiles --ckpt $OUT/psi64-0/ckpt.pt"
}

for figure in ${*:-scaling lr_sweep sanity ablations variants perplexity retrieval latency maps}; do
    $figure
done | each_seed
