# Shared by the scripts of this folder. Each defines its figures as functions and calls `main`.
#
#   bash runs/small.sh                    every figure; finished work is not repeated
#   bash runs/small.sh scaling lr_sweep   some figures
#   bash runs/small.sh --print scaling    print the commands, one per line; run nothing
#   LANES=2 bash runs/small.sh            two commands at a time
#   OUT=out-edited bash runs/small.sh     in a folder of its own, for an edited model
#
# A command that fails does not stop the others: all failures are listed at the end.

cd "$(dirname "$0")/.." || exit 1
SELF=runs/$(basename "$0")
OUT=${OUT:-out/$(basename "$0" .sh)}
LANES=${LANES:-1}

# One thread per process: the numbers do not depend on the number of cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 OUT FAILED
PRINT= STOP=130 REPORT=$OUT/report E="python -m experiments"

# A command, or with --print its line. Ctrl-C, which is 130, ends this script, too.
attempt() {
    if [ "$PRINT" ]; then
        echo "$*"
        return
    fi
    echo "+ $*"
    "$@"
    local code=$?
    [ $code = 130 ] && exit $STOP
    return $code
}

fail() {
    echo "$*" >>"$FAILED" || exit $STOP
    return 1
}

run() {
    attempt "$@" || fail "$@"
}

# Train a run in the folder named by the last word. Divergence is a result, not a failure: exit
# code 3, but torchrun has its own.
train() {
    attempt ${LAUNCH:-python} train.py "$@" || [ $? = 3 ] ||
        [ "$LAUNCH" -a -e "${!#}/diverged.txt" ] || fail train.py "$@"
}

# each "0 1 2" COMMAND...: the command once for each word, which replaces @. LANES at a time.
each() {
    local word words=$1
    shift
    if [ "$PRINT" ]; then
        for word in $words; do "${@//@/$word}"; done
        return
    fi
    # After Ctrl-C `cat` stays until the last of them has saved its checkpoint.
    printf '%s\0' $words | xargs -0 -I @ -P "$LANES" bash "$SELF" --lane "$@" | (trap '' INT; cat)
    [ "${PIPESTATUS[1]}" -lt 124 ] || exit $STOP
}

main() {
    if [ "$1" = --lane ]; then
        STOP=255                                       # for xargs: start nothing more
        "${@:2}"
        exit 0
    fi
    local figure figures=()
    for figure in "$@"; do
        case " --print $FIGURES " in
            *" $figure "*) ;;
            *) echo "error: $figure is not a figure of $SELF: take $FIGURES" >&2; exit 1 ;;
        esac
        if [ "$figure" = --print ]; then PRINT=yes; else figures+=("$figure"); fi
    done
    [ ${#figures[@]} -gt 0 ] || figures=($FIGURES)
    trap 'exit 130' INT
    FAILED=$(mktemp) || exit 1
    trap 'rm -f "$FAILED"' EXIT
    for figure in "${figures[@]}"; do $figure; done
    [ ! -s "$FAILED" ] && exit 0
    echo "failed:"
    cat "$FAILED"
    exit 1
}
