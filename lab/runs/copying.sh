# How far back does a model of text find what it has read, and when does that begin? docs/copying.md
# has the protocol. Each run trains in pieces of 1,000 steps and keeps the checkpoint of each piece.
# With a larger STEPS the runs continue, but first move $OUT/report/copying.tsv away, as it has the
# old last checkpoints. TRAIN and MEASURE may hold more flags, for train.py and for measuring.
OUT=${OUT:-out/copying} SEEDS=${SEEDS:-32 33 34}
. "$(dirname "$0")/lib.sh"
export STEPS=${STEPS:-20000}

# The text: the sources of Python and of all packages of this environment. Every twentieth file is
# held out, in val/.
if [ ! -e $OUT/text ]; then
    mkdir -p $OUT/text.tmp
    run python - $OUT/text.tmp <<END || exit
import shutil, sys, sysconfig
from pathlib import Path
from support.data import HELD_OUT, standard_library

packages = Path(sysconfig.get_paths()["purelib"])
files = [*standard_library(), *sorted(packages.rglob("*.py"))]
held_out = {*files[HELD_OUT]}
for n, path in enumerate(files):
    folder = Path(sys.argv[1]) / ("val" if path in held_out else "train")
    folder.mkdir(exist_ok=True)
    shutil.copyfile(path, folder / f"{n:05}.py")
END
    mv $OUT/text.tmp $OUT/text
fi

# Train a run, NAME-SEED, and keep its checkpoints: pieces RUN [flags of train.py]
pieces() {
    local out=$OUT/copying_$1 n
    for n in $(seq 1000 1000 $STEPS); do
        [ -f $out/at_$n.pt ] && continue
        run python train.py --resume ${@:2} --data $OUT/text --eval-every 1000 --steps $n $TRAIN \
            --out $out || return 0
        # A run that diverged or was stopped has not come to the end of its piece.
        [ "$(tail -n 1 $out/log.tsv | cut -f 1)" = $n ] || return 0
        cp $out/ckpt.pt $out/at_$n.tmp && mv $out/at_$n.tmp $out/at_$n.pt
    done
}
export -f pieces

for seed in $SEEDS; do
    echo pieces multiscreen-$seed --psi 8 --lr 0.0078125 --seed $seed
    echo pieces softmax-$seed --model transformer:6,4,112 --lr 0.0009765625 --seed $seed
    echo pieces local-$seed --model transformer:6,4,112:local --lr 0.001953125 --seed $seed
done | lanes

MEASURE="--strings 10 --data $OUT/text/val $MEASURE"
# Measure the last checkpoints at all distances.
lanes <<END
python -m lab.copying --swe $MEASURE --ckpt $OUT/copying_multiscreen-SEED/ckpt.pt
python -m lab.copying $MEASURE --ckpt $OUT/copying_softmax-SEED/ckpt.pt
python -m lab.copying $MEASURE --ckpt $OUT/copying_local-SEED/ckpt.pt
END
# Measure all checkpoints that were kept, at two distances.
for ckpt in $OUT/copying_*-*/at_*.pt; do
    case $ckpt in *multiscreen-*) swe=--swe ;; *) swe= ;; esac
    echo python -m lab.copying $swe --distances 128 1024 $MEASURE --ckpt $ckpt
done | lanes

run python -m lab.copying --out $OUT/report/copying.png \
    $OUT/copying_{multiscreen,softmax,local}-*/copying.tsv
run python -m lab.copying --out $OUT/report/copying_steps.png \
    $OUT/copying_{multiscreen,softmax,local}-*/at_*_copying.tsv
