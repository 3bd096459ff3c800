# The paper's evaluation: each run with its GPUs, seeds and steps. Nobody has run these commands.
#   bash runs/paper.sh                      prints all of them, one a line, as for a Slurm array
#   bash runs/paper.sh scaling lr_sweep     prints those of two figures
# The first four figures train, in this order, on machines of eight GPUs of 80 GiB; HEAD: the first
# one. The others measure these models on one GPU. support.prepare makes slimpajama/ and pg19/.
OUT=${OUT:-out/paper}
torchrun="torchrun --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint ${HEAD:-localhost}"
two="$torchrun --nnodes 2 train.py"
eight="$torchrun --nnodes 8 train.py"
data="--data slimpajama --tokenizer gpt2 --seq-len 4096 --batch-tokens 4194304 --warmup 4096"
data="$data --log-every 1 --eval-every 4096 --steps"
psi16="--psi 16 --batch-size 32 $data"
transformer_45M="--batch-size 64 $data 65536 --model transformer:45M"

perplexity="python -m experiments.perplexity"
books="--data pg19 --documents 5747 --length 131072 --window 0.1"
abcdigits="python abcdigits.py --digits 6"
grid="--lengths 4096 8192 16384 32768 65536 131072 --trials 1000"
factors="--rope-scale 1 2 4 8 16 32 64"
compare="python -m experiments.compare --out $OUT/report --window 256"
multiscreens="psi8-0 psi8-1 psi8-2 psi16-0 psi16-1 psi16-2 psi32-0 psi32-1 psi32-2 psi48-0"
transformers="8M-0 8M-1 8M-2 45M-0 45M-1 45M-2 353M-0 353M-1 353M-2 1.3B-0"
ablations="rope nope no-tanhnorm no-gate fixed-r"

# A command with three seeds, into OUT/NAME-SEED.
seeds() {
    for seed in 0 1 2; do echo "$1 --seed $seed --out $OUT/$2-$seed"; done
}

scaling() {
    seeds "$two --psi 8 --batch-size 64 $data 65536" psi8
    seeds "$two $psi16 65536" psi16
    seeds "$two --model transformer:8M --batch-size 64 $data 65536" 8M
    seeds "$two $transformer_45M" 45M
    seeds "$eight --psi 32 --batch-size 4 $data 65536" psi32
    seeds "$eight --model transformer:353M --batch-size 8 $data 65536" 353M
    echo "$eight --psi 48 --batch-size 2 $data 65536 --seed 0 --out $OUT/psi48-0"
    echo "$eight --psi 64 --batch-size 1 --shard 8 $data 65536 --seed 0 --out $OUT/psi64-0"
    echo "$eight --model transformer:1.3B --batch-size 2 $data 65536 --seed 0 --out $OUT/1.3B-0"
    echo "python -m experiments.scaling --out $OUT/report" \
        "$OUT/{psi8,psi16,psi32,8M,45M,353M}-{0,1,2} $OUT/{psi48,psi64,1.3B}-0"
}

lr_sweep() {
    for n in {-14..0}; do
        rate=$(awk "BEGIN { printf \"%.17g\", 2^$n }")
        seeds "$two $psi16 65536 --lr $rate" "psi16_lr$n"
        seeds "$two $transformer_45M --lr $rate" "45M_lr$n"
        echo "$two $transformer_45M:qknorm --lr $rate --seed 0 --out $OUT/qknorm_lr$n-0"
    done
    echo "$compare --by lr --name lr_sweep 'Transformer=$OUT/45M_lr*-?'" \
        "'Transformer + QKNorm=$OUT/qknorm_lr*-0' 'Multiscreen=$OUT/psi16_lr*-?'"
    for name in psi16 45M qknorm; do
        echo "$compare --name curves_$name $OUT/${name}_lr*-0"
    done
}

sanity() {
    seeds "$two $transformer_45M --weight-decay 0" no_decay
    seeds "$two $transformer_45M --clip 0" no_clipping
    echo "$compare --name sanity 'Transformer=$OUT/45M-?'" \
        "'Transformer, no weight decay=$OUT/no_decay-?'" \
        "'Transformer, no clipping=$OUT/no_clipping-?' 'Multiscreen=$OUT/psi16-?'"
}

ablations() {
    seeds "$two $psi16 16384" original
    for name in $ablations; do seeds "$two --model multiscreen:$name $psi16 16384" $name; done
    echo "$compare --name ablations $OUT/{original,${ablations// /,}}-{0,1,2}"
}

# Perplexity and retrieval of the ablations.
variants() {
    for seed in 0 1 2; do
        for name in original $ablations; do
            local more=
            [ $name = rope ] && more=" $factors"
            echo "$perplexity $books$more --ckpt $OUT/$name-$seed/ckpt.pt"
            echo "$abcdigits $grid$more --ckpt $OUT/$name-$seed/ckpt.pt"
            echo "$abcdigits $grid --swe --ckpt $OUT/$name-$seed/ckpt.pt"
        done
    done
    echo "python -m experiments.perplexity --out $OUT/report/long_context_ablations.png" \
        "$OUT/{original,${ablations// /,}}-{0,1,2}/perplexity.tsv"
    echo "python -m experiments.retrieval --out $OUT/report/abcdigits_ablations.png" \
        "$OUT/{original,${ablations// /,}}-{0,1,2}/abcdigits.tsv"
}

perplexity() {
    for name in psi48-0 psi32-0 psi32-1 psi32-2; do
        echo "$perplexity $books --ckpt $OUT/$name/ckpt.pt"
    done
    for name in 1.3B-0 353M-0 353M-1 353M-2; do
        echo "$perplexity $books $factors --ckpt $OUT/$name/ckpt.pt"
    done
    echo "python -m experiments.perplexity --out $OUT/report/long_context.png" \
        "$OUT/{psi48-0,psi32-{0,1,2},1.3B-0,353M-{0,1,2}}/perplexity.tsv"
}

retrieval() {
    for task in "$abcdigits" "python -m experiments.passkey"; do
        for name in $multiscreens; do
            echo "$task $grid --ckpt $OUT/$name/ckpt.pt"
            echo "$task $grid --swe --ckpt $OUT/$name/ckpt.pt"
        done
        for name in $transformers; do
            echo "$task $grid $factors --ckpt $OUT/$name/ckpt.pt"
        done
    done
    for task in abcdigits passkey; do
        echo "python -m experiments.retrieval --out $OUT/report/$task.png" \
            "$OUT/{{psi8,psi16,psi32,8M,45M,353M}-{0,1,2},psi48-0,1.3B-0}/$task.tsv"
    done
}

latency() {
    echo "python -m benchmarks.gpu train decode forward"
    for name in $multiscreens psi64-0; do
        echo "python -m benchmarks.cpu --what forward-compiled --models multiscreen --repeats 100" \
            "--lengths {1024,4096,16384,65536,131072} --device cuda --ckpt $OUT/$name/ckpt.pt"
    done
}

maps() {
    for psi in 8 64; do
        echo "python -m experiments.tiles --ckpt $OUT/psi$psi-0/ckpt.pt"
    done
}

for figure in ${*:-scaling lr_sweep sanity ablations variants perplexity retrieval latency maps}; do
    $figure
done
