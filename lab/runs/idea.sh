# Is your idea better? This trains the code as it stands with seeds 0, 1 and 2, in six minutes on two
# cores. For more seeds put SEEDS="3 4 5" before the command.
#   bash lab/runs/idea.sh original
#   bash lab/runs/idea.sh mine                             after an edit, in a copy or in place
#   bash lab/runs/idea.sh mine --model multiscreen:mine.Tiles    with any flags of train.py
#   NEEDLES=1 bash lab/runs/idea.sh mine                   and retrieval, half an hour more per seed
# Each seed is trained on text, in the folder out/idea/NAME-SEED, and then its perplexity is measured
# up to 16 times the training length. With NEEDLES=1, a second model of the same code and flags is
# trained on retrieval, in out/needles/NAME-SEED. If you press Ctrl-C, go on with the same command
# and --resume. Do not edit anything until the script ends, because each seed reads the code when it
# starts. After an edit choose another name: a name is one code, so a name that has runs is refused
# without --resume, and with it unless the code is that of its runs.
cd "$(dirname "$0")/../.." || exit 1
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
export name=$1

refuse() {
    echo "error: $*" >&2
    exit 1
}
case $name in
    ""|-*|*[!A-Za-z0-9._-]*)
        refuse "name your idea in one word: bash lab/runs/idea.sh NAME [flags of train.py]" ;;
esac
shift
# Refuse all seeds if one has a run of other code, or may get one.
for seed in ${SEEDS:-0 1 2}; do
    out=out/idea/$name-$seed
    [ -e "$out/ckpt.pt" ] || continue
    case " $* " in
        *" --force "*) ;;
        *" --resume "*)
            files=$(LC_ALL=C diff -rq "$out/source" . |
                sed -n "s/^Files .* and .\/\(.*\) differ/\1/p")
            [ -z "$files" ] || refuse "$out was trained with other code: take" $files \
                "from $out/source, or choose another name" ;;
        *) refuse "$out holds a run: add --resume to continue it, --force to overwrite it, or" \
            "choose another name" ;;
    esac
done

one_seed() {
    local seed=$1 out=out/idea/$name-$1 needles=out/needles/$name-$1
    shift
    python train.py --psi 6 --seq-len 128 --steps 1000 --warmup 250 "$@" --seed $seed --out $out
    case $? in 0) ;; 3) return 0 ;; *) return 1 ;; esac    # 3: it diverged, which is a result
    python -m lab.perplexity --length 2048 --ckpt $out/ckpt.pt
    [ "$NEEDLES" ] || return 0
    python train.py --data abcdigits --digits 2 --layers 4 --lr 0.015625 --w-th 16 --steps 4800 \
        "$@" --seed $seed --out $needles || return
    for swe in "" --swe; do python abcdigits.py $swe --ckpt $needles/ckpt.pt; done
}
# The seed before each line. Ctrl-C stops all but the two readers, which stay until the checkpoints
# are saved.
labelled() {
    set -o pipefail
    one_seed "$@" 2>&1 |
        (trap '' INT TERM HUP; while IFS= read -r line; do echo "seed $1: $line"; done)
}
export -f one_seed labelled
set -o pipefail
trap : INT
printf '%s\n' ${SEEDS:-0 1 2} |
    xargs -P "${LANES:-2}" -I SEED bash -c 'labelled "$@"' idea SEED "$@" |
    (trap '' INT TERM HUP; cat) || {
    echo "not finished: correct the error above, if there is one, and repeat the command with" \
        "--resume to go on; after an edit choose another name" >&2
    exit 1
}
if [ "$name" = original ]; then
    echo "Now edit an equation, and run this script again under another name."
    exit
fi
ls -d out/idea/original-* >/dev/null 2>&1 ||
    echo "First train the code without your edit in the same way: bash lab/runs/idea.sh original"
echo "To compare them: python -m lab.compare out/idea/original-* out/idea/$name-*"
echo "No learning rate was tuned for $name. Before you believe that it is worse, try --lr 0.03125"
echo "and --lr 0.125 under other names."
