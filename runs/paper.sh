# The paper's evaluation: each run with its GPUs, seeds and steps. Nobody has run these commands.
#   bash runs/paper.sh --print scaling    the commands, one per line, as for a Slurm array
# The first four figures train, in this order, on machines of eight GPUs of 80 GiB; HEAD: the first
# one. The others measure these models on one GPU. support.prepare makes slimpajama/ and pg19/.
FIGURES="scaling lr_sweep sanity ablations variants perplexity retrieval latency maps"
. "$(dirname "$0")/lib.sh"

TORCHRUN="torchrun --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint ${HEAD:-localhost}"
DATA="--data slimpajama --tokenizer gpt2 --seq-len 4096 --batch-tokens 4194304 --warmup 4096"
DATA="$DATA --log-every 1 --eval-every 4096"
LONG="$DATA --steps 65536"
PSI_16="--psi 16 --batch-size 32"
T_45M="--batch-size 64 $LONG --model transformer:45M"
BOOKS="--data pg19 --documents 5747 --length 131072 --window 0.1"
GRID="--lengths 4096 8192 16384 32768 65536 131072 --trials 1000"
FACTORS="--rope-scale 1 2 4 8 16 32 64"
MULTISCREENS="psi8-0 psi8-1 psi8-2 psi16-0 psi16-1 psi16-2 psi32-0 psi32-1 psi32-2 psi48-0"
export LAUNCH="$TORCHRUN --nnodes 2"
TRANSFORMERS="8M-0 8M-1 8M-2 45M-0 45M-1 45M-2 353M-0 353M-1 353M-2 1.3B-0"

scaling() {
    each "0 1 2" train --psi 8 --batch-size 64 $LONG --seed @ --out $OUT/psi8-@
    each "0 1 2" train $PSI_16 $LONG --seed @ --out $OUT/psi16-@
    each "0 1 2" train --model transformer:8M --batch-size 64 $LONG --seed @ --out $OUT/8M-@
    each "0 1 2" train $T_45M --seed @ --out $OUT/45M-@
    local LAUNCH="$TORCHRUN --nnodes 8"
    each "0 1 2" train --psi 32 --batch-size 4 $LONG --seed @ --out $OUT/psi32-@
    each "0 1 2" train --model transformer:353M --batch-size 8 $LONG --seed @ --out $OUT/353M-@
    train --psi 48 --batch-size 2 $LONG --seed 0 --out $OUT/psi48-0
    train --psi 64 --batch-size 1 --shard 8 $LONG --seed 0 --out $OUT/psi64-0
    train --model transformer:1.3B --batch-size 2 $LONG --seed 0 --out $OUT/1.3B-0
    run $E.scaling --unfitted 64 --out $REPORT $OUT/{psi8,psi16,psi32,8M,45M,353M}-{0,1,2} \
        $OUT/{psi48,psi64,1.3B}-0
}
lr_sweep() {
    for e in {-14..0}; do
        rate=$(awk "BEGIN { printf \"%.17g\", 2^$e }")
        each "0 1 2" train $PSI_16 $LONG --lr $rate --seed @ --out $OUT/psi16_lr$e-@
        each "0 1 2" train $T_45M --lr $rate --seed @ --out $OUT/45M_lr$e-@
        train $T_45M:qknorm --lr $rate --seed 0 --out $OUT/qknorm_lr$e-0
    done
    run $E.compare --by lr --name lr_sweep --window 256 --out $REPORT "Transformer=$OUT/45M_lr*-?" \
        "Transformer + QKNorm=$OUT/qknorm_lr*-0" "Multiscreen=$OUT/psi16_lr*-?"
    for name in psi16 45M qknorm; do
        run $E.compare --name curves_$name --window 256 --out $REPORT $OUT/${name}_lr*-0
    done
}
sanity() {
    each "0 1 2" train $T_45M --weight-decay 0 --seed @ --out $OUT/no_decay-@
    each "0 1 2" train $T_45M --clip 0 --seed @ --out $OUT/no_clipping-@
    run $E.compare --name sanity --window 256 --out $REPORT "Transformer=$OUT/45M-?" \
        "Transformer, no weight decay=$OUT/no_decay-?" "Transformer, no clipping=$OUT/no_clipping-?" \
        "Multiscreen=$OUT/psi16-?"
}
ablations() {
    local names="rope nope no-tanhnorm no-gate fixed-r" size="$PSI_16 $DATA --steps 16384"
    each "0 1 2" train $size --seed @ --out $OUT/original-@
    for n in 0 1 2; do
        each "$names" train --model multiscreen:@ $size --seed $n --out $OUT/@-$n
    done
    run $E.compare --name ablations --out $REPORT \
        $OUT/{original,rope,nope,no-tanhnorm,no-gate,fixed-r}-{0,1,2}
}
variants() {
    local rest="original nope no-tanhnorm no-gate fixed-r" needles="python abcdigits.py --digits 6"
    for n in 0 1 2; do
        each "$rest" run $E.perplexity $BOOKS --ckpt $OUT/@-$n/ckpt.pt
        run $E.perplexity $BOOKS $FACTORS --ckpt $OUT/rope-$n/ckpt.pt
        each "$rest" run $needles $GRID --ckpt $OUT/@-$n/ckpt.pt
        run $needles $GRID $FACTORS --ckpt $OUT/rope-$n/ckpt.pt
        each "rope $rest" run $needles $GRID --swe --ckpt $OUT/@-$n/ckpt.pt
    done
    run $E.perplexity --out $REPORT/long_context_ablations.png \
        $OUT/{original,rope,nope,no-tanhnorm,no-gate,fixed-r}-{0,1,2}/perplexity.tsv
    run $E.retrieval --out $REPORT/abcdigits_ablations.png \
        $OUT/{original,rope,nope,no-tanhnorm,no-gate,fixed-r}-{0,1,2}/abcdigits.tsv
}
perplexity() {
    each "psi48-0 psi32-0 psi32-1 psi32-2" run $E.perplexity $BOOKS --ckpt $OUT/@/ckpt.pt
    each "1.3B-0 353M-0 353M-1 353M-2" run $E.perplexity $BOOKS $FACTORS --ckpt $OUT/@/ckpt.pt
    run $E.perplexity --out $REPORT/long_context.png \
        $OUT/{psi48-0,psi32-{0,1,2},1.3B-0,353M-{0,1,2}}/perplexity.tsv
}
retrieval() {
    for task in "abcdigits.py --digits 6" "-m experiments.passkey"; do
        each "$MULTISCREENS" run python $task $GRID --ckpt $OUT/@/ckpt.pt
        each "$MULTISCREENS" run python $task $GRID --swe --ckpt $OUT/@/ckpt.pt
        each "$TRANSFORMERS" run python $task $GRID $FACTORS --ckpt $OUT/@/ckpt.pt
    done
    for name in abcdigits passkey; do
        run $E.retrieval --out $REPORT/$name.png \
            $OUT/{{psi8,psi16,psi32,8M,45M,353M}-{0,1,2},psi48-0,1.3B-0}/$name.tsv
    done
}
latency() {
    each "$MULTISCREENS psi64-0" run $E.latency --repeats 100 --compile --ckpt $OUT/@/ckpt.pt
}
maps() {
    for psi in 8 64; do run $E.tiles --ckpt $OUT/psi$psi-0/ckpt.pt; done
}
main "$@"
